"""Reduce statistics over ranks.

Ranks see different batches and must write identical scales. The difficulty: a collective that one rank does not enter
hangs the others, so no data, gap or failure of a single rank may decide which collectives come next.

Method: each rank describes its statistics. From all descriptions, which every rank has, each derives the same list of
reductions, in one order, or the same error. Then one bucket for each kind of reduction: all extremes in one minimum of
integers, all sums of integers in one, all sums and means of floats in one (:mod:`~lightning_obs.ranks.reduction`). A
rank that lacks a statistic sends the reduction's identity; a mean is a sum and the number of ranks that have it.
Statistics are found by name, never by position: an expert's cannot end up in another's.

Extremes and sums of integers have the same bits for any ranks. Sums and means of floats are added in float64, in
the order of the backend; every rank gets the same bits. A statistic without a reduction (the range of the last tensor,
undeclared attributes) is taken from the lowest rank that has it, and is sent with the agreement. Statistics
that only one rank holds (its experts') are not reduced. Global scales of fused sets (q, k, v) are computed from ranges,
which are the same on every rank by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_obs.errors import CalibrationError, key_text, refuse, require_no_failure, sendable
from lightning_obs.numerics.many_tensors import all_finite
from lightning_obs.observers import Key, Observer
from lightning_obs.ranks.collectives import Collectives, Stretch
from lightning_obs.ranks.reduction import (
    WIDE,
    Agreed,
    Form,
    occupied_blocks,
    pack_tensors,
    reduce_statistics,
    union_of_blocks,
    unpack_tensors,
)

_REMEDY = "declare SUM, AVG, MIN or MAX of a tensor in _act_sync_dict."


@dataclass(frozen=True)
class Synced:
    """The agreement of the ranks; the same on every rank, except for ``failure``."""

    unreached: list[Key]  # observers without statistics on every rank; ordered
    owners: dict[Key, int]  # for each weight the rank that searches its range, see :func:`partition`
    collectives: int  # how many this took
    notes: list[Any]  # of each rank, see :func:`sync_statistics`
    #: of this rank alone, after the ranks had agreed: to be raised on all by their next agreement (:class:`.Stretch`)
    failure: Exception | None = field(default=None, repr=False)


def sync_statistics(
    observers: Mapping[Key, Observer],
    collectives: Collectives,
    *,
    weights: Mapping[Key, int] | None = None,
    failure: Exception | None = None,
    note: Any = None,
) -> Synced:
    """Give every observer the statistics of all ranks' data. Every rank must call this.

    An observer that saw nothing on this rank has statistics afterwards too; ``reset`` forgets them.

    Args:
        observers: this rank's, by module name and base name; other ranks may hold others.
        collectives: how to talk to the other ranks.
        weights: number of elements of each weight that this rank holds, to share out the search for their ranges.
        failure: an earlier failure of this rank, to be raised on all.
        note: something small to send to all ranks.

    Raises:
        CalibrationError: on every rank alike: NaN or infinity in the statistics of a rank; ranks whose statistics of
            one module differ in shape, dtype or reduction; a reduction that cannot be made; a rank's failure.

    >>> from compressed_tensors.quantization import QuantizationArgs
    >>> observer = Observer.load_from_registry("static_minmax", base_name="input", args=QuantizationArgs())
    >>> sync_statistics({("fc1", "input"): observer}, Collectives())
    Synced(unreached=[('fc1', 'input')], owners={}, collectives=1, notes=[None])
    """
    mine = _Description(weights=dict(weights or {}), note=note)
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
        collectives: of this rank.
        failure: as of :func:`sync_statistics`; then nothing is searched here.

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
    return _sync(observers, collectives, owned, _Description(), failure, reduced=False)


def partition(sizes: Sequence[int], ranks: int, holders: Sequence[Iterable[int]] | None = None) -> list[int]:
    """Share out work: for each item the rank that does it. Largest first, each to the rank with least by then.

    ``holders`` are for each item the ranks that can do it; by default all.

    >>> partition([4, 4, 6, 2], ranks=2)
    [1, 1, 0, 0]
    """
    # compressed-tensors' greedy_bin_packing does the same where every rank can do every item; it knows no holders, and
    # a rank may hold a part of the experts only.
    load, owners = [0] * ranks, [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        able = range(ranks) if holders is None else holders[item]
        owners[item] = min(able, key=lambda rank: (load[rank], rank))
        load[owners[item]] += sizes[item]
    return owners


def _sync(
    observers: Mapping[Key, Observer],
    collectives: Collectives,
    counted: set[Key],
    mine: _Description,
    failure: Exception | None,
    reduced: bool,
) -> Synced:
    """Describe, agree, reduce, take over. ``mine`` holds this rank's weights and note."""
    alone = collectives.size == 1
    with torch.inference_mode(False), torch.no_grad():
        try:
            _describe(mine, observers, counted, reduced, alone)
        except Exception as error:  # the others are waiting for a description
            mine, failure = _Description(weights=mine.weights, note=mine.note), failure or error
        mine.failure = None if failure is None else sendable(failure)
        every: list[_Description] = [mine] if alone else collectives.gather_object(mine)
        try:
            require_no_failure([d.failure for d in every])
            _require_finite(every)
        except CalibrationError as error:
            raise error from failure
        stretch = Stretch(collectives)
        reductions = 0 if alone else _reduce_into(observers, every, collectives, stretch)
        for observer in observers.values():
            observer.is_finite = True
    sizes = {key: max(d.weights.get(key, 0) for d in every) for key in sorted({k for d in every for k in d.weights})}
    holders = [[rank for rank, d in enumerate(every) if key in d.weights] for key in sizes]
    owners = dict(zip(sizes, partition(list(sizes.values()), len(every), holders), strict=True))
    unreached = {key for d in every for key in d.unreached}
    unreached -= {key for d in every for key in d.held.keys() - d.unreached}
    return Synced(sorted(unreached), owners, 1 + reductions, [d.note for d in every], stretch.failure)


