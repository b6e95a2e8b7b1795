"""The base class of observers: a subclass writes one method.

Phase 1: ``observer(value)`` flattens the value and hands it to ``update_statistics_from_observed``. Hooks call it at
each forward of a module; a weight is observed once, at the end.
Phase 2: ``observer.get_qparams()`` turns the statistics into scale, zero point and global scale, once all ranks have
the same statistics.

A class written to the ecosystem's observers' guide runs here with its import line changed. Two differences are
deliberate: a getter deletes nothing (``reset`` forgets), and the caller's ``args`` are copied, never changed, so that
observers made from the same ``args`` do not share hyperparameters.

Instead, a class may declare its ``statistics`` (:mod:`.statistic`) and write ``measure``, the statistics of one tensor.
Batches are then combined as declared, and modules that read the same tensor (q, k, v) share one ``measure``
(:mod:`.shared_measurements`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch import distributed as dist

from lightning_obs.errors import CalibrationError, likely
from lightning_obs.numerics.qparams import (
    BASE_NAMES,
    ROUNDING,
    QParamsDict,
    can_be_signed,
    compute_global_scale,
    compute_qparams,
    flatten_for_calibration,
    power_of_two,
    rounding_of,
)
from lightning_obs.observers.registry import Registry
from lightning_obs.observers.statistic import Statistics, observing

__all__ = ["Key", "MinMaxTuple", "Observer", "QParamsDict"]

MinMaxTuple: TypeAlias = tuple[torch.Tensor, torch.Tensor]
#: module name and base name: the place of an observer in a model
Key: TypeAlias = tuple[str, str]
#: defaults by name; None: not declared
Hyperparameters: TypeAlias = dict[str, Any] | None


class Observer(Statistics, Registry):
    """Gathers statistics of one tensor (a weight, an activation, an attention state) and computes its qparams.

    Subclass it and write ``update_statistics_from_observed``, which sets ``min_vals`` and ``max_vals`` of shape
    ``(*qparam_shape,)``. With other statistics, write ``has_statistics`` and ``get_qparams`` (or ``get_min_max``)
    too. Any attribute set while observing is a statistic: ``reset`` forgets it, a NaN in it is found. Or declare
    ``statistics`` and write ``measure``. An observer of weights that also wants the module's inputs declares statistics
    ``of_inputs`` and writes ``measure_inputs(value)``, the statistics of one input ``(..., C)`` in their order.

    Args:
        base_name: the observed tensor: weight, input, output, q, k or v.
        args: number format, strategy and ``observer_kwargs``; copied, never changed.
        **observer_kwargs: hyperparameters; they take precedence over ``args.observer_kwargs``.

    Raises:
        CalibrationError: an unknown base name; a hyperparameter that the class does not declare in
            ``hyperparameters`` (a class that declares none takes any).

    Examples:
        >>> args = QuantizationArgs(num_bits=8)
        >>> observer = Observer.load_from_registry("static_minmax", base_name="input", args=args)
        >>> _ = observer(torch.tensor([[-1.0, 2.0]]))(torch.tensor([[0.0, 3.0]]))
        >>> observer.get_min_max()
        (tensor([-1.]), tensor([3.]))
        >>> observer.get_qparams()["scale"]
        tensor([0.0235])
    """

    #: declared hyperparameters and their defaults; each becomes an attribute. None: takes anything.
    hyperparameters: ClassVar[Hyperparameters] = None

    #: whether scales may be negative, a hyperparameter of observers of weights; see
    #: :func:`~lightning_obs.numerics.qparams.signed_scale`
    signed = False

    #: whether a per-tensor range is widened to cover the ranges of the whole fused set
    _joins_ranges = False

    #: whether the NVFP4 global scale is rounded down to a power of two: group scales round alike for any such scale
    _rounds_global_scale = False

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        if base_name not in BASE_NAMES:
            raise CalibrationError(f"unknown base name {base_name!r}", expected=f"one of {', '.join(BASE_NAMES)}")
        self.base_name = base_name
        kwargs = {**(args.observer_kwargs or {}), **observer_kwargs}
        self.args = args.model_copy(deep=True, update={"observer_kwargs": kwargs})
        #: equal for observers that measure the same statistics in a tensor
        self.kind = (type(self), base_name, repr(self.args))
        #: the other members of a set whose modules engines run as one: q, k and v; gate and up
        self._fused_observers: list[Observer] = []
        #: dtype of the module's weight; under autocast wider than that of the observed values
        self.qparams_dtype: torch.dtype | None = None
        set_hyperparameters(self, kwargs)
        #: how the weight is rounded once its scales are chosen; None: to the nearest number
        self.rounding = rounding_of(self.args)
        if self.rounding is not None and base_name != "weight":
            raise CalibrationError("only weights are rounded", got=f"rounding for {base_name}")
        if self.signed and not can_be_signed(base_name, args):
            number_format = args.model_dump(mode="json", include={"num_bits", "type", "symmetric", "scale_dtype"})
            raise CalibrationError(
                "signed scales are for weights in symmetric integer formats, with scales of 16 bits or more",
                got=f"{base_name}, {number_format}",
                remedy="leave out signed=True.",
            )

    # ------------------------------------------------------------------ phase 1

    def __call__(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        """Observe one tensor; see :meth:`forward`."""
        return self.forward(value, g_idx)

    def forward(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        """Observe one tensor (shapes: :func:`flatten_for_calibration`). An empty one changes nothing."""
        if value.numel():
            with observing(self):
                self.update_statistics_from_observed(flatten_for_calibration(value, self.base_name, self.args, g_idx))
        return self

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        """Take in one flattened tensor ``(num_observations, *qparam_shape, group_size)``; called by :meth:`forward`."""
        self.combine(self.measure(observed))

    def measure(self, observed: torch.Tensor) -> Sequence[torch.Tensor]:
        """The statistics of one flattened tensor, in the order of ``statistics``.

        They may depend on the tensor, ``args`` and hyperparameters alone, because observers of one kind share them.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement update_statistics_from_observed, or statistics and measure"
        )

    def combine(self, measured: Sequence[torch.Tensor]) -> None:
        """Combine the statistics of one tensor with the statistics so far, as declared."""
        combine_declared(self, measured, of_inputs=False)

    def observe_inputs(self, value: torch.Tensor) -> None:
        """Take in an input ``(..., C)`` of the module whose weight is observed.

        Hooks call this at each forward of the module if ``needs_inputs``. An empty input changes nothing.
        """
        if not hasattr(self, "measure_inputs"):
            raise NotImplementedError(f"{type(self).__name__} must implement measure_inputs or observe_inputs")
        if value.numel():
            with observing(self):
                combine_declared(self, self.measure_inputs(value), of_inputs=True)

    # ------------------------------------------------------------------ phase 2

    def get_min_max(self) -> MinMaxTuple:
        """The range, ``(*qparam_shape,)`` each, in the units of the observed tensor.

        Raises:
            CalibrationError: nothing was observed.
        """
        require_statistics(self)
        return self.min_vals, self.max_vals

    def get_global_scale(self) -> torch.Tensor | None:
        """Global scale ``(1,)`` shared by the fused set; None unless the strategy is tensor_group."""
        if self.args.strategy != QuantizationStrategy.TENSOR_GROUP:
            return None
        members = [self, *self._fused_observers]
        global_scale = compute_global_scale([member.get_min_max() for member in members], self.args)
        if global_scale is not None and any(member._rounds_global_scale for member in members):
            return power_of_two(global_scale)
        return global_scale

    def get_qparams(self) -> QParamsDict:
        """Compute scale, zero point and global scale, at the end of an observation (``calibration/finalize.py``).

        It changes nothing: a second call returns the same.

        Raises:
            CalibrationError: nothing was observed, or the observed values hold NaN or infinity.
        """
        require_statistics(self)
        problems = None if self.is_finite else self.nonfinite_statistics()
        if problems:
            remedy = "find the NaN in weights or data."
            raise CalibrationError("the statistics are not finite", got=problems, remedy=remedy)
        min_vals, max_vals = _joined_range_of(self) if self._joins_ranges else self.get_min_max()
        if self.qparams_dtype is not None:
            dtype = torch.promote_types(min_vals.dtype, self.qparams_dtype)
            min_vals = min_vals.to(dtype)
            max_vals = max_vals.to(dtype)
        return compute_qparams(min_vals, max_vals, self.args, self.get_global_scale(), self.signed)

    # ------------------------------------------------------------------ fused sets and ranks

    @staticmethod
    def fuse(observers: Sequence[Observer], join_ranges: bool = False) -> None:
        """Make observers share one global scale (q, k, v; gate, up). Each keeps the others in ``_fused_observers``.

        Called when the observers of a plan are made, and where an expert borrows the ranges of others.

        Args:
            observers: of modules that are fused.
            join_ranges: where each has one range for its whole tensor, take the widest of all for each.
        """
        for observer in observers:
            observer._fused_observers = [member for member in observers if member is not observer]
            observer._joins_ranges = join_ranges and observer.args.strategy == QuantizationStrategy.TENSOR

    def sync_activation_stats(self) -> list[Any]:
        """Start one all_reduce per statistic in ``_act_sync_dict`` and return the handles to wait for.

        Only code written to the guide calls this; this package reduces all observers' statistics together
        (:mod:`lightning_obs.ranks.sync`).
        """
        handles = []
        for name, operation in self._act_sync_dict.items():
            if hasattr(self, name):
                statistic = getattr(self, name).clone()  # other observers may hold it
                self.load_statistics({name: statistic})
                handles.append(dist.all_reduce(statistic, op=operation, async_op=True))
        return handles


