"""How much quantizing each layer changes the model's predictions, for every candidate scheme at once.

Every candidate is calibrated in one pass over the data, on copies of the modules that share their parameters; a Hessian
that several candidates gather from one input is kept once. Then :mod:`.divergence` measures all
copies in one forward and backward pass per batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, combinations, product
from typing import Any, Literal, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import nn
from typing_extensions import Unpack

from lightning_obs.calibration.options import CalibrationOptions, OptionKeywords, takes_keywords_of
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.checkpoint.entries import stored_layout
from lightning_obs.choice.divergence import Losses, ModuleTwins, Twins, divergences, weights_shared
from lightning_obs.engines.engine import Engine, PlannedCheckpoint, engine_of
from lightning_obs.errors import CalibrationError, refuse, warn
from lightning_obs.forward.calls import call_on
from lightning_obs.forward.extra_runs import left_as_it_was
from lightning_obs.forward.quantized_tensors import quantized_weight
from lightning_obs.model.kinds import is_dispatched
from lightning_obs.model.mark import make_mark
from lightning_obs.model.module_qparams import calibration_of, put_back
from lightning_obs.model.offload import at_rest
from lightning_obs.model.weight import adapters_of, full_weight, in_shards
from lightning_obs.schemes.config import SchemeLike, as_names
from lightning_obs.schemes.planned_modules import PlannedModule

Batches: TypeAlias = Iterable[Mapping[str, Any] | torch.Tensor]
#: a scheme, or a dict of ``scheme`` and other options of a calibration
Candidate: TypeAlias = SchemeLike | Mapping[str, Any]
#: candidates by name; None is full precision
Schemes: TypeAlias = Sequence[str | None] | Mapping[str, Candidate | None]
Method: TypeAlias = Literal["divergence", "weight error"]

#: the name of full precision among candidates
FULL_PRECISION = "none"


@dataclass(frozen=True)
class Group:
    """Modules that get one scheme together: a fused set, the experts of a layer, or one module.

    Attributes:
        names: of the modules.
        weights: how many numbers their weights have.
        losses: by scheme, in the units of :attr:`Sensitivity.method`.
        sizes: by scheme, the bytes of their weights and scales in a checkpoint.

    :func:`sensitivity` makes them; ``choose_schemes`` and ``choose_observers`` decide for each.
    """

    names: tuple[str, ...]
    weights: int
    losses: dict[str, float]
    sizes: dict[str, int]


@dataclass(frozen=True)
class Sensitivity:
    """The loss of each candidate scheme in each layer.

    Attributes:
        groups: modules that choose together, in the model's order.
        layers: by scheme, the loss of each module alone.
        schemes: by name, the scheme of each module.
        ignore: as given, left out by all candidates; and modules that cannot be quantized (tied heads).
        method: ``"divergence"``: losses are estimated KL divergences of the model's predictions, in nats per token;
            ``"weight error"``: relative squared errors of the weights, which no data was needed for and which say
            little about the model.
        tokens: predictions that were measured.
        alone: whether a plan may have only one of the schemes, because an engine reads only one.
    """

    groups: list[Group]
    layers: dict[str, dict[str, float]]
    schemes: dict[str, dict[str, QuantizationScheme]]
    ignore: list[str] = field(default_factory=list)
    method: Method = "divergence"
    tokens: int = 0
    alone: bool = False

    @property
    def weights(self) -> int:
        """How many numbers the weights of all groups have."""
        return sum(group.weights for group in self.groups)

    @property
    def candidates(self) -> list[str]:
        """Names of the candidate schemes."""
        return list(self.groups[0].sizes)

    @property
    def least(self) -> int:
        """Bytes of the weights and scales where each group has its smallest candidate."""
        smallest_sizes = [min(group.sizes.values()) for group in self.groups]
        return sum(smallest_sizes)


@takes_keywords_of(CalibrationOptions)
def sensitivity(
    model: nn.Module,
    batches: Batches | None,
    schemes: Schemes,
    *,
    calibration: Batches | None = None,
    seed: int = 0,
    **options: Unpack[OptionKeywords],
) -> Sensitivity:
    """Estimate how quantizing each layer alone changes the model's predictions, for every candidate scheme.

    The model runs unquantized, in evaluation mode; afterwards it is as it was. Scales are a CalibrationSession's.

    Args:
        model: a module whose output is logits ``(..., classes)``, or has them as ``logits``.
        batches: keyword arguments (or one tensor) for the model, a few thousand tokens. None: the weights' own error.
        schemes: names of presets, or ``{name: scheme}``; None is full precision. A candidate that differs in more than
            its scheme is a dict of ``scheme`` and fields of :class:`~lightning_obs.CalibrationOptions`:
            ``{"scheme": "W4A16", "observers": {"weight": {"name": "hessian", "signed": True}}, "rounding": "gptq"}``.
        calibration: batches for candidates that observe data; default: ``batches``.
        seed: of the random signs.
        **options: fields of :class:`~lightning_obs.CalibrationOptions` for candidates that do not name them.
            Candidates that one of ``engines`` does not take are left out, with a warning.

    Raises:
        CalibrationError: a scheme that does not fit; none that all ``engines`` take; none, or a name twice; weights in
            shards; logits not finite.

    Reference:
        Martens, New Insights and Perspectives on the Natural Gradient Method, 2020, arXiv:1412.1193, sections 5 and 9
        (KL and the Fisher); Dong et al., HAWQ-V2, 2020, arXiv:1911.03852 (sensitivities of second order).

    Examples:
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> found = sensitivity(model, [torch.randn(8, 16)], {"int8": "W8A8", "none": None})
        >>> [group.names for group in found.groups], found.groups[0].sizes
        ([('0',), ('2',)], {'int8': 320, 'none': 1024})
    """
    engines = [engine_of(name) for name in as_names(options.pop("engines", ()))]
    if engines:  # asked below, where a refusal leaves a candidate out
        options["engines"] = "unchecked"
        options["fused_sets"] = [*engines[0].fused_sets, *options.get("fused_sets", ())]
    schemes_by_name = _by_name(schemes)
    sessions = _sessions(model, schemes_by_name, engines, options)
    candidates = []
    for name, scheme in schemes_by_name.items():
        if name in sessions or scheme is None:
            candidates.append(name)
    measured_batches = None if batches is None else list(batches)
    calibration_batches = measured_batches if calibration is None else list(calibration)
    twins = _calibrate(model, sessions, calibration_batches)
    modules = _planned_modules(model, sessions)
    groups = _groups(list(modules), sessions)
    module_names = list(chain.from_iterable(groups))
    measured_sets = dict.fromkeys(groups)
    for name in module_names:
        measured_sets[(name,)] = None
    if measured_batches is None:
        method: Method = "weight error"
        losses = _weight_errors(twins, measured_sets)
        tokens = 0
    else:
        method = "divergence"
        losses, tokens = divergences(model, measured_batches, twins, measured_sets, seed)
    return Sensitivity(
        groups=[_group(modules, group, candidates, losses, twins) for group in groups],
        layers=_losses_of_modules(candidates, module_names, losses),
        schemes=dict(zip(sessions, map(_schemes_of, sessions.values()), strict=True)),
        ignore=[*as_names(options.get("ignore", ())), *_left_out(sessions.values())],
        method=method,
        tokens=tokens,
        alone=_need_one_scheme(sessions.values(), groups[0], engines),
    )


def _losses_of_modules(
    candidates: Iterable[str], module_names: Sequence[str], losses: Losses
) -> dict[str, dict[str, float]]:
    """By scheme and module, the loss of the module alone; 0 where it was not measured."""
    layers: dict[str, dict[str, float]] = {}
    for scheme in candidates:
        layers[scheme] = {name: losses.get((scheme, (name,)), 0.0) for name in module_names}
    return layers


def _schemes_of(session: CalibrationSession) -> dict[str, QuantizationScheme]:
    """By name, the scheme of each module that the session has calibrated."""
    return {target.name: target.scheme for target in _calibrated_targets(session)}


def _calibrated_targets(session: CalibrationSession) -> list[PlannedModule]:
    """The planned modules, without those that no data reached."""
    return [target for target in session.plan.targets if target.name not in session.skipped]


def _left_out(sessions: Iterable[CalibrationSession]) -> list[str]:
    """Modules that any session's plan leaves out, each once."""
    names: dict[str, None] = {}
    for session in sessions:
        names |= dict.fromkeys(session.plan.left_out)
    return list(names)


