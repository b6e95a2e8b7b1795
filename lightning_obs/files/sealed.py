"""States with a checksum of all that they hold: one that was changed, cut or mixed up is refused."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from lightning_obs.errors import CalibrationError
from lightning_obs.files.read import naming

#: the key of the checksum in a sealed state
SEAL = "crc"
_PLAIN = (str, bytes, int, float, complex, torch.dtype, torch.device)


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with a checksum of all that it holds, for :func:`require_whole`."""
    parts = {key: value for key, value in state.items() if key != SEAL}
    return {**parts, SEAL: state_checksum(parts)}


def require_whole(
    state: Mapping[str, Any],
    name: str = "the saved calibration",
    remedy: str = "load the checkpoint of this model, or calibrate again.",
) -> None:
    """Refuse a state, called ``name``, of which anything was changed, lost or added since it was :func:`sealed`.

    Raises:
        CalibrationError: with that ``name`` and ``remedy``.
    """
    with naming(name, remedy=remedy):
        if state.get(SEAL) != sealed(state)[SEAL]:
            raise CalibrationError(f"{name} has changed since it was saved", remedy=remedy)


def state_checksum(value: Any, crc: int = 0) -> int:
    """CRC-32 of tensors, numbers and strings, and of lists, sets and dicts of them in any order of their keys."""
    if isinstance(value, torch.Tensor):
        crc = form_checksum(value, crc)
        return zlib.crc32(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data, crc)
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    if isinstance(value, Mapping):
        value = [part for key in sorted(value, key=repr) for part in (key, value[key])]
    if isinstance(value, (list, tuple)):
        for part in (f"{len(value)} parts", *value):
            crc = state_checksum(part, crc)
        return crc
    if value is None or isinstance(value, _PLAIN):
        return zlib.crc32(repr(value).encode(errors="backslashreplace"), crc)
    return zlib.crc32(pickle.dumps(value), crc)  # the text of an array leaves most of it out


def form_checksum(tensor: torch.Tensor, crc: int = 0) -> int:
    """The part of a tensor's :func:`state_checksum` that comes before its bytes: of its dtype and shape."""
    return state_checksum([str(tensor.dtype), *tensor.shape], crc)
