"""Bring tensors to the host without waiting for each of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies on the CPU; one transfer for each device, whatever the shapes and dtypes."""
    found = [x if x.device.type != "cpu" else x.detach().clone() for x in tensors]
    for device in {x.device for x in found if x.device.type != "cpu"}:
        places = [place for place, x in enumerate(tensors) if x.device == device]
        parts = [tensors[place].detach().contiguous().view(-1).view(torch.uint8) for place in places]
        for place, part in zip(places, torch.cat(parts).cpu().split([len(part) for part in parts]), strict=True):
            found[place] = part.clone().view(tensors[place].dtype).view(tensors[place].shape)
    return found
