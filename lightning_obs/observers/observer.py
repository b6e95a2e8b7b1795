"""The base class of observers: a subclass writes one method.

Phase 1: ``observer(value)`` flattens the value and hands it to ``update_statistics_from_observed``.
Phase 2: ``observer.get_qparams()`` turns the statistics into scale, zero point and global scale.

A class written to the ecosystem's observers' guide runs here with its import line changed. Two differences are
deliberate: a getter deletes nothing (``reset`` forgets), and the caller's ``args`` are copied, never changed, so that
observers made from the same ``args`` do not share hyperparameters.

Instead, a class may declare its ``statistics`` (:mod:`.statistic`) and write ``measure``, the statistics of one tensor.
Batches are then combined as declared, and modules that read the same tensor (q, k, v) share one ``measure``.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch import distributed as dist

from lightning_obs.errors import CalibrationError, likely
from lightning_obs.numerics.histogram import Support
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
from lightning_obs.observers.statistic import Statistics

__all__ = ["Key", "MinMaxTuple", "Observer", "QParamsDict"]

MinMaxTuple: TypeAlias = tuple[torch.Tensor, torch.Tensor]
#: module name and base name: the place of an observer in a model
Key: TypeAlias = tuple[str, str]


class Observer(Statistics, Registry):
    """Gathers statistics of one tensor (a weight, an activation, an attention state) and computes its qparams.

    Subclass it and write ``update_statistics_from_observed``, which sets ``min_vals`` and ``max_vals`` of shape
    ``(*qparam_shape,)``. With other statistics, write ``has_statistics`` and ``get_qparams`` (or ``get_min_max``)
    too. Any attribute set while observing is a statistic: ``reset`` forgets it, a NaN in it is found. Or declare
    ``statistics`` and write ``measure``.

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
    hyperparameters: ClassVar[dict[str, Any] | None] = None

    #: declared beside a ``measure_inputs`` that reads no hyperparameter: the fields of ``args`` that it reads
    _inputs_by: ClassVar[tuple[str, ...]]

    #: whether scales may be negative, a hyperparameter of observers of weights; see
    #: :func:`~lightning_obs.numerics.qparams.signed_scale`
    signed: bool = False

    #: whether a per-tensor range is widened to cover the ranges of the whole fused set, see :meth:`fuse`
    _joins_ranges: bool = False

    #: whether the global scale of its fused set is a power of two: any of these rounds group scales alike
    _rounds_global_scale: ClassVar[bool] = False

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        if base_name not in BASE_NAMES:
            raise CalibrationError(f"unknown base name {base_name!r}", expected=f"one of {', '.join(BASE_NAMES)}")
        self.base_name = base_name
        kwargs = {**(args.observer_kwargs or {}), **observer_kwargs}
        self.args = args.model_copy(deep=True, update={"observer_kwargs": kwargs})
        self._fused_observers: list[Observer] = []
        #: dtype of the module's weight; under autocast wider than that of the observed values
        self.qparams_dtype: torch.dtype | None = None
        self._set_hyperparameters(kwargs)
        #: how the weight is rounded once its scales are chosen; None: to the nearest number
        self.rounding = rounding_of(self.args)
        if self.rounding is not None and base_name != "weight":
            raise CalibrationError("only weights are rounded", got=f"rounding for {base_name}")
        if self.signed and not can_be_signed(base_name, args):
            given = args.model_dump(mode="json", include={"num_bits", "type", "symmetric", "scale_dtype"})
            raise CalibrationError(
                "signed scales are for weights in symmetric integer formats, stored as they are",
                got=f"{base_name}, {given}",
                remedy="leave out signed=True.",
            )

    def _set_hyperparameters(self, given: dict[str, Any]) -> None:
        known: dict[str, Any] = {}
        for cls in reversed(type(self).__mro__):
            known.update(vars(cls).get("hyperparameters") or {})
        declares = vars(type(self)).get("hyperparameters") is not None
        unknown = [f"{name!r}{likely(name, known)}" for name in given if name not in (*known, ROUNDING)]
        if declares and unknown:
            raise CalibrationError(
                f"{type(self).__name__} has no hyperparameter {', '.join(unknown)}",
                expected=", ".join(known) or "none, it takes no hyperparameters",
            )
        for name, default in known.items():
            value = given.get(name, default)
            setattr(self, name, value)
            self._require_like(name, value, default)

    @functools.cached_property
    def _kind(self) -> Hashable:
        """Equal for observers that measure the same statistics in a tensor."""
        return type(self), self.base_name, repr(self.args)

    def _require_like(self, name: str, value: Any, default: Any) -> None:
        """Raise a CalibrationError where a hyperparameter is of another kind than its default: a text is no number."""
        if isinstance(default, bool):
            self._require(name, isinstance(value, bool), "True or False")
        elif isinstance(default, (int, float)) and value is not None:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            self._require(name, is_number, "a number")

    def _require(self, name: str, holds: bool, expected: str) -> None:
        """Raise a CalibrationError that names a hyperparameter, unless it is as expected."""
        if not holds:
            raise CalibrationError(f"{type(self).__name__}: {name}", got=repr(getattr(self, name)), expected=expected)

    # ------------------------------------------------------------------ phase 1

    def __call__(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        """Observe one tensor; see :meth:`forward`."""
        return self.forward(value, g_idx)

    def forward(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        """Observe one tensor (shapes: :func:`flatten_for_calibration`). An empty one changes nothing."""
        if value.numel():
            with self._observing():
                self.update_statistics_from_observed(flatten_for_calibration(value, self.base_name, self.args, g_idx))
        return self

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        """Take in one flattened tensor ``(num_observations, *qparam_shape, group_size)``."""
        self.combine(self.measure(observed))

    def measure(self, observed: torch.Tensor) -> Sequence[torch.Tensor]:
        """The statistics of one flattened tensor, in the order of ``statistics``, by tensor and ``args`` alone."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement update_statistics_from_observed, or statistics and measure"
        )

    def combine(self, measured: Sequence[torch.Tensor]) -> None:
        """Combine the statistics of one tensor with the statistics so far, as declared."""
        self._combine(measured, of_inputs=False)

    def measure_inputs(self, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """The statistics ``of_inputs`` of one input ``(..., C)``, in the order of ``statistics``."""
        raise NotImplementedError(f"{type(self).__name__} must implement measure_inputs or observe_inputs")

    def observe_shared(self, value: torch.Tensor, measured: dict[Hashable, Any]) -> None:
        """Observe a tensor that other modules read, too; observers of one kind measure it once.

        Args:
            value: the tensor.
            measured: by kind, the statistics measured in ``value`` so far; added to. Observers that have seen the same
                tensors share their statistics: one histogram is added up and kept for q, k and v.
        """
        cls = type(self)
        if cls.update_statistics_from_observed is not Observer.update_statistics_from_observed or not value.numel():
            self(value)
            return
        with self._observing():
            if self._kind not in measured:
                measured[self._kind] = self.measure(flatten_for_calibration(value, self.base_name, self.args)), {}
            self._combine_once(False, *measured[self._kind])

    def observe_inputs(self, value: torch.Tensor, measured: dict[Hashable, Any] | None = None) -> None:
        """Take in an input ``(..., C)`` of the module whose weight is observed; called if ``needs_inputs``.

        Args:
            value: the module's input. An empty one changes nothing.
            measured: see :meth:`observe_shared`.
        """
        if not value.numel():
            return
        measured, kind = {} if measured is None else measured, self._kind_of_inputs
        with self._observing():
            if kind not in measured:
                measured[kind] = self.measure_inputs(value), {}
            self._combine_once(True, *measured[kind])

    @property
    def takes_segments(self) -> bool:
        """Whether :meth:`observe_segments` can observe for it: it measures as the class that has the method."""
        owner = next((cls for cls in type(self).__mro__ if "measure_segments" in vars(cls)), None)
        return owner is not None and all(
            getattr(type(self), name) is getattr(owner, name) for name in ("measure", "update_statistics_from_observed")
        )

    @staticmethod
    def observe_segments(
        observers: Sequence[Any], rows: torch.Tensor, lengths: Sequence[int], numbers: Sequence[int]
    ) -> None:
        """Observe a part of the rows with each of several observers of one kind that take segments.

        Parts are measured together and statistics combined together, in a number of operations that does not grow with
        the number of observers (the experts of a layer). The statistics are those of ``observer(part)``, one after the
        other.

        Args:
            observers: each once.
            rows: activations ``(n, C)``, the parts one below the other.
            lengths: rows of each part; one without rows changes nothing.
            numbers: of the part that each observer observes; several may observe the same.
        """
        first, names = observers[0], [statistic.name for statistic in observers[0].statistics]
        with first._observing():
            on_device = torch.tensor(lengths).to(rows.device, non_blocking=True)
            measured = first.measure_segments(flatten_for_calibration(rows, first.base_name, first.args), on_device)
            parts = [*zip(*measured, strict=True)]
            for seen in (True, False):
                placed = zip(observers, numbers, strict=True)
                own = [(o, parts[number]) for o, number in placed if lengths[number] and o.has_statistics == seen]
                if not own:
                    continue
                together = first._new()
                if seen:
                    together.load_statistics({n: torch.stack([getattr(o, n) for o, _ in own]) for n in names})
                together.combine([torch.stack(each) for each in zip(*(new for _, new in own), strict=True)])
                combined = zip(*(getattr(together, name).unbind() for name in names), strict=True)
                for (observer, _), statistics in zip(own, combined, strict=True):
                    observer.load_statistics(dict(zip(names, statistics, strict=True)))

    def _combine_once(self, of_inputs: bool, new: Sequence[torch.Tensor], combined: dict[Any, Any]) -> None:
        """Combine with ``new``, once for all observers of a kind whose statistics are the same objects."""
        names = [statistic.name for statistic in self.declared if statistic.of_inputs == of_inputs]
        before = [vars(self).get(name) for name in names]
        same = tuple(map(id, before))
        if same not in combined or not self._declares_all:
            if of_inputs:
                self._combine(new, of_inputs)
            else:
                self.combine(new)
            # ``before`` is kept: an id is of one object while that is alive
            combined[same] = before, {name: vars(self)[name] for name in names if name in vars(self)}
        self.__dict__ |= combined[same][1]

    @property
    def _kind_of_inputs(self) -> Hashable:
        """Equal for observers that measure the same in an input."""
        owner = next(cls for cls in type(self).__mro__ if "measure_inputs" in vars(cls))
        fields = vars(owner).get("_inputs_by")
        return self._kind if fields is None else (owner, *(str(getattr(self.args, field)) for field in fields))

    def observe_without_inputs(self, weight: torch.Tensor) -> None:
        """Observe a weight whose module no data reached, if that is possible."""
        self(weight)

    @property
    def observes_data(self) -> bool:
        """Whether its statistics depend on the data that the model runs on: not where it needs a weight alone."""
        return self.base_name != "weight" or self.needs_inputs

    @property
    def lacks_inputs(self) -> bool:
        """Whether the observer needs inputs and saw none."""
        return self.needs_inputs and not all(hasattr(self, name) for name in self.input_statistics)

    @property
    def is_reached(self) -> bool:
        """Whether data reached it: a tensor of its own, or inputs for a weight that is observed at the end."""
        return self.has_statistics or (self.needs_inputs and not self.lacks_inputs)

    @property
    def counted(self) -> Support | None:
        """The values that were observed and how often each was; None unless one histogram holds them all."""
        return None

    # ------------------------------------------------------------------ phase 2

    def get_min_max(self) -> MinMaxTuple:
        """The range, ``(*qparam_shape,)`` each, in the units of the observed tensor.

        Raises:
            CalibrationError: nothing was observed.
        """
        self._require_statistics()
        return self.min_vals, self.max_vals

    def get_global_scale(self) -> torch.Tensor | None:
        """Global scale ``(1,)`` shared by the fused set; None unless the strategy is tensor_group."""
        members = (self, *self._fused_observers)
        scale = compute_global_scale((member.get_min_max() for member in members), self.args)
        return power_of_two(scale) if scale is not None and any(m._rounds_global_scale for m in members) else scale

    def get_qparams(self) -> QParamsDict:
        """Compute scale, zero point and global scale. Changes nothing: a second call returns the same.

        Raises:
            CalibrationError: nothing was observed, or the observed values hold NaN or infinity.
        """
        self._require_statistics()
        bad = None if self.is_finite else self.nonfinite_statistics()
        if bad:
            raise CalibrationError("the statistics are not finite", got=bad, remedy="find the NaN in weights or data.")
        min_vals, max_vals = self.get_min_max()
        for other in self._fused_observers if self._joins_ranges else ():
            low, high = other.get_min_max()
            min_vals, max_vals = torch.minimum(min_vals, low), torch.maximum(max_vals, high)
        if self.qparams_dtype is not None:
            dtype = torch.promote_types(min_vals.dtype, self.qparams_dtype)
            min_vals, max_vals = min_vals.to(dtype), max_vals.to(dtype)
        return compute_qparams(min_vals, max_vals, self.args, self.get_global_scale(), self.signed)

    def _require_statistics(self) -> None:
        if not self.has_statistics:
            raise CalibrationError(
                f"No statistics available in {type(self).__name__} ({self.base_name})",
                remedy="observe a tensor first: observer(value).",
            )

    # ------------------------------------------------------------------ fused sets and ranks

    @property
    def merges_extremes_only(self) -> bool:
        """Whether it merges extremes only, so that ranks may have seen the same data, or other features of it."""
        return self.keeps_extremes and {statistic.reduction for statistic in self.declared} <= {"min", "max"}

    @staticmethod
    def fuse(observers: Sequence[Observer], join_ranges: bool = False) -> None:
        """Make observers share one global scale (q, k, v; gate, up). Each keeps the others in ``_fused_observers``.

        Args:
            observers: of modules that are fused.
            join_ranges: where each has one range for its whole tensor, take the widest of all for each.
        """
        for observer in observers:
            observer._fused_observers = [other for other in observers if other is not observer]
            observer._joins_ranges = join_ranges and observer.args.strategy == QuantizationStrategy.TENSOR

    def sync_activation_stats(self) -> list[Any]:
        """Start one all_reduce per statistic in ``_act_sync_dict`` and return the handles to wait for.

        Kept for code written to the guide; :mod:`lightning_obs.ranks.sync` packs all observers' statistics.
        """
        present = {name: op for name, op in self._act_sync_dict.items() if hasattr(self, name)}
        self.load_statistics({name: getattr(self, name).clone() for name in present})  # others may share them
        return [dist.all_reduce(getattr(self, name), op=op, async_op=True) for name, op in present.items()]
