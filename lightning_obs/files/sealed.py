"""Saved states with a checksum of everything in them: a state that was changed, cut or mixed up is refused.

The states of callbacks in Lightning's checkpoints and of unfinished runs are :func:`sealed` when they are saved, and
pass :func:`require_whole` when they are loaded.
"""

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
#: types whose ``repr`` tells any two values apart
_PLAIN = (str, bytes, int, float, complex, torch.dtype, torch.device)


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the state with one more entry: the checksum of all other entries, for :func:`require_whole`.

    Called when a callback gives its state to Lightning's checkpoint, and when a long run saves the state of a step.
    """
    content = {key: value for key, value in state.items() if key != SEAL}
    checksum = state_checksum(content)
    content[SEAL] = checksum
    return content


def require_whole(
    state: Mapping[str, Any],
    name: str = "the saved calibration",
    remedy: str = "load the checkpoint of this model, or calibrate again.",
) -> None:
    """Refuse a state that has changed, or has lost or gained entries, since it was :func:`sealed`.

    Called when a calibration is loaded from Lightning's checkpoint, and when a long run continues after a kill.

    Args:
        state: a state that was loaded from a file.
        name: name of the state in the error.
        remedy: remedy in the error.

    Raises:
        CalibrationError: the checksum is missing or differs, or cannot be computed.
    """
    with naming(name, remedy=remedy):
        if state.get(SEAL) != sealed(state)[SEAL]:
            raise CalibrationError(f"{name} has changed since it was saved", remedy=remedy)


def state_checksum(value: Any, crc: int = 0) -> int:
    """CRC-32 of a state: of tensors, numbers and strings, and of lists, sets and dicts of them.

    The order of a dict's keys does not matter. :func:`sealed` calls it for a whole state, :class:`.TensorReader` for
    each tensor that it reads under :meth:`.TensorReader.watch`, and a run layer by layer for its inputs.

    Args:
        value: the state, or a part of it.
        crc: the checksum of the parts before this one, which is continued.
    """
    if isinstance(value, torch.Tensor):
        crc = form_checksum(value, crc)
        return zlib.crc32(_raw_bytes(value), crc)
    if isinstance(value, (list, tuple)):
        return _checksum_of_items(list(value), crc)
    if isinstance(value, (set, frozenset)):
        return _checksum_of_items(sorted(value, key=repr), crc)
    if isinstance(value, Mapping):
        keys_and_values = []
        for key in sorted(value, key=repr):
            keys_and_values += [key, value[key]]
        return _checksum_of_items(keys_and_values, crc)
    if value is None or isinstance(value, _PLAIN):
        return zlib.crc32(repr(value).encode(errors="backslashreplace"), crc)
    return zlib.crc32(pickle.dumps(value), crc)  # the repr of an array leaves most of it out


def _checksum_of_items(items: list[Any], crc: int) -> int:
    """The checksum ``crc``, continued by the number of items and by each item in its order."""
    crc = state_checksum(f"{len(items)} parts", crc)
    for item in items:
        crc = state_checksum(item, crc)
    return crc


def form_checksum(tensor: torch.Tensor, crc: int = 0) -> int:
    """Return the checksum of a tensor's dtype and shape, without its data.

    :func:`state_checksum` continues it with the bytes of the tensor.
    """
    return state_checksum([str(tensor.dtype), *tensor.shape], crc)


def _raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor as bytes, copied to the CPU if it is elsewhere."""
    flat = tensor.detach().cpu().reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy().data
