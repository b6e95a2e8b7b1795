"""What an observer is: a class with one method to write.

Phase 1: ``observer(value)`` flattens the value and hands it to ``update_statistics_from_observed``.
Phase 2: ``observer.get_qparams()`` turns what was gathered into scale, zero point and global scale.

A class written to the ecosystem's observers' guide runs here with its import line changed. Two things are
different on purpose: a getter deletes nothing (``reset`` forgets), and the caller's ``args`` are never changed (the
observer keeps a copy), so two observers made from one ``args`` cannot leak hyperparameters into each other.

An observer whose statistics can be computed for one tensor and merged later may implement ``measure`` and ``merge``
instead. Modules that read the same tensor (q, k, v) then share one ``measure``.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch import distributed as dist

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.numerics.histogram import Support
from lightning_obs.numerics.qparams import QParamsDict, compute_global_scale, compute_qparams
from lightning_obs.numerics.reshape import BASE_NAMES, flatten_for_calibration
from lightning_obs.observers.registry import Registry
from lightning_obs.observers.rows import join_ranges, rows_per_scale

__all__ = ["Key", "MinMaxTuple", "Observer", "QParamsDict"]

MinMaxTuple: TypeAlias = tuple[torch.Tensor, torch.Tensor]
#: module name, base name: which observer of a model it is
Key: TypeAlias = tuple[str, str]


class Observer(Registry):
    """Gathers statistics of one tensor (a weight, an activation, an attention state) and computes its qparams.

    Subclass it and write ``update_statistics_from_observed``, which sets ``min_vals`` and ``max_vals`` of shape
    ``(*qparam_shape,)``. With other statistics, write ``has_statistics`` and ``get_qparams`` (or ``get_min_max``)
    too. Any attribute set while observing is a statistic: ``reset`` forgets it, a NaN in it is found.

    Args:
        base_name: what is observed: weight, input, output, q, k or v.
        args: number format, strategy and ``observer_kwargs``; copied, never changed.
        **observer_kwargs: hyperparameters; they take precedence over ``args.observer_kwargs``.

    Raises:
        CalibrationError: an unknown base name; a hyperparameter that the class does not declare in
            ``hyperparameters`` (a class that declares none takes what it is given).

    Examples:
        >>> args = QuantizationArgs(num_bits=8)
        >>> observer = Observer.load_from_registry("static_minmax", base_name="input", args=args)
        >>> _ = observer(torch.tensor([[-1.0, 2.0]]))(torch.tensor([[0.0, 3.0]]))
        >>> observer.get_min_max()
        (tensor([-1.]), tensor([3.]))
        >>> observer.get_qparams()["scale"]
        tensor([0.0235])
    """

    #: statistic attribute -> reduction over ranks. One that is not named here is that of the lowest rank that has it.
    _act_sync_dict: ClassVar[dict[str, Any]] = {}

    #: a weight's observer that also wants what the module reads: whoever attaches it calls ``observe_inputs``
    needs_inputs: ClassVar[bool] = False

    #: attributes that may change and are no statistics
    _bookkeeping: ClassVar[tuple[str, ...]] = (
        *("_before_observing", "_fused_observers", "_joins_ranges", "input_extremes"),
    )

    #: statistics that ``observe_inputs`` sets
    input_statistics: ClassVar[tuple[str, ...]] = ()

    #: whether a range depends on nothing but its own rows of a weight, see :meth:`for_rows`
    by_rows: ClassVar[bool] = False

    #: whether ``min_vals`` and ``max_vals`` are the smallest and the largest values of everything observed
    keeps_extremes: ClassVar[bool] = False

    #: whether :meth:`measure` takes hardly longer than reading the tensor
    measures_fast: ClassVar[bool] = False

    #: declared hyperparameters and their defaults; each becomes an attribute. None: takes anything.
    hyperparameters: ClassVar[dict[str, Any] | None] = None

    #: whether the range of a whole tensor is the widest of its fused group's, see :meth:`fuse`
    _joins_ranges: bool = False

    #: smallest and largest value of all inputs, ``(2,)``, where they were kept beside (:meth:`keep_input_extremes`)
    input_extremes: torch.Tensor | None = None

    def __init_subclass__(cls, *, by_rows: bool = False, keeps_extremes: bool = False, **kwargs: Any) -> None:
        """``class Mine(Observer, by_rows=True)``: each class says it of itself, as a subclass may observe otherwise."""
        super().__init_subclass__(**kwargs)
        cls.by_rows, cls.keeps_extremes = by_rows, keeps_extremes

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        if base_name not in BASE_NAMES:
            raise CalibrationError(f"unknown base name {base_name!r}", expected=f"one of {', '.join(BASE_NAMES)}")
        self.base_name = base_name
        kwargs = {**(args.observer_kwargs or {}), **observer_kwargs}
        self.args = args.model_copy(deep=True, update={"observer_kwargs": kwargs})
        self._fused_observers: list[Observer] = []
        #: dtype of the weight whose module the scale is for; under autocast wider than what is observed
        self.qparams_dtype: torch.dtype | None = None
        self._before_observing: dict[str, Any] | None = None
        self._set_hyperparameters(kwargs)

    def _set_hyperparameters(self, given: dict[str, Any]) -> None:
        known: dict[str, Any] = {}
        for cls in reversed(type(self).__mro__):
            known.update(vars(cls).get("hyperparameters") or {})
        declares = vars(type(self)).get("hyperparameters") is not None
        unknown = [name for name in given if name not in known]
        if declares and unknown:
            raise CalibrationError(
                f"{type(self).__name__} has no hyperparameter {', '.join(map(repr, unknown))}",
                expected=", ".join(known) or "none, it takes no hyperparameters",
            )
        for name, default in known.items():
            setattr(self, name, given.get(name, default))

    # ------------------------------------------------------------------ phase 1

    def __call__(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        """Observe one tensor; see :meth:`forward`."""
        return self.forward(value, g_idx)

    def forward(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        """Observe one tensor (shapes: :func:`flatten_for_calibration`). An empty one changes nothing."""
        if value.numel() == 0:
            return self
        # Lightning validates under inference mode; a statistic born in it could not be updated in training.
        with torch.inference_mode(False), torch.no_grad():
            self._remember_initial_state()
            self.update_statistics_from_observed(flatten_for_calibration(value, self.base_name, self.args, g_idx))
        return self

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        """Take in one flattened tensor ``(num_observations, *qparam_shape, group_size)``."""
        self.merge(self.measure(observed))

    def measure(self, observed: torch.Tensor) -> Any:
        """What one flattened tensor has to say; depends on nothing but the tensor and :attr:`measure_key`."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement update_statistics_from_observed, or measure and merge"
        )

    def merge(self, measured: Any) -> None:
        """Add a measurement to the statistics."""
        raise NotImplementedError(f"{type(self).__name__} implements measure without merge")

    @property
    def measure_key(self) -> Hashable | None:
        """Two observers with equal keys measure a tensor alike, so one measurement serves both. None: never share."""
        return None

    def observe_shared(self, value: torch.Tensor, measured: dict[Hashable, Any]) -> None:
        """Observe ``value``, taking the measurement from (or leaving it in) ``measured`` where it can be shared."""
        cls = type(self)
        measures = cls.update_statistics_from_observed is Observer.update_statistics_from_observed
        if self.measure_key is None or not measures or value.numel() == 0:
            self(value)
            return
        # A subclass that measures differently must not share under its parent's key.
        how = (cls.measure, self.measure_key)
        key = (how, self.base_name in ("q", "k", "v"), self.args.strategy, self.args.group_size)
        with torch.inference_mode(False), torch.no_grad():
            self._remember_initial_state()
            if key not in measured:
                measured[key] = self.measure(flatten_for_calibration(value, self.base_name, self.args))
            self.merge(measured[key])

    def observe_inputs(self, value: torch.Tensor, measured: dict[Hashable, Any] | None = None) -> None:
        """Take in an input ``(..., C)`` of the module whose weight is observed; called if ``needs_inputs``.

        Args:
            value: what the module reads.
            measured: measurements of this tensor, to take from and to add to (:meth:`observe_shared`).
        """
        raise NotImplementedError(f"{type(self).__name__} has needs_inputs but no observe_inputs")

    def observe_without_inputs(self, weight: torch.Tensor) -> None:
        """Observe a weight whose module no data reached, if that is possible."""
        self(weight)

    def keep_input_extremes(self, value: torch.Tensor, measured: dict[Hashable, Any]) -> None:
        """Keep the smallest and largest value beside the statistics, unless they hold them already.

        Args:
            value: the input that is observed.
            measured: measurements of this tensor, to take from and to add to (:meth:`observe_shared`).
        """
        if self.keeps_extremes or value.numel() == 0:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._remember_initial_state()
            if "extremes" not in measured:
                measured["extremes"] = torch.stack(torch.aminmax(value))
            low, high = measured["extremes"]
            if self.input_extremes is not None:
                low, high = torch.minimum(low, self.input_extremes[0]), torch.maximum(high, self.input_extremes[1])
            self.input_extremes = torch.stack([low, high])

    @property
    def observed_range(self) -> tuple[float, float] | None:
        """Smallest and largest value of everything observed, where they are known."""
        if self.keeps_extremes and self.has_statistics:
            return float(self.min_vals.min()), float(self.max_vals.max())
        if self.input_extremes is None:
            return None
        low, high = self.input_extremes.tolist()
        return low, high

    @property
    def counted(self) -> Support | None:
        """How often each value was observed, where one histogram holds that."""
        return None

    @property
    def observes_data(self) -> bool:
        """Whether what the model runs on decides its statistics: all observers but those of a weight by itself."""
        return self.base_name != "weight" or self.needs_inputs

    @property
    def lacks_inputs(self) -> bool:
        """Whether the observer needs inputs and saw none."""
        return self.needs_inputs and not all(hasattr(self, name) for name in self.input_statistics)

    @property
    def is_reached(self) -> bool:
        """Whether data reached it: a tensor, or the inputs of a weight that is observed at the end."""
        return self.has_statistics or (self.needs_inputs and not self.lacks_inputs)

    def load_statistics(self, statistics: Mapping[str, Any]) -> None:
        """Take over statistics that were gathered elsewhere, by attribute; :meth:`reset` forgets them too.

        Raises:
            CalibrationError: a name that no statistic can have, as it is the observer's own.
        """
        own = {"args", "base_name", "qparams_dtype", "_before_observing", "_fused_observers", "_joins_ranges"}
        behaviour = [n for n in statistics if callable(of := getattr(type(self), n, None)) or isinstance(of, property)]
        refuse(sorted(own & statistics.keys()) + behaviour, f"{type(self).__name__} has no such statistic")
        if self._before_observing is None:
            with torch.inference_mode(False), torch.no_grad():
                self._remember_initial_state()
        for name, value in statistics.items():
            setattr(self, name, value)

    def reset(self, keep: Collection[str] = ()) -> None:
        """Forget everything observed, except the statistics named in ``keep``."""
        if self._before_observing is None:
            return
        state = self._before_observing
        kept = {name: vars(self)[name] for name in ("_fused_observers", "_joins_ranges", *keep) if name in vars(self)}
        self.__dict__ = {name: _copy(value) for name, value in state.items()} | kept
        self._before_observing = state if keep else None

    def _remember_initial_state(self) -> None:
        if self._before_observing is None:
            self._before_observing = {name: _copy(value) for name, value in vars(self).items()}

    # ------------------------------------------------------------------ phase 2

    @property
    def has_statistics(self) -> bool:
        """Whether anything was observed."""
        return hasattr(self, "min_vals") and hasattr(self, "max_vals")

    def get_min_max(self) -> MinMaxTuple:
        """The range, ``(*qparam_shape,)`` each, in the units of the observed tensor.

        Raises:
            CalibrationError: nothing was observed.
        """
        self._require_statistics()
        return self.min_vals, self.max_vals

    def get_global_scale(self) -> torch.Tensor | None:
        """Global scale ``(1,)`` shared by the fused group; None unless the strategy is tensor_group."""
        return compute_global_scale((member.get_min_max() for member in (self, *self._fused_observers)), self.args)

    def get_qparams(self) -> QParamsDict:
        """Compute scale, zero point and global scale. Changes nothing: a second call returns the same.

        Raises:
            CalibrationError: nothing was observed, or what was observed holds NaN or infinity.
        """
        self._require_statistics()
        bad = self.nonfinite_statistics()
        if bad:
            raise CalibrationError("the statistics are not finite", got=bad, remedy="find the NaN in weights or data.")
        min_vals, max_vals = self.get_min_max()
        for other in self._fused_observers if self._joins_ranges else ():
            low, high = other.get_min_max()
            min_vals, max_vals = torch.minimum(min_vals, low), torch.maximum(max_vals, high)
        if self.qparams_dtype is not None:
            dtype = torch.promote_types(min_vals.dtype, self.qparams_dtype)
            min_vals, max_vals = min_vals.to(dtype), max_vals.to(dtype)
        return compute_qparams(min_vals, max_vals, self.args, self.get_global_scale())

    def nonfinite_statistics(self) -> str | None:
        """Say how many values of which statistic are NaN or infinite; None if all are finite."""
        bad = []
        for name in self.statistic_names():
            value = getattr(self, name)
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                wide = value.float() if value.itemsize == 1 else value  # torch does not ask it of float8
                if (wide - wide).any():  # NaN where a value is not finite, else zero: two operations, not five
                    count = int((~torch.isfinite(wide)).sum())
                    bad.append(f"{count} of {value.numel()} {name.lstrip('_')} not finite")
        return ", ".join(bad) or None

    def statistic_names(self) -> list[str]:
        """Attributes that observing has set."""
        initial = self._before_observing
        if initial is None:
            return []
        return [n for n, v in vars(self).items() if initial.get(n) is not v and n not in self._bookkeeping]

    def _require_statistics(self) -> None:
        if not self.has_statistics:
            raise CalibrationError(
                f"No statistics available in {type(self).__name__} ({self.base_name})",
                remedy="observe a tensor first: observer(value).",
            )

    # ------------------------------------------------------------------ groups and ranks

    def for_rows(self, start: int) -> Observer | None:
        """A new observer for a rank's rows of a weight, from row ``start`` on; None: it has to be observed whole.

        The answer is the same on every rank. What the parts found comes together in :meth:`join`.
        """
        if not self.by_rows or not self._may_start_at(start):
            return None
        part = type(self)(self.base_name, self.args)
        for name in self.input_statistics:
            if hasattr(self, name):
                setattr(part, name, getattr(self, name))
        return part

    def _may_start_at(self, row: int) -> bool:
        height = rows_per_scale(self.args)
        return height is not None and row % height == 0

    def agree(self, parts: Sequence[Any]) -> bool:
        """Let observers of :meth:`for_rows`, of all rows, decide together; whether they have to observe once more."""
        return False

    def join(self, parts: Sequence[tuple[int, Any]]) -> None:
        """Take over the weight's whole range from ``(first row, observer of :meth:`for_rows`)`` of all its rows."""
        low, high = join_ranges([(row, *part.get_min_max()) for row, part in parts], rows_per_scale(self.args))
        self.load_statistics({"min_vals": low, "max_vals": high})

    @property
    def merges_extremes_only(self) -> bool:
        """Whether ranks that share data, or split its features, still have nothing but its extremes to merge."""
        return self.keeps_extremes and set(self._act_sync_dict.values()) <= {dist.ReduceOp.MIN, dist.ReduceOp.MAX}

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
        return [dist.all_reduce(getattr(self, name), op=op, async_op=True) for name, op in present.items()]


def _copy(value: Any) -> Any:
    """A copy of what an observer may change in place while it observes."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return copy(value) if isinstance(value, (list, dict, set)) else value
