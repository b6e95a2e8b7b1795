"""Make every rank's statistics one.

Ranks see different batches and must write identical scales. What is hard: a collective that one rank does not enter
hangs the others, so nothing that a rank saw, lacks or failed at may decide which collectives come next.

Method: the ranks first agree (:mod:`~lightning_obs.ranks.agreement`) on which statistics there are, in one order, or
raise the same error. Then one bucket for each kind of reduction: all extremes in one minimum of integers, all
sums of integers in one, all sums and means of floats in one. A rank that lacks a statistic sends the reduction's
identity; a mean is a sum and the number of ranks that have it. Statistics are found by name, never by position: an
expert's cannot end up in another's.

Choices:

- Extremes and sums of integers have the same bits whatever the ranks. Sums and means of floats are added in float64,
  in the order of the backend; every rank gets the same bits.
- A statistic without a reduction (the range of the last tensor, whatever a class does not declare) is taken from the
  lowest rank that has it, and is sent with the agreement; one that cannot be sent is an error. So ranks agree whatever
  the observer. Statistics that only one rank holds (its experts') are not reduced.
- A histogram is 512 KiB, 448 of them 224 MiB. Only the blocks of 128 bins that some rank counted into are sent,
  and the agreement says which these are. At worst, with all of them occupied, the bucket is as large as one rank's
  histograms.

Fused groups (q, k, v) need nothing more: their global scale is computed from ranges, which are the same on every rank
by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_obs.errors import CalibrationError
from lightning_obs.observers import Key, Observer
from lightning_obs.ranks.agreement import (
    Description,
    agree,
    describe,
    lowest_ranks,
    unreached,
)
from lightning_obs.ranks.collectives import Collectives, Op
from lightning_obs.ranks.failures import require_finite, require_no_failure, sendable
from lightning_obs.ranks.packing import unpack_tensors
from lightning_obs.ranks.reduction import reduce_statistics

__all__ = [
    "MAX_COLLECTIVES",
    "Collectives",
    "Op",
    "Synced",
    "partition",
    "share_weights",
    "sync_statistics",
]

#: Collectives of one calibration, at most, for any number of observers: :func:`sync_statistics` takes one gather of
#: objects and three reductions, :func:`share_weights` one gather. (``torch.distributed.all_gather_object`` makes
#: two of a gather: lengths, then contents. Lightning's ``reduce`` adds a barrier to a reduction.)
MAX_COLLECTIVES = 5


@dataclass(frozen=True)
class Synced:
    """What the ranks agreed on; the same on every rank.

    Attributes:
        unreached: observers, of any rank, of which no rank has statistics; ordered.
        owners: for each weight the rank that searches its range, see :func:`partition`.
        collectives: how many this took.
        ranks: how many ranks there are.
        notes: of each rank, see :func:`sync_statistics`.
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

    Statistics are reduced as the observer declares them. A mean is over the ranks that have the statistic. A statistic
    that is not declared is taken from the lowest rank that has it. An observer that saw nothing on this rank has
    statistics afterwards too; ``reset`` forgets them.

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
    mine = Description(weights=dict(weights or {}), note=note)
    return _sync(observers, collectives, set(observers), mine, failure, reduced=True)


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
    return _sync(observers, collectives, owned, Description(), failure, reduced=False)


def partition(sizes: Sequence[int], ranks: int, holders: Sequence[Iterable[int]] | None = None) -> list[int]:
    """Share out work: for each item the rank that does it. Largest first, each to the rank with least by then.

    Args:
        sizes: of the items.
        ranks: how many there are.
        holders: for each item the ranks that can do it; by default all.

    >>> partition([4, 4, 6, 2], ranks=2)
    [1, 1, 0, 0]
    """
    # compressed-tensors' greedy_bin_packing does the same where every rank can do every item; it knows no holders, and
    # a rank may hold a part of the experts only.
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
    counted: set[Key],
    mine: Description,
    failure: Exception | None,
    reduced: bool,
) -> Synced:
    """Describe, agree, reduce, take over. ``mine`` holds this rank's weights and note."""
    with torch.inference_mode(False), torch.no_grad():
        try:
            described = describe(observers, counted, reduced=reduced, alone=collectives.size == 1)
        except Exception as error:  # the others are waiting for a description
            described, failure = Description(), failure or error
        described.failure = None if failure is None else sendable(failure)
        described.weights, described.note = mine.weights, mine.note
        every: list[Description] = collectives.gather_object(described)
        try:
            require_no_failure([d.failure for d in every])
            require_finite([d.not_finite for d in every])
        except CalibrationError as error:
            raise error from failure
        reductions = _reduce_into(observers, every, collectives) if len(every) > 1 else 0
        for observer in observers.values():
            observer.is_finite = True
    return Synced(unreached(every), _owners(every), 1 + reductions, len(every), [d.note for d in every])


def _reduce_into(observers: Mapping[Key, Observer], every: Sequence[Description], collectives: Collectives) -> int:
    """Give the observers the statistics of all ranks; returns how many reductions that took."""
    reduced, reductions = reduce_statistics(agree(every), observers, collectives)
    for key, statistics in reduced.items():
        observers[key].load_statistics(statistics)
    for key, rank in lowest_ranks(every).items():
        packed = every[rank].packed
        if key in observers and rank != collectives.rank and packed is not None:
            observers[key].load_statistics(unpack_tensors(every[rank].kept[key], packed, collectives.device))
    return reductions


def _owners(every: Sequence[Description]) -> dict[Key, int]:
    keys = sorted({key for d in every for key in d.weights})
    sizes = [max(d.weights.get(key, 0) for d in every) for key in keys]
    holders = [[rank for rank, d in enumerate(every) if key in d.weights] for key in keys]
    return dict(zip(keys, partition(sizes, len(every), holders), strict=True))
