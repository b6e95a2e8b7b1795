"""The record of one observation.

The record (:class:`Observation`) holds the modules of a plan, their observers, and what has been observed so far. A
session makes the record and owns it. Hooks fill it, and :func:`.finalize` reads it; both are given the record, not the
session. Nothing outside ``calibration/`` writes to it. :class:`.CalibrationResult` describes the finished calibration.

A *helper observer* gathers a statistic that the observer of the plan does not keep, under a base name of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from compressed_tensors.quantization import QuantizationArgs
from torch import nn

from lightning_obs.calibration.base_names import GRADIENTS, HESSIAN, INPUT_ERRORS, RANGE
from lightning_obs.calibration.expert_tokens import ExpertWatch
from lightning_obs.calibration.fitted_recipe import fitted_options
from lightning_obs.calibration.hold_out import HoldOut, judged_targets
from lightning_obs.calibration.input_errors import InputErrors
from lightning_obs.calibration.observed_calls import ObservedCalls
from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.output_readers import OutputReaders
from lightning_obs.engines import Verdict
from lightning_obs.engines.engine import PlannedCheckpoint, ask_engines
from lightning_obs.errors import CalibrationError
from lightning_obs.files.tensors import Progress
from lightning_obs.model.kinds import is_transformers_model, may_hold_experts, without_wrappers
from lightning_obs.model.module_qparams import qparams_home
from lightning_obs.model.offload import at_rest
from lightning_obs.model.weight import matrix_shape
from lightning_obs.moe.experts import LinearExperts, expert_containers
from lightning_obs.numerics.histogram import Support
from lightning_obs.observers import HessianObserver, Key, Observer, StaticMinMaxObserver
from lightning_obs.observers.counting import CountingObserver
from lightning_obs.observers.hessian import MOST_OUTPUTS
from lightning_obs.observers.statistic import observes_data
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.schemes.build_plan import build_plan, check_inputs_fit
from lightning_obs.schemes.config import make_observer, rounds_on_quantized_inputs
from lightning_obs.schemes.planned_modules import Plan, PlannedModule, drop_outputs


@dataclass
class Coverage:
    """Which observers and modules the data of an observation reached; ``Observation.coverage`` is one.

    :func:`.finalize` sets all fields but the last, with :mod:`.unreached`, and reads what an earlier call has set. A
    session reads them afterwards.

    Attributes:
        unreached: the observers that no data reached on any rank; None: statistics were not reduced over ranks yet. The
            session sets it back to None when it attaches.
        lacks_data: whether the last :func:`.finalize` failed, on all ranks, because data were missing.
        skipped: names of modules that were left in full precision, because no data reached them.
        others_have_data: in the record of a part of a model (:meth:`Observation.of`), whether data reached other parts,
            so that a part without data does not mean a calibration without data. :mod:`.stepwise` sets it before it
            finalizes the part; in every other record it is False.
    """

    unreached: list[Key] | None = None
    lacks_data: bool = False
    skipped: set[str] = field(default_factory=set)
    others_have_data: bool = False


@dataclass
class Observation:
    """The record of one observation; made by :meth:`of_model`.

    Attributes:
        model: the model whose calls are observed, without wrappers.
        options: of the calibration.
        plan: the modules that will be quantized.
        engines: by engine's name, its verdict on the checkpoint that the calibration will give.
        observers: the observers of the plan, by module name and base name.
        data_observers: the observers that observe data: those of the plan that need data, and helper observers.
        hold_outs: by name of a few modules, the observers that judge how far the fit of the module's weight holds on
            other data (:mod:`.hold_out`).
        experts: the watch over the model's experts; None: the model has none.
        inseparable: groups of names of modules that are quantized together or not at all.
        collectives: how this rank communicates with the other ranks.
        calls: the record of the calls of the model so far.
        progress: the function that is called with each weight that this rank has searched; None: no progress is shown.
            The session sets it (``show_progress``).
        judges_fit: whether the fit of weights to the data is judged; False while candidates are tried or weights train.
        is_fitting: whether an error would end a training; modules that no data reached are then left in float. The
            session sets it when a Trainer's run begins (``begin_run``).
        coverage: which observers and modules the data reached; known when the observation was finalized.
    """

    model: nn.Module
    options: CalibrationOptions
    plan: Plan
    engines: Mapping[str, Verdict]
    observers: dict[Key, Observer]
    data_observers: dict[Key, Observer]
    hold_outs: dict[str, HoldOut]
    experts: ExpertWatch | None
    inseparable: list[list[str]]
    collectives: Collectives = field(default_factory=Collectives)
    calls: ObservedCalls = field(default_factory=ObservedCalls)
    progress: Progress | None = None
    judges_fit: bool = True
    is_fitting: bool = False
    coverage: Coverage = field(default_factory=Coverage)

    def __getstate__(self) -> dict[str, Any]:
        """Leave ``progress`` out of a copy or pickle, as the function may hold a terminal."""
        return {**vars(self), "progress": None}

    @classmethod
    def of_model(
        cls, model: nn.Module, options: CalibrationOptions, collectives: Collectives | None = None
    ) -> Observation:
        """Make the record of a new observation: a plan of the model, and observers without statistics.

        Called by the constructor of a session, and for the quantization of a checkpoint's files without data.

        While the plan is made, wrapped submodules (by FSDP1, ``torch.compile``...) are replaced by what they wrap, and
        offloaded weights are not loaded: only names and shapes are read.

        Args:
            model: not itself a wrapper; its submodules may have wrappers.
            options: of the calibration. The record's own ``options`` lack the parts of a recipe that do not fit.
            collectives: how this rank communicates with the others; None: there is one rank.

        Raises:
            CalibrationError: the options do not fit the model, or an engine refuses the checkpoint.
        """
        with without_wrappers(model), at_rest():
            if options.recipe is not None:
                options = fitted_options(model, options)
            plan = build_plan(model, options.config, [*options.engine.fused_sets, *options.fused_sets])
            checkpoint = PlannedCheckpoint(model, plan.targets, options.fused_sets)
            engines = ask_engines(checkpoint, options.engine, options.further_engines)
            containers = expert_containers(model) if may_hold_experts(model) else {}
            experts = _watch_of_experts(model, containers, options.calibrate_all_experts)
            layers = _layers_of_experts(model, containers, plan)
        observers = _make_observers(plan)
        helpers = _make_helpers(plan, observers)
        data_observers = {key: observer for key, observer in observers.items() if observes_data(observer)} | helpers
        check_inputs_fit(plan.targets, observers)
        _fuse(plan, observers, options.join_fused_scales)
        inseparable = [*plan.fused, *layers]
        collectives = collectives or Collectives()
        calls = ObservedCalls()
        if any("output" in target.args for target in plan.targets):
            calls.readers = OutputReaders()
        return cls(
            model=model,
            options=options,
            plan=plan,
            engines=engines,
            observers=observers,
            data_observers=data_observers,
            hold_outs=_make_hold_outs(plan, observers),
            experts=experts,
            inseparable=inseparable,
            collectives=collectives,
            calls=calls,
        )

    @property
    def needs_data(self) -> bool:
        """Whether the model has to run on data: for static activations, or for weights whose observers need inputs.

        Callbacks, command line and file calibrations ask it before they run data.
        """
        return bool(self.data_observers)

    @property
    def rounds_on_quantized_inputs(self) -> bool:
        """Whether some weight is rounded on the inputs that the quantized modules before it give.

        Asked when a session or a calibration layer by layer is made. The session then keeps the calls of the model, to
        run them again in steps.
        """
        return rounds_on_quantized_inputs(self.plan.config)

    @property
    def is_fitted(self) -> bool:
        """Whether some weight is fitted to data and the fit is judged.

        ``result_of`` (:mod:`.result`) asks this for the result, which then says how the fit went.
        """
        return self.judges_fit and bool(_fitted_weights(self.observers))

    @property
    def all_observers(self) -> list[Observer]:
        """The observers of the plan, helper observers, and the observers of hold-outs.

        They are reset by :meth:`forget`, and by calibrations part by part once a part is finished.
        """
        observers = list((self.observers | self.data_observers).values())
        for hold_out in self.hold_outs.values():
            observers += hold_out.observers.values()
        return observers

    @property
    def weighed_modules(self) -> list[str]:
        """Names of the modules for whose weights tokens count by their gradients (``weigh_tokens``).

        The hooks make a :class:`.TokenWeights` for these modules, if there are any. Calibrations from files, and
        training of weights, refuse them before the data.
        """
        names = []
        for (name, _), observer in self.data_observers.items():
            if getattr(observer, "weigh_tokens", False):
                names.append(name)
        return names

    @property
    def input_counts(self) -> dict[str, Support]:
        """By module name, how often each value of its input was observed, if the observer counts (``histogram``...).

        ``callbacks/results.py`` reads it after the calibration, to measure the errors of inputs on these counts without
        running the model again.
        """
        counts_of_modules = {}
        for (name, base), observer in self.observers.items():
            if base != "input" or not isinstance(observer, CountingObserver):
                continue
            counts = observer.counted_values()
            if counts is not None:
                counts_of_modules[name] = counts
        return counts_of_modules

    def forget(self) -> None:
        """Forget the statistics of all observers, and how many batches and measurements there were.

        A session calls this when it attaches, unless it continues an observation; :meth:`.KeptRuns.calibrate` calls it
        when a run in steps has failed. What else belongs to the last calibration is replaced elsewhere: the session
        sets ``coverage.unreached`` to None when it attaches, the experts' hooks begin their counts at zero, and
        :func:`.finalize` sets the rest of ``coverage``.
        """
        self.calls.batches = 0
        self.calls.measurements = 0
        for observer in self.all_observers:
            observer.reset()

    def judge_no_fit(self) -> None:
        """Do not judge how well fitted weights hold on other data.

        Called before the data by :func:`~lightning_obs.sensitivity`, which only tries candidates, and by quantized
        training, whose weights change.
        """
        self.judges_fit = False
        self.hold_outs.clear()

    def leave_out_input_errors(self) -> None:
        """Remove the observers of input errors, and make hold-outs that observe inputs in full precision instead.

        Called by :meth:`.KeptRuns.round_by_full_precision` when a recipe goes over to inputs in full precision: before
        the data, or at their end, before the kept calls run once more. In the second case the fit is judged on the kept
        calls alone. The plan's schemes say already how weights are rounded.
        """
        if self.hold_outs:  # else no fit is judged
            self.hold_outs = _make_hold_outs(self.plan, self.observers)
        for key in list(self.data_observers):
            _, base_name = key
            if base_name == INPUT_ERRORS:
                del self.data_observers[key]

    def drop_outputs(self, followed: Collection[str]) -> None:
        """Remove the outputs of some modules from plan and observers.

        Called by :func:`.settle_outputs` after the data, and when a session loads a saved calibration.

        Args:
            followed: names of the modules whose output is not quantized (:attr:`.OutputReaders.followed`).
        """
        drop_outputs(self.plan, followed)
        for name in followed:
            self.observers.pop((name, "output"), None)
            self.data_observers.pop((name, "output"), None)

    def of(self, module_names: Collection[str], progress: Progress | None = None) -> Observation:
        """Make a record of some modules alone, so that this part of the model can be finalized by itself.

        Called for each step by :mod:`.stepwise`, and for each block or fused set by ``streaming/``. The new record
        shares the observers with this one. What :func:`.finalize` changes in it (``coverage``, counts) does not change
        here. Its model is a list of the planned modules.

        Args:
            module_names: the modules of the part, with all members of each fused set; unplanned modules are ignored.
            progress: called with each weight of the part that this rank has searched.
        """
        targets = [target for target in self.plan.targets if target.name in module_names]
        fused = [group for group in self.plan.fused if group[0] in module_names]
        expert_tokens = {name: counts for name, counts in self.calls.expert_tokens.items() if name in module_names}
        return replace(
            self,
            model=nn.ModuleList(target.module for target in targets),
            plan=replace(self.plan, targets=targets, fused=fused),
            observers=_of_modules(self.observers, module_names),
            data_observers=_of_modules(self.data_observers, module_names),
            hold_outs={name: hold_out for name, hold_out in self.hold_outs.items() if name in module_names},
            calls=replace(self.calls, expert_tokens=expert_tokens),
            progress=progress,
            coverage=replace(self.coverage),
        )


def fused_sets_by_module(plan: Plan) -> dict[str, tuple[str, ...]]:
    """By name of each module in a fused set, the names of all modules of the set.

    Called once by the hooks (:mod:`.hooks`) and :class:`.TokenWeights` when they are made, and by
    ``QuantizedFiles.fused_sets`` (``streaming/quantized_files.py``).
    """
    fused_sets: dict[str, tuple[str, ...]] = {}
    for group in plan.fused:
        fused_sets |= dict.fromkeys(group, tuple(group))
    return fused_sets


def _of_modules(observers: Mapping[Key, Observer], module_names: Collection[str]) -> dict[Key, Observer]:
    """The observers of the modules in ``module_names``."""
    return {key: observer for key, observer in observers.items() if key[0] in module_names}


# ---------------------------------------------------------------------- observers of a plan


def _make_observers(plan: Plan) -> dict[Key, Observer]:
    """Make an observer for each tensor of the plan whose qparams are not computed at run time (dynamically).

    Each observer knows the dtype in which its scales will be stored: the weight's, or that of attention's first
    parameter.
    """
    observers: dict[Key, Observer] = {}
    for target in plan.targets:
        parameter = qparams_home(target.module)
        for base_name, args in target.args.items():
            if args.dynamic is not True:
                observer = make_observer(base_name, args)
                observer.qparams_dtype = None if parameter is None else parameter.dtype
                observers[target.name, base_name] = observer
    return observers


def _make_helpers(plan: Plan, observers: Mapping[Key, Observer]) -> dict[Key, Observer]:
    """Make the helper observers of a plan: of the ranges of inputs, and of what roundings need."""
    helpers: dict[Key, Observer] = {}
    for target in plan.targets:
        for base_name in target.args:
            observer = observers.get((target.name, base_name))
            if observer is None:
                continue
            if base_name == "input" and not observer.keeps_extremes:
                helpers[target.name, RANGE] = StaticMinMaxObserver("input", QuantizationArgs())
            else:
                helpers |= _rounding_helpers(target, observer)
    return helpers


def _rounding_helpers(target: PlannedModule, observer: Observer) -> dict[Key, Observer]:
    """Make the helpers that gather what the rounding of a weight needs and its ``observer`` does not gather.

    Called for the observers of a plan, and for those of its hold-outs. With token weights, the gradients at a module's
    outputs are gathered, too, unless it has more than ``MOST_OUTPUTS`` outputs: their products would take over 1 GiB,
    and the rounding does without them.

    Args:
        target: the module.
        observer: of its weight; others than those with a ``rounding`` need no helpers.

    Returns:
        The helpers, by module name and base name.
    """
    helpers: dict[Key, Observer] = {}
    if observer.rounding is None:
        return helpers
    weighs_tokens = getattr(observer, "weigh_tokens", False)
    if not isinstance(observer, HessianObserver):
        helpers[target.name, HESSIAN] = HessianObserver("weight", QuantizationArgs(), weigh_tokens=weighs_tokens)
    shape = matrix_shape(target.module)
    has_too_many_outputs = shape is not None and shape[0] > MOST_OUTPUTS
    if weighs_tokens and not has_too_many_outputs:
        helpers[target.name, GRADIENTS] = HessianObserver("weight", QuantizationArgs())
    if observer.rounding.correction:
        helpers[target.name, INPUT_ERRORS] = InputErrors("weight", QuantizationArgs())
    return helpers


def _fitted_weights(observers: Mapping[Key, Observer]) -> set[str]:
    """Names of the modules whose weights are fitted to data, by their observers or by the rounding after these.

    Asked when hold-outs are made, and when a result says whether anything was fitted.
    """
    names = set()
    for (name, base), observer in observers.items():
        if base == "weight" and (observer.needs_inputs or observer.rounding is not None):
            names.add(name)
    return names


def _make_hold_outs(plan: Plan, observers: Mapping[Key, Observer]) -> dict[str, HoldOut]:
    """Make the hold-outs of a few modules with fitted weights; their observers are others than those of the plan."""
    hold_outs: dict[str, HoldOut] = {}
    fitted = _fitted_weights(observers)
    if not fitted:
        return hold_outs
    fitted_targets = [target for target in plan.targets if target.name in fitted]
    for target in judged_targets(fitted_targets, observers):
        observer = make_observer("weight", target.args["weight"])
        observer.qparams_dtype = observers[target.name, "weight"].qparams_dtype
        helpers = {base: helper for (_, base), helper in _rounding_helpers(target, observer).items()}
        hold_outs[target.name] = HoldOut(target, observer, helpers)
    return hold_outs


def _fuse(plan: Plan, observers: Mapping[Key, Observer], join_ranges: bool) -> None:
    """Let the observers of each fused set share their global scale, and with ``join_ranges`` their range per tensor."""
    for group in plan.fused:
        for base_name in ("weight", "input"):
            fused = [observers[name, base_name] for name in group if (name, base_name) in observers]
            Observer.fuse(fused, join_ranges)


def _watch_of_experts(
    model: nn.Module, containers: Mapping[str, list[nn.Module]], all_experts: bool
) -> ExpertWatch | None:
    """Make the watch over a model's experts; None if the model has none.

    Raises:
        CalibrationError: the model has no experts, and ``all_experts`` (``calibrate_all_experts``) is set.
    """
    if containers:
        return ExpertWatch(model, containers, all_experts)
    if all_experts:
        raise CalibrationError(
            "calibrate_all_experts, but no experts were found",
            got=type(model).__name__,
            expected="stacked experts after linearize_experts(model), or a ModuleList called `experts`",
            remedy="leave calibrate_all_experts out if the model has no experts.",
        )
    return None


def _layers_of_experts(model: nn.Module, containers: Collection[str], plan: Plan) -> list[list[str]]:
    """Names of the planned modules of each layer's experts, which must be quantized all or not at all.

    vLLM runs, and transformers loads, the experts of a layer as one module. In models with code of their own, experts
    in a ``ModuleList`` are independent.

    Args:
        model: the calibrated model.
        containers: the names of the modules that hold the experts of a layer; ``""`` if the model itself holds them.
        plan: of the model.
    """
    layers = []
    for container in containers:
        if is_transformers_model(model) or isinstance(model.get_submodule(container), LinearExperts):
            prefix = f"{container}." if container else ""
            layers.append([target.name for target in plan.targets if target.name.startswith(prefix)])
    return layers
