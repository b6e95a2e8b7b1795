"""Make every rank's statistics one.

Ranks see different batches and must write identical scales. What is hard: a collective that one rank does not enter
hangs the others, so nothing that a rank saw, lacks or failed at may decide which collectives come next.

Method: the ranks first agree (:mod:`lightning_obs.agreement`) on the union of their statistics, ordered by key, or
raise the same error. Then one bucket for each kind of reduction: all extremes in one minimum of integers, all sums of
integers in one, all sums and means of floats in one. A rank that lacks a statistic contributes the reduction's
identity; a mean is a sum and the number of ranks that have it. Nothing is looked up by position: an expert's
statistics cannot end up in another's.

Choices:

- Extremes and sums of integers have the same bits whatever the ranks. Sums and means of floats are added in float64,
  in the order of the backend; every rank gets the same bits.
- What an observer does not declare (the range of the last tensor) is taken from the lowest rank that has it, as bytes
  in the sum of integers. So ranks agree whatever the observer. What only one rank holds (its experts) is not sent.
- A histogram is 512 KiB, 448 of them 224 MiB. Only the blocks of 128 bins that some rank counted into are sent,
  and the agreement says which these are. At worst, with all of them occupied, the bucket is as large as one rank's
  histograms.

Fused groups (q, k, v) need nothing more: their global scale is computed from ranges, which are the same on every rank
by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import distributed as dist

from lightning_obs.agreement import (
    Agreed,
    Description,
    Key,
    agree,
    describe,
    numbers_of,
    require_no_failure,
    sendable,
    text,
)
from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.packing import (
    BLOCK,
    WIDE,
    extreme,
    ordered,
    read_bytes,
    unordered,
    words,
    write_bytes,
)
from lightning_obs.observers import Observer

#: Collectives of one calibration, at most, for any number of observers: :func:`sync_statistics` takes one gather of
#: objects and three reductions, :func:`share_weights` one and one. (``torch.distributed.all_gather_object`` makes
#: two of a gather: lengths, then contents. Lightning's ``reduce`` adds a barrier to a reduction.)
MAX_COLLECTIVES = 6

Op: TypeAlias = Literal["sum", "min"]


def _alone(tensor: torch.Tensor, op: Op) -> torch.Tensor:
    return tensor


def _only(thing: Any) -> list[Any]:
    return [thing]


@dataclass(frozen=True)
class Collectives:
    """How this rank talks to the others. The default is a single device, which talks to nobody.

    Attributes:
        reduce: ``(tensor, op) -> tensor`` over all ranks, op ``"sum"`` or ``"min"``; may work in place. Called with
            contiguous one-dimensional tensors of int32, int64 or float64, of the same shape on every rank. In
            Lightning: ``lambda tensor, op: trainer.strategy.reduce(tensor, reduce_op=op)``.
            Each rank must see different data, or sums count it twice: under tensor parallelism, reduce over the
            data-parallel group.
        gather_object: ``object -> list``: every rank's object, in the order of the ranks.
        rank: of this process, its place in that list.
        size: how many ranks there are.
        device: where reductions take place, and where statistics go that this rank did not have.
    """

    reduce: Callable[[torch.Tensor, Op], torch.Tensor] = _alone
    gather_object: Callable[[Any], list[Any]] = _only
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    size: int = 1

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> Collectives:
        """Those of ``torch.distributed``, over the ranks of a process group; by default over all."""
        if device is None:
            on_host = "gloo" in dist.get_backend(group)
            device = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())

        def reduce(tensor: torch.Tensor, op: Op) -> torch.Tensor:
            with all_ranks_answer():
                dist.all_reduce(tensor, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MIN, group=group)
            return tensor

        def gather_object(thing: Any) -> list[Any]:
            found: list[Any] = [None] * dist.get_world_size(group)
            with all_ranks_answer():
                dist.all_gather_object(found, thing, group=group)
            return found

        return cls(reduce, gather_object, dist.get_rank(group), device, dist.get_world_size(group))


@contextmanager
def all_ranks_answer() -> Iterator[None]:
    """Say, in place of a socket's error, that another rank has ended.

    Raises:
        CalibrationError: a collective in the ``with`` block failed or did not end within the group's time limit.
    """
    try:
        yield
    except RuntimeError as error:  # of gloo, NCCL and the store alike
        raise CalibrationError(
            "another rank ended, or did not answer in time, while the ranks' statistics were made one",
            got=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            remedy="look for the first error in the other ranks' output, then run again; nothing was written.",
        ) from error


@dataclass(frozen=True)
class Synced:
    """What the ranks agreed on; the same on every rank.

    Attributes:
        unreached: observers, of any rank, of which no rank has statistics; ordered.
        owners: for each weight the rank that searches its range, see :func:`partition`.
        collectives: how many this took.
        ranks: how many ranks there are.
        notes: what each rank had to say beside.
    """

    unreached: list[Key]
    owners: dict[Key, int]
    collectives: int
    ranks: int
    notes: list[Any]


def sync_statistics(
    observers: Mapping[Key, Observer],
    collectives: Collectives,
    *,
    weights: Mapping[Key, int] | None = None,
    failure: Exception | None = None,
    note: Any = None,
) -> Synced:
    """Give the observers of one key, on all ranks, the statistics of all data. Every rank must call this.

    Statistics are merged as the observer declares in ``_act_sync_dict``: SUM, AVG, MIN or MAX. A mean is over the
    ranks that have the statistic. What is not declared is taken from the lowest rank that has it. An observer that
    saw nothing on this rank has statistics afterwards too; ``reset`` forgets them.

    Args:
        observers: what this rank holds, by module name and base name; other ranks may hold others.
        collectives: how to talk to the other ranks.
        weights: number of elements of each weight that this rank holds, to share out the search for their ranges.
        failure: what went wrong on this rank before, to be raised on all.
        note: anything small that all ranks shall know of this one.

    Raises:
        CalibrationError: on every rank alike: NaN or infinity in the statistics of a rank; ranks whose statistics of
            one module differ in shape, dtype or reduction; a reduction that cannot be made; a rank's failure.

    >>> from compressed_tensors.quantization import QuantizationArgs
    >>> observer = Observer.load_from_registry("static_minmax", base_name="input", args=QuantizationArgs())
    >>> sync_statistics({("fc1", "input"): observer}, Collectives())
    Synced(unreached=[('fc1', 'input')], owners={}, collectives=1, ranks=1, notes=[None])
    """
    return _sync(observers, collectives, set(observers), dict(weights or {}), failure, by_declaration=True, note=note)


def share_weights(
    observers: Mapping[Key, Observer],
    owners: Mapping[Key, int],
    search: Callable[[Key], object],
    collectives: Collectives,
    failure: Exception | None = None,
) -> Synced:
    """Search the weights' ranges, each on the rank that owns it, and give every rank the bits that were found.

    Args:
        observers: of the weights that this rank holds.
        owners: of these weights, as :func:`sync_statistics` returns them.
        search: makes the observer of a key observe its weight; called for the keys that this rank owns.
        collectives: how to talk to the other ranks.
        failure: what went wrong on this rank before, to be raised on all; then nothing is searched here.

    Raises:
        CalibrationError: on every rank alike: a rank's failure; the search failed on a rank, or found NaN or infinity.
    """
    owned: set[Key] = set()
    for key in sorted(observers) if failure is None else ():
        try:
            if owners[key] == collectives.rank:
                search(key)
                owned.add(key)
        except Exception as error:
            failure = sendable(error, key)
            failure.__cause__ = error
            break
    return _sync(observers, collectives, owned, {}, failure, by_declaration=False)


def partition(sizes: Sequence[int], ranks: int, holders: Sequence[Iterable[int]] | None = None) -> list[int]:
    """Share out work: for each item the rank that does it. Largest first, each to the rank with least by then.

    Args:
        sizes: of the items.
        ranks: how many there are.
        holders: for each item the ranks that can do it; by default all.

    >>> partition([4, 4, 6, 2], ranks=2)
    [1, 1, 0, 0]
    """
    load = [0] * ranks
    owners = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        able = range(ranks) if holders is None else holders[item]
        owners[item] = min(able, key=lambda rank: (load[rank], rank))
        load[owners[item]] += sizes[item]
    return owners


def _sync(
    observers: Mapping[Key, Observer],
    collectives: Collectives,
    told: set[Key],
    weights: dict[Key, int],
    failure: Exception | None,
    by_declaration: bool,
    note: Any = None,
) -> Synced:
    with torch.inference_mode(False), torch.no_grad():
        try:
            description = describe(observers, told, by_declaration=by_declaration)
        except Exception as error:  # the others are waiting for a description
            description, failure = Description(), failure or error
        description.failure = None if failure is None else sendable(failure)
        description.weights, description.note = weights, note
        every: list[Description] = collectives.gather_object(description)
        try:
            require_no_failure(every)
        except CalibrationError as error:
            raise error from failure
        merged, reductions = _merge(agree(every), observers, collectives)
        for key, numbers in numbers_of(every).items():
            merged.setdefault(key, {}).update(numbers)
        for key in merged.keys() & observers.keys():
            observers[key].load_statistics(merged[key])
    unreached = set[Key]().union(*(told_by.held for told_by in every))
    unreached.difference_update(*(told_by.reached for told_by in every))
    return Synced(sorted(unreached), _owners(every), 1 + reductions, len(every), [told_by.note for told_by in every])


def _owners(every: Sequence[Description]) -> dict[Key, int]:
    keys = sorted({key for told in every for key in told.weights})
    sizes = [max(told.weights.get(key, 0) for told in every) for key in keys]
    holders = [[rank for rank, told in enumerate(every) if key in told.weights] for key in keys]
    return dict(zip(keys, partition(sizes, len(every), holders), strict=True))


# ---------------------------------------------------------------------- buckets


class _Group(NamedTuple):
    """Statistics of one reduction and dtype, and what this rank has of them."""

    op: str
    dtype: torch.dtype
    members: list[Agreed]
    mine: list[torch.Tensor | None]

    @property
    def sizes(self) -> list[int]:
        """Elements of each."""
        return [one.numel for one in self.members]


def _merge(
    agreed: Sequence[Agreed], observers: Mapping[Key, Observer], collectives: Collectives
) -> tuple[dict[Key, dict[str, Any]], int]:
    """The merged statistics of this rank's observers, in new tensors, and the number of reductions made."""
    alike: dict[tuple[str, torch.dtype], list[Agreed]] = {}
    for one in agreed:
        alike.setdefault((one.statistic.op, one.statistic.dtype), []).append(one)
    buckets: dict[Callable[..., Iterable[Iterable[torch.Tensor]]], list[_Group]] = {}
    for (op, dtype), members in alike.items():
        rank = collectives.rank
        mine = [getattr(observers[one.key], one.statistic.name) if rank in one.ranks else None for one in members]
        buckets.setdefault(_bucket(op, dtype), []).append(_Group(op, dtype, members, mine))
    merged: dict[Key, dict[str, Any]] = {}
    kinds = [kind for kind in (_extremes, _sums_of_floats, _integers) if kind in buckets]
    for kind in kinds:
        for group, found in zip(buckets[kind], kind(buckets[kind], collectives), strict=True):
            for one, value, total in zip(group.members, group.mine, found, strict=True):
                if one.key not in observers:
                    continue
                if value is not None and value.device != total.device:
                    total = total.to(value.device)
                if total.shape != one.statistic.shape:
                    total = total.view(one.statistic.shape)
                merged.setdefault(one.key, {})[one.statistic.name] = total
    return merged, len(kinds)


