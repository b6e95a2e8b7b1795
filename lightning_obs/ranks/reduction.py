"""Reduce the statistics of all observers in a few collectives: extremes, sums of integers, sums of floats.

``sync.py`` calls :func:`reduce_statistics`, after all ranks have told each other what they hold.

A model has hundreds of statistics, of a few bytes each, and an operation on one costs as much as on all. So statistics
of one reduction are packed into one tensor, widened without loss, and unpacked afterwards. Hessians are not that small:
sums of floats are reduced in buckets of 256 MiB, and the observers of a bucket take them over before the next one is
packed.

Minima and maxima are sent as integers that are ordered as the values are. One minimum of integers serves every dtype,
and maxima too: ``~key`` reverses the order without overflow. -0.0 is less than 0.0, and NaN has a fixed place, where a
minimum of floats gives each rank another result.

Integers beside floats (counts of tokens beside sums of squares) are sent with the floats if they are few. They are
split into halves, whose sums float64 holds exactly.

Counts of a histogram are mostly zero: a bell-shaped tensor occupies about 6,000 of 65,536 bins, which are next to each
other. So only blocks of bins in which some rank has counted are sent. A bit for each block takes 64 bytes for 65,536
bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch.utils._pytree import tree_map_only

from lightning_obs.errors import CalibrationError, key_text
from lightning_obs.observers import Key, Observer
from lightning_obs.ranks.collectives import Collectives, Op, Stretch

#: the dtype in which values of a dtype are ordered or compared, without loss
WIDE: dict[torch.dtype, torch.dtype] = {
    torch.float64: torch.float64,
    torch.int64: torch.int64,
    **dict.fromkeys(
        (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2), torch.float32
    ),
    **dict.fromkeys((torch.int32, torch.int16, torch.int8, torch.uint8), torch.int32),
}
#: the integers that stand for floats in a minimum
_ORDERED_AS: dict[torch.dtype, torch.dtype] = {torch.float32: torch.int32, torch.float64: torch.int64}
#: bins of a block: one power of two of a histogram
BLOCK = 128
#: size of a bucket of floating-point sums
BUCKET_BYTES = 2**28
#: up to this number, integers are sent with the floats, which saves a collective
_FEW_INTEGERS = 2**14


class Form(NamedTuple):
    """The facts about a statistic of an observer on which ranks must agree. ``reduction``: sum, mean, min or max."""

    name: str
    reduction: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements in one observer."""
        return math.prod(self.shape)

    @property
    def is_extreme(self) -> bool:
        """Whether it is a minimum or a maximum."""
        return self.reduction in ("min", "max")

    @property
    def is_sparse(self) -> bool:
        """Whether only its occupied blocks are sent: for sums of integers that are long enough for that to pay."""
        is_count = self.reduction == "sum" and self.dtype == torch.int64
        return is_count and self.numel >= 16 * BLOCK and self.numel % (8 * BLOCK) == 0


class SharedStatistic(NamedTuple):
    """One statistic to reduce, for all observers that hold it on the same ranks."""

    form: Form
    keys: list[Key]  # the observers, in the same order on every rank
    ranks: list[int]  # hold it; the others send its identity
    blocks: Sequence[torch.Tensor | None]  # numbers of each observer's occupied blocks; None: everything is sent

    @property
    def numel(self) -> int:
        """Number of elements of all observers together."""
        return len(self.keys) * self.form.numel


@dataclass(frozen=True)
class _Entry:
    """A statistic in a packed tensor, and this rank's value of it for each observer; none if this rank lacks it."""

    statistic: SharedStatistic
    values: list[torch.Tensor] = field(default_factory=list)


def reduce_statistics(
    statistics: Iterable[SharedStatistic],
    observers: Mapping[Key, Observer],
    collectives: Collectives,
    stretch: Stretch,
) -> Iterator[dict[Key, dict[str, torch.Tensor]]]:
    """Reduce statistics over ranks, one collective for each item of the iterator, which every rank must exhaust.

    Extremes come first, then integers: a sum that does not fit its dtype is an error before any sum is given out, and
    extremes can be reduced again.

    Args:
        statistics: the same on every rank.
        observers: of this rank. They are read, not changed.
        collectives: of this rank.
        stretch: keeps a failure of this rank alone; its reductions are made all the same.

    Yields:
        For each reduction, the reduced statistics of this rank's observers, in new tensors.

    Raises:
        CalibrationError: on every rank alike: a sum does not fit its dtype.
    """
    extremes: list[SharedStatistic] = []
    integers: list[SharedStatistic] = []
    floats: list[SharedStatistic] = []
    for statistic in statistics:
        if statistic.form.is_extreme:
            extremes.append(statistic)
        elif statistic.form.dtype.is_floating_point:
            floats.append(statistic)
        else:
            integers.append(statistic)
    buckets_of_floats = list(_in_buckets(floats))
    if buckets_of_floats and sum(statistic.numel for statistic in integers) <= _FEW_INTEGERS:
        buckets_of_floats[0] += integers
        integers = []
    if extremes:
        yield _reduce_bucket(_EXTREMES, extremes, observers, collectives, stretch)
    if integers:
        yield _reduce_bucket(_SUMS, integers, observers, collectives, stretch)
    for bucket in buckets_of_floats:
        yield _reduce_bucket(_SUMS, bucket, observers, collectives, stretch)