def _sessions(
    model: nn.Module,
    schemes: Mapping[str, Candidate | None],
    engines: Sequence[Engine],
    options: Mapping[str, Any],
) -> dict[str, CalibrationSession]:
    """A session of each candidate that all engines take; a warning names the others.

    Raises:
        CalibrationError: weights in shards; a candidate that does not fit the model; none that all engines take.
    """
    with_shards = [name for name, module in model.named_modules() if in_shards(module)]
    refuse(with_shards, "sensitivities need whole weights")
    sessions: dict[str, CalibrationSession] = {}
    for name, scheme in schemes.items():
        if scheme is None:
            continue
        try:
            candidate = candidate_options(scheme, **options)
            sessions[name] = CalibrationSession(model, candidate)
        except CalibrationError as failure:
            raise failure.said_of(name) from failure
    refusals: dict[str, CalibrationError] = {}
    for engine, (name, session) in product(engines, sessions.items()):
        refusal = _refusal(engine, session, session.plan.targets)
        if refusal is not None:
            warn(f"{name} is not a candidate: {refusal}")
            refusals[name] = refusal
    if len(refusals) == len(sessions):
        raise CalibrationError("no candidate is taken by all engines", got="; ".join(map(str, refusals.values())))
    for name in refusals:
        del sessions[name]
    return sessions


