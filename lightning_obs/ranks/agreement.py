"""What ranks tell each other before they reduce anything, and what follows from it.

Each rank describes what it holds. From all descriptions, which every rank has, each derives the same list of
statistics, or the same error: nothing here depends on which rank computes it. So what one rank saw, lacks or failed at
can neither hang the others nor give them something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lightning_obs.errors import CalibrationError
from lightning_obs.observers import Key, Observer
from lightning_obs.ranks.failures import key_text
from lightning_obs.ranks.packing import WIDE, can_be_sparse, occupied_blocks, union_of_blocks

_OPS = {"sum": "SUM", "mean": "AVG", "min": "MIN", "max": "MAX"}
_PLAIN = Observer.nonfinite_statistics
_REMEDY = "declare SUM, AVG, MIN or MAX of a tensor in _act_sync_dict."


class Statistic(NamedTuple):
    """One statistic of an observer. ``op``: sum, mean, min, max; or copy, of the lowest rank that has it."""

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Description:
    """What one rank tells: a few hundred bytes, and some ten for each observer.

    Attributes:
        failure: what went wrong on this rank.
        weights: number of elements of the weights that it holds.
        note: anything else that the others shall know.
        kinds: distinct sets of statistics.
        held: observers that it holds, and which of ``kinds`` they have.
        unreached: those of them that no data reached.
        plain: undeclared statistics that are numbers, strings, or lists, dicts... of these and tensors.
        unsendable: names of undeclared statistics that are neither these nor tensors.
        not_finite: what of an observer is NaN or infinite.
        occupied: which blocks of a sum of integers are not empty.
        input_extremes: smallest and largest input, of observers that it is kept beside.
    """

    failure: CalibrationError | None = None
    weights: dict[Key, int] = field(default_factory=dict)
    note: Any = None
    kinds: list[tuple[Statistic, ...]] = field(default_factory=list)
    held: dict[Key, int] = field(default_factory=dict)
    unreached: set[Key] = field(default_factory=set)
    plain: dict[Key, dict[str, Any]] = field(default_factory=dict)
    unsendable: dict[Key, list[str]] = field(default_factory=dict)
    not_finite: dict[Key, str] = field(default_factory=dict)
    occupied: dict[tuple[Key, str], bytes] = field(default_factory=dict)
    input_extremes: dict[Key, list[float]] = field(default_factory=dict)

    def statistics(self, key: Key) -> tuple[Statistic, ...]:
        """Of one observer; none if this rank does not hold it."""
        return self.kinds[self.held[key]] if key in self.held else ()


class Agreed(NamedTuple):
    """A statistic to be made one, of all observers that the same ranks have it of.

    Attributes:
        statistic: which; its shape is that of one observer's.
        keys: the observers, in the same order on every rank.
        ranks: which have it; for a copy the lowest of them only.
        blocks: for each observer which blocks are not empty, if empty ones are left out.
    """

    statistic: Statistic
    keys: list[Key]
    ranks: list[int]
    blocks: list[torch.Tensor] | None = None

    @property
    def numel(self) -> int:
        """Elements of one observer's."""
        return math.prod(self.statistic.shape)


# ---------------------------------------------------------------------- one rank's side


def describe(observers: Mapping[Key, Observer], counted: set[Key], *, by_declaration: bool) -> Description:
    """Describe what this rank holds, and of ``counted`` also the statistics.

    Args:
        observers: of this rank.
        counted: those whose statistics count.
        by_declaration: reduce as the observer declares; otherwise copy everything.

    Raises:
        CalibrationError: a declared reduction that cannot be made.
    """
    description = Description(held=dict.fromkeys(observers, 0), unreached=observers.keys() - counted)
    kinds: dict[tuple[Statistic, ...], int] = {(): 0}
    members: list[list[Key]] = [[]]  # of each kind
    declarations: dict[int, _Declaration] = {}  # by identity of the declaration, of which there are few
    for key, observer in observers.items():
        if key not in counted:
            continue
        declared = observer._act_sync_dict
        declaration = declarations.get(id(declared))
        if declaration is None:
            declaration = declarations[id(declared)] = _Declaration(declared if by_declaration else {})
        statistics = declaration.statistics(key, observer)
        seen = observer.has_statistics
        if seen:
            statistics += _undeclared(key, observer, declaration.ops, description)
        if not seen and not observer.is_reached:
            description.unreached.add(key)
        if observer.input_extremes is not None:
            description.input_extremes[key] = observer.input_extremes.tolist()
        kind = description.held[key] = kinds.setdefault(statistics, len(kinds))
        if kind == len(members):
            members.append([])
        members[kind].append(key)
    description.kinds = list(kinds)
    description.not_finite = _not_finite(observers, description.kinds, members)
    return description


