"""Put tensors of any dtype into a few flat ones, so that one reduction over ranks serves them all, and loses nothing.

Smallest and largest values are sent as integers that are ordered as the values are. So one integer minimum serves every
dtype, and largest values too (``~key`` reverses the order, without overflow); -0.0 is less than 0.0, and NaN has a
fixed place, where a minimum of floats gives each rank another result.

Counts are mostly empty: 65,536 bins, of which a bell-shaped tensor occupies about 6,000, and these lie together. So
only the blocks of bins that some rank has counted into are sent. A list of them takes 64 bytes per 65,536 bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

#: what a dtype is widened to, without loss, before it is compared or ordered
WIDE: dict[torch.dtype, torch.dtype] = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.int64: torch.int64,
    torch.int32: torch.int32,
    torch.int16: torch.int32,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
}
_KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}

BLOCK = 128  # bins: one power of two of a histogram
_BITS = 8


def ordered(values: torch.Tensor) -> torch.Tensor:
    """Integers ordered as the values are, one for each bit pattern: int32 for float32, int64 for float64.

    >>> ordered(torch.tensor([-float("inf"), -1.0, -0.0, 0.0, 1.0])).diff().gt(0).all()
    tensor(True)
    """
    if values.dtype not in _KEYS:
        return values
    keys = values.view(_KEYS[values.dtype])
    return keys ^ _magnitude_of_negatives(keys)


def unordered(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of :func:`ordered`, whose ``dtype`` is float32, float64, int32 or int64."""
    keys = keys.to(_KEYS.get(dtype, dtype))
    return (keys ^ _magnitude_of_negatives(keys)).view(dtype) if dtype in _KEYS else keys


def _magnitude_of_negatives(keys: torch.Tensor) -> torch.Tensor:
    # Negative floats are sign and magnitude: the larger the bits, the smaller the value. The sign bit stays.
    return (keys >> (torch.iinfo(keys.dtype).bits - 1)) & torch.iinfo(keys.dtype).max


def extreme(dtype: torch.dtype, largest: bool) -> float | int:
    """The value of a dtype that changes no minimum (``largest``) or no maximum."""
    if dtype.is_floating_point:
        return math.inf if largest else -math.inf
    return torch.iinfo(dtype).max if largest else torch.iinfo(dtype).min


@dataclass(frozen=True)
class _Place:
    """Where the bytes of a tensor are."""

    start: int
    shape: torch.Size
    dtype: torch.dtype


def pack_tensors(value: Any) -> tuple[Any, torch.Tensor]:
    """A nest of dicts and lists with its tensors taken out, and their bytes end to end in one tensor on the CPU.

    One tensor is pickled in a hundredth of the time of a thousand, and torch cannot unpickle float8.
    """
    parts: list[torch.Tensor] = []
    ends = [0]

    def place(tensor: torch.Tensor) -> _Place:
        parts.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
        ends.append(ends[-1] + parts[-1].numel())
        return _Place(ends[-2], tensor.shape, tensor.dtype)

    nest = tree_map_only(torch.Tensor, place, value)
    return nest, torch.cat([torch.empty(0, dtype=torch.uint8), *parts])


def unpack_tensors(nest: Any, packed: torch.Tensor, device: torch.device) -> Any:
    """Undo :func:`pack_tensors`; tensors are on ``device`` and in memory of their own."""

    def read(place: _Place) -> torch.Tensor:
        nbytes = math.prod(place.shape) * place.dtype.itemsize
        own = packed[place.start : place.start + nbytes].clone()
        return own.view(place.dtype).reshape(place.shape).to(device)

    return tree_map_only(_Place, read, nest)


def can_be_sparse(dtype: torch.dtype, numel: int) -> bool:
    """Whether a sum is of integers, and many enough for leaving out empty blocks to pay."""
    return dtype == torch.int64 and numel >= 2 * _BITS * BLOCK and numel % (_BITS * BLOCK) == 0


def occupied_blocks(values: list[torch.Tensor]) -> list[bytes]:
    """For each tensor, which of its blocks of 128 have an element other than 0: a bit each, the lowest first."""
    if not values:
        return []
    # One copy to the host for all of them.
    device = values[0].device
    occupied = torch.cat([(value.reshape(-1, BLOCK) != 0).any(1).to(device) for value in values]).view(-1, _BITS)
    place = 2 ** torch.arange(_BITS, device=occupied.device)
    packed = bytes((occupied * place).sum(1).tolist())
    ends = torch.tensor([0, *(value.numel() // (BLOCK * _BITS) for value in values)]).cumsum(0).tolist()
    return [packed[start:end] for start, end in pairwise(ends)]


def union_of_blocks(parts: list[bytes]) -> torch.Tensor:
    """Numbers of the blocks that at least one part has, ascending, in int64."""
    union = 0
    for part in parts:
        union |= int.from_bytes(part, "little")
    packed = torch.tensor(list(union.to_bytes(len(parts[0]), "little")))
    return ((packed[:, None] >> torch.arange(_BITS)) & 1).reshape(-1).nonzero()[:, 0]
