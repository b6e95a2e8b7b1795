"""The base class of observers: a subclass writes one method.

Phase 1: ``observer(value)`` flattens the value and passes it to ``update_statistics_from_observed``. Hooks observe
activations at each forward of a module, through :func:`observe_shared`; a weight is observed once, at the end.
Phase 2: ``observer.get_qparams()`` computes scale, zero point and global scale from the statistics, once all ranks have
the same statistics.

A class that is written to llm-compressor's guide for observers runs here with its import line changed. Two differences
are deliberate: a getter deletes nothing (``reset`` does), and the caller's ``args`` are copied, never changed, so that
observers made from the same ``args`` do not share hyperparameters.

Alternatively, a class declares its ``statistics`` (:mod:`.statistic`) and writes ``measure``, which computes the
statistics of one tensor. Batches are then combined as declared.

A class is registered by name, in compressed-tensors' registry; a user's class may replace a built-in one.

A tensor is measured once for all modules that read it: q, k and v; gate and up; the same module in several sessions.
Observers of one *kind* (class, base name, ``args`` and hyperparameters) measure the same statistics of a tensor. If two
of them have observed the same tensors so far, they hold the same statistic objects; then the combination with the next
tensor is computed once, and both hold the result. So one histogram is added up and kept for q, k and v. The hooks
(``calibration/hooks.py``) call :func:`observe_shared` at each forward. They keep the dict ``measured`` in a
:class:`ReadCache` as long as modules read the same tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.registry.registry import RegistryMixin, standardize_lookup_name
from torch import distributed as dist

from lightning_obs.errors import CalibrationError, likely, warn
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
from lightning_obs.observers.statistic import Statistics, declared_statistics, observing

__all__ = ["Key", "MinMaxTuple", "Observer", "QParamsDict"]

#: smallest and largest value of each range
MinMaxTuple: TypeAlias = tuple[torch.Tensor, torch.Tensor]
#: module name and base name, which identify an observer in a model
Key: TypeAlias = tuple[str, str]
#: default of each hyperparameter, by name; None: the class does not declare its hyperparameters
Hyperparameters: TypeAlias = dict[str, Any] | None


# ---------------------------------------------------------------------- by name


class Registry(RegistryMixin):
    """A registry of classes by name, with replacement: the base class of :class:`Observer`.

    compressed-tensors' registry refuses a name twice. Here the newer class replaces the older one, with a warning.
    """

    #: name -> the class that replaced the one first registered under it
    _replacements: ClassVar[dict[str, type]] = {}

    @classmethod
    def register_value(cls, value: Any, name: str | None = None, alias: str | list[str] | None = None) -> None:
        """Register a class by name; the decorator ``@Observer.register("name")`` calls it.

        If another class is registered under the name, the new class replaces it there, with a warning, and gets its
        further names one after the other in the same way.

        Args:
            value: the class.
            name: the name of the observer; None: the name of the class.
            alias: further names for the class.
        """
        name = name or value.__name__
        key = standardize_lookup_name(name)
        if key not in _registered_names(cls):
            super(Registry, _base_class(cls)).register_value(value, name=key, alias=alias)
            return
        current = cls.get_value_from_registry(key)
        if _full_name(current) != _full_name(value):
            warn(f"observer {name!r} is now {_full_name(value)}; it replaces {_full_name(current)}")
        cls._replacements[key] = value
        for further in [alias] if isinstance(alias, str) else alias or []:
            cls.register_value(value, further)

    @classmethod
    def get_value_from_registry(cls, name: str) -> Any:
        """The class registered under ``name``; ``load_from_registry`` calls it when a plan's observers are made.

        ``-`` and ``_`` are the same in a name.

        Raises:
            CalibrationError: the name is unknown; the message lists the known names.
        """
        registered = _registered_names(cls)
        names = sorted(key.replace("-", "_") for key in registered)  # as users write them
        if not isinstance(name, str):
            raise CalibrationError("an observer has a name", got=repr(name), expected=f"one of {', '.join(names)}")
        key = standardize_lookup_name(name)
        if key in cls._replacements:
            return cls._replacements[key]
        if key not in registered:
            raise CalibrationError(
                f"unknown observer {name!r}{likely(name, names)}", expected=f"one of {', '.join(names)}"
            )
        return super(Registry, _base_class(cls)).get_value_from_registry(key)


def _base_class(cls: type) -> Any:
    """The ancestor of ``cls`` that directly inherits :class:`Registry` (Observer): names are registered under it."""
    for ancestor in reversed(cls.__mro__):
        if issubclass(ancestor, Registry) and ancestor is not Registry:
            return ancestor
    raise TypeError(f"{cls.__name__} has no base class to register under")


def _registered_names(cls: type) -> list[str]:
    """All names and aliases of observers, in compressed-tensors' spelling."""
    base = _base_class(cls)
    return [*base.registered_names(), *base.registered_aliases()]


