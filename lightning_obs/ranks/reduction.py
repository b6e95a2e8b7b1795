"""Reduce the statistics of all observers in a few collectives: extremes, sums of integers, sums of floats.

``sync.py`` calls :func:`reduce_statistics` after all ranks have exchanged which statistics they hold. An *extreme* is a
minimum or a maximum.

A model has hundreds of statistics, of a few bytes each, and a collective on one takes as long as on all. So statistics
with the same reduction are packed into one tensor, widened without loss, and unpacked afterwards. Hessians are larger:
sums of floats are reduced in buckets of 256 MiB, and the observers of a bucket get their results before the next bucket
is packed.

Extremes are sent as integers (keys) that are ordered as the values are. One minimum of integers serves every dtype, and
also maxima: ``~key`` reverses the order without overflow. -0.0 is less than 0.0, and NaN has a fixed place in the
order; a minimum of floats may treat both differently on each rank.

If the integers are few (the counts of tokens that accompany sums of squares), they are sent with the floats. They are
split into halves, whose sums float64 holds exactly.

Counts of a histogram are mostly zero: a bell-shaped tensor occupies about 6,000 of 65,536 bins, which are next to each
other. So bins are divided into blocks, and only blocks that are *occupied*, with a count on some rank, are sent. A bit
for each block takes 64 bytes for 65,536 bins.
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

#: dtype of a statistic -> the wider dtype in which its extremes are reduced, without loss; others cannot be reduced
WIDE: dict[torch.dtype, torch.dtype] = {
    torch.float64: torch.float64,
    torch.int64: torch.int64,
    **dict.fromkeys(
        (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2), torch.float32
    ),
    **dict.fromkeys((torch.int32, torch.int16, torch.int8, torch.uint8), torch.int32),
}
#: dtype of floats -> the integers that are ordered as they are
_ORDERED_AS: dict[torch.dtype, torch.dtype] = {torch.float32: torch.int32, torch.float64: torch.int64}
#: elements of a block: the bins of one power of two in a histogram
BLOCK = 128
#: least number of blocks of a statistic that is sent by blocks; 16 blocks are 16 KiB, and less is quickly sent whole
_FEWEST_BLOCKS = 16
#: size of a bucket of floating-point sums
BUCKET_BYTES = 2**28
#: up to this number of integers, they are sent with the floats, which saves a collective
_FEW_INTEGERS = 2**14


class Form(NamedTuple):
    """The facts about a statistic of an observer on which ranks must agree before they reduce it.

    ``name`` is the observer's attribute; ``reduction`` is sum, mean, min or max; ``shape`` and ``dtype`` are those of
    one observer's value. ``sync.py`` makes one for each statistic of a rank.
    """

    name: str
    reduction: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements of one observer's value; read when statistics are divided into buckets and packed."""
        return math.prod(self.shape)

    @property
    def is_extreme(self) -> bool:
        """Whether the statistic is a minimum or a maximum; :func:`reduce_statistics` reduces these first."""
        return self.reduction in ("min", "max")

    @property
    def is_sparse(self) -> bool:
        """Whether only its occupied blocks are sent: True for counts of at least ``_FEWEST_BLOCKS`` blocks.

        Their length must be a multiple of eight blocks, because :func:`occupied_blocks` packs a bit for each block into
        bytes. ``sync.py`` asks when it describes the statistics of a rank.
        """
        is_count = self.reduction == "sum" and self.dtype == torch.int64
        return is_count and self.numel >= _FEWEST_BLOCKS * BLOCK and self.numel % (8 * BLOCK) == 0


class SharedStatistic(NamedTuple):
    """One statistic to reduce, for all observers that hold it on the same ranks. ``sync.py`` makes the list of them."""

    form: Form
    keys: list[Key]  # the observers, in the same order on every rank
    ranks: list[int]  # the ranks that hold it; other ranks send the reduction's identity
    blocks: Sequence[torch.Tensor | None]  # for each observer the indices of its occupied blocks; None: all is sent

    @property
    def numel(self) -> int:
        """The number of elements of all observers together; read when the statistic is packed and unpacked."""
        return len(self.keys) * self.form.numel


@dataclass(frozen=True)
class _Entry:
    """A statistic to pack, and this rank's value of it for each observer; no values if this rank does not hold it.

    :func:`_reduce_bucket` makes one for each statistic of a bucket.
    """

    statistic: SharedStatistic
    values: list[torch.Tensor] = field(default_factory=list)


