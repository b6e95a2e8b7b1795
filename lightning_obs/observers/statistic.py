"""A statistic is declared once: its name, and how two of them are reduced to one.

From the declaration follow, and are written nowhere else: how batches are combined, how ranks are reduced, what
``reset`` forgets, the values checked for NaN, and the saved state.

A statistic that was not observed yet has no attribute, which stands for its identity: combining and reducing omit it.
Its shape and dtype follow from the first tensor observed, so ranks agree on them (:mod:`lightning_obs.ranks`).

A tensor is replaced when it changes, never written to: several observers may hold it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import distributed as dist

from lightning_obs.errors import refuse
from lightning_obs.numerics.many_tensors import all_finite, widened

#: reduction -> name of torch.distributed's ReduceOp
_REDUCE_OPS = {"sum": "SUM", "mean": "AVG", "min": "MIN", "max": "MAX"}
#: members that a subclass writes to observe differently from its parent
_OBSERVING_MEMBERS = {
    "forward",
    "update_statistics_from_observed",
    "measure",
    "combine",
    "measure_inputs",
    "observe_inputs",
    "_act_sync_dict",
}


class Statistic(NamedTuple):
    """The declaration of one statistic, an attribute of an observer; a class lists its declarations in ``statistics``.

    Attributes:
        name: of the attribute.
        reduction: of batches and of ranks. ``sum``, ``min``, ``max``; ``mean``: over ranks (of batches the newest,
            unless the observer combines them itself); ``keep``: the newest batch, the lowest rank that has it.
        of_inputs: gathered of the inputs of the module whose weight is observed.
    """

    name: str
    reduction: str = "keep"
    of_inputs: bool = False

    def combine(self, earlier: torch.Tensor | None, newest: torch.Tensor) -> torch.Tensor:
        """The statistic of two batches, in memory of its own; :meth:`.Observer.combine` calls this for each batch.

        Args:
            earlier: of the batches so far; None before the first.
            newest: of one batch.
        """
        if earlier is None or self.reduction in ("keep", "mean"):
            return newest.clone()  # it may be a view of the observed tensor
        if self.reduction == "sum":
            return earlier + newest
        if self.reduction == "min":
            return torch.minimum(earlier, newest)
        return torch.maximum(earlier, newest)

    def is_exact(self, value: Any) -> bool:
        """Whether reducing ``value`` with other values gives the same bits in any order.

        Only such statistics of an incomplete observation are reduced when it is saved.
        """
        if self.reduction in ("min", "max"):
            return True
        counts = isinstance(value, torch.Tensor) and not value.is_floating_point()
        return self.reduction == "sum" and counts


def of_sync_dict(reductions: Mapping[str, Any]) -> tuple[Statistic, ...]:
    """The statistics that an ``_act_sync_dict`` declares: by name, a reduction as a ReduceOp or as text.

    A reduction that is not known keeps its own name, for the error.

    >>> of_sync_dict({"total": dist.ReduceOp.SUM, "high": "max"})[1].reduction
    'max'
    """
    return tuple(Statistic(name, _reduction(operation)) for name, operation in reductions.items())


def _reduction(operation: Any) -> str:
    """Our name (``sum``) of a reduction that is written as a ReduceOp, as its name, or as our name, in any case."""
    for reduction, name in _REDUCE_OPS.items():
        if isinstance(operation, str):
            if operation.upper() in (reduction.upper(), name):
                return reduction
        elif operation == getattr(dist.ReduceOp, name):
            return reduction
    return str(operation)


class Statistics:
    """The base of :class:`.Observer` that holds the statistics: what was gathered, saving and loading, ``reset``."""

    args: QuantizationArgs
    base_name: str

    #: all statistics of the class, in the order in which ``measure`` returns them. Empty: not declared, or only in part
    #: by ``_act_sync_dict``; then every attribute that observing changes is a statistic, too
    statistics: ClassVar[tuple[Statistic, ...]] = ()

    #: the same as the ecosystem's guide writes it: statistic -> reduction over ranks
    _act_sync_dict: ClassVar[dict[str, Any]] = {}

    #: whether the observer of a weight also wants the module's inputs: its owner calls ``observe_inputs``
    needs_inputs = False

    #: whether ``min_vals`` and ``max_vals`` are the smallest and the largest values of everything observed
    keeps_extremes = False

    #: attributes that are set from outside, which ``reset`` keeps, and that are not statistics
    _settings: ClassVar[tuple[str, ...]] = ("qparams_dtype", "_fused_observers", "_joins_ranges", "is_finite", "kind")

    #: whether ``statistics`` are all that observing sets
    _declares_all = False

    #: whether the statistics were found to be finite since they were last changed
    is_finite = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Called for each new class: find out whether ``statistics`` are all that its observers set.

        A class that declares ``statistics`` says so. A class that observes differently from its parent without
        declaring its own has undeclared statistics.
        """
        super().__init_subclass__(**kwargs)
        members = vars(cls).keys()
        observes_differently = bool(_OBSERVING_MEMBERS & members)
        if "statistics" in members:
            cls._declares_all = True
            cls._act_sync_dict = {}  # for code written to the guide
            for statistic in cls.statistics:
                operation = _REDUCE_OPS.get(statistic.reduction)
                if operation is not None:
                    cls._act_sync_dict[statistic.name] = getattr(dist.ReduceOp, operation)
            cls.needs_inputs = any(statistic.of_inputs for statistic in cls.statistics)
        elif observes_differently:
            cls._declares_all = False
        if ("statistics" in members or observes_differently) and "keeps_extremes" not in members:
            cls.keeps_extremes = False

    def get_statistics(self) -> dict[str, Any]:
        """Everything that was gathered, ``{attribute: value}``: to save it, send it to other ranks, or check it.

        Without a declaration that is every attribute that differs from a new observer's.
        """
        attributes = vars(self)
        statistics = {}
        for declared in declared_statistics(self):
            if attributes.get(declared.name) is not None:
                statistics[declared.name] = attributes[declared.name]
        if self._declares_all:
            return statistics
        initial = vars(new_like(self))
        for name, value in attributes.items():
            if name in statistics or name in self._settings:
                continue
            if name not in initial or not equal_values(initial[name], value):
                statistics[name] = value
        return statistics

    def load_statistics(self, statistics: Mapping[str, Any]) -> None:
        """Take over statistics that were gathered elsewhere, by attribute: reduced over ranks, or from a saved state.

        :meth:`reset` forgets them too.

        Raises:
            CalibrationError: a name that no statistic can have, because the observer has another member of that name.
        """
        reserved = []
        for name in statistics:
            member = getattr(type(self), name, None)
            is_setting = name in ("args", "base_name") or name in self._settings
            if is_setting or callable(member) or isinstance(member, property):
                reserved.append(name)
        refuse(sorted(reserved), f"{type(self).__name__} has no such statistic")
        self.__dict__.update(statistics)
        self.is_finite = False

    def reset(self, keep: Collection[str] = ()) -> None:
        """Forget everything observed, except the statistics named in ``keep``; settings and hyperparameters stay.

        Called when an observation begins anew, and where statistics are not needed any more.
        """
        if self._declares_all:  # a new observer costs much more
            for statistic in self.statistics:
                if statistic.name not in keep:
                    vars(self).pop(statistic.name, None)
            return
        kept = {}
        for name, value in vars(self).items():
            if name in self._settings or name in keep:
                kept[name] = value
        with torch.inference_mode(False):
            initial = vars(new_like(self))
        self.__dict__.clear()
        self.__dict__.update(initial | kept)

    @property
    def has_statistics(self) -> bool:
        """Whether anything was observed: the statistics of one tensor are set together, so the first tells of all."""
        if self._declares_all:
            for statistic in self.statistics:
                if not statistic.of_inputs:
                    return hasattr(self, statistic.name)
        return hasattr(self, "min_vals") and hasattr(self, "max_vals")

    def nonfinite_statistics(self) -> str | None:
        """The number of NaN or infinite values of each statistic, as text for an error; None if all are finite.

        Asked for every observer before ranks reduce statistics, and by :meth:`.Observer.get_qparams`.
        """
        statistics = self.get_statistics()
        if all_finite(statistics.values()):
            return None
        problems = []
        for name, value in statistics.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                count = int((~torch.isfinite(widened(value))).sum())
                shown_name = name.lstrip("_")
                if count:
                    problems.append(f"{count} of {value.numel()} {shown_name} not finite")
        return ", ".join(problems)


