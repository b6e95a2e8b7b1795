"""Give all ranks the same statistics: of data by :func:`sync_statistics`, of weights by :func:`share_weights`.

At the end of an observation, ``calibration/finalize.py`` calls :func:`sync_statistics`. Then it searches the weights'
ranges by :func:`share_weights`: each rank searches its share of the weights, and all ranks get the results.

Ranks see different batches and must write identical scales. The difficulty: if one rank does not enter a collective,
the others hang, so neither the data nor a failure of a single rank may decide which collectives come next.

Method: each rank sends a *description* of its statistics to all others, in one gather. From the same descriptions every
rank derives the same list of reductions in the same order, or the same error. Then there is one collective for each
kind of reduction: all minima and maxima as one minimum of integers, all sums of integers, all sums and means of floats
(:mod:`~lightning_obs.ranks.reduction`). A rank that lacks a statistic sends the reduction's identity. A mean is reduced
as a sum, and divided by the number of ranks that hold it. Statistics are matched by name, never by position, so an
expert's statistics cannot end up in another expert.

Extremes and sums of integers have the same bits for any partition of the data over ranks. Floats are added in float64,
in the order of the backend, and every rank gets the same bits. A statistic without a reduction (the range of the last
tensor, an undeclared attribute) is sent with the description, and all ranks take the value of the lowest rank that has
one. Statistics that only one rank holds (of its experts) are not reduced. Global scales of fused sets (q, k, v) are
computed afterwards, from ranges that are then the same on every rank.
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
from lightning_obs.observers.statistic import declared_statistics, is_reached
from lightning_obs.ranks.collectives import Collectives, Stretch
from lightning_obs.ranks.reduction import (
    WIDE,
    Form,
    SharedStatistic,
    occupied_blocks,
    pack_tensors,
    reduce_statistics,
    union_of_blocks,
    unpack_tensors,
)

_REMEDY = "declare SUM, AVG, MIN or MAX of a tensor in _act_sync_dict."


@dataclass(frozen=True)
class Synced:
    """The result of :func:`sync_statistics` or :func:`share_weights`; the same on every rank, except for ``failure``.

    Read by their callers: finalize, ``calibration/saved_state.py`` and ``calibration/sharded_weights.py``.

    Attributes:
        unreached: observers that no data reached on any rank, sorted.
        owners: for each weight, the rank that searches its range (:func:`partition`).
        collectives: the number of collectives: the exchange of descriptions, which a single process counts without
            making it, and one for each kind of reduction.
        notes: the ``note`` of each rank, an argument of :func:`sync_statistics`.
        failure: a failure of this rank after the descriptions were exchanged. The caller passes it to its
            :class:`.Stretch`, which raises it on all ranks.
    """

    unreached: list[Key]
    owners: dict[Key, int]
    collectives: int
    notes: list[Any]
    failure: Exception | None = field(default=None, repr=False)


def sync_statistics(
    observers: Mapping[Key, Observer],
    collectives: Collectives,
    *,
    weights: Mapping[Key, int] | None = None,
    failure: Exception | None = None,
    note: Any = None,
) -> Synced:
    """Replace the statistics of every observer by those of all ranks' data. Every rank must call it.

    Called by finalize at the end of an observation, and by ``calibration/saved_state.py`` when an incomplete
    observation is saved. Afterwards, an observer that observed nothing on this rank has the other ranks' statistics.

    Args:
        observers: this rank's observers, by module name and base name; other ranks may hold other observers.
        collectives: the collectives of this rank.
        weights: number of elements of each weight that this rank holds; the weights are assigned to ranks, which then
            search their ranges.
        failure: an earlier failure of this rank, to be raised on all ranks.
        note: a small object to send to all ranks.

    Raises:
        CalibrationError: the same error on every rank: NaN or infinity in the statistics of a rank; ranks whose
            statistics of one module differ in shape, dtype or reduction; a statistic that cannot be reduced; a failure
            of a rank.

    >>> from compressed_tensors.quantization import QuantizationArgs
    >>> observer = Observer.load_from_registry("static_minmax", base_name="input", args=QuantizationArgs())
    >>> sync_statistics({("fc1", "input"): observer}, Collectives())
    Synced(unreached=[('fc1', 'input')], owners={}, collectives=1, notes=[None])
    """
    description = _Description(weights=dict(weights or {}), note=note)
    return _sync(observers, collectives, set(observers), description, failure, reduced=True)


def share_weights(
    observers: Mapping[Key, Observer],
    owners: Mapping[Key, int],
    search: Callable[[Key], object],
    collectives: Collectives,
    failure: Exception | None = None,
) -> Synced:
    """Search the range of each weight on the rank that owns it, and give the results to every rank. All must call it.

    Called by finalize after :func:`sync_statistics`, and by ``calibration/sharded_weights.py`` for weights that FSDP
    shards.

    Args:
        observers: observers of the weights that this rank holds.
        owners: the rank that searches each of these weights (:attr:`Synced.owners`).
        search: a function that lets the observer of a key observe its weight; called for the keys that this rank owns.
        collectives: the collectives of this rank.
        failure: an earlier failure of this rank, to be raised on all ranks; this rank then searches nothing.

    Raises:
        CalibrationError: the same error on every rank: a failure of a rank, or NaN or infinity in a weight.
    """
    searched: set[Key] = set()
    if failure is None:
        for key in sorted(observers):
            try:
                if owners[key] == collectives.rank:
                    search(key)
                    searched.add(key)
            except Exception as error:
                failure = sendable(error, key)
                failure.__cause__ = error
                break
    return _sync(observers, collectives, searched, _Description(), failure, reduced=False)


def partition(sizes: Sequence[int], ranks: int, holders: Sequence[Iterable[int]] | None = None) -> list[int]:
    """Assign items of work to ranks: largest first, each to the rank with the least work so far.

    :func:`_assign_weights` calls it to decide which rank searches the range of which weight.

    Args:
        sizes: the amount of work of each item.
        ranks: the number of ranks.
        holders: for each item, the ranks that can do it; default: all ranks.

    Returns:
        The rank of each item.

    >>> partition([4, 4, 6, 2], ranks=2)
    [1, 1, 0, 0]
    """
    # compressed-tensors' greedy_bin_packing assigns in the same way, but to any rank. Here a rank may hold some experts
    # only, and can search no others.
    work_of_ranks = [0] * ranks
    owners = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        candidates = range(ranks) if holders is None else holders[item]
        owner = min(candidates, key=lambda rank: (work_of_ranks[rank], rank))
        owners[item] = owner
        work_of_ranks[owner] += sizes[item]
    return owners


def _sync(
    observers: Mapping[Key, Observer],
    collectives: Collectives,
    counted: set[Key],
    description: _Description,
    failure: Exception | None,
    reduced: bool,
) -> Synced:
    """Describe this rank's statistics, exchange descriptions, reduce, and load the result into the observers.

    The common part of :func:`sync_statistics` and :func:`share_weights`. A single process exchanges and reduces
    nothing. At the end, the statistics of all observers are marked as finite, because NaN or infinity on any rank is an
    error here. Lightning validates in inference mode, whose tensors cannot be changed afterwards; so it is switched off
    here, where statistics are made and loaded.

    Args:
        observers: this rank's observers, by module name and base name.
        collectives: the collectives of this rank.
        counted: the observers whose statistics this rank contributes; its other observers only receive statistics.
        description: holds this rank's weights and note; the other fields are filled in here.
        failure: an earlier failure of this rank.
        reduced: True: statistics are reduced as they declare. False: all are taken from the lowest rank that has them.
    """
    is_alone = collectives.size == 1
    with torch.inference_mode(False), torch.no_grad():
        try:
            _describe(description, observers, counted, reduced, is_alone)
        except Exception as error:  # the other ranks are waiting for a description
            description = _Description(weights=description.weights, note=description.note)
            failure = failure or error
        if failure is not None:
            description.failure = sendable(failure)
        descriptions = [description] if is_alone else collectives.gather_object(description)
        try:
            require_no_failure([description.failure for description in descriptions])
            _require_finite(descriptions)
        except CalibrationError as error:
            raise error from failure
        stretch = Stretch(collectives)
        reductions = 0 if is_alone else _reduce_into(observers, descriptions, collectives, stretch)
        for observer in observers.values():
            observer.is_finite = True
    return Synced(
        unreached=_unreached_everywhere(descriptions),
        owners=_assign_weights(descriptions),
        collectives=1 + reductions,
        notes=[description.note for description in descriptions],
        failure=stretch.failure,
    )


# ---------------------------------------------------------------------- the description of one rank


@dataclass
class _Description:
    """The message of one rank to all others: some ten bytes for each observer, and statistics without a reduction.

    Attributes:
        failure: a failure of the rank.
        weights: number of elements of each weight that the rank holds.
        note: an object for all ranks.
        forms: for each observer of the rank, the forms of its statistics that are to be reduced.
        unreached: the rank's observers that no data reached.
        kept: by observer and name, the statistics without a reduction, with names in place of their tensors.
        packed: the tensors of ``kept`` as bytes (:func:`pack_tensors`).
        not_finite: the rank's observers with NaN or infinity in a statistic, with a text that says how many.
        occupied: by observer and name, for each long statistic of counts, which of its blocks hold a count: only these
            are sent (:mod:`.reduction`).
    """

    failure: CalibrationError | None = None
    weights: dict[Key, int] = field(default_factory=dict)
    note: Any = None
    forms: dict[Key, tuple[Form, ...]] = field(default_factory=dict)
    unreached: set[Key] = field(default_factory=set)
    kept: dict[Key, dict[str, Any]] = field(default_factory=dict)
    packed: bytes = b""
    not_finite: dict[Key, str] = field(default_factory=dict)
    occupied: dict[tuple[Key, str], bytes] = field(default_factory=dict)


def _describe(
    description: _Description,
    observers: Mapping[Key, Observer],
    counted: set[Key],
    reduced: bool,
    is_alone: bool,
) -> None:
    """Fill in everything about this rank's observers, before descriptions are exchanged.

    Args:
        description: holds weights and note already.
        observers, counted, reduced: as in :func:`_sync`.
        is_alone: whether there is only this rank.

    Raises:
        CalibrationError: a statistic that cannot be reduced as declared, or that cannot be sent.
    """
    description.forms = dict.fromkeys(observers, ())
    description.unreached = observers.keys() - counted
    statistics: dict[Key, dict[str, Any]] = {}
    equal_forms: dict[tuple[Form, ...], tuple[Form, ...]] = {}  # most observers are alike: pickle sends one object once
    for key, observer in observers.items():
        if key not in counted:
            continue
        statistics[key] = observer.get_statistics()
        if not is_reached(observer):
            description.unreached.add(key)
        forms, without_reduction = _forms_and_others(key, observer, statistics[key], reduced)
        description.forms[key] = equal_forms.setdefault(forms, forms)
        # Without `has_statistics` the observer of a weight has gathered inputs only. It has not yet observed the tensor
        # for which the other ranks would take these statistics.
        if without_reduction and observer.has_statistics and not is_alone:
            description.kept[key] = without_reduction
    require_plain(
        description.kept,
        "these statistics cannot be sent to the other ranks, so ranks would continue with different values",
        _REMEDY,
    )
    if description.kept:
        description.kept, description.packed = pack_tensors(description.kept)
    description.not_finite = _not_finite(observers, statistics)
    if not is_alone:
        description.occupied = _occupied_blocks_of(description.forms, statistics)


def _forms_and_others(
    key: Key, observer: Observer, statistics: Mapping[str, Any], reduced: bool
) -> tuple[tuple[Form, ...], dict[str, Any]]:
    """The forms of an observer's statistics that are to be reduced, and its other statistics by name.

    Args:
        key: module name and base name of the observer.
        observer: holds the statistics.
        statistics: by name.
        reduced: False: none of them is reduced.

    Raises:
        CalibrationError: a statistic that cannot be reduced as declared.
    """
    reductions = _declared_reductions(observer) if reduced else {}
    forms = []
    without_reduction = {}
    for name, value in statistics.items():
        if name in reductions:
            forms.append(_form_of(key, observer, name, reductions[name], value))
        else:
            without_reduction[name] = value
    return tuple(forms), without_reduction


def _declared_reductions(observer: Observer) -> dict[str, str]:
    """The reduction of each statistic for which an observer declares one, by name."""
    return {
        statistic.name: statistic.reduction
        for statistic in declared_statistics(observer)
        if statistic.reduction != "keep"
    }


def _form_of(key: Key, observer: Observer, name: str, reduction: str, value: Any) -> Form:
    """The form of a statistic that is to be reduced over ranks.

    Args:
        key: the observer's module name and base name, for the error.
        observer: the observer, for the error.
        name: the name of the statistic.
        reduction: its declared reduction.
        value: this rank's value.

    Raises:
        CalibrationError: the statistic cannot be reduced as it is declared.
    """
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
    raise CalibrationError(
        f"the statistic {name} of {type(observer).__name__} cannot be reduced over ranks",
        where=[key_text(key)],
        got=problem,
        remedy=_REMEDY,
    )


def _not_finite(observers: Mapping[Key, Observer], statistics: Mapping[Key, Mapping[str, Any]]) -> dict[Key, str]:
    """For each observer with NaN or infinity in its statistics, sorted, a text that says how many."""
    # All are checked at once. An observer is checked alone if something is not finite, or if it has its own check.
    values = chain.from_iterable(values.values() for values in statistics.values())
    is_finite = all_finite(values)
    texts = {}
    for key in sorted(statistics):
        observer = observers[key]
        has_own_check = type(observer).nonfinite_statistics is not Observer.nonfinite_statistics
        if has_own_check or not is_finite:
            text = observer.nonfinite_statistics()
            if text:
                texts[key] = text
    return texts


def _occupied_blocks_of(
    forms_of_observers: Mapping[Key, tuple[Form, ...]], statistics: Mapping[Key, Mapping[str, Any]]
) -> dict[tuple[Key, str], bytes]:
    """For each statistic that is sent by blocks, by observer and name, which of its blocks are occupied."""
    places = []
    sums = []
    for key, forms in forms_of_observers.items():
        for form in forms:
            if form.is_sparse:
                places.append((key, form.name))
                sums.append(statistics[key][form.name])
    return dict(zip(places, occupied_blocks(sums), strict=True))


def require_plain(statistics: Mapping[Key, Mapping[str, Any]], what: str, remedy: str | None = None) -> None:
    """Raise a CalibrationError for statistics that are not plain (:func:`_is_plain`).

    Called by :func:`_describe` before statistics are sent to other ranks, and by ``calibration/saved_state.py`` before
    they are saved.

    Args:
        statistics: the values of the statistics, by observer and name.
        what: the error's first sentence, which says why such statistics are refused.
        remedy: the remedy in the error.
    """
    not_plain = []
    for key, values in statistics.items():
        for name, value in values.items():
            if not _is_plain(value):
                not_plain.append(key_text(key, more=name))
    refuse(
        not_plain,
        what,
        expected="tensors, numbers, strings, dtypes, None, and lists, tuples, sets and dicts of them",
        remedy=remedy,
    )


def _is_plain(value: Any) -> bool:
    """Whether a value can be sent to other ranks and saved; :func:`require_plain` asks it for each statistic.

    Plain are tensors that are not sharded, numbers, strings, dtypes, None, and lists, tuples, sets and dicts of these.
    """
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.keys())) and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    if isinstance(value, DTensor):
        return False
    return value is None or isinstance(value, (torch.Tensor, bool, int, float, str, torch.dtype))


# ---------------------------------------------------------------------- conclusions, the same on every rank


def _require_finite(descriptions: Sequence[_Description]) -> None:
    """Raise a CalibrationError that names modules and ranks if any rank's statistics hold NaN or infinity."""
    texts = []
    for rank, description in enumerate(descriptions):
        shown_rank = rank if len(descriptions) > 1 else None
        for key, text in description.not_finite.items():
            texts.append(key_text(key, shown_rank, text))
    refuse(
        texts,
        "observed values are not finite",
        expected="finite weights and activations",
        remedy="find the NaN or infinity in these modules' weights or in the data; nothing was written.",
    )