def reduce_statistics(
    statistics: Iterable[SharedStatistic],
    observers: Mapping[Key, Observer],
    collectives: Collectives,
    stretch: Stretch,
) -> Iterator[dict[Key, dict[str, torch.Tensor]]]:
    """Reduce statistics over ranks, with one collective for each item that is yielded.

    ``sync.py`` calls it at the end of an observation. Every rank must exhaust the iterator. Extremes come first, then
    integers, then floats: if a sum of integers does not fit its dtype, the error is raised before an observer gets a
    sum, and extremes can be reduced a second time.

    Args:
        statistics: the statistics to reduce, the same list on every rank.
        observers: this rank's observers. They are read, not changed.
        collectives: the collectives of this rank.
        stretch: keeps a failure of this rank; the rank still takes part in all reductions.

    Yields:
        For each reduction, the reduced statistics of this rank's observers, in new tensors.

    Raises:
        CalibrationError: a sum does not fit its dtype; the same error on every rank.
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
        bucket: the statistics to reduce, the same on every rank.
        observers, collectives, stretch: as in :func:`reduce_statistics`.

    Returns:
        The reduced statistics of this rank's observers, by observer and name.
    """
    entries: list[_Entry] = []
    packed = None
    with stretch:
        for statistic in bucket:
            entries.append(_Entry(statistic, _values_of(statistic, observers, collectives.rank)))
        packed = packing.pack(entries, collectives.device)
    if packed is None:  # this rank failed, but the others reduce, so it takes part with identities
        entries = [_Entry(statistic) for statistic in bucket]
        packed = packing.pack(entries, collectives.device)
    unpacked = packing.unpack(entries, collectives.reduce(packed, packing.op))
    del packed
    reduced: dict[Key, dict[str, torch.Tensor]] = {}
    try:
        for entry, totals in zip(entries, unpacked, strict=True):
            statistic = entry.statistic
            if statistic.keys[0] not in observers:  # a rank has either all observers of a statistic or none
                continue
            for key, total in zip(statistic.keys, _on_devices_of(entry.values, totals), strict=True):
                reduced.setdefault(key, {})[statistic.form.name] = total
    except CalibrationError:
        raise  # about the reduced numbers, which are the same on every rank
    except Exception as error:
        stretch.keep(error)
    return reduced


def _values_of(statistic: SharedStatistic, observers: Mapping[Key, Observer], rank: int) -> list[torch.Tensor]:
    """This rank's value of a statistic for each of its observers; empty if this rank does not hold it."""
    if rank not in statistic.ranks:
        return []
    return [getattr(observers[key], statistic.form.name) for key in statistic.keys]


