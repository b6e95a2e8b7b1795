"""Memory for results that are read once and forgotten, such as the quantized weight of each Linear in turn.

The allocator of a CPU gives memory of some megabytes back to the system and asks for it again at once, each page of it
cleared; between tensors that stay, it leaves gaps that no later tensor fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Scratch:
    """Lends memory for a tensor in float32, and keeps that of the largest for the next time.

    All modules of a model in training share one (:class:`~lightning_obs.forward.quantized_tensors.Switch`). Several
    threads may borrow at once, and a block inside another block gets other memory. Copies and pickles have none.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def __reduce__(self) -> Any:
        return Scratch, ()

    @contextmanager
    def lend(self, like: torch.Tensor) -> Iterator[torch.Tensor | None]:
        """For a ``with`` block, memory of the shape of ``like``, which nobody may read afterwards.

        Yields:
            A contiguous tensor with any values; None where memory is not a CPU's, or not in float32.
        """
        if like.device.type != "cpu" or like.dtype != torch.float32 or type(like) not in (torch.Tensor, nn.Parameter):
            yield None
            return
        count = like.numel()
        try:
            memory = self._free.pop()
        except IndexError:
            memory = like.new_empty(count)
        if memory.numel() < count:
            memory = like.new_empty(count)
        try:
            yield memory[:count].view(like.shape)
        finally:
            self._free[:] = [memory]