def _reduce_bucket(
    packing: _Packing,
    bucket: Sequence[SharedStatistic],
    observers: Mapping[Key, Observer],
    collectives: Collectives,
    stretch: Stretch,
) -> dict[Key, dict[str, torch.Tensor]]:
    """Pack a bucket of statistics, reduce it in one collective, and unpack it.

    Args:
        packing: how statistics of this reduction are packed.
        bucket: the same on every rank.
        observers, collectives, stretch: as for :func:`reduce_statistics`.

    Returns:
        The reduced statistics of this rank's observers, by observer and name.
    """
    entries: list[_Entry] = []
    packed = None
    with stretch:
        for statistic in bucket:
            entries.append(_Entry(statistic, _values_of(statistic, observers, collectives.rank)))
        packed = packing.pack(entries, collectives.device)
    if packed is None:  # this rank failed; the others reduce in any case
        entries = [_Entry(statistic) for statistic in bucket]
        packed = packing.pack(entries, collectives.device)
    unpacked = packing.unpack(entries, collectives.reduce(packed, packing.op))
    del packed
    reduced: dict[Key, dict[str, torch.Tensor]] = {}
    try:
        for entry, totals in zip(entries, unpacked, strict=True):
            statistic = entry.statistic
            if statistic.keys[0] not in observers:  # a rank has all of these observers or none
                continue
            for key, total in zip(statistic.keys, _on_devices_of(entry.values, totals), strict=True):
                reduced.setdefault(key, {})[statistic.form.name] = total
    except CalibrationError:
        raise  # about the reduced numbers, which are the same on every rank
    except Exception as error:
        stretch.keep(error)
    return reduced


def _values_of(statistic: SharedStatistic, observers: Mapping[Key, Observer], rank: int) -> list[torch.Tensor]:
    """This rank's value of a statistic for each of its observers; empty if this rank lacks it."""
    if rank not in statistic.ranks:
        return []
    return [getattr(observers[key], statistic.form.name) for key in statistic.keys]