# ---------------------------------------------------------------------- one rank's side


@dataclass
class _Description:
    """The message of one rank: a few hundred bytes, some ten for each observer, and statistics without a reduction."""

    failure: CalibrationError | None = None
    weights: dict[Key, int] = field(default_factory=dict)  # elements of those that it holds
    note: Any = None
    held: dict[Key, tuple[Form, ...]] = field(default_factory=dict)  # observers, and their statistics that are reduced
    unreached: set[Key] = field(default_factory=set)  # observers that no data reached
    kept: dict[Key, dict[str, Any]] = field(default_factory=dict)  # statistics without a reduction, but their tensors
    packed: bytes = b""  # these tensors
    not_finite: dict[Key, str] = field(default_factory=dict)  # statistics with NaN or infinity
    occupied: dict[tuple[Key, str], bytes] = field(default_factory=dict)  # blocks of a sum of integers


def _describe(
    mine: _Description, observers: Mapping[Key, Observer], counted: set[Key], reduced: bool, alone: bool
) -> None:
    """Fill in this rank's observers, and the statistics of ``counted``, to be ``reduced`` as declared or kept as is.

    An error is a declared reduction that cannot be made, or a statistic that cannot be sent.
    """
    mine.held, mine.unreached = dict.fromkeys(observers, ()), observers.keys() - counted
    statistics = {key: observer.get_statistics() for key, observer in observers.items() if key in counted}
    known: dict[tuple[Form, ...], tuple[Form, ...]] = {}  # most observers are alike: one object is sent once
    for key, found in statistics.items():
        observer = observers[key]
        if not observer.is_reached:
            mine.unreached.add(key)
        declared = {s.name: s.reduction for s in observer.declared if s.reduction != "keep"} if reduced else {}
        forms = tuple([_form(key, observer, n, declared[n], value) for n, value in found.items() if n in declared])
        mine.held[key] = known.setdefault(forms, forms)
        kept = {name: value for name, value in found.items() if name not in declared}
        if kept and observer.has_statistics and not alone:
            mine.kept[key] = kept
    require_plain(mine.kept, "statistics that cannot be sent to other ranks, which would go on with others", _REMEDY)
    if mine.kept:
        mine.kept, mine.packed = pack_tensors(mine.kept)
    # All are checked at once; one by one only if something is not finite, or an observer has a check of its own.
    finite = all_finite(chain.from_iterable(found.values() for found in statistics.values()))
    for key in sorted(statistics):
        asked = not finite or type(observers[key]).nonfinite_statistics is not Observer.nonfinite_statistics
        if asked and (bad := observers[key].nonfinite_statistics()):
            mine.not_finite[key] = bad
    if not alone:
        places = [(key, form.name) for key, forms in mine.held.items() for form in forms if form.is_sparse]
        blocks = occupied_blocks([statistics[key][name] for key, name in places])
        mine.occupied = dict(zip(places, blocks, strict=True))