def _need_one_scheme(
    sessions: Iterable[CalibrationSession], first_group: Sequence[str], engines: Sequence[Engine]
) -> bool:
    """Whether an engine refuses any two of the candidates in one plan.

    In the plan that engines are asked about, the modules of ``first_group`` have one candidate, all others the second.
    """
    for first, second in combinations(sessions, 2):
        targets = [target for target in first.plan.targets if target.name in first_group]
        targets += [target for target in second.plan.targets if target.name not in first_group]
        for engine in engines:
            if _refusal(engine, first, targets) is not None:
                return True
    return False


def _refusal(engine: Engine, session: CalibrationSession, targets: list[PlannedModule]) -> CalibrationError | None:
    """The reason why an engine does not take a checkpoint of these targets; None: it takes it."""
    try:
        checkpoint = PlannedCheckpoint(session.model, targets, session.options.fused_sets)
        engine.check(checkpoint)
    except CalibrationError as error:
        return error
    return None


def candidate_options(candidate: Candidate, **options: Any) -> CalibrationOptions:
    """The options of one candidate: its own take precedence over the options of all candidates.

    Called for each candidate's session, by the choice of observers to see whether a candidate fits, and by the command
    line's search for a plan.
    """
    if not isinstance(candidate, Mapping) or "scheme" not in candidate:
        return CalibrationOptions.of(candidate, **options)
    observers_of_all = options.get("observers") or {}
    own_observers = candidate.get("observers") or {}
    observers = {**observers_of_all, **own_observers}
    return CalibrationOptions.of(**{**options, **candidate, "observers": observers})


def _by_name(schemes: Schemes) -> dict[str, Candidate | None]:
    """Candidate schemes by name; None is full precision.

    Raises:
        CalibrationError: a scheme without a name, a name twice, or nothing to quantize.
    """
    if isinstance(schemes, Mapping):
        named: dict[str, Candidate | None] = dict(schemes)
    elif isinstance(schemes, Sequence) and not isinstance(schemes, str):
        named = _presets_by_name(schemes)
    else:
        named = {}
    if all(scheme is None for scheme in named.values()):
        expected = "a list of preset names, or {name: scheme}, at least one of which quantizes something"
        raise CalibrationError("schemes", got=repr(schemes), expected=expected)
    return named


def _presets_by_name(presets: Sequence[str | None]) -> dict[str, Candidate | None]:
    """Presets by their names; None is named :data:`FULL_PRECISION`."""
    unnamed = [repr(scheme) for scheme in presets if scheme is not None and not isinstance(scheme, str)]
    refuse(
        unnamed,
        "in a list, candidate schemes are names of presets",
        remedy="give schemes of your own by a name each: schemes={'my scheme': {...}}.",
    )
    named: dict[str, Candidate | None] = {}
    listed_twice = set()
    for preset in presets:
        name = FULL_PRECISION if preset is None else preset
        if name in named:
            listed_twice.add(name)
        named[name] = None if name == FULL_PRECISION else name
    refuse(sorted(listed_twice), "a candidate scheme is listed twice")
    return named


def _calibrate(model: nn.Module, sessions: Mapping[str, CalibrationSession], batches: Sequence[Any] | None) -> Twins:
    """Calibrate every candidate in one pass over the data."""
    twins: Twins = {}
    earlier_calibration = calibration_of(model)
    try:
        with_states = []
        for session in sessions.values():
            with_states += [target.name for target in session.plan.targets if target.states]
        refuse(
            with_states,
            "attention states have no weights to choose a scheme for",
            remedy="leave them out here, and give kv_cache to the calibration.",
        )
        observing = {name: session for name, session in sessions.items() if session.needs_data}
        refuse(
            [] if batches else list(observing),
            "candidates that observe data were given none",
            remedy="give batches, or only schemes that are dynamic or quantize weights alone.",
        )
        _observe(model, list(observing.values()), batches or ())
        for name, session in sessions.items():
            session.finalize()  # and detach
            for observer in session.data_observers.values():
                observer.reset()  # a Hessian is large
            for target in _calibrated_targets(session):
                twins_of_module = twins.setdefault(target.name, ModuleTwins(target.module))
                twins_of_module.by_scheme[name] = _twin(target.module)
    finally:
        put_back(earlier_calibration)
    return twins


