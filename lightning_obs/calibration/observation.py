"""The record of one observation, and its result.

The record has the modules of a plan, their observers, and what the observers were given.

A session makes the record and owns it. Hooks fill it, :func:`.finalize` reads it; both take the record, not the
session. Nobody outside ``calibration/`` writes to it. The result describes the finished calibration, for
people and reports.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn

from lightning_obs.calibration.expert_tokens import ExpertWatch
from lightning_obs.calibration.fitted_recipe import fitted_options
from lightning_obs.calibration.input_errors import InputErrors
from lightning_obs.calibration.observed_calls import ObservedCalls
from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.output_readers import OutputReaders
from lightning_obs.engines import Verdict
from lightning_obs.engines.engine import PlannedCheckpoint, ask_engines
from lightning_obs.errors import CalibrationError, name_list, printable
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
from lightning_obs.observers.lattice import GridShares, grid_text
from lightning_obs.observers.statistic import observes_data
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.schemes.build_plan import build_plan, check_inputs_fit
from lightning_obs.schemes.config import make_observer, rounds_on_quantized_inputs
from lightning_obs.schemes.planned_modules import Plan, PlannedModule, drop_outputs, shares_text

#: base names of helper observers, which gather a statistic that the observer of the plan does not keep:
#: the input's smallest and largest value, for the report
RANGE = "input range"
#: the Hessian of a module's inputs, by which its weight is rounded
HESSIAN = "weight by its inputs"
#: the products of the gradients at a module's outputs, by which the rows of its weight are rounded together
GRADIENTS = "weight by the gradients at its outputs"
#: how a module's inputs differ once the modules before it are quantized, which the rounding of its weight makes up for
INPUT_ERRORS = "weight by the errors of its inputs"


@dataclass
class Observation:
    """The record of one observation.

    Attributes:
        model: the model whose calls are observed, without wrappers.
        options: of the calibration.
        plan: the modules that will be quantized.
        engines: each engine's verdict on the checkpoint.
        observers: the observers of the plan.
        data_observers: the observers that data reach: those of the plan that need data, and helper observers.
        experts: the model's experts; None: it has none.
        inseparable: groups of names of modules that are quantized together or not at all.
        collectives: how to talk to the other ranks.
        calls: the calls of the model so far.
        progress: called with each weight that this rank has searched.
        is_fitting: whether an error would end a training; modules that no data reached are then left in float.
        unreached: the observers that no data reached on any rank; None: the ranks were not reduced yet.
        lacks_data: whether the last :func:`.finalize` failed because data were missing, on all ranks alike.
        skipped: names of modules that were left in full precision, because no data reached them.
        others_have_data: of a part of a model, whether data reached other parts.
    """

    model: nn.Module
    options: CalibrationOptions
    plan: Plan
    engines: Mapping[str, Verdict]
    observers: dict[Key, Observer]
    data_observers: dict[Key, Observer]
    experts: ExpertWatch | None
    inseparable: list[list[str]]
    collectives: Collectives = field(default_factory=Collectives)
    calls: ObservedCalls = field(default_factory=ObservedCalls)
    progress: Progress | None = None
    is_fitting: bool = False
    unreached: list[Key] | None = None
    lacks_data: bool = False
    skipped: set[str] = field(default_factory=set)
    others_have_data: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy reports no progress: the callback may hold a terminal."""
        return {**vars(self), "progress": None}

    @classmethod
    def of_model(
        cls, model: nn.Module, options: CalibrationOptions, collectives: Collectives | None = None
    ) -> Observation:
        """The record of an observation that begins: a plan of the model, and observers without statistics.

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
        _check_inputs(plan, observers, helpers)
        _fuse(plan, observers, options.join_fused_scales)
        inseparable = [*plan.fused, *layers]
        collectives = collectives or Collectives()
        calls = ObservedCalls()
        if any("output" in target.args for target in plan.targets):
            calls.readers = OutputReaders()
        return cls(model, options, plan, engines, observers, data_observers, experts, inseparable, collectives, calls)

    @property
    def needs_data(self) -> bool:
        """Whether the model has to be run: for static activations, or for weights that need inputs."""
        return bool(self.data_observers)

    @property
    def rounds_on_quantized_inputs(self) -> bool:
        """Whether a weight is rounded by the inputs that the quantized modules before it give."""
        return rounds_on_quantized_inputs(self.plan.config)

    @property
    def weighed_modules(self) -> list[str]:
        """Names of the modules whose weight is chosen by tokens that count by their gradients (``weigh_tokens``)."""
        names = []
        for (name, _), observer in self.data_observers.items():
            if getattr(observer, "weigh_tokens", False):
                names.append(name)
        return names

    @property
    def input_counts(self) -> dict[str, Support]:
        """How often each value was read, by module name, where the input's observer counts (``histogram``...)."""
        counts_of_modules = {}
        for (name, base), observer in self.observers.items():
            if base != "input" or not isinstance(observer, CountingObserver):
                continue
            counts = observer.counted_values()
            if counts is not None:
                counts_of_modules[name] = counts
        return counts_of_modules

    def forget(self) -> None:
        """Forget all statistics and counts."""
        self.calls.batches = 0
        self.calls.measurements = 0
        for observer in (self.observers | self.data_observers).values():
            observer.reset()

    def drop_outputs(self, followed: Collection[str]) -> None:
        """Leave outputs in float that are quantized behind their followers; called by :func:`.finalize`.

        Args:
            followed: names of the modules whose output a follower reads, on any rank.
        """
        drop_outputs(self.plan, followed)
        for name in followed:
            self.observers.pop((name, "output"), None)
            self.data_observers.pop((name, "output"), None)

    def of(self, module_names: Collection[str], progress: Progress | None = None) -> Observation:
        """The record of some modules: a part of the model, to be finalized by itself.

        It shares observers with this record, and nothing that :func:`.finalize` replaces. Its model is a list of the
        modules.

        Args:
            module_names: all modules of the part; a fused set is in it whole. Unplanned modules are left out.
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
            calls=replace(self.calls, expert_tokens=expert_tokens),
            progress=progress,
        )


def fused_sets_by_module(plan: Plan) -> dict[str, tuple[str, ...]]:
    """The names of the modules of its fused set, by the name of each module in one."""
    fused_sets: dict[str, tuple[str, ...]] = {}
    for group in plan.fused:
        fused_sets |= dict.fromkeys(group, tuple(group))
    return fused_sets


def _of_modules(observers: Mapping[Key, Observer], module_names: Collection[str]) -> dict[Key, Observer]:
    return {key: observer for key, observer in observers.items() if key[0] in module_names}


# ---------------------------------------------------------------------- observers of a plan


def _make_observers(plan: Plan) -> dict[Key, Observer]:
    """An observer for each tensor that is not quantized dynamically."""
    observers: dict[Key, Observer] = {}
    for target in plan.targets:
        home = qparams_home(target.module)
        for base_name, args in target.args.items():
            if args.dynamic is not True:
                observer = make_observer(base_name, args)
                observer.qparams_dtype = None if home is None else home.dtype
                observers[target.name, base_name] = observer
    return observers


def _make_helpers(plan: Plan, observers: Mapping[Key, Observer]) -> dict[Key, Observer]:
    """Helper observers, of :data:`RANGE`, :data:`HESSIAN` and :data:`GRADIENTS`."""
    helpers: dict[Key, Observer] = {}
    for target in plan.targets:
        for base_name in target.args:
            observer = observers.get((target.name, base_name))
            if observer is None:
                continue
            if base_name == "input" and not observer.keeps_extremes:
                helpers[target.name, RANGE] = StaticMinMaxObserver("input", QuantizationArgs())
            elif observer.rounding is not None:
                helpers |= _rounding_helpers(target, observer)
    return helpers


def _rounding_helpers(target: PlannedModule, observer: Observer) -> dict[Key, Observer]:
    """The helpers that gather what the rounding of a weight needs, and its ``observer`` does not gather."""
    helpers: dict[Key, Observer] = {}
    weighs_tokens = getattr(observer, "weigh_tokens", False)
    if not isinstance(observer, HessianObserver):
        helpers[target.name, HESSIAN] = HessianObserver("weight", QuantizationArgs(), weigh_tokens=weighs_tokens)
    shape = matrix_shape(target.module)
    outputs = 0 if shape is None else shape[0]
    if weighs_tokens and outputs <= MOST_OUTPUTS:
        helpers[target.name, GRADIENTS] = HessianObserver("weight", QuantizationArgs())
    if observer.rounding is not None and observer.rounding.correction:
        helpers[target.name, INPUT_ERRORS] = InputErrors("weight", QuantizationArgs())
    return helpers


def _check_inputs(plan: Plan, observers: Mapping[Key, Observer], helpers: Mapping[Key, Observer]) -> None:
    """Refuse weights whose inputs their observers, or the Hessians for their rounding, cannot take.

    A weight with a helper for its Hessian needs inputs because of the helper, so the helper is asked in the place of
    the weight's observer.
    """
    input_observers = dict(observers)
    for (name, base), helper in helpers.items():
        if base == HESSIAN:
            input_observers[name, "weight"] = helper
    check_inputs_fit(plan.targets, input_observers)


def _fuse(plan: Plan, observers: Mapping[Key, Observer], join_ranges: bool) -> None:
    """Let the observers of each fused set share their global scale."""
    for group in plan.fused:
        for base_name in ("weight", "input"):
            fused = [observers[name, base_name] for name in group if (name, base_name) in observers]
            Observer.fuse(fused, join_ranges)


def _watch_of_experts(
    model: nn.Module, containers: Mapping[str, list[nn.Module]], all_experts: bool
) -> ExpertWatch | None:
    """The experts of a model; None if it has none, which is an error with ``calibrate_all_experts``."""
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
    """The planned modules of each layer's experts, where engines run all of them quantized or none.

    vLLM does so, and transformers loads them so.
    """
    layers = []
    for container in containers:
        if is_transformers_model(model) or isinstance(model.get_submodule(container), LinearExperts):
            prefix = f"{container}."
            layers.append([target.name for target in plan.targets if target.name.startswith(prefix)])
    return layers


# ---------------------------------------------------------------------- the result


#: the fields of a result that grow part by part
ADDED = ("skipped", "fallback", "collectives", "input_ranges", "chosen_input_ranges", "expert_tokens", "grids")
#: facts that are a number of things, and the name of one
_COUNTED = {"modules": "module", "observers": "observer", "batches": "batch", "collectives": "collective"}


@dataclass
class PlanSummary:
    """What the plan of a calibration says of the quantized model.

    Attributes:
        fused: groups of modules that an engine takes quantized as a whole or not at all.
        left_out: modules of a targeted class that cannot be quantized, by name the reason (tied to an embedding, say).
        in_float: the share of the model's bytes that stays in float, by class of module, largest first; biases of
            quantized modules do not count. None: not known.
        engines: each engine's verdict on the checkpoint; empty for a model that is not of transformers.
    """

    fused: list[list[str]] = field(default_factory=list)
    left_out: Mapping[str, str] = field(default_factory=dict)
    in_float: Mapping[str, float] | None = None
    engines: Mapping[str, Verdict] = field(default_factory=dict)


@dataclass(repr=False)
class CalibrationResult:
    """The result of a calibration.

    Attributes:
        scheme: short name of the scheme.
        modules: names of the modules that were quantized.
        observers: how many observers took part.
        batches: how many batches (calls of the model) this rank saw.
        measurements: how often an activation was reduced; fewer than the observers' calls where modules share inputs.
        seconds: wall time from attaching to finishing, the user's forward passes included.
        qparams: ``{"layer.weight_scale": tensor, ...}`` on the CPU.
        input_ranges: smallest and largest input of each module that was observed, in the units of the activation.
        chosen_input_ranges: the range that each module's input scale was computed from, in the same units: an observer
            may choose a smaller range than it observed, or a larger one.
        skipped: modules left in full precision because no data reached them (``on_missing="warn"``, or in a fit).
        expert_tokens: how many tokens the router sent to each expert, by the name of the experts' container. A token
            mask leaves padding out, except in experts that are not of this package.
        fallback: modules of experts that no data reached, whose activations have their siblings' ranges
            (``on_missing="siblings"``).
        grids: how much of each weight lies on a grid, by the name of its module, where the observer ``lattice`` looked
            for one: the shares of its scales that give a grid, and that store their values bit for bit.
        plan: what was known of the quantized model before the data.
        ranks: how many ranks took part.
        collectives: how many collectives reduced their statistics.
    """

    scheme: str
    modules: list[str]
    observers: int
    batches: int = 0
    measurements: int = 0
    seconds: float = 0.0
    qparams: dict[str, torch.Tensor] = field(default_factory=dict)
    input_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    chosen_input_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    expert_tokens: dict[str, list[int]] = field(default_factory=dict)
    fallback: list[str] = field(default_factory=list)
    grids: dict[str, GridShares] = field(default_factory=dict)
    plan: PlanSummary = field(default_factory=PlanSummary)
    ranks: int = 1
    collectives: int = 0

    def add(self, part: CalibrationResult) -> None:
        """Add the result of a part of the model; facts of the whole plan stay."""
        for name in ADDED:
            total = getattr(self, name)
            addend = getattr(part, name)
            setattr(self, name, total | addend if isinstance(total, dict) else total + addend)

    def facts(self) -> dict[str, str]:
        """The facts by name, in the order of every report: closing summary, page, log, ``repr``."""
        has_ranks = self.ranks > 1
        facts = {
            "scheme": self.scheme,
            "modules": f"{len(self.modules):,}",
            "observers": f"{self.observers:,}",
            "batches": f"{self.batches:,}" + (f" x {self.ranks} ranks" if has_ranks else ""),
        }
        if has_ranks:
            facts["collectives"] = str(self.collectives)
        facts["calibration"] = f"{self.seconds:.1f} s"
        if self.plan.in_float is not None:
            facts["left in float"] = shares_text(self.plan.in_float)
        if self.grids:
            facts["grids"] = grid_text(self.grids)
        return facts

    def line(self, between: str) -> str:
        """The facts but for the scheme as one line: 14 modules, 28 observers, 2 batches x 2 ranks, 0.3 s..."""
        facts = self.facts()
        texts = []
        for plural, singular in _COUNTED.items():
            if plural in facts:
                number, _, ranks = facts[plural].partition(" ")
                noun = singular if number == "1" else plural
                texts.append(f"{number} {noun} {ranks}".strip())
        texts.append(facts["calibration"])
        if "left in float" in facts:
            texts.append(f"left in float: {facts['left in float']}")
        if "grids" in facts:
            texts.append(facts["grids"])
        return between.join(texts)

    def __repr__(self) -> str:
        """Ten lines at most; the tensors are in :attr:`qparams`."""
        facts = self.facts()
        total = sum(value.nbytes for value in self.qparams.values())
        left_out = [f"{name} ({reason})" for name, reason in self.plan.left_out.items()]
        rows = facts | {
            "modules": f"{facts['modules']}: {name_list(self.modules, 3)}",
            "observers": f"{facts['observers']}, {self.measurements} measurements of activations",
            "qparams": f"{len(self.qparams)} tensors, {total:,} bytes",
            "widest input": self._widest_input(),
            "skipped": name_list(self.skipped, 3),
            "left out": name_list(left_out, 3),
            "fallback": name_list(self.fallback, 3),
        }
        lines = [f"  {key}: {value}" for key, value in rows.items() if value]
        return printable("\n".join(["CalibrationResult", *lines]))

    def _widest_input(self) -> str:
        """The module whose input has the largest value, and the range of that input; empty if none was observed."""
        widest = ""
        largest = -1.0
        for name, (low, high) in self.input_ranges.items():
            if max(-low, high) > largest:
                largest = max(-low, high)
                widest = f"{name} [{low:.4g}, {high:.4g}]"
        return widest