def _form(key: Key, observer: Observer, name: str, reduction: str, value: Any) -> Form:
    if reduction not in ("sum", "mean", "min", "max"):
        problem = f"reduction {reduction}"
    elif not isinstance(value, torch.Tensor):
        problem = type(value).__name__
    elif isinstance(value, DTensor):
        problem = "a DTensor, which is sharded already"
    elif value.dtype not in WIDE or (reduction == "mean" and not value.is_floating_point()):
        problem = f"{reduction} of {value.dtype}"
    else:
        return Form(name, reduction, tuple(value.shape), value.dtype)
    what = f"the statistic {name} of {type(observer).__name__} cannot be reduced over ranks"
    raise CalibrationError(what, where=[key_text(key)], got=problem, remedy=_REMEDY)


def require_plain(statistics: Mapping[Key, Mapping[str, Any]], what: str, remedy: str | None = None) -> None:
    """Refuse, as ``what``, every statistic that is not a tensor, number, string, or a list, dict... of these."""
    refuse(
        [key_text(key, more=n) for key, found in statistics.items() for n, x in found.items() if not _is_plain(x)],
        what,
        expected="tensors, numbers, strings, and lists and dicts of them",
        remedy=remedy,
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    plain = (torch.Tensor, bool, int, float, str, torch.dtype)
    return value is None or (isinstance(value, plain) and not isinstance(value, DTensor))


# ---------------------------------------------------------------------- conclusions, the same on every rank


def _require_finite(every: Sequence[_Description]) -> None:
    refuse(
        [
            key_text(key, rank if len(every) > 1 else None, what)
            for rank, description in enumerate(every)
            for key, what in description.not_finite.items()
        ],
        "observed values are not finite",
        expected="finite weights and activations",
        remedy="find the NaN or infinity in these modules' weights or in the data; nothing was written.",
    )


def _agree(every: Sequence[_Description]) -> list[Agreed]:
    """The statistics to reduce, in the same order on every rank. A statistic of only one rank is not among them.

    Raises:
        CalibrationError: ranks differ in shape, dtype or reduction.
    """
    alike: dict[tuple[tuple[Form, ...] | None, ...], list[Key]] = {}  # by the ranks' forms; most observers are alike
    for key in dict.fromkeys(chain.from_iterable(d.held for d in every)):
        alike.setdefault(tuple([d.held.get(key) for d in every]), []).append(key)
    agreed: list[Agreed] = []
    differing: list[tuple[Key, str]] = []
    for of_ranks, keys in alike.items():
        if len(of_ranks) - of_ranks.count(None) < 2:
            continue
        by_name: dict[str, dict[int, Form]] = {}
        for rank, forms in enumerate(of_ranks):
            for form in forms or ():
                by_name.setdefault(form.name, {})[rank] = form
        for name, by_rank in sorted(by_name.items()):
            form = next(iter(by_rank.values()))
            if len(set(by_rank.values())) > 1:
                differing += [(key, key_text(key, rank, _shown(f))) for key in keys for rank, f in by_rank.items()]
            elif form.is_sparse:
                blocks = [union_of_blocks(every[rank].occupied[key, name] for rank in by_rank) for key in keys]
                agreed.append(Agreed(form, keys, list(by_rank), blocks))
            else:
                agreed.append(Agreed(form, keys, list(by_rank), [None] * len(keys)))
    refuse(
        [what for _, what in sorted(differing)],
        "ranks differ in the statistics of one module",
        expected="the same shape, dtype and reduction on every rank",
        remedy="run the same model, observers and precision on all ranks.",
    )
    return agreed


def _shown(form: Form) -> str:
    shape = "x".join(map(str, form.shape)) or "scalar"
    return f"{form.reduction} of {form.name} {shape} {str(form.dtype).removeprefix('torch.')}"


def _reduce_into(
    observers: Mapping[Key, Observer], every: Sequence[_Description], collectives: Collectives, stretch: Stretch
) -> int:
    """Give the observers the statistics of all ranks; returns how many reductions that took.

    A failure of this rank alone is kept in ``stretch``.
    """
    reductions = 0
    for reduced in reduce_statistics(_agree(every), observers, collectives, stretch):
        reductions += 1
        with stretch:
            for key, statistics in reduced.items():
                _load(key, observers[key], statistics)
    known: set[Key] = set()
    with stretch:
        for rank, description in enumerate(every):  # the lowest rank gives statistics without a reduction
            lowest = {key: nest for key, nest in description.kept.items() if key in observers and key not in known}
            known |= lowest.keys()
            if lowest and rank != collectives.rank:
                for key, statistics in unpack_tensors(lowest, description.packed, collectives.device).items():
                    _load(key, observers[key], statistics)
    return reductions


def _load(key: Key, observer: Observer, statistics: Mapping[str, Any]) -> None:
    """Let an observer take over reduced statistics; an error names it."""
    try:
        observer.load_statistics(statistics)
    except Exception as error:
        raise sendable(error, key) from error
