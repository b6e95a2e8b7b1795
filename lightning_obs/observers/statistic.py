"""The statistics of observers: what a class declares of them, and what an observer does with them.

A class declares each statistic once: its name, and the reduction that combines two values to one. From this
declaration follow how batches are combined, how ranks are reduced, what ``reset`` deletes, which values are checked for
NaN, and the saved state.

Before the first tensor is observed, the attribute of a statistic does not exist; it stands for the identity of the
reduction. The first tensor observed determines shape and dtype, so ranks have to exchange them
(:mod:`lightning_obs.ranks`).

When a statistic changes, its tensor is replaced, never changed in place, because several observers may hold it.
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
#: members that a subclass overrides if it observes differently from its parent
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
    """The declaration of one statistic of an observer; a class lists its declarations in ``statistics``.

    Attributes:
        name: the name of the observer's attribute.
        reduction: how batches are combined and ranks reduced: ``sum``, ``min`` or ``max``. ``mean``: the mean over
            ranks; a newer batch replaces the older unless the observer combines them itself. ``keep``: the newest
            batch, and the value of the lowest rank that has one.
        of_inputs: whether the statistic is gathered from the inputs of the module whose weight is observed.
    """

    name: str
    reduction: str = "keep"
    of_inputs: bool = False

    def combine(self, earlier: torch.Tensor | None, newest: torch.Tensor) -> torch.Tensor:
        """The statistic of the batches so far and one more, as a new tensor. Called for each batch that is observed.

        Args:
            earlier: the statistic of the batches so far; None before the first batch.
            newest: the statistic of one batch.
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

        Asked when an incomplete observation is saved: only such statistics are reduced over ranks; others are saved for
        each rank.
        """
        if self.reduction in ("min", "max"):
            return True
        counts = isinstance(value, torch.Tensor) and not value.is_floating_point()
        return self.reduction == "sum" and counts


def of_sync_dict(reductions: Mapping[str, Any]) -> tuple[Statistic, ...]:
    """Convert an ``_act_sync_dict``, as llm-compressor's observers have it, to declarations of statistics.

    For :func:`declared_statistics`.

    Args:
        reductions: name of each statistic -> its reduction over ranks, a ReduceOp or its name. An unknown reduction is
            kept as text, so that an error can name it.

    >>> of_sync_dict({"total": dist.ReduceOp.SUM, "high": "max"})[1].reduction
    'max'
    """
    return tuple(Statistic(name, _reduction(operation)) for name, operation in reductions.items())


def _reduction(operation: Any) -> str:
    """The name of a reduction in this package (``sum``), from a ReduceOp or a name (``SUM``, ``sum``); else as text."""
    for reduction, name in _REDUCE_OPS.items():
        if isinstance(operation, str):
            if operation.upper() in (reduction.upper(), name):
                return reduction
        elif operation == getattr(dist.ReduceOp, name):
            return reduction
    return str(operation)


class Statistics:
    """The base class of :class:`.Observer` that manages its statistics: reading, loading, checking, ``reset``.

    Statistics are attributes of the observer.
    """

    #: the number format and strategy of the tensor, with the observer's hyperparameters; :class:`.Observer` sets it
    args: QuantizationArgs
    #: which tensor of its module is observed: weight, input, output, q, k or v; :class:`.Observer` sets it
    base_name: str

    #: all statistics of the class, in the order in which ``measure`` returns them. Empty: the class does not declare
    #: them, or only some in ``_act_sync_dict``; then every attribute that observing changes is a statistic
    statistics: ClassVar[tuple[Statistic, ...]] = ()

    #: declarations as llm-compressor's observers have them: statistic -> reduction over ranks
    _act_sync_dict: ClassVar[dict[str, Any]] = {}

    #: whether the observer of a weight also needs the module's inputs; hooks then pass each input to the observer
    #: (:func:`.observe_inputs_shared`)
    needs_inputs = False

    #: whether ``min_vals`` and ``max_vals`` are the smallest and the largest of all observed values; finalize then
    #: reports them, and no helper has to observe the extremes of inputs
    keeps_extremes = False

    #: attributes that are no statistics, and that ``reset`` keeps. The constructor of :class:`.Observer` makes and
    #: explains the dtype of qparams and the kind (what is equal for observers that measure the same);
    #: :meth:`.Observer.fuse` sets the fused observers and whether their ranges are joined; ``is_finite`` is below
    _settings: ClassVar[tuple[str, ...]] = ("qparams_dtype", "_fused_observers", "_joins_ranges", "is_finite", "kind")

    #: whether ``statistics`` lists every attribute that observing sets
    _declares_all = False

    #: whether all statistics were found finite since they last changed. ``ranks/sync.py`` sets it at the end of an
    #: observation, after it has checked all ranks; then ``get_qparams`` need not check again. :func:`observing` and
    #: ``load_statistics`` take it back.
    is_finite = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Set the class attributes that follow from a new class's declarations; Python calls it for each subclass.

        - A class that declares ``statistics`` states that observing sets nothing else (``_declares_all``). From them
          follow ``_act_sync_dict`` and ``needs_inputs``.
        - A class that observes differently from its parent (it has one of ``_OBSERVING_MEMBERS``) without declaring
          ``statistics`` may set other attributes, so its declaration is incomplete.
        - A class of either kind may keep other values in ``min_vals`` and ``max_vals`` than its parent. So
          ``keeps_extremes`` is False unless the class says True itself.
        """
        super().__init_subclass__(**kwargs)
        members = vars(cls).keys()
        observes_differently = bool(_OBSERVING_MEMBERS & members)
        if "statistics" in members:
            cls._declares_all = True
            cls._act_sync_dict = {}  # for code written for llm-compressor's observers
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
        """All statistics gathered so far, ``{attribute: value}``.

        Called by ``calibration/saved_state.py`` to save them, by ``ranks/sync.py`` to reduce them over ranks, and by
        :meth:`nonfinite_statistics`. If the class does not declare them all, every attribute that differs from a new
        observer's is a statistic.
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
        """Replace statistics by those that were gathered elsewhere: reduced over ranks, or from a saved state.

        Called by ``ranks/sync.py`` with the reduced statistics, and when a saved observation is loaded.

        Args:
            statistics: ``{attribute: value}``; other statistics stay as they are.

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
        """Delete all statistics, except those named in ``keep``; settings and hyperparameters stay.

        Called by calibration when an observation starts over and before a weight is observed again, and by
        ``choice/sensitivity.py`` to free memory.
        """
        if self._declares_all:  # making a new observer, as below, takes much longer
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
        """Whether a tensor was observed. The statistics of one tensor are set together, so the first one tells.

        Read by getters before they compute qparams, by ``ranks/sync.py`` to find out what each rank has observed, and
        by finalize for the ranges in the report.
        """
        if self._declares_all:
            for statistic in self.statistics:
                if not statistic.of_inputs:
                    return hasattr(self, statistic.name)
        return hasattr(self, "min_vals") and hasattr(self, "max_vals")

    def nonfinite_statistics(self) -> str | None:
        """A text with the number of NaN or infinite values of each statistic, for an error; None if all are finite.

        Called before ranks reduce statistics, and by :meth:`.Observer.get_qparams`.
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
    """The statistics that an observer declares, in ``statistics`` or in ``_act_sync_dict``.

    Called by the other functions here, and wherever statistics are combined (``observer.py``), reduced over ranks
    (``ranks/sync.py``) or saved (``calibration/saved_state.py``). A class that declares ``statistics`` has an
    ``_act_sync_dict`` that is made of them. A user's observer may set an ``_act_sync_dict`` on itself, for example in
    its constructor: then this dict says what the observer has.
    """
    if observer._declares_all and "_act_sync_dict" not in vars(observer):
        return observer.statistics
    return of_sync_dict(observer._act_sync_dict)


def input_statistics(observer: Statistics) -> list[str]:
    """The names of the statistics that an observer of a weight gathers from the module's inputs.

    Finalize keeps these statistics when it resets the observer to observe the weight again. Also called by
    :func:`lacks_inputs`, and where calibration subtracts the inputs of batches that it keeps out.
    """
    return [statistic.name for statistic in declared_statistics(observer) if statistic.of_inputs]


def observes_data(observer: Statistics) -> bool:
    """Whether an observer's statistics depend on data: those of activations, and of weights with their inputs.

    Asked when an observation is set up: an observer for which it is False gets no hooks. Also asked when a checkpoint
    is quantized without data, which refuses observers for which it is True.
    """
    return observer.base_name != "weight" or observer.needs_inputs


def lacks_inputs(observer: Statistics) -> bool:
    """Whether an observer of a weight requires inputs of the module and has observed none.

    False if its hyperparameter ``strict`` is False. Asked before the weight is searched: by ``observers/by_inputs.py``,
    and in training by ``fine_tuning/quantized_training.py``, which then waits for inputs.
    """
    if not observer.needs_inputs or not getattr(observer, "strict", True):
        return False
    return not all(hasattr(observer, name) for name in input_statistics(observer))


def is_reached(observer: Statistics) -> bool:
    """Whether an observer has observed all data that it needs.

    An observer needs its tensor, or, for a weight that is observed at the end, the inputs of the module. Asked at the
    end of an observation by ``ranks/sync.py`` and ``calibration/expert_tokens.py``, to find modules that no data
    reached.
    """
    return observer.has_statistics or (observer.needs_inputs and not lacks_inputs(observer))


def merges_extremes_only(observer: Statistics) -> bool:
    """Whether an observer's statistics are only minima and maxima.

    Tensor parallelism allows no other observers of activations: its ranks see the same data, or different features of
    the same data, which sums would count twice. ``callbacks/strategies.py`` asks it before a calibration starts.
    """
    reductions = {statistic.reduction for statistic in declared_statistics(observer)}
    return observer.keeps_extremes and reductions <= {"min", "max"}


# ---------------------------------------------------------------------- changing statistics


@contextmanager
def observing(observer: Statistics) -> Iterator[None]:
    """A context in which an observer changes its statistics: without gradients, and outside inference mode.

    Entered wherever an observer observes a tensor. Lightning validates in inference mode, and a tensor created there
    could not be used in training. Entering the context also marks the statistics as unchecked (``is_finite``).
    """
    with torch.inference_mode(False), torch.no_grad():
        observer.is_finite = False
        yield


def new_like(observer: Any) -> Any:
    """A new observer of the same class, base name and hyperparameters, without statistics.

    Made by ``get_statistics`` and ``reset`` to find out which attributes observing sets, and by ``segments.py`` as a
    temporary observer that combines the statistics of many.
    """
    return type(observer)(observer.base_name, observer.args)


def equal_values(earlier: Any, later: Any) -> bool:
    """Whether two values of an attribute are equal: tensors by dtype, device and elements, other values by ``==``.

    Two objects of one class that defines no ``__eq__`` count as equal. ``get_statistics`` calls it to find which
    attributes observing has changed, and the observer ``histogram`` to find whether it can reuse a search.
    """
    if type(earlier) is not type(later):
        return False
    if isinstance(earlier, torch.Tensor):
        is_of_one_kind = (earlier.dtype, earlier.device) == (later.dtype, later.device)
        return is_of_one_kind and torch.equal(earlier, later)
    try:
        if earlier == later:
            return True
    except (RuntimeError, ValueError, TypeError):  # containers of tensors
        return False
    ancestors = type(earlier).__mro__[:-1]
    return not any("__eq__" in vars(ancestor) for ancestor in ancestors)