def _on_devices_of(values: list[torch.Tensor], totals: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Totals, each on the device of this rank's value; as they are if this rank has none."""
    if not values:
        return totals
    return [total.to(value.device) for total, value in zip(totals, values, strict=True)]


def _in_buckets(statistics: Iterable[SharedStatistic]) -> Iterator[list[SharedStatistic]]:
    """Distribute statistics to buckets of at most ``BUCKET_BYTES`` in float64, each of which is reduced at once.

    The observers of a statistic may be divided among buckets; a larger statistic of one observer is a bucket itself.
    """
    bucket: list[SharedStatistic] = []
    bytes_left = BUCKET_BYTES
    for statistic in statistics:
        observer_bytes = 8 * statistic.form.numel
        observers_in_bucket = max(1, BUCKET_BYTES // max(1, observer_bytes))
        for start in range(0, len(statistic.keys), observers_in_bucket):
            stop = start + observers_in_bucket
            keys = statistic.keys[start:stop]
            size = len(keys) * observer_bytes
            if bucket and size > bytes_left:
                yield bucket
                bucket = []
                bytes_left = BUCKET_BYTES
            bucket.append(statistic._replace(keys=keys, blocks=statistic.blocks[start:stop]))
            bytes_left -= size
    if bucket:
        yield bucket


# ---------------------------------------------------------------------- extremes


def ordered(values: torch.Tensor) -> torch.Tensor:
    """Integers ordered as the values are, one for each bit pattern: int32 for float32, int64 for float64.

    >>> ordered(torch.tensor([-float("inf"), -1.0, -0.0, 0.0, 1.0])).diff().gt(0).all()
    tensor(True)
    """
    if values.dtype not in _ORDERED_AS:
        return values
    keys = values.view(_ORDERED_AS[values.dtype])
    return keys ^ _magnitude_of_negatives(keys)


def unordered(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo :func:`ordered`: the values, in ``dtype`` float32, float64, int32 or int64, that the integers stand for."""
    if dtype not in _ORDERED_AS:
        return keys.to(dtype)
    keys = keys.to(_ORDERED_AS[dtype])
    return (keys ^ _magnitude_of_negatives(keys)).view(dtype)


def _magnitude_of_negatives(keys: torch.Tensor) -> torch.Tensor:
    """A mask of the bits to flip: all but the sign of negative floats, which are larger the smaller the value is."""
    return (keys >> (torch.iinfo(keys.dtype).bits - 1)) & torch.iinfo(keys.dtype).max


def _pack_extremes(entries: Sequence[_Entry], device: torch.device) -> torch.Tensor:
    """Minima and maxima of all dtypes as one tensor, for one minimum of integers that are ordered as the values are."""
    keys_of_entries = []
    for entry in entries:
        form = entry.statistic.form
        wide = WIDE[form.dtype]
        if entry.values:
            values = torch.stack([value.to(device) for value in entry.values])
            keys = ordered(values.reshape(-1).to(wide))
            if form.reduction == "max":
                keys = ~keys
        else:  # the largest key is the identity of a minimum
            dtype = _ORDERED_AS.get(wide, wide)
            keys = torch.full((entry.statistic.numel,), torch.iinfo(dtype).max, dtype=dtype)
        keys_of_entries.append(keys.to(device))
    return torch.cat(keys_of_entries)


def _unpack_extremes(entries: Sequence[_Entry], reduced: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
    """Yield, for each packed statistic, the minimum or maximum over ranks for each of its observers."""
    lengths = [entry.statistic.numel for entry in entries]
    for entry, keys in zip(entries, reduced.split(lengths), strict=True):
        statistic = entry.statistic
        form = statistic.form
        if form.reduction == "max":
            keys = ~keys
        values = unordered(keys, WIDE[form.dtype]).to(form.dtype)
        yield _in_memory_of_their_own(values.view(len(statistic.keys), *form.shape))


def _in_memory_of_their_own(values: torch.Tensor) -> Sequence[torch.Tensor]:
    """The items of the first dimension as copies: a view would keep the whole packed tensor alive."""
    copies: Sequence[torch.Tensor] = torch.unbind_copy(values)  # type: ignore[func-returns-value, assignment]
    return copies


# ---------------------------------------------------------------------- sums


def occupied_blocks(values: list[torch.Tensor]) -> list[bytes]:
    """Which blocks of :data:`BLOCK` elements of each tensor are not all zero, for the description of a rank.

    Returns:
        For each tensor a bit for each block, the lowest bit of a byte first.
    """
    if not values:
        return []
    device = values[0].device
    occupied = [(value.reshape(-1, BLOCK) != 0).any(1).to(device) for value in values]
    flags = torch.cat(occupied).cpu().numpy()  # one copy to the host for all of them
    bits_of_tensors = []
    start = 0
    for value in values:
        stop = start + value.numel() // BLOCK
        bits_of_tensors.append(np.packbits(flags[start:stop], bitorder="little").tobytes())
        start = stop
    return bits_of_tensors


def union_of_blocks(bits_of_ranks: Iterable[bytes]) -> torch.Tensor:
    """Numbers of the blocks that are occupied on at least one rank, ascending, in int64."""
    masks = [np.frombuffer(bits, np.uint8) for bits in bits_of_ranks]
    union = np.bitwise_or.reduce(masks)
    return torch.from_numpy(np.flatnonzero(np.unpackbits(union, bitorder="little")))


def _pack_sums(entries: Sequence[_Entry], device: torch.device) -> torch.Tensor:
    """Sums as one tensor in float64 or int64, without blocks that are empty on all ranks; zeros if this rank has none.

    Integers among floats are sent as two halves of 32 bits, whose sums over ranks are exact in float64.
    """
    dtype = _sum_dtype(entries)
    lengths = _sent_lengths(entries)
    packed = torch.zeros(sum(lengths), dtype=dtype, device=device)
    segments = iter(packed.split(lengths))
    for entry in entries:
        is_halved = _is_halved(entry.statistic.form, dtype)
        for index, blocks in enumerate(entry.statistic.blocks):
            segment = next(segments)
            if not entry.values:
                continue
            value = entry.values[index]
            if blocks is not None:
                value = value.reshape(-1, BLOCK)[blocks.to(value.device)]
            segment.copy_(_halves(value) if is_halved else value.reshape(-1))
    return packed


def _unpack_sums(entries: Sequence[_Entry], reduced: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
    """Yield, for each packed statistic, the sum or mean over ranks for each of its observers.

    A mean is the sum divided by the number of ranks that have it.
    """
    segments = iter(reduced.split(_sent_lengths(entries)))
    for entry in entries:
        statistic = entry.statistic
        form = statistic.form
        totals = []
        for key, blocks in zip(statistic.keys, statistic.blocks, strict=True):
            total = next(segments)
            if form.reduction == "mean":
                total = total / len(statistic.ranks)
            if _is_halved(form, reduced.dtype):
                total = _from_halves(total)
            if blocks is None:
                totals.append(_narrowed(total, form, key))
            else:
                totals.append(_with_empty_blocks(total, form, blocks))
        yield totals


def _sum_dtype(entries: Sequence[_Entry]) -> torch.dtype:
    """The dtype in which a bucket of sums is reduced: float64 if there is a float among them."""
    for entry in entries:
        if entry.statistic.form.dtype.is_floating_point:
            return torch.float64
    return torch.int64


def _is_halved(form: Form, sum_dtype: torch.dtype) -> bool:
    """Whether a statistic's integers are sent as halves, in a bucket of ``sum_dtype``."""
    return sum_dtype.is_floating_point and not form.dtype.is_floating_point


def _halves(integers: torch.Tensor) -> torch.Tensor:
    """The higher 32 bits of each integer, then the lower ones, in float64.

    >>> _from_halves(_halves(torch.tensor([-1, 2**62 + 1]))).tolist() == [-1, 2**62 + 1]
    True
    """
    flat = integers.reshape(-1).to(torch.int64)
    return torch.cat([flat >> 32, flat & 0xFFFFFFFF]).to(torch.float64)


def _from_halves(halves: torch.Tensor) -> torch.Tensor:
    """The integers of :func:`_halves`, or of sums of them."""
    high, low = halves.to(torch.int64).chunk(2)
    return (high << 32) + low


def _sent_lengths(entries: Sequence[_Entry]) -> list[int]:
    """The number of elements that are sent for each statistic and observer, in the order of packing."""
    dtype = _sum_dtype(entries)
    lengths = []
    for entry in entries:
        form = entry.statistic.form
        halves = 2 if _is_halved(form, dtype) else 1
        for blocks in entry.statistic.blocks:
            sent = form.numel if blocks is None else len(blocks) * BLOCK
            lengths.append(halves * sent)
    return lengths


def _with_empty_blocks(sums: torch.Tensor, form: Form, blocks: torch.Tensor) -> torch.Tensor:
    """One observer's sum in its whole shape, from the sums of its occupied blocks; the others are zero."""
    whole = sums.new_zeros(form.numel // BLOCK, BLOCK)
    whole[blocks.to(sums.device)] = sums.view(-1, BLOCK)
    return whole.view(form.shape)


def _narrowed(sums: torch.Tensor, form: Form, key: Key) -> torch.Tensor:
    """One observer's sum in its dtype, as a copy: a view would keep the whole packed tensor alive."""
    narrow = sums.to(form.dtype, copy=True)
    if not form.dtype.is_floating_point and (sums != narrow).any():
        raise CalibrationError(
            f"the sum of {form.name} over ranks does not fit into {form.dtype}",
            where=[key_text(key)],
            remedy="count in int64.",
        )
    return narrow.view(form.shape)


class _Packing(NamedTuple):
    """A reduction of one packed tensor: its operation, how entries are packed, and how totals are unpacked."""

    op: Op
    pack: Callable[[Sequence[_Entry], torch.device], torch.Tensor]
    unpack: Callable[[Sequence[_Entry], torch.Tensor], Iterator[Sequence[torch.Tensor]]]


_EXTREMES = _Packing("min", _pack_extremes, _unpack_extremes)
_SUMS = _Packing("sum", _pack_sums, _unpack_sums)


# ---------------------------------------------------------------------- statistics without a reduction


class _TensorName(str):
    """Takes the place of a tensor in a nest of dicts and lists."""


def pack_tensors(nest: Any) -> tuple[Any, bytes]:
    """Prepare statistics without a reduction to be sent to other ranks.

    Pickling takes a hundredth of the time this way, and torch cannot unpickle float8.

    Args:
        nest: dicts and lists that hold tensors.

    Returns:
        The nest with names in place of its tensors, and the tensors in the format of safetensors.
    """
    tensors: dict[str, torch.Tensor] = {}

    def take_out(tensor: torch.Tensor) -> _TensorName:
        name = _TensorName(len(tensors))
        tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return name

    without_tensors = tree_map_only(torch.Tensor, take_out, nest)
    return without_tensors, safetensors.torch.save(tensors)


def unpack_tensors(nest: Any, packed: bytes, device: torch.device) -> Any:
    """Undo :func:`pack_tensors`; tensors are on ``device``."""
    tensors = safetensors.torch.load(packed)
    return tree_map_only(_TensorName, lambda name: tensors[name].to(device), nest)