def _full_name(cls: type) -> str:
    """Module and name of a class, for the warning, and to recognize a class that is defined again."""
    return f"{cls.__module__}.{cls.__qualname__}"


# ---------------------------------------------------------------------- the base class


class Observer(Statistics, Registry):
    """Gathers statistics of one tensor (a weight, an activation, an attention state) and computes its qparams.

    A session makes one for each tensor that its plan quantizes with calibrated scales, by the observer's registered
    name.

    Subclass it and write ``update_statistics_from_observed``, which sets ``min_vals`` and ``max_vals`` of shape
    ``(*qparam_shape,)``. A class with other statistics also writes ``has_statistics`` and ``get_qparams`` (or
    ``get_min_max``). Any attribute that is set while observing is a statistic: ``reset`` deletes it, and a NaN in it is
    an error.

    Alternatively, declare ``statistics`` and write ``measure``. An observer of weights that needs the module's inputs
    declares statistics with ``of_inputs`` and writes ``measure_inputs(value)``, which returns these statistics of one
    input ``(..., C)``, in the order of the declaration.

    Args:
        base_name: the observed tensor: weight, input, output, q, k or v.
        args: number format, strategy and ``observer_kwargs``; copied, never changed.
        **observer_kwargs: hyperparameters; they take precedence over ``args.observer_kwargs``.

    Raises:
        CalibrationError: an unknown base name; a hyperparameter that the class does not declare in
            ``hyperparameters`` (a class that declares none takes any); signed scales or a rounding where they are not
            possible.

    Examples:
        >>> args = QuantizationArgs(num_bits=8)
        >>> observer = Observer.load_from_registry("static_minmax", base_name="input", args=args)
        >>> _ = observer(torch.tensor([[-1.0, 2.0]]))(torch.tensor([[0.0, 3.0]]))
        >>> observer.get_min_max()
        (tensor([-1.]), tensor([3.]))
        >>> observer.get_qparams()["scale"]
        tensor([0.0235])
    """

    #: the hyperparameters that the class declares, with their defaults; each becomes an attribute, and those of parent
    #: classes are added. None: the class takes any hyperparameter.
    hyperparameters: ClassVar[Hyperparameters] = None

    #: whether scales may be negative; a hyperparameter of some observers of weights, see
    #: :func:`~lightning_obs.numerics.qparams.signed_scale`
    signed = False

    #: whether a per-tensor range is widened to cover the ranges of the whole fused set; :meth:`fuse` sets it
    _joins_ranges = False

    #: whether the global scale of NVFP4 is rounded down to a power of two, which a search needs that rounds group
    #: scales before the global scale is known
    _rounds_global_scale = False

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        if base_name not in BASE_NAMES:
            raise CalibrationError(f"unknown base name {base_name!r}", expected=f"one of {', '.join(BASE_NAMES)}")
        self.base_name = base_name
        kwargs = {**(args.observer_kwargs or {}), **observer_kwargs}
        self.args = args.model_copy(deep=True, update={"observer_kwargs": kwargs})
        #: equal for observers that measure the same statistics of a tensor
        self.kind = (type(self), base_name, repr(self.args))
        #: the observers of the other modules that engines fuse with this module: q, k and v; gate and up
        self._fused_observers: list[Observer] = []
        #: dtype in which the module's scales are stored, that of its weight (in attention, of its first parameter);
        #: ``calibration/observation.py`` sets it when it makes the observer. qparams get at least this dtype, also if
        #: autocast makes the observed values narrower. None: the module has no parameter.
        self.qparams_dtype: torch.dtype | None = None
        set_hyperparameters(self, kwargs)
        #: how the weight is rounded once its scales are chosen; None: to nearest
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
        """Observe one tensor: call :meth:`forward`.

        Finalize calls it with a weight. Hooks call :func:`observe_shared` for an activation, which calls this only if
        the class overrides ``update_statistics_from_observed``.
        """
        return self.forward(value, g_idx)

    def forward(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        """Flatten one tensor and update the statistics with it; an empty tensor changes nothing.

        Called by :meth:`__call__`.

        Args:
            value: the tensor, in one of the shapes that :func:`flatten_for_calibration` lists.
            g_idx: for a weight in activation order, the group of each column; else None.

        Returns:
            The observer itself.
        """
        if value.numel():
            with observing(self):
                self.update_statistics_from_observed(flatten_for_calibration(value, self.base_name, self.args, g_idx))
        return self

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        """Update the statistics with a flattened tensor ``(num_observations, *qparam_shape, group_size)``.

        Called by :meth:`forward`, for weights and for classes that override this method. Activations of all other
        classes are measured by :func:`observe_shared`. A user's class overrides this method, or :meth:`measure`, whose
        result is combined with the statistics here.
        """
        measured = self.measure(observed)
        self.combine(measured)

    def measure(self, observed: torch.Tensor) -> Sequence[torch.Tensor]:
        """Compute the statistics of one flattened tensor, in the order of ``statistics``; a subclass writes it.

        Called by :meth:`update_statistics_from_observed` for a weight, and by :func:`observe_shared` for an activation,
        there once for all observers of one kind that read the tensor. So the result may depend only on the tensor,
        ``args`` and the hyperparameters.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement update_statistics_from_observed, or statistics and measure"
        )

    def combine(self, measured: Sequence[torch.Tensor]) -> None:
        """Combine one tensor's statistics with the statistics so far, as declared. Called after :meth:`measure`."""
        combine_declared(self, measured, of_inputs=False)

    def observe_inputs(self, value: torch.Tensor) -> None:
        """Update the statistics of inputs with an input ``(..., C)`` of the module whose weight is observed.

        :func:`observe_inputs_shared` calls it for a class that overrides this method. ``calibration/token_weights.py``
        calls it for observers of gradients, ``calibration/hold_out.py`` for samples of inputs. An empty input changes
        nothing.
        """
        if not hasattr(self, "measure_inputs"):
            raise NotImplementedError(f"{type(self).__name__} must implement measure_inputs or observe_inputs")
        if value.numel():
            with observing(self):
                measured = self.measure_inputs(value)
                combine_declared(self, measured, of_inputs=True)

    # ------------------------------------------------------------------ phase 2

    def get_min_max(self) -> MinMaxTuple:
        """The smallest and the largest value of each range, ``(*qparam_shape,)``, in the units of the observed tensor.

        Called by :meth:`get_qparams`, by members of the fused set, by finalize for the report, and by calibration for
        outputs that only a ReLU reads and for experts that borrow a range. A subclass whose statistics are not
        ``min_vals`` and ``max_vals`` overrides it.

        Raises:
            CalibrationError: nothing was observed.
        """
        require_statistics(self)
        return self.min_vals, self.max_vals

    def get_global_scale(self) -> torch.Tensor | None:
        """The global scale ``(1,)`` that the fused set shares; None unless the strategy is tensor_group.

        Called by :meth:`get_qparams`.
        """
        if self.args.strategy != QuantizationStrategy.TENSOR_GROUP:
            return None
        members = [self, *self._fused_observers]
        global_scale = compute_global_scale([member.get_min_max() for member in members], self.args)
        if global_scale is not None and any(member._rounds_global_scale for member in members):
            return power_of_two(global_scale)
        return global_scale

    def get_qparams(self) -> QParamsDict:
        """Compute scale, zero point and global scale from the statistics.

        ``calibration/finalize.py`` calls it at the end of an observation. It changes nothing: a second call returns the
        same.

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

        Called by ``calibration/observation.py`` when it makes the observers of a plan, and again by
        ``calibration/expert_tokens.py`` when an expert without data borrows the ranges of other experts.

        Args:
            observers: the observers of the modules of one fused set, for the same base name.
            join_ranges: if the observers have one range for the whole tensor, use the union of all their ranges for
                each of them.
        """
        for observer in observers:
            observer._fused_observers = [member for member in observers if member is not observer]
            observer._joins_ranges = join_ranges and observer.args.strategy == QuantizationStrategy.TENSOR

    def sync_activation_stats(self) -> list[Any]:
        """Start one all_reduce for each statistic in ``_act_sync_dict``, and return the handles to wait for.

        Only code written for llm-compressor's observers calls it; this package reduces the statistics of all observers
        together (:mod:`lightning_obs.ranks.sync`).
        """
        handles = []
        for name, operation in self._act_sync_dict.items():
            if hasattr(self, name):
                statistic = getattr(self, name).clone()  # other observers may hold it
                self.load_statistics({name: statistic})
                handles.append(dist.all_reduce(statistic, op=operation, async_op=True))
        return handles


def combine_declared(observer: Observer, measured: Sequence[torch.Tensor], of_inputs: bool) -> None:
    """Combine the statistics of one tensor with an observer's statistics so far, as its class declares it.

    A declared statistic for which ``measured`` has no value stays as it is, and further values are ignored: a user's
    class may set statistics by itself. Called by the observer's ``combine`` for each observed tensor, and for each
    observed input by ``observe_inputs`` and :func:`observe_inputs_shared`.

    Args:
        observer: its statistics are replaced by the combined ones.
        measured: the statistics of one tensor, in the order of the declaration.
        of_inputs: whether these are statistics of the module's inputs, for the observer of its weight.
    """
    declared = [statistic for statistic in observer.statistics if statistic.of_inputs == of_inputs]
    for statistic, newest in zip(declared, measured, strict=False):
        earlier = getattr(observer, statistic.name, None)
        setattr(observer, statistic.name, statistic.combine(earlier, newest))


def _joined_range_of(observer: Observer) -> MinMaxTuple:
    """The union of the ranges of all members of an observer's fused set, ``(*Q,)`` each, for ``get_qparams``."""
    low, high = observer.get_min_max()
    for member in observer._fused_observers:
        member_low, member_high = member.get_min_max()
        low = torch.minimum(low, member_low)
        high = torch.maximum(high, member_high)
    return low, high


def require_statistics(observer: Observer) -> None:
    """Raise a CalibrationError if nothing was observed yet; getters call it before they read statistics."""
    if not observer.has_statistics:
        raise CalibrationError(
            f"No statistics available in {type(observer).__name__} ({observer.base_name})",
            remedy="observe a tensor first: observer(value).",
        )


# ---------------------------------------------------------------------- hyperparameters


def set_hyperparameters(observer: Observer, kwargs: dict[str, Any]) -> None:
    """Set the hyperparameters that an observer's class and its parents declare as attributes; for the constructor.

    Args:
        observer: the observer that is being constructed.
        kwargs: values by name; a hyperparameter that is missing gets its default.

    Raises:
        CalibrationError: the class itself declares ``hyperparameters``, and a name in ``kwargs`` is not among them or
            those of its parents; a value is no bool although the default is one; a value is neither a number nor None
            although the default is a number. Other values are not checked here.
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
    """The hyperparameters that a class and its parents declare, with their defaults; a subclass's default wins.

    For :func:`set_hyperparameters`, and for the observer ``histogram``, which compares its hyperparameters with those
    of an earlier search.
    """
    defaults: dict[str, Any] = {}
    for ancestor in reversed(cls.__mro__):
        defaults.update(vars(ancestor).get("hyperparameters") or {})
    return defaults


def require(observer: Observer, name: str, is_valid: bool, expected: str) -> None:
    """Raise a CalibrationError for a hyperparameter unless ``is_valid``; constructors of observers call it.

    Args:
        observer: has the hyperparameter as an attribute.
        name: the name of the hyperparameter.
        is_valid: whether the caller has found its value valid.
        expected: the values that are valid, for the error.
    """
    if not is_valid:
        value = repr(getattr(observer, name))
        raise CalibrationError(f"{type(observer).__name__}: {name}", got=value, expected=expected)


# ---------------------------------------------------------------------- observers that read one tensor


#: ``id()`` of each of an observer's statistics, which tells whether two observers hold the same objects
Identities: TypeAlias = tuple[int, ...]


@dataclass
class ReadCache:
    """Results computed from the tensor that was read last, for the next module that reads it (q, then k, then v).

    The hooks of a session share one cache (``calibration/observed_calls.py``), and read and fill it in each forward.

    Attributes:
        tensor: a weak reference to the tensor that was read last; None: no tensor was read yet.
        stamp: a value of the hook that differs if the content of the tensor may have changed.
        tokens: the tensor's tokens that the token mask leaves; None: they were not selected yet.
        measured: the tensor's :class:`Measurement` by kind of observer.
    """

    tensor: Callable[[], torch.Tensor | None] | None = None
    stamp: Hashable = None
    tokens: torch.Tensor | None = None
    measured: dict[Hashable, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy or a pickle: an empty cache, because a weak reference cannot be copied."""
        return vars(ReadCache())

    def forget(self) -> None:
        """Empty the cache. Called when hooks are attached or detached, and when the token mask changes."""
        vars(self).update(vars(ReadCache()))

    def read(self, tensor: torch.Tensor, stamp: Hashable) -> None:
        """Empty the cache for a new tensor, unless it is the tensor that was read last, unchanged.

        A hook calls it with each tensor before it uses ``tokens`` and ``measured``.
        """
        is_last = self.tensor is not None and self.tensor() is tensor
        if not is_last or self.stamp != stamp:
            vars(self).update(vars(ReadCache(weakref.ref(tensor), stamp)))


class Measurement(NamedTuple):
    """The statistics of one tensor for one kind of observer, and their combinations with earlier statistics.

    :func:`observe_shared` and :func:`observe_inputs_shared` make one when the first observer of a kind reads a tensor,
    and read it for the other observers of the kind.

    Attributes:
        statistics: the statistics of the tensor, in the order in which the kind declares them.
        combined: key: the identities of an observer's statistics before this tensor. Value: these statistics (kept,
            because an ``id()`` is unique only while its object is alive), and the combined statistics by name.
    """

    statistics: Sequence[torch.Tensor]
    combined: dict[Identities, tuple[list[Any], dict[str, Any]]]


def observe_shared(observer: Observer, value: torch.Tensor, measured: dict[Hashable, Any]) -> None:
    """Observe an activation that other modules may read, too; a hook calls it in place of ``observer(value)``.

    Args:
        observer: an observer of any class; one that overrides ``update_statistics_from_observed`` is called without
            sharing.
        value: the tensor; an empty tensor changes nothing.
        measured: the measurements of ``value`` so far, by kind of observer; a new measurement is added.
    """
    observes_itself = type(observer).update_statistics_from_observed is not Observer.update_statistics_from_observed
    if observes_itself or not value.numel():
        observer(value)
        return

    def measure() -> Sequence[torch.Tensor]:
        return observer.measure(flatten_for_calibration(value, observer.base_name, observer.args))

    _combine_shared(observer, observer.kind, measure, measured, of_inputs=False)


def observe_inputs_shared(observer: Observer, value: torch.Tensor, measured: dict[Hashable, Any]) -> None:
    """Observe a module's input ``(..., C)`` for the observer of its weight; other modules may read the input, too.

    A hook calls it in place of ``observer.observe_inputs(value)``. ``calibration/hold_out.py`` calls it for batches
    that are kept out of a fit, and ``calibration/paired_inputs.py`` for pairs of full-precision and quantized inputs.

    Args:
        observer: an observer of a weight, with ``needs_inputs``; one that overrides ``observe_inputs`` is called
            without sharing.
        value: the input; an empty input changes nothing.
        measured: the measurements of ``value`` so far, by kind of observer; a new measurement is added.
    """
    observes_itself = type(observer).observe_inputs is not Observer.observe_inputs
    if observes_itself or not hasattr(observer, "measure_inputs") or not value.numel():
        observer.observe_inputs(value)
        return

    def measure() -> Sequence[torch.Tensor]:
        return observer.measure_inputs(value)

    _combine_shared(observer, _kind_of_inputs(observer), measure, measured, of_inputs=True)


def _kind_of_inputs(observer: Observer) -> Hashable:
    """A key that is equal for observers whose ``measure_inputs`` returns the same for an input.

    A class that declares ``_inputs_by`` together with ``measure_inputs`` states that this method depends only on these
    fields of ``args``, and on no hyperparameter. Observers that weigh tokens get weighted inputs, so they have a
    different key.
    """
    measuring_class = next(cls for cls in type(observer).__mro__ if "measure_inputs" in vars(cls))
    fields = vars(measuring_class).get("_inputs_by")
    if fields is None:
        return "inputs", observer.kind
    values = [str(getattr(observer.args, field)) for field in fields]
    return "inputs", measuring_class, getattr(observer, "weigh_tokens", False), *values


def _combine_shared(
    observer: Observer,
    kind: Hashable,
    measure: Callable[[], Sequence[torch.Tensor]],
    measured: dict[Hashable, Any],
    of_inputs: bool,
) -> None:
    """Combine an observer's statistics with a tensor's, once for all observers that hold the same statistics.

    Args:
        observer: its statistics are replaced by the combined ones.
        kind: equal for observers that measure the same statistics of the tensor.
        measure: computes the statistics of the tensor; called only for the first observer of a kind.
        measured: the measurements of the tensor so far, by kind; a new measurement is added.
        of_inputs: whether the tensor is an input, for the observer of the module's weight.
    """
    with observing(observer):
        if kind not in measured:
            statistics = measure()
            measured[kind] = Measurement(statistics, {})
        measurement: Measurement = measured[kind]
        names = []
        for statistic in declared_statistics(observer):
            if statistic.of_inputs == of_inputs:
                names.append(statistic.name)
        attributes = observer.__dict__
        earlier = [attributes.get(name) for name in names]
        identities = tuple(map(id, earlier))
        # Observers of one kind that hold the same statistics share the combined ones. Not if the class sets attributes
        # beside its ``statistics`` while it observes: they may differ, so that each such observer combines for itself.
        may_share = observer._declares_all
        if identities not in measurement.combined or not may_share:
            if of_inputs:
                combine_declared(observer, measurement.statistics, of_inputs)
            else:
                observer.combine(measurement.statistics)
            together = {name: attributes[name] for name in names if name in attributes}
            measurement.combined[identities] = earlier, together
        _, together = measurement.combined[identities]
        attributes.update(together)