def _observe(model: nn.Module, sessions: Sequence[CalibrationSession], batches: Sequence[Any]) -> None:
    """Run the batches once, while all sessions observe; what several of them measure in one tensor is measured once."""
    with ExitStack() as stack, left_as_it_was(model), torch.no_grad():
        for session in sessions:
            session.attach(shares_calls_with=sessions[0])
            stack.callback(session.detach)
        if sessions:
            for batch in batches:
                call_on(model, batch)


def _twin(module: nn.Module) -> nn.Module:
    """A copy that shares parameters; the qparams that its quantized forward registers are its own."""
    twin = copy.copy(module)
    if is_dispatched(module):  # weights_shared lends it parameters, so its forward needs no hook that loads them
        for name in ("_hf_hook", "_old_forward", "_original_forward_func", "forward"):
            vars(twin).pop(name, None)
    twin._buffers = dict(module._buffers)
    twin._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    adapters = adapters_of(module)
    if adapters is not None:
        make_mark(twin).lora_layer = adapters
    return twin


def _planned_modules(model: nn.Module, sessions: Mapping[str, CalibrationSession]) -> dict[str, nn.Module]:
    """The modules that any candidate quantizes, by their names in plans, in the model's order."""
    modules: dict[str, nn.Module] = {}
    for session in sessions.values():
        for target in session.plan.targets:
            modules[target.name] = target.module
    positions = {module: position for position, module in enumerate(model.modules())}
    names = sorted(modules, key=lambda name: positions[modules[name]])
    return {name: modules[name] for name in names}


def _groups(module_names: Sequence[str], sessions: Mapping[str, CalibrationSession]) -> list[tuple[str, ...]]:
    """The modules ``module_names`` in sets that must have one scheme."""
    sets = {name: {name} for name in module_names}  # by module, the modules that must have its scheme
    for session in sessions.values():
        for fused in session.result.plan.fused if session.result else ():
            union: set[str] = set()
            for name in fused:
                union |= sets[name]
            sets.update(dict.fromkeys(union, union))
    groups: dict[tuple[str, ...], None] = {}
    for module_name in module_names:
        group = tuple(name for name in module_names if name in sets[module_name])
        groups[group] = None
    return list(groups)


@torch.no_grad()
def _weight_errors(twins: Twins, groups: Iterable[tuple[str, ...]]) -> Losses:
    """The sum of squared relative errors of weights, by scheme and modules."""
    errors: dict[str, dict[str, float]] = {}  # by scheme and module
    for name, twins_of_module in twins.items():
        with weights_shared(twins_of_module):
            for scheme, twin in twins_of_module.by_scheme.items():
                errors.setdefault(scheme, {})[name] = _weight_error(twin)
    losses: Losses = {}
    for scheme, errors_of_modules in errors.items():
        for group in groups:
            errors_of_group = [errors_of_modules.get(name, 0.0) for name in group]
            losses[scheme, group] = sum(errors_of_group)
    return losses


def _weight_error(twin: nn.Module) -> float:
    """The squared error of a module's quantized weight, relative to the weight's own squares."""
    parameter = full_weight(twin)
    rounded = quantized_weight(twin)
    assert parameter is not None
    assert rounded is not None
    weight = parameter.float()
    return float((rounded.float() - weight).square().sum() / weight.square().sum())


@at_rest()
def _group(
    modules: Mapping[str, nn.Module], names: tuple[str, ...], schemes: Iterable[str], losses: Losses, twins: Twins
) -> Group:
    """One group with its number of weights, and its loss and stored bytes by scheme."""
    sizes = dict.fromkeys(schemes, 0)
    number = 0
    for name in names:
        weight: Any = getattr(modules[name], "weight", None)  # a ReLU whose output is quantized has none
        if weight is None:
            continue
        number += weight.numel()
        for scheme in sizes:
            twin = twins[name].by_scheme.get(scheme) if name in twins else None
            stored = {"weight": weight} if twin is None else stored_layout(twin)
            for key, value in stored.items():
                if key != "bias":
                    sizes[scheme] += value.nbytes
    losses_of_group = {scheme: losses.get((scheme, names), 0.0) for scheme in sizes}
    return Group(names, number, losses_of_group, sizes)