def _unreached_everywhere(descriptions: Sequence[_Description]) -> list[Key]:
    """The observers that no data reached on any rank, sorted."""
    unreached: set[Key] = set()
    reached: set[Key] = set()
    for description in descriptions:
        unreached |= description.unreached
        reached |= description.forms.keys() - description.unreached
    return sorted(unreached - reached)


def _assign_weights(descriptions: Sequence[_Description]) -> dict[Key, int]:
    """For each weight, the rank that is to search its range: one of the ranks that hold it."""
    sizes: dict[Key, int] = {}
    holders: dict[Key, list[int]] = {}
    for rank, description in enumerate(descriptions):
        for key, size in description.weights.items():
            sizes[key] = max(size, sizes.get(key, 0))
            holders.setdefault(key, []).append(rank)
    keys = sorted(sizes)
    owners = partition([sizes[key] for key in keys], len(descriptions), [holders[key] for key in keys])
    return dict(zip(keys, owners, strict=True))


def _shared_statistics(descriptions: Sequence[_Description]) -> list[SharedStatistic]:
    """The statistics to reduce, in the same order on every rank: those of observers that at least two ranks hold.

    Raises:
        CalibrationError: ranks differ in shape, dtype or reduction of a statistic.
    """
    statistics: list[SharedStatistic] = []
    differing: list[tuple[Key, str]] = []
    for forms_of_ranks, keys in _observers_with_equal_forms(descriptions):
        for form_of_rank in _forms_by_name(forms_of_ranks):
            form, *other_forms = dict.fromkeys(form_of_rank.values())
            if other_forms:
                differing += _differing_forms(keys, form_of_rank)
                continue
            ranks = list(form_of_rank)
            blocks: list[torch.Tensor | None] = [None] * len(keys)
            if form.is_sparse:
                blocks = [_blocks_of_ranks(descriptions, ranks, key, form.name) for key in keys]
            statistics.append(SharedStatistic(form, keys, ranks, blocks))
    refuse(
        [text for _, text in sorted(differing)],
        "ranks differ in the statistics of one module",
        expected="the same shape, dtype and reduction on every rank",
        remedy="run the same model, observers and precision on all ranks.",
    )
    return statistics


