"""What ranks tell each other before they reduce anything, and what follows from it.

Each rank describes what it holds. From all descriptions, which every rank has, each derives the same list of
reductions, or the same error: nothing here depends on which rank computes it. So what one rank saw, lacks or failed at
can neither hang the others nor give them something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.observers import Key, Observer
from lightning_obs.observers.statistic import all_finite
from lightning_obs.ranks.failures import key_text
from lightning_obs.ranks.packing import WIDE, can_be_sparse, occupied_blocks, pack_tensors, union_of_blocks

_REMEDY = "declare SUM, AVG, MIN or MAX of a tensor in _act_sync_dict."


class Form(NamedTuple):
    """What ranks have to agree on before they reduce a statistic. ``reduction``: sum, mean, min or max."""

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
        """Whether only its occupied blocks are sent."""
        return self.reduction == "sum" and can_be_sparse(self.dtype, self.numel)


@dataclass
class Description:
    """What one rank tells: a few hundred bytes, some ten for each observer, and the statistics without a reduction.

    Attributes:
        failure: what went wrong on this rank.
        weights: number of elements of the weights that it holds.
        note: anything else that the others shall know.
        held: observers that it holds, and the forms of their statistics that are reduced.
        unreached: those of them that no data reached.
        kept: statistics without a reduction, without their tensors.
        packed: these tensors, see :func:`~lightning_obs.ranks.packing.pack_tensors`.
        not_finite: what of an observer is NaN or infinite.
        occupied: which blocks of a sum of integers are not empty.
    """

    failure: CalibrationError | None = None
    weights: dict[Key, int] = field(default_factory=dict)
    note: Any = None
    held: dict[Key, tuple[Form, ...]] = field(default_factory=dict)
    unreached: set[Key] = field(default_factory=set)
    kept: dict[Key, dict[str, Any]] = field(default_factory=dict)
    packed: torch.Tensor | None = None
    not_finite: dict[Key, str] = field(default_factory=dict)
    occupied: dict[tuple[Key, str], bytes] = field(default_factory=dict)


class Agreed(NamedTuple):
    """One statistic to reduce, of the observers that hold it on the same ranks.

    Attributes:
        form: of one observer's.
        keys: the observers, in the same order on every rank.
        ranks: that hold it; the others send its identity.
        blocks: for each observer which blocks are not empty, if empty ones are left out.
    """

    form: Form
    keys: list[Key]
    ranks: list[int]
    blocks: list[torch.Tensor] | None = None


# ---------------------------------------------------------------------- one rank's side


def describe(observers: Mapping[Key, Observer], counted: set[Key], *, reduced: bool, alone: bool) -> Description:
    """Describe what this rank holds, and of ``counted`` also the statistics.

    Args:
        observers: of this rank.
        counted: those whose statistics count.
        reduced: reduce as the observer declares; otherwise keep everything.
        alone: there are no other ranks, to which anything would be sent.

    Raises:
        CalibrationError: a declared reduction that cannot be made; a statistic that cannot be sent.
    """
    description = Description(held=dict.fromkeys(observers, ()), unreached=observers.keys() - counted)
    statistics = {key: observer.get_statistics() for key, observer in observers.items() if key in counted}
    known: dict[tuple[Form, ...], tuple[Form, ...]] = {}  # most observers are alike: one object is sent once
    for key, found in statistics.items():
        observer = observers[key]
        if not observer.is_reached:
            description.unreached.add(key)
        declared = {s.name: s.reduction for s in observer.declared if s.reduction != "keep"} if reduced else {}
        forms = tuple([_form(key, observer, n, declared[n], value) for n, value in found.items() if n in declared])
        description.held[key] = known.setdefault(forms, forms)
        kept = {name: value for name, value in found.items() if name not in declared}
        if kept and observer.has_statistics and not alone:
            description.kept[key] = kept
    _require_sendable(description.kept)
    if description.kept:
        description.kept, description.packed = pack_tensors(description.kept)
    description.not_finite = _not_finite({key: observers[key] for key in statistics}, statistics.values())
    if not alone:
        description.occupied = _occupied(description.held, statistics)
    return description


def _form(key: Key, observer: Observer, name: str, reduction: str, value: Any) -> Form:
    problem = None
    if reduction not in ("sum", "mean", "min", "max"):
        problem = f"reduction {reduction}"
    elif not isinstance(value, torch.Tensor):
        problem = type(value).__name__
    elif isinstance(value, DTensor):
        problem = "a DTensor, which is sharded already"
    elif value.dtype not in WIDE or (reduction == "mean" and not value.is_floating_point()):
        problem = f"{reduction} of {value.dtype}"
    if problem:
        what = f"the statistic {name} of {type(observer).__name__} cannot be reduced over ranks"
        raise CalibrationError(what, where=[key_text(key)], got=problem, remedy=_REMEDY)
    return Form(name, reduction, tuple(value.shape), value.dtype)


def _require_sendable(kept: Mapping[Key, Mapping[str, Any]]) -> None:
    """What has no reduction is that of the lowest rank on all, so it has to be something that can be sent."""
    refuse(
        [
            key_text(key, more=name)
            for key, found in kept.items()
            for name, value in found.items()
            if not is_plain(value)
        ],
        "statistics that cannot be sent to other ranks, which would go on with others",
        expected="tensors, numbers, strings, and lists and dicts of them",
        remedy=_REMEDY,
    )


def is_plain(value: Any) -> bool:
    """Whether a statistic is a tensor, a number, a string, or a list, dict... of these."""
    if isinstance(value, Mapping):
        return all(is_plain(x) for x in (*value.keys(), *value.values()))
    if isinstance(value, (list, tuple, set)):
        return all(is_plain(x) for x in value)
    plain = (torch.Tensor, bool, int, float, str, torch.dtype)
    return value is None or (isinstance(value, plain) and not isinstance(value, DTensor))


def _not_finite(observers: Mapping[Key, Observer], statistics: Iterable[Mapping[str, Any]]) -> dict[Key, str]:
    """What of which observer is not finite: one question for all; one by one only if something is not."""
    finite = all_finite(chain.from_iterable(found.values() for found in statistics))
    suspects = {
        key: observer
        for key, observer in observers.items()
        if not finite or type(observer).nonfinite_statistics is not Observer.nonfinite_statistics
    }
    return {key: bad for key, observer in sorted(suspects.items()) if (bad := observer.nonfinite_statistics())}


def _occupied(
    held: Mapping[Key, tuple[Form, ...]], statistics: Mapping[Key, Mapping[str, Any]]
) -> dict[tuple[Key, str], bytes]:
    places = [(key, form.name) for key, forms in held.items() for form in forms if form.is_sparse]
    return dict(zip(places, occupied_blocks([statistics[key][name] for key, name in places]), strict=True))


# ---------------------------------------------------------------------- what follows, the same on every rank


def agree(descriptions: Sequence[Description]) -> list[Agreed]:
    """The statistics to reduce, in the same order on every rank. What only one rank holds is not among them.

    Raises:
        CalibrationError: ranks differ in shape, dtype or reduction.
    """
    alike: dict[tuple[tuple[Form, ...] | None, ...], list[Key]] = {}  # by what each rank has; most observers are alike
    for key in dict.fromkeys(chain.from_iterable(d.held for d in descriptions)):
        alike.setdefault(tuple([d.held.get(key) for d in descriptions]), []).append(key)
    agreed: list[Agreed] = []
    differing: list[tuple[Key, str]] = []
    for of_ranks, keys in alike.items():
        if len(of_ranks) - of_ranks.count(None) < 2:
            continue
        by_name: dict[str, dict[int, Form]] = {}
        for rank, forms in enumerate(of_ranks):
            for form in forms or ():
                by_name.setdefault(form.name, {})[rank] = form
        for name, forms_of in sorted(by_name.items()):
            if len(set(forms_of.values())) > 1:
                shown = {rank: _shown(form) for rank, form in forms_of.items()}
                differing += [(key, key_text(key, rank, what)) for key in keys for rank, what in shown.items()]
                continue
            form, ranks, blocks = next(iter(forms_of.values())), list(forms_of), None
            if form.is_sparse:
                blocks = [union_of_blocks([descriptions[rank].occupied[key, name] for rank in ranks]) for key in keys]
            agreed.append(Agreed(form, keys, ranks, blocks))
    refuse(
        [what for _, what in sorted(differing, key=lambda one: one[0])],
        "ranks differ in the statistics of one module",
        expected="the same shape, dtype and reduction on every rank",
        remedy="run the same model, observers and precision on all ranks.",
    )
    return agreed


def _shown(form: Form) -> str:
    shape = "x".join(map(str, form.shape)) or "scalar"
    return f"{form.reduction} of {form.name} {shape} {str(form.dtype).removeprefix('torch.')}"


def unreached(descriptions: Sequence[Description]) -> list[Key]:
    """The observers that no rank has seen data for, ordered."""
    candidates = set[Key]().union(*(d.unreached for d in descriptions))
    return sorted(key for key in candidates if all(key in d.unreached for d in descriptions if key in d.held))


def lowest_ranks(descriptions: Sequence[Description]) -> dict[Key, int]:
    """The lowest rank that has statistics without a reduction, of each observer that several ranks hold."""
    lowest: dict[Key, int] = {}
    for rank, description in enumerate(descriptions):
        for key in description.kept:
            lowest.setdefault(key, rank)
    return {key: rank for key, rank in lowest.items() if sum(key in d.held for d in descriptions) > 1}