def _on_devices_of(values: list[torch.Tensor], totals: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Move each reduced value to the device of this rank's own value; without own values, leave them as they are."""
    if not values:
        return totals
    return [total.to(value.device) for total, value in zip(totals, values, strict=True)]


def _in_buckets(statistics: Iterable[SharedStatistic]) -> Iterator[list[SharedStatistic]]:
    """Distribute statistics to buckets of at most ``BUCKET_BYTES`` in float64; each bucket is reduced at once.

    The observers of a statistic may be divided among buckets. If one observer's value is larger than a bucket, it gets
    a bucket of its own.
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
    """Map values to integers that are ordered as the values are: float32 to int32, float64 to int64.

    Each bit pattern has its own integer. Integers are returned as they are. Used to pack extremes.

    >>> ordered(torch.tensor([-float("inf"), -1.0, -0.0, 0.0, 1.0])).diff().gt(0).all()
    tensor(True)
    """
    if values.dtype not in _ORDERED_AS:
        return values
    keys = values.view(_ORDERED_AS[values.dtype])
    return keys ^ _magnitude_of_negatives(keys)


def unordered(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo :func:`ordered` when extremes are unpacked; ``dtype`` is float32, float64, int32 or int64."""
    if dtype not in _ORDERED_AS:
        return keys.to(dtype)
    keys = keys.to(_ORDERED_AS[dtype])
    return (keys ^ _magnitude_of_negatives(keys)).view(dtype)


def _magnitude_of_negatives(keys: torch.Tensor) -> torch.Tensor:
    """A mask of the bits to flip: for negative floats all but the sign bit, for others none.

    Read as an integer, the bits of a negative float grow with its magnitude, so their order has to be reversed.
    """
    return (keys >> (torch.iinfo(keys.dtype).bits - 1)) & torch.iinfo(keys.dtype).max


def _pack_extremes(entries: Sequence[_Entry], device: torch.device) -> torch.Tensor:
    """Pack extremes of all dtypes into one tensor of integers (:func:`ordered`), for one minimum over ranks."""
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
    """Copies of the items of the first dimension; views would keep the whole packed tensor alive."""
    copies: Sequence[torch.Tensor] = torch.unbind_copy(values)  # type: ignore[func-returns-value, assignment]
    return copies


# ---------------------------------------------------------------------- sums


def occupied_blocks(values: list[torch.Tensor]) -> list[bytes]:
    """Find the blocks of :data:`BLOCK` elements that are not all zero. ``sync.py`` adds them to a rank's description.

    Args:
        values: tensors of integers whose number of elements is a multiple of 8 blocks.

    Returns:
        For each tensor, a bit for each block, the lowest bit of a byte first.
    """
    if not values:
        return []
    device = values[0].device
    occupied = [(value.reshape(-1, BLOCK) != 0).any(1).to(device) for value in values]
    flags = torch.cat(occupied).cpu().numpy()  # one copy to the host for all tensors
    bits_of_tensors = []
    start = 0
    for value in values:
        stop = start + value.numel() // BLOCK
        bits_of_tensors.append(np.packbits(flags[start:stop], bitorder="little").tobytes())
        start = stop
    return bits_of_tensors


def union_of_blocks(bits_of_ranks: Iterable[bytes]) -> torch.Tensor:
    """The indices of the blocks that are occupied on at least one rank, ascending, in int64.

    ``sync.py`` calls it with the bits from the descriptions of all ranks that hold a statistic.
    """
    masks = [np.frombuffer(bits, np.uint8) for bits in bits_of_ranks]
    union = np.bitwise_or.reduce(masks)
    return torch.from_numpy(np.flatnonzero(np.unpackbits(union, bitorder="little")))


def _pack_sums(entries: Sequence[_Entry], device: torch.device) -> torch.Tensor:
    """Pack sums and means into one tensor in float64 or int64, without blocks that are empty on all ranks.

    A statistic that this rank does not hold is zero. Integers among floats are packed as two halves of 32 bits, whose
    sums over ranks are exact in float64.
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

    A mean is the sum divided by the number of ranks that hold the statistic.
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
    """The dtype in which a bucket of sums is reduced: float64 if the bucket holds a float, else int64."""
    for entry in entries:
        if entry.statistic.form.dtype.is_floating_point:
            return torch.float64
    return torch.int64


def _is_halved(form: Form, sum_dtype: torch.dtype) -> bool:
    """Whether a statistic's integers are sent as halves, because the bucket's ``sum_dtype`` is a float."""
    return sum_dtype.is_floating_point and not form.dtype.is_floating_point


def _halves(integers: torch.Tensor) -> torch.Tensor:
    """Split integers: the upper 32 bits of each, then the lower 32 bits of each, in float64.

    >>> _from_halves(_halves(torch.tensor([-1, 2**62 + 1]))).tolist() == [-1, 2**62 + 1]
    True
    """
    flat = integers.reshape(-1).to(torch.int64)
    return torch.cat([flat >> 32, flat & 0xFFFFFFFF]).to(torch.float64)


def _from_halves(halves: torch.Tensor) -> torch.Tensor:
    """Undo :func:`_halves`, also for sums of halves."""
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
    """One observer's sum in its full shape, from the sums of its occupied blocks; all other blocks are zero."""
    whole = sums.new_zeros(form.numel // BLOCK, BLOCK)
    whole[blocks.to(sums.device)] = sums.view(-1, BLOCK)
    return whole.view(form.shape)


def _narrowed(sums: torch.Tensor, form: Form, key: Key) -> torch.Tensor:
    """One observer's sum in its dtype, as a copy, since a view would keep the whole packed tensor alive.

    Raises:
        CalibrationError: a sum of integers does not fit the dtype.
    """
    narrow = sums.to(form.dtype, copy=True)
    if not form.dtype.is_floating_point and (sums != narrow).any():
        raise CalibrationError(
            f"the sum of {form.name} over ranks does not fit into {form.dtype}",
            where=[key_text(key)],
            remedy="count in int64.",
        )
    return narrow.view(form.shape)


class _Packing(NamedTuple):
    """How statistics of one reduction are packed into a tensor, the operation on it, and how the result is unpacked."""

    op: Op
    pack: Callable[[Sequence[_Entry], torch.device], torch.Tensor]
    unpack: Callable[[Sequence[_Entry], torch.Tensor], Iterator[Sequence[torch.Tensor]]]


_EXTREMES = _Packing("min", _pack_extremes, _unpack_extremes)
_SUMS = _Packing("sum", _pack_sums, _unpack_sums)


# ---------------------------------------------------------------------- statistics without a reduction


class _TensorName(str):
    """A placeholder for a tensor in nested dicts and lists: the tensor's name in the safetensors bytes."""


def pack_tensors(nest: Any) -> tuple[Any, bytes]:
    """Take the tensors out of statistics that have no reduction, before ``sync.py`` sends them with its description.

    The nest without tensors is pickled in a hundredth of the time that the nest with tensors takes. And torch cannot
    unpickle float8 tensors. Tensors in lists, tuples and dicts are taken out; a tensor in a set stays, and is pickled
    with the set, so it must not be in float8.

    Args:
        nest: nested dicts and lists that hold tensors.

    Returns:
        The nest with names in place of its tensors, and the tensors as bytes in the format of safetensors.
    """
    tensors: dict[str, torch.Tensor] = {}

    def take_out(tensor: torch.Tensor) -> _TensorName:
        name = _TensorName(len(tensors))
        tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return name

    without_tensors = tree_map_only(torch.Tensor, take_out, nest)
    return without_tensors, safetensors.torch.save(tensors)


def unpack_tensors(nest: Any, packed: bytes, device: torch.device) -> Any:
    """Undo :func:`pack_tensors`: put the packed tensors back into the nest, on ``device``.

    ``sync.py`` calls it for statistics that this rank takes from another rank.
    """
    tensors = safetensors.torch.load(packed)
    return tree_map_only(_TensorName, lambda name: tensors[name].to(device), nest)