def add_occupied_blocks(description: Description, observers: Mapping[Key, Observer]) -> None:
    """Describe also which blocks of counts are occupied: the others do not have to be sent."""
    for number, statistics in enumerate(description.kinds):
        for name in [one.name for one in statistics if _is_sparse(one)]:
            keys = [key for key, kind in description.held.items() if kind == number]
            blocks = occupied_blocks([getattr(observers[key], name) for key in keys])
            description.occupied.update(zip([(key, name) for key in keys], blocks, strict=True))


class _Declaration:
    """What a class of observers declares in ``_act_sync_dict``."""

    def __init__(self, declared: Mapping[str, Any]) -> None:
        self.declared = declared
        self.ops = {name: _op(reduction) for name, reduction in declared.items()}
        self._known: dict[tuple[Any, ...], tuple[Statistic, ...]] = {}  # most observers are alike

    def statistics(self, key: Key, observer: Observer) -> tuple[Statistic, ...]:
        """Those declared statistics that an observer has.

        Raises:
            CalibrationError: one of them cannot be reduced.
        """
        values = [getattr(observer, name, None) for name in self.ops]
        looks = tuple([(type(v), v.shape, v.dtype) if isinstance(v, torch.Tensor) else type(v) for v in values])
        known = self._known.get(looks)
        if known is None:
            known = self._known[looks] = tuple(self._look_at(key, observer, values))
        return known

    def _look_at(self, key: Key, observer: Observer, values: Iterable[Any]) -> Iterator[Statistic]:
        for (name, op), value in zip(self.ops.items(), values, strict=True):
            if value is None and op is not None:
                continue
            problem = None
            if op is None:
                problem = f"reduction {self.declared[name]}"
            elif not isinstance(value, torch.Tensor):
                problem = type(value).__name__
            elif isinstance(value, DTensor):
                problem = "a DTensor, which is sharded already"
            elif value.dtype not in WIDE or (op == "mean" and not value.is_floating_point()):
                problem = f"{op} of {value.dtype}"
            if problem:
                what = f"the statistic {name} of {type(observer).__name__} cannot be reduced over ranks"
                raise CalibrationError(what, where=[key_text(key)], got=problem, remedy=_REMEDY)
            assert isinstance(value, torch.Tensor)
            assert op is not None
            yield Statistic(name, op, tuple(value.shape), value.dtype)


def _op(reduction: Any) -> str | None:
    if isinstance(reduction, str):
        return next((op for op, name in _OPS.items() if reduction.upper() in (op.upper(), name)), None)
    return next((op for op, name in _OPS.items() if reduction == getattr(dist.ReduceOp, name)), None)


def _undeclared(key: Key, observer: Observer, declared: Iterable[str], into: Description) -> tuple[Statistic, ...]:
    """What else observing changed: tensors are returned, the rest is noted in the description."""
    before = observer._before_observing
    if before is None:
        return ()
    copies = []
    for name in observer.statistic_names():
        if name in declared:
            continue
        value = getattr(observer, name)
        if _equal(before.get(name), value):
            continue
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            copies.append(Statistic(name, "copy", tuple(value.shape), value.dtype))
        elif not isinstance(value, torch.Tensor) and is_plain(value):
            into.plain.setdefault(key, {})[name] = tensors_to("cpu", value)
        else:
            into.unsendable.setdefault(key, []).append(name)
    return tuple(copies)


def is_plain(value: Any) -> bool:
    """Whether a statistic is a tensor, a number, a string, or a list, dict... of these."""
    if isinstance(value, Mapping):
        return all(is_plain(x) for x in (*value.keys(), *value.values()))
    if isinstance(value, (list, tuple, set)):
        return all(is_plain(x) for x in value)
    return value is None or isinstance(value, (torch.Tensor, bool, int, float, str, torch.dtype))