def _observers_with_equal_forms(
    descriptions: Sequence[_Description],
) -> list[tuple[tuple[tuple[Form, ...] | None, ...], list[Key]]]:
    """Group observers that have the same forms on each rank, so that a group can be packed in one operation.

    Returns:
        For each group, the forms on each rank (None: the rank does not hold these observers), and the observers.
        Observers that only one rank holds are left out.
    """
    groups: dict[tuple[tuple[Form, ...] | None, ...], list[Key]] = {}
    all_keys = dict.fromkeys(chain.from_iterable(description.forms for description in descriptions))
    for key in all_keys:
        forms_of_ranks = tuple([description.forms.get(key) for description in descriptions])
        holders = len(forms_of_ranks) - forms_of_ranks.count(None)
        if holders > 1:
            groups.setdefault(forms_of_ranks, []).append(key)
    return list(groups.items())


def _forms_by_name(forms_of_ranks: Sequence[Sequence[Form] | None]) -> list[dict[int, Form]]:
    """For each statistic of a group of observers, sorted by name, its form on each rank that has it."""
    by_name: dict[str, dict[int, Form]] = {}
    for rank, forms in enumerate(forms_of_ranks):
        for form in forms or ():
            by_name.setdefault(form.name, {})[rank] = form
    return [by_name[name] for name in sorted(by_name)]


