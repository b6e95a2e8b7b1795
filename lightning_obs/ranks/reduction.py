"""Reduce all statistics of all observers in three reductions: extremes, sums of integers, sums of floats.

Statistics of one reduction and dtype are put end to end as one tensor, widened without loss, and taken apart again
afterwards: a model has hundreds of them, of a few bytes each, and every operation on one costs as much as on all.
Hessians are not that small. Sums of floats are reduced in buckets of 256 MiB; an observer takes over its own before
the next bucket is made.

Smallest and largest values are sent as integers that are ordered as the values are. So one integer minimum serves every
dtype, and largest values too (``~key`` reverses the order, without overflow); -0.0 is less than 0.0, and NaN has a
fixed place, where a minimum of floats gives each rank another result.

A few integers beside floats (counts of tokens beside sums of squares) go with them, split into halves that float64
holds exactly.

Counts are mostly empty: 65,536 bins, of which a bell-shaped tensor occupies about 6,000, and these lie together. So
only the blocks of bins that some rank has counted into are sent. A list of them takes 64 bytes per 65,536 bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import safetensors.torch
import torch
from torch.utils._pytree import tree_map_only

from lightning_obs.errors import CalibrationError, key_text
from lightning_obs.observers import Key, Observer
from lightning_obs.ranks.collectives import Collectives, Op, Stretch

#: the dtype that a dtype is widened to, without loss, before it is compared or ordered
WIDE: dict[torch.dtype, torch.dtype] = {
    torch.float64: torch.float64,
    torch.int64: torch.int64,
    **dict.fromkeys(
        (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2), torch.float32
    ),
    **dict.fromkeys((torch.int32, torch.int16, torch.int8, torch.uint8), torch.int32),
}
_KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}
BLOCK = 128  # bins: one power of two of a histogram
_FEW = 2**14  # integers that are sent with floats, which saves a collective
BUCKET_BYTES = 2**28  # of sums of floats that are reduced at a time


class Form(NamedTuple):
    """Facts that ranks have to agree on before they reduce a statistic. ``reduction``: sum, mean, min or max."""

    name: str
    reduction: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of one observer's."""
        return math.prod(self.shape)

    @property
    def is_sparse(self) -> bool:
        """Whether only its occupied blocks are sent: of sums of integers, if they are many enough for that to pay."""
        many = self.numel >= 16 * BLOCK and self.numel % (8 * BLOCK) == 0
        return self.reduction == "sum" and self.dtype == torch.int64 and many


class Agreed(NamedTuple):
    """One statistic to reduce, of the observers that hold it on the same ranks."""

    form: Form
    keys: list[Key]  # the observers, in the same order on every rank
    ranks: list[int]  # that hold it; the others send its identity
    blocks: Sequence[torch.Tensor | None]  # each observer's blocks that are not empty; None: empty ones are sent too


#: a statistic of many observers, and this rank's values of it: of all of them, or None
_Part: TypeAlias = tuple[Agreed, list[torch.Tensor] | None]


def reduce_statistics(
    agreed: Iterable[Agreed], observers: Mapping[Key, Observer], collectives: Collectives, stretch: Stretch
) -> Iterator[dict[Key, dict[str, torch.Tensor]]]:
    """The reduced statistics of this rank's observers, in new tensors: one dict for each reduction that is made.

    Extremes first, then integers: a sum that does not fit is an error before any is handed out, and extremes can be
    reduced again. A failure of this rank alone is kept in ``stretch``, and its reductions are made all the same.
    """
    kinds: list[list[Agreed]] = [[], [], []]
    for one in agreed:
        sums = 2 if one.form.dtype.is_floating_point else 1
        kinds[0 if one.form.reduction in ("min", "max") else sums].append(one)
    extremes, integers, floats = kinds
    buckets_of_floats = list(_cut(floats))
    if floats and sum(len(one.keys) * one.form.numel for one in integers) <= _FEW:
        buckets_of_floats[0] += integers
        integers = []
    buckets = [(_EXTREMES, extremes), (_SUMS, integers), *((_SUMS, bucket) for bucket in buckets_of_floats)]
    for kind, bucket in buckets:
        if bucket:
            yield _reduced(kind, bucket, observers, collectives, stretch)


def _reduced(
    kind: _Kind,
    bucket: Sequence[Agreed],
    observers: Mapping[Key, Observer],
    collectives: Collectives,
    stretch: Stretch,
) -> dict[Key, dict[str, torch.Tensor]]:
    parts: list[_Part] = []
    packed = None
    with stretch:
        for one in bucket:
            has_it = collectives.rank in one.ranks
            parts.append((one, [getattr(observers[key], one.form.name) for key in one.keys] if has_it else None))
        packed = kind.pack(parts, collectives.device)
    if packed is None:  # the other ranks reduce in any case
        parts = [(one, None) for one in bucket]
        packed = kind.pack(parts, collectives.device)
    totals_of_all = kind.unpack(parts, collectives.reduce(packed, kind.op))
    del packed
    reduced: dict[Key, dict[str, torch.Tensor]] = {}
    try:
        for (one, mine), totals in zip(parts, totals_of_all, strict=True):
            if one.keys[0] not in observers:  # this rank holds all of the keys or none
                continue
            if mine is not None:
                totals = [total.to(value.device) for total, value in zip(totals, mine, strict=True)]
            for key, total in zip(one.keys, totals, strict=True):
                reduced.setdefault(key, {})[one.form.name] = total
    except CalibrationError:
        raise  # of the reduced numbers, which are the same on every rank
    except Exception as error:
        stretch.keep(error)
    return reduced