def combine_declared(observer: Observer, measured: Sequence[torch.Tensor], of_inputs: bool) -> None:
    """Combine new statistics with an observer's statistics so far, as its class declares it.

    Args:
        observer: gets the combined statistics.
        measured: the statistics of one tensor, in the order of the declaration.
        of_inputs: they are of an input of the module, for the observer of its weight.
    """
    declared = [statistic for statistic in observer.statistics if statistic.of_inputs == of_inputs]
    for statistic, newest in zip(declared, measured, strict=False):
        earlier = getattr(observer, statistic.name, None)
        setattr(observer, statistic.name, statistic.combine(earlier, newest))


def _joined_range_of(observer: Observer) -> MinMaxTuple:
    """The range that covers the ranges of all members of an observer's fused set, ``(*Q,)`` each, for its scale."""
    low, high = observer.get_min_max()
    for member in observer._fused_observers:
        member_low, member_high = member.get_min_max()
        low = torch.minimum(low, member_low)
        high = torch.maximum(high, member_high)
    return low, high


def require_statistics(observer: Observer) -> None:
    """Raise a CalibrationError unless something was observed; for a ``get_min_max`` that computes from statistics."""
    if not observer.has_statistics:
        raise CalibrationError(
            f"No statistics available in {type(observer).__name__} ({observer.base_name})",
            remedy="observe a tensor first: observer(value).",
        )