def _differing_forms(keys: Sequence[Key], form_of_rank: Mapping[int, Form]) -> list[tuple[Key, str]]:
    """For the error about ranks that differ in a statistic: each of its observers, with the form that a rank has."""
    differing = []
    for key in keys:
        for rank, form in form_of_rank.items():
            differing.append((key, key_text(key, rank, _shown(form))))
    return differing


def _blocks_of_ranks(descriptions: Sequence[_Description], ranks: Sequence[int], key: Key, name: str) -> torch.Tensor:
    """The indices of the blocks of a sparse statistic that are occupied on some rank.

    Args:
        descriptions: of all ranks.
        ranks: those that have the statistic.
        key: of the observer.
        name: of the statistic.
    """
    return union_of_blocks(descriptions[rank].occupied[key, name] for rank in ranks)


def _shown(form: Form) -> str:
    """A form as text, for the error about ranks that differ."""
    shape = "x".join(map(str, form.shape)) or "scalar"
    return f"{form.reduction} of {form.name} {shape} {str(form.dtype).removeprefix('torch.')}"


def _reduce_into(
    observers: Mapping[Key, Observer],
    descriptions: Sequence[_Description],
    collectives: Collectives,
    stretch: Stretch,
) -> int:
    """Reduce the described statistics over ranks, and load the results into this rank's observers.

    A failure of this rank is kept in ``stretch``.

    Returns:
        The number of collectives that were made.
    """
    reductions = 0
    for reduced in reduce_statistics(_shared_statistics(descriptions), observers, collectives, stretch):
        reductions += 1
        with stretch:
            for key, statistics in reduced.items():
                _load(key, observers[key], statistics)
    with stretch:
        _take_kept(observers, descriptions, collectives)
    return reductions


def _take_kept(
    observers: Mapping[Key, Observer], descriptions: Sequence[_Description], collectives: Collectives
) -> None:
    """Load statistics without a reduction into this rank's observers, from the lowest rank that has them."""
    done: set[Key] = set()
    for rank, description in enumerate(descriptions):
        due = {}
        for key, statistics in description.kept.items():
            if key in observers and key not in done:
                due[key] = statistics
        done |= due.keys()
        if due and rank != collectives.rank:
            unpacked = unpack_tensors(due, description.packed, collectives.device)
            for key, statistics in unpacked.items():
                _load(key, observers[key], statistics)


def _load(key: Key, observer: Observer, statistics: Mapping[str, Any]) -> None:
    """Load reduced statistics into an observer; an error names the observer's key."""
    try:
        observer.load_statistics(statistics)
    except Exception as error:
        raise sendable(error, key) from error