def _cut(statistics: Iterable[Agreed]) -> Iterator[list[Agreed]]:
    """Statistics in buckets of at most ``BUCKET_BYTES``; a larger observer's alone."""
    bucket: list[Agreed] = []
    left = BUCKET_BYTES
    for one in statistics:
        size = 8 * one.form.numel
        at_a_time = max(1, BUCKET_BYTES // max(1, size))
        for at in range(0, len(one.keys), at_a_time):
            keys = one.keys[at : at + at_a_time]
            if len(keys) * size > left and bucket:
                yield bucket
                bucket, left = [], BUCKET_BYTES
            bucket.append(one._replace(keys=keys, blocks=one.blocks[at : at + at_a_time]))
            left -= len(keys) * size
    yield bucket


# ---------------------------------------------------------------------- extremes


def ordered(values: torch.Tensor) -> torch.Tensor:
    """Integers ordered as the values are, one for each bit pattern: int32 for float32, int64 for float64.

    >>> ordered(torch.tensor([-float("inf"), -1.0, -0.0, 0.0, 1.0])).diff().gt(0).all()
    tensor(True)
    """
    keys = values.view(_KEYS.get(values.dtype, values.dtype))
    return keys ^ _magnitude_of_negatives(keys) if values.dtype in _KEYS else values


def unordered(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of :func:`ordered`, whose ``dtype`` is float32, float64, int32 or int64."""
    keys = keys.to(_KEYS.get(dtype, dtype))
    return (keys ^ _magnitude_of_negatives(keys)).view(dtype) if dtype in _KEYS else keys


def _magnitude_of_negatives(keys: torch.Tensor) -> torch.Tensor:
    # Negative floats are sign and magnitude: the larger the bits, the smaller the value. The sign bit stays.
    return (keys >> (torch.iinfo(keys.dtype).bits - 1)) & torch.iinfo(keys.dtype).max


def _pack_extremes(parts: Sequence[_Part], device: torch.device) -> torch.Tensor:
    """Minima and maxima of all dtypes, for one minimum of integers that are ordered as the values are."""
    keys = []
    for one, mine in parts:
        wide = WIDE[one.form.dtype]
        if mine is None:  # the key that no other is larger than
            key = _KEYS.get(wide, wide)
            flat = torch.full((len(one.keys) * one.form.numel,), torch.iinfo(key).max, dtype=key)
        else:
            flat = ordered(torch.stack([value.to(device) for value in mine]).reshape(-1).to(wide))
            flat = flat if one.form.reduction == "min" else ~flat
        keys.append(flat.to(device))
    return torch.cat(keys)


def _unpack_extremes(parts: Sequence[_Part], reduced: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
    lengths = [len(one.keys) * one.form.numel for one, _ in parts]
    for (one, _), values in zip(parts, reduced.split(lengths), strict=True):
        values = values if one.form.reduction == "min" else ~values
        yield _apart(unordered(values, WIDE[one.form.dtype]), one)


def _apart(values: torch.Tensor, one: Agreed) -> Sequence[torch.Tensor]:
    """Each observer's values, in their dtype and in memory of their own: a view would keep the whole bucket alive."""
    values = values.to(one.form.dtype).view(len(one.keys), *one.form.shape)
    apart: Sequence[torch.Tensor] = torch.unbind_copy(values)  # type: ignore[func-returns-value, assignment]
    return apart


# ---------------------------------------------------------------------- sums


def occupied_blocks(values: list[torch.Tensor]) -> list[bytes]:
    """For each tensor, whether each block of 128 has an element other than 0: a bit each, the lowest first."""
    if not values:
        return []
    # One copy to the host for all of them.
    device = values[0].device
    occupied = torch.cat([(value.reshape(-1, BLOCK) != 0).any(1).to(device) for value in values]).cpu().numpy()
    ends = np.cumsum([value.numel() // BLOCK for value in values])[:-1]
    return [np.packbits(each, bitorder="little").tobytes() for each in np.split(occupied, ends)]


def union_of_blocks(parts: Iterable[bytes]) -> torch.Tensor:
    """Numbers of the blocks that at least one part has, ascending, in int64."""
    union = np.bitwise_or.reduce([np.frombuffer(part, np.uint8) for part in parts])
    return torch.from_numpy(np.flatnonzero(np.unpackbits(union, bitorder="little")))


def _pack_sums(parts: Sequence[_Part], device: torch.device) -> torch.Tensor:
    """Sums in float64 or int64, of counts without their empty blocks; zeros where this rank has none.

    Integers among floats are sent as two halves of 32 bits, whose sums over ranks are exact in float64.
    """
    wide = _sum_dtype(parts)
    sizes = _sizes(parts)
    bucket = torch.zeros(sum(map(sum, sizes)), dtype=wide, device=device)
    for (one, mine), place, each in zip(parts, bucket.split(list(map(sum, sizes))), sizes, strict=True):
        for value, blocks, into in zip(mine or (), one.blocks, place.split(each), strict=False):
            rows = value if blocks is None else value.reshape(-1, BLOCK)[blocks.to(value.device)]
            into.copy_(_halves(rows) if _is_halved(one, wide) else rows.reshape(-1))
    return bucket


def _unpack_sums(parts: Sequence[_Part], reduced: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
    """Each observer's sums; means are sums over the ranks that have them."""
    sizes = _sizes(parts)
    for (one, _), place, each in zip(parts, reduced.split(list(map(sum, sizes))), sizes, strict=True):
        if one.form.reduction == "mean":
            place /= len(one.ranks)
        sums = [_whole(part) if _is_halved(one, reduced.dtype) else part for part in place.split(each)]
        yield [_read_sum(one.form, *of) for of in zip(one.keys, one.blocks, sums, strict=True)]


def _sum_dtype(parts: Sequence[_Part]) -> torch.dtype:
    """The dtype in which a bucket of sums is reduced: float64 if there is a float among them."""
    has_floats = any(one.form.dtype.is_floating_point for one, _ in parts)
    return torch.float64 if has_floats else torch.int64


def _is_halved(one: Agreed, dtype: torch.dtype) -> bool:
    """Whether a statistic of integers is sent as halves, in a bucket of ``dtype``."""
    return dtype.is_floating_point and not one.form.dtype.is_floating_point


def _halves(integers: torch.Tensor) -> torch.Tensor:
    """The higher 32 bits of each integer, then the lower ones, in float64.

    >>> _whole(_halves(torch.tensor([-1, 2**62 + 1]))).tolist() == [-1, 2**62 + 1]
    True
    """
    flat = integers.reshape(-1).to(torch.int64)
    return torch.cat([flat >> 32, flat & 0xFFFFFFFF]).to(torch.float64)


def _whole(halves: torch.Tensor) -> torch.Tensor:
    """The integers of :func:`_halves`, or of sums of them."""
    high, low = halves.to(torch.int64).chunk(2)
    return (high << 32) + low


def _sizes(parts: Sequence[_Part]) -> list[list[int]]:
    """Of each statistic and observer, how many elements are sent."""
    sizes = []
    wide = _sum_dtype(parts)
    for one, _ in parts:
        times = 2 if _is_halved(one, wide) else 1
        sizes.append([times * (one.form.numel if b is None else len(b) * BLOCK) for b in one.blocks])
    return sizes


def _read_sum(form: Form, key: Key, blocks: torch.Tensor | None, sums: torch.Tensor) -> torch.Tensor:
    """One observer's sum, in its dtype and in memory of its own: a view would keep the whole bucket alive."""
    if blocks is not None:
        dense = sums.new_zeros(form.numel // BLOCK, BLOCK)
        dense[blocks.to(sums.device)] = sums.view(-1, BLOCK)
        return dense.view(form.shape)
    narrow = sums.to(form.dtype, copy=True)
    if not form.dtype.is_floating_point and (sums != narrow).any():
        raise CalibrationError(
            f"the sum of {form.name} over ranks does not fit into {form.dtype}",
            where=[key_text(key)],
            remedy="count in int64.",
        )
    return narrow.view(form.shape)


class _Kind(NamedTuple):
    """A reduction of one tensor: how statistics are put into it and taken out of it again."""

    op: Op
    pack: Callable[[Sequence[_Part], torch.device], torch.Tensor]
    unpack: Callable[[Sequence[_Part], torch.Tensor], Iterator[Sequence[torch.Tensor]]]


_EXTREMES = _Kind("min", _pack_extremes, _unpack_extremes)
_SUMS = _Kind("sum", _pack_sums, _unpack_sums)


# ---------------------------------------------------------------------- statistics without a reduction


class _Name(str):
    """Stands in a nest for a tensor that was taken out."""


def pack_tensors(nest: Any) -> tuple[Any, bytes]:
    """A nest of dicts and lists with its tensors taken out, and these as safetensors.

    Pickling takes a hundredth of the time so, and torch cannot unpickle float8.
    """
    parts: dict[str, torch.Tensor] = {}

    def take(tensor: torch.Tensor) -> _Name:
        name = _Name(len(parts))
        parts[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return name

    return tree_map_only(torch.Tensor, take, nest), safetensors.torch.save(parts)


def unpack_tensors(nest: Any, packed: bytes, device: torch.device) -> Any:
    """Undo :func:`pack_tensors`; tensors are on ``device``."""
    parts = safetensors.torch.load(packed)
    return tree_map_only(_Name, lambda name: parts[name].to(device), nest)