def _bucket(op: str, dtype: torch.dtype) -> Callable[..., Iterable[Iterable[torch.Tensor]]]:
    if op in ("min", "max"):
        return _extremes
    return _integers if op == "copy" or not dtype.is_floating_point else _sums_of_floats


def _extremes(groups: Sequence[_Group], collectives: Collectives) -> Iterator[list[torch.Tensor]]:
    """Minima and maxima of all dtypes, in one minimum of integers that are ordered as the values are."""
    keys = []
    for group in groups:
        flat = ordered(_flat(group, extreme(WIDE[group.dtype], largest=group.op == "min"), collectives.device))
        keys.append(flat if group.op == "min" else ~flat)
    parts = collectives.reduce(torch.cat(keys), "min").split([len(k) for k in keys])
    for group, part in zip(groups, parts, strict=True):
        yield _split(unordered(part if group.op == "min" else ~part, WIDE[group.dtype]), group)


def _sums_of_floats(groups: Sequence[_Group], collectives: Collectives) -> Iterator[list[torch.Tensor]]:
    """Sums in float64, and means as sums over the number of ranks that have them."""
    sums = [_flat(group, 0, collectives.device).double() for group in groups]
    parts = collectives.reduce(torch.cat(sums), "sum").split([len(part) for part in sums])
    for group, part in zip(groups, parts, strict=True):
        if group.op == "mean":
            counts = torch.tensor([len(one.ranks) for one in group.members])
            part = part / counts.repeat_interleave(torch.tensor(group.sizes)).to(part.device)
        yield _split(part, group)