# ---------------------------------------------------------------------- hyperparameters


def set_hyperparameters(observer: Observer, kwargs: dict[str, Any]) -> None:
    """Set an observer's hyperparameters, its class's and its class's parents', as attributes; for its constructor.

    Raises:
        CalibrationError: a name in ``kwargs`` that is not declared; a value of another kind than the default's.
    """
    cls = type(observer)
    defaults = declared_hyperparameters(cls)
    if vars(cls).get("hyperparameters") is not None:
        unknown = []
        for name in kwargs:
            if name not in defaults and name != ROUNDING:
                unknown.append(f"{name!r}{likely(name, defaults)}")
        if unknown:
            raise CalibrationError(
                f"{cls.__name__} has no hyperparameter {', '.join(unknown)}",
                expected=", ".join(defaults) or "none, it takes no hyperparameters",
            )
    for name, default in defaults.items():
        value = kwargs.get(name, default)
        setattr(observer, name, value)
        if isinstance(default, bool):
            require(observer, name, isinstance(value, bool), "True or False")
        elif isinstance(default, (int, float)) and value is not None:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            require(observer, name, is_number, "a number")


def declared_hyperparameters(cls: type) -> dict[str, Any]:
    """The hyperparameters of a class and of its parents, with their defaults."""
    defaults: dict[str, Any] = {}
    for ancestor in reversed(cls.__mro__):
        defaults.update(vars(ancestor).get("hyperparameters") or {})
    return defaults


def require(observer: Observer, name: str, is_valid: bool, expected: str) -> None:
    """Raise a CalibrationError that names a hyperparameter and its value, unless it is valid; for constructors."""
    if not is_valid:
        value = repr(getattr(observer, name))
        raise CalibrationError(f"{type(observer).__name__}: {name}", got=value, expected=expected)