# ---------------------------------------------------------------------- questions about an observer's statistics


def declared_statistics(observer: Statistics) -> tuple[Statistic, ...]:
    """The statistics that an observer declares, in ``statistics`` or, as the ecosystem's guide does, in a dict."""
    if observer._declares_all and "_act_sync_dict" not in vars(observer):
        return observer.statistics
    return of_sync_dict(observer._act_sync_dict)


def input_statistics(observer: Statistics) -> list[str]:
    """The names of the statistics that an observer of a weight gathers of the module's inputs."""
    return [statistic.name for statistic in declared_statistics(observer) if statistic.of_inputs]


def observes_data(observer: Statistics) -> bool:
    """Whether the statistics depend on the data that the model runs on: not where a weight alone is observed."""
    return observer.base_name != "weight" or observer.needs_inputs


def lacks_inputs(observer: Statistics) -> bool:
    """Whether the observer needs inputs and saw none. One whose hyperparameter ``strict`` is off goes without."""
    if not observer.needs_inputs or not getattr(observer, "strict", True):
        return False
    return not all(hasattr(observer, name) for name in input_statistics(observer))


def is_reached(observer: Statistics) -> bool:
    """Whether data reached the observer: a tensor of its own, or inputs for a weight that is observed at the end."""
    return observer.has_statistics or (observer.needs_inputs and not lacks_inputs(observer))


def merges_extremes_only(observer: Statistics) -> bool:
    """Whether an observer's statistics are minima and maxima only.

    Then ranks may have seen the same data, or other features of it: no sum counts anything twice. Tensor parallelism
    takes no other observers.
    """
    reductions = {statistic.reduction for statistic in declared_statistics(observer)}
    return observer.keeps_extremes and reductions <= {"min", "max"}


# ---------------------------------------------------------------------- changing statistics


@contextmanager
def observing(observer: Statistics) -> Iterator[None]:
    """For a ``with`` block in which an observer changes its statistics: without gradients, outside inference mode.

    Lightning validates under inference mode, and a statistic that was made in it could not be updated in training.
    """
    with torch.inference_mode(False), torch.no_grad():
        observer.is_finite = False
        yield


def new_like(observer: Any) -> Any:
    """An observer of the same class, tensor and hyperparameters that has seen nothing."""
    return type(observer)(observer.base_name, observer.args)


def equal_values(earlier: Any, later: Any) -> bool:
    """Whether two values of an attribute are the same: tensors by dtype and elements, other values by ``==``.

    Two objects of a class that defines no equality are taken for the same.
    """
    if type(earlier) is not type(later):
        return False
    if isinstance(earlier, torch.Tensor):
        return earlier.dtype == later.dtype and torch.equal(earlier, later)
    try:
        if earlier == later:
            return True
    except (RuntimeError, ValueError, TypeError):  # containers of tensors
        return False
    ancestors = type(earlier).__mro__[:-1]
    return not any("__eq__" in vars(ancestor) for ancestor in ancestors)