def _flat(group: _Group, identity: float, device: torch.device) -> torch.Tensor:
    """A group's values end to end, widened; what this rank lacks is the identity."""
    wide = WIDE[group.dtype]
    found = [value for value in group.mine if value is not None and value.device == device]
    if len(found) < len(group.members):
        found = [
            torch.full((one.numel,), identity, dtype=wide, device=device) if value is None else value.to(device, wide)
            for one, value in zip(group.members, group.mine, strict=True)
        ]
    return torch.cat([value if value.ndim == 1 else value.reshape(-1) for value in found]).to(wide)


def _split(values: torch.Tensor, group: _Group) -> list[torch.Tensor]:
    """A group's values, in its dtype and in memory of their own: a view would keep the whole bucket alive."""
    return [part.clone() for part in values.to(group.dtype).split(group.sizes)]


def _integers(groups: Sequence[_Group], collectives: Collectives) -> Iterator[Iterator[torch.Tensor]]:
    """Sums of integers without their empty blocks, and copies as bytes, to which the other ranks add zero."""
    sizes = [[_length(one) for one in group.members] for group in groups]
    bucket = torch.zeros(sum(map(sum, sizes)), dtype=torch.int64, device=collectives.device)
    for group, part, each in zip(groups, bucket.split([sum(each) for each in sizes]), sizes, strict=True):
        for one, value, place in zip(group.members, group.mine, part.split(each), strict=True):
            if value is not None:
                _write_integers(one, value, place)
    bucket = collectives.reduce(bucket, "sum")
    for group, part, each in zip(groups, bucket.split([sum(each) for each in sizes]), sizes, strict=True):
        yield map(_read_integers, group.members, part.split(each))


def _length(one: Agreed) -> int:
    if one.statistic.op == "copy":
        return words(one.numel * one.statistic.dtype.itemsize)
    return one.numel if one.blocks is None else len(one.blocks) * BLOCK


def _write_integers(one: Agreed, value: torch.Tensor, place: torch.Tensor) -> None:
    if one.statistic.op == "copy":
        write_bytes(place, value)
    elif one.blocks is not None:
        place.copy_(value.reshape(-1, BLOCK)[one.blocks.to(value.device)].reshape(-1))
    else:
        place.copy_(value.reshape(-1))


def _read_integers(one: Agreed, part: torch.Tensor) -> torch.Tensor:
    if one.statistic.op == "copy":
        return read_bytes(part, one.statistic.dtype, one.statistic.shape)
    if one.blocks is not None:
        dense = part.new_zeros(one.numel // BLOCK, BLOCK)
        dense[one.blocks.to(part.device)] = part.view(-1, BLOCK)
        return dense
    found = part.to(one.statistic.dtype, copy=True)
    if (part != found).any():
        raise CalibrationError(
            f"the sum of {one.statistic.name} over ranks does not fit into {one.statistic.dtype}",
            where=[text(one.key)],
            remedy="count in int64.",
        )
    return found
