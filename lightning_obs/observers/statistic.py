"""A statistic is declared once: its name, and how two of them become one.

From the declaration follow, and are written nowhere else: how batches are combined, how ranks are reduced, what
``reset`` forgets, the values checked for NaN, and the saved state.

A statistic that was not observed yet has no attribute, which stands for its identity: combining and reducing omit it.
Its shape and dtype follow from the first tensor observed, so ranks agree on them (:mod:`lightning_obs.ranks`).

A tensor is replaced when it changes, never written to: several observers may hold it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import distributed as dist

from lightning_obs.errors import refuse
from lightning_obs.numerics.many_tensors import all_finite, widened

_OPS = {"sum": "SUM", "mean": "AVG", "min": "MIN", "max": "MAX"}
#: methods that a subclass writes to observe differently from its parent
_PHASE_1 = {
    "forward",
    "update_statistics_from_observed",
    "measure",
    "combine",
    "measure_inputs",
    "observe_inputs",
    "_act_sync_dict",
}


class Statistic(NamedTuple):
    """The declaration of one statistic: an attribute of an observer.

    Attributes:
        name: of the attribute.
        reduction: of batches and of ranks. ``sum``, ``min``, ``max``; ``mean``: over ranks (of batches the newest,
            unless the observer combines them itself); ``keep``: the newest batch, the lowest rank that has it.
        of_inputs: gathered of the inputs of the module whose weight is observed.
    """

    name: str
    reduction: str = "keep"
    of_inputs: bool = False

    def combine(self, old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        """The statistic of two batches, in memory of its own; ``old`` is None before the first."""
        if old is None or self.reduction in ("keep", "mean"):
            return new.clone()  # it may be a view of the observed tensor
        if self.reduction == "sum":
            return old + new
        return torch.minimum(old, new) if self.reduction == "min" else torch.maximum(old, new)

    def is_exact(self, value: Any) -> bool:
        """Whether reducing ``value`` with the others gives the same bits in any order."""
        counts = isinstance(value, torch.Tensor) and not value.is_floating_point()
        return self.reduction in ("min", "max") or (self.reduction == "sum" and counts)


def of_sync_dict(declared: Mapping[str, Any]) -> tuple[Statistic, ...]:
    """Read an ``_act_sync_dict``. A reduction that is not known keeps its own name, for the error.

    >>> of_sync_dict({"total": dist.ReduceOp.SUM, "high": "max"})[1].reduction
    'max'
    """
    return tuple(Statistic(name, _reduction(given)) for name, given in declared.items())


def _reduction(given: Any) -> str:
    for reduction, op in _OPS.items():
        if given.upper() in (reduction.upper(), op) if isinstance(given, str) else given == getattr(dist.ReduceOp, op):
            return reduction
    return str(given)


class Statistics:
    """The state of an observer, as it is declared."""

    args: QuantizationArgs
    base_name: str

    #: all statistics of the class, in the order in which ``measure`` returns them. Empty: not declared, or only in part
    #: by ``_act_sync_dict``; then every attribute that observing changes is a statistic, too
    statistics: ClassVar[tuple[Statistic, ...]] = ()

    #: the same as the ecosystem's guide writes it: statistic -> reduction over ranks
    _act_sync_dict: ClassVar[dict[str, Any]] = {}

    #: a weight's observer that also wants the module's inputs: its owner calls ``observe_inputs``
    needs_inputs: ClassVar[bool] = False

    #: whether ``min_vals`` and ``max_vals`` are the smallest and the largest values of everything observed
    keeps_extremes: ClassVar[bool] = False

    #: attributes that are set from outside, which ``reset`` keeps, and that are not statistics
    _settings: ClassVar[tuple[str, ...]] = (
        "qparams_dtype",
        "_fused_observers",
        "_joins_ranges",
        "is_finite",
        "_chosen",
        "_kind",
    )

    #: whether ``statistics`` are all that observing sets
    _declares_all: ClassVar[bool] = False

    #: whether the statistics were found to be finite since they were last changed
    is_finite: bool = False

    #: a range that was searched in the statistics, beside what it was searched in; None since they were last changed
    _chosen: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A class that observes differently from its parent, and does not declare its statistics, declares nothing."""
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "statistics" in own:
            operations = {s.name: _OPS[s.reduction] for s in cls.statistics if s.reduction in _OPS}
            cls._declares_all = True
            cls._act_sync_dict = {name: getattr(dist.ReduceOp, op) for name, op in operations.items()}
            cls.needs_inputs = any(statistic.of_inputs for statistic in cls.statistics)
        elif _PHASE_1 & own.keys():
            cls._declares_all = False
        if {"statistics", *_PHASE_1} & own.keys() and "keeps_extremes" not in own:
            cls.keeps_extremes = False

    def _new(self) -> Statistics:
        """An observer like this one that has seen nothing."""
        return type(self)(self.base_name, self.args)  # type: ignore[call-arg]

    @contextmanager
    def _observing(self) -> Iterator[None]:
        # Lightning validates under inference mode; a statistic born in it could not be updated in training.
        with torch.inference_mode(False), torch.no_grad():
            self.is_finite, self._chosen = False, None
            yield

    def _combine(self, measured: Sequence[torch.Tensor], of_inputs: bool) -> None:
        declared = [statistic for statistic in self.statistics if statistic.of_inputs == of_inputs]
        for statistic, new in zip(declared, measured, strict=False):
            setattr(self, statistic.name, statistic.combine(getattr(self, statistic.name, None), new))

    @property
    def declared(self) -> tuple[Statistic, ...]:
        """The statistics that the class declares, in ``statistics`` or as the guide does."""
        if self._declares_all and "_act_sync_dict" not in vars(self):
            return self.statistics
        return of_sync_dict(self._act_sync_dict)

    def get_statistics(self) -> dict[str, Any]:
        """Everything that was gathered: ``{attribute: value}``."""
        found = {s.name: vars(self)[s.name] for s in self.declared if vars(self).get(s.name) is not None}
        if self._declares_all:
            return found
        new = vars(self._new())
        others = vars(self).keys() - found.keys() - set(self._settings)
        changed = [n for n in vars(self) if n in others and not (n in new and equal_values(new[n], vars(self)[n]))]
        return found | {name: vars(self)[name] for name in changed}

    def load_statistics(self, statistics: Mapping[str, Any]) -> None:
        """Take over statistics that were gathered elsewhere, by attribute; :meth:`reset` forgets them too.

        Raises:
            CalibrationError: a name that no statistic can have, as it is the observer's own.
        """
        own = {"args", "base_name", *self._settings}
        behaviour = [n for n in statistics if callable(of := getattr(type(self), n, None)) or isinstance(of, property)]
        refuse(sorted(own & statistics.keys()) + behaviour, f"{type(self).__name__} has no such statistic")
        self.__dict__ |= {**statistics, "is_finite": False, "_chosen": None}

    def reset(self, keep: Collection[str] = ()) -> None:
        """Forget everything observed, except the statistics named in ``keep``; settings and hyperparameters stay."""
        if self._declares_all:  # a new observer costs much more
            self._chosen = None
            for statistic in self.statistics:
                if statistic.name not in keep:
                    vars(self).pop(statistic.name, None)
            return
        kept = {name: value for name, value in vars(self).items() if name in (*self._settings, *keep)}
        with torch.inference_mode(False):
            self.__dict__ = vars(self._new()) | kept

    @property
    def input_statistics(self) -> tuple[str, ...]:
        """The names of the statistics ``of_inputs``."""
        return tuple(statistic.name for statistic in self.declared if statistic.of_inputs)

    @property
    def has_statistics(self) -> bool:
        """Whether anything was observed."""
        observed = [s.name for s in self.statistics if not s.of_inputs] if self._declares_all else []
        return all(hasattr(self, name) for name in observed[:1] or ("min_vals", "max_vals"))

    def nonfinite_statistics(self) -> str | None:
        """The number of NaN or infinite values of each statistic, as text; None if all are finite."""
        statistics = self.get_statistics()
        if all_finite(statistics.values()):
            return None
        counted = {
            name: (int((~torch.isfinite(widened(value))).sum()), value.numel())
            for name, value in statistics.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        }
        return ", ".join(f"{bad} of {n} {name.lstrip('_')} not finite" for name, (bad, n) in counted.items() if bad)


def equal_values(before: Any, now: Any) -> bool:
    """Whether an attribute has not changed. An object of a class of its own is taken for unchanged."""
    if type(before) is not type(now):
        return False
    if isinstance(before, torch.Tensor):
        return before.dtype == now.dtype and torch.equal(before, now)
    try:
        return bool(before == now) or "__eq__" not in chain.from_iterable(map(vars, type(before).__mro__[:-1]))
    except (RuntimeError, ValueError, TypeError):  # containers of tensors
        return False