def tensors_to(device: torch.device | str, value: Any) -> Any:
    """A plain statistic with its tensors on a device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def _equal(before: Any, now: Any) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
        return before.dtype == now.dtype and torch.equal(before, now)
    try:
        return type(before) is type(now) and bool(before == now)
    except (RuntimeError, ValueError, TypeError):  # containers of tensors
        return False


def _not_finite(
    observers: Mapping[Key, Observer], kinds: Sequence[tuple[Statistic, ...]], members: Sequence[Sequence[Key]]
) -> dict[Key, str]:
    """What of which observer is not finite. One look at all values together; one by one only if there is something."""
    parts: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for statistics, keys in zip(kinds, members, strict=True):
        for one in statistics:
            if not one.dtype.is_floating_point:
                continue
            by_device: dict[torch.device, list[torch.Tensor]] = {}
            for value in [getattr(observers[key], one.name) for key in keys]:
                by_device.setdefault(value.device, []).append(value)
            for device, values in by_device.items():
                parts.setdefault((one.dtype, device), []).append(torch.stack(values).reshape(-1))
    joined = [torch.cat(each).to(WIDE.get(dtype, dtype)) for (dtype, _), each in parts.items()]
    suspects = [key for keys in members for key in keys]
    if all(bool(torch.isfinite(values).all()) for values in joined):
        own = {
            cls for cls in {type(observer) for observer in observers.values()} if cls.nonfinite_statistics is not _PLAIN
        }
        suspects = [key for key in suspects if type(observers[key]) in own] if own else []
    return {key: bad for key in sorted(suspects) if (bad := observers[key].nonfinite_statistics())}


# ---------------------------------------------------------------------- what follows, the same on every rank


def agree(descriptions: Sequence[Description]) -> list[Agreed]:
    """The statistics to be made one, in the same order on every rank. What only one rank holds is not among them.

    Raises:
        CalibrationError: ranks differ in shape, dtype or reduction; a rank lacks what cannot be sent.
    """
    agreed: list[Agreed] = []
    differing: list[tuple[Key, str]] = []
    alike: dict[tuple[int | None, ...], list[Key]] = {}  # by what each rank has of it; most observers are alike
    kinds_of = [d.held.get for d in descriptions]
    for key in dict.fromkeys(chain.from_iterable(d.held for d in descriptions)):
        alike.setdefault(tuple([kind_of(key) for kind_of in kinds_of]), []).append(key)
    for kinds, keys in alike.items():
        if len(kinds) - kinds.count(None) < 2:
            continue
        for ranks, statistics in _union(
            [() if kind is None else d.kinds[kind] for d, kind in zip(descriptions, kinds, strict=True)]
        ):
            first = statistics[0]
            if any(other != first for other in statistics):
                shown = [(rank, _shown(statistic)) for rank, statistic in zip(ranks, statistics, strict=True)]
                differing += [(key, key_text(key, rank, what)) for key in keys for rank, what in shown]
                continue
            blocks = None
            if _is_sparse(first):
                blocks = [
                    union_of_blocks([descriptions[rank].occupied[key, first.name] for rank in ranks]) for key in keys
                ]
            agreed.append(Agreed(first, keys, ranks, blocks))
    if differing:
        raise CalibrationError(
            "ranks differ in the statistics of one module",
            where=[what for _, what in sorted(differing, key=itemgetter(0))],
            expected="the same shape, dtype and reduction on every rank",
            remedy="run the same model, observers and precision on all ranks.",
        )
    _require_sendable(descriptions)
    return agreed


def _union(by_rank: Sequence[Sequence[Statistic]]) -> list[tuple[list[int], list[Statistic]]]:
    """The statistics of one observer, in the order of their names, and the ranks whose values count."""
    by_name: dict[str, tuple[list[int], list[Statistic]]] = {}
    for rank, statistics in enumerate(by_rank):
        for statistic in statistics:
            ranks, those = by_name.setdefault(statistic.name, ([], []))
            if not ranks or those[0].op != "copy":  # a copy is of the lowest rank that has it
                ranks.append(rank)
                those.append(statistic)
    return [by_name[name] for name in sorted(by_name)]


def _is_sparse(statistic: Statistic) -> bool:
    return statistic.op == "sum" and can_be_sparse(statistic.dtype, math.prod(statistic.shape))


def _shown(statistic: Statistic) -> str:
    shape = "x".join(map(str, statistic.shape)) or "scalar"
    return f"{statistic.op} of {statistic.name} {shape} {str(statistic.dtype).removeprefix('torch.')}"


def _require_sendable(descriptions: Sequence[Description]) -> None:
    """What is not declared is that of the lowest rank on all, so it has to be something that can be sent."""
    bad = sorted(
        {
            key_text(key, more=name)
            for d in descriptions
            for key, names in d.unsendable.items()
            for name in names
            if sum(key in other.held for other in descriptions) > 1
        }
    )
    if bad:
        raise CalibrationError(
            "statistics that cannot be sent to other ranks, which would go on with others",
            where=bad,
            expected="tensors, numbers, strings, and lists and dicts of them",
            remedy=_REMEDY,
        )


def unreached(descriptions: Sequence[Description]) -> list[Key]:
    """The observers that no rank has seen data for, ordered."""
    candidates = set[Key]().union(*(d.unreached for d in descriptions))
    return sorted(key for key in candidates if all(key in d.unreached for d in descriptions if key in d.held))


def without_reduction(descriptions: Sequence[Description]) -> dict[Key, dict[str, Any]]:
    """Statistics that the descriptions hold already, of the observers that several ranks hold.

    Undeclared statistics are those of the lowest rank that has any, input extremes those of all ranks.
    """
    values: dict[Key, dict[str, Any]] = {}
    for d in descriptions:
        for key, plain in d.plain.items():
            values.setdefault(key, dict(plain))
    for key in {key for d in descriptions for key in d.input_extremes}:
        lows, highs = zip(*(d.input_extremes[key] for d in descriptions if key in d.input_extremes), strict=True)
        values.setdefault(key, {})["input_extremes"] = torch.tensor([min(lows), max(highs)], dtype=torch.float64)
    return {key: held for key, held in values.items() if sum(key in d.held for d in descriptions) > 1}
