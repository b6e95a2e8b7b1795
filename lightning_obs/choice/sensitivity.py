"""Estimate how much quantizing each layer changes the model's predictions, for every candidate scheme at once.

All candidates are calibrated in one pass over the data: each has a session, and the sessions observe the same calls. A
Hessian that several candidates gather from one input is computed once. Each calibrated module gets a *twin* for each
candidate: a copy that shares its parameters and has the candidate's qparams. Then :mod:`.divergence` runs all twins in
one forward and backward pass for each batch.

:mod:`.mixed_precision` chooses schemes by the result, :mod:`.observer_choice` observers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, product
from typing import Any, Literal, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils.match import is_match
from torch import nn
from typing_extensions import Unpack

from lightning_obs.calibration.options import CalibrationOptions, OptionKeywords, takes_keywords_of
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.checkpoint.entries import stored_layout
from lightning_obs.choice.divergence import Losses, ModuleTwins, Twins, divergences, weights_shared
from lightning_obs.engines.engine import Engine, FusedSets, PlannedCheckpoint, engine_of
from lightning_obs.errors import CalibrationError, refuse, require_at_least, warn
from lightning_obs.forward.calls import call_on
from lightning_obs.forward.extra_runs import left_as_it_was
from lightning_obs.forward.quantized_module import quantized_weight
from lightning_obs.model.kinds import is_dispatched
from lightning_obs.model.mark import make_mark
from lightning_obs.model.module_qparams import calibration_of, put_back
from lightning_obs.model.offload import at_rest
from lightning_obs.model.weight import adapters_of, full_weight, in_shards, refuse_uninitialized
from lightning_obs.schemes.config import SchemeLike, as_names
from lightning_obs.schemes.planned_modules import PlannedModule

Batches: TypeAlias = Iterable[Mapping[str, Any] | torch.Tensor]
#: a scheme, or a dict of ``scheme`` and other options of a calibration
Candidate: TypeAlias = SchemeLike | Mapping[str, Any]
#: a list of presets, or candidates by name; None is full precision
Schemes: TypeAlias = Sequence[str | None] | Mapping[str, Candidate | None]
#: how losses were computed (:class:`Sensitivity`)
Method: TypeAlias = Literal["divergence", "weight error"]

#: the name of full precision among candidates
FULL_PRECISION = "none"


@dataclass(frozen=True)
class Group:
    """Modules that get one scheme together: a fused set, the experts of a layer, or one module.

    Attributes:
        names: the names of the modules.
        weights: how many numbers the modules' weights have.
        losses: by name of the candidate, the estimated loss if the whole group has it, in the unit that
            :attr:`Sensitivity.method` names.
        sizes: by name of the candidate, the bytes of the modules' weights and scales in a checkpoint.

    :func:`sensitivity` makes the groups; ``choose_schemes`` and ``choose_observers`` choose a candidate for each.
    """

    names: tuple[str, ...]
    weights: int
    losses: dict[str, float]
    sizes: dict[str, int]


@dataclass(frozen=True)
class Sensitivity:
    """The estimated loss of each candidate in each layer, as :func:`sensitivity` returns it.

    ``choose_schemes``, ``frontier`` and ``choose_observers`` choose by it; the command line also reports it.

    Attributes:
        groups: the modules in groups that must have one scheme, in the model's order.
        layers: by name of the candidate and of the module, the loss of the module alone.
        schemes: by name of the candidate and of the module, the module's scheme; without full precision.
        ignore: names and patterns of modules that no candidate quantizes: the entries of the option ``ignore`` that
            match no module of ``groups``, and modules that a candidate targets by their class but cannot quantize
            (tied heads). ``ignore`` in a candidate's own dict adds nothing here.
        method: ``"divergence"``: losses are estimated KL divergences of the model's predictions, in nats per token;
            ``"weight error"``: losses are relative squared errors of the weights, which need no data and say little
            about the model.
        tokens: how many predictions were measured; 0 without data.
        alone: whether a plan may use only one scheme and full precision, because an engine reads only one scheme.
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
        """How many numbers the weights of all groups have; budgets in bits per weight refer to it."""
        return sum(group.weights for group in self.groups)

    @property
    def candidates(self) -> list[str]:
        """Names of the candidates, full precision included; ``choose_schemes`` chooses one of them for each group."""
        return list(self.groups[0].sizes)

    @property
    def least(self) -> int:
        """Bytes of all weights and scales if each group has its smallest candidate: the smallest possible plan.

        ``frontier`` starts at this size; ``choose_schemes`` names it in the error for a budget that is too small.
        """
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

    The model runs unquantized, in evaluation mode, and is afterwards as it was. Each candidate is calibrated as by a
    :class:`~lightning_obs.CalibrationSession`. Called by users, :func:`~lightning_obs.mixed_precision`,
    :func:`.choose_observers` and the command line.

    Args:
        model: a module whose output is logits ``(..., classes)``, or has them as ``logits``.
        batches: keyword arguments (or one tensor) for each call of the model, a few thousand tokens in all. None: no
            data; losses are the errors of the weights.
        schemes: names of presets, or ``{name: scheme}``; None is full precision. A candidate that differs in more than
            its scheme is a dict of ``scheme`` and fields of :class:`~lightning_obs.CalibrationOptions`:
            ``{"scheme": "W4A16", "observers": {"weight": {"name": "hessian", "signed": True}}, "rounding": "gptq"}``.
        calibration: batches for candidates that observe data; default: ``batches``.
        seed: the seed of the random signs (:mod:`.divergence`).
        **options: fields of :class:`~lightning_obs.CalibrationOptions` for candidates that do not name them.
            Candidates that one of ``engines`` refuses are left out, with a warning. Without ``engines``, a candidate
            that transformers refuses is an error, as in any calibration.

    Raises:
        CalibrationError: a scheme does not fit the model; the engines refuse all candidates; there is no candidate, or
            a name twice; weights are in shards; logits are not finite.

    Reference:
        Martens, New Insights and Perspectives on the Natural Gradient Method, 2020, arXiv:1412.1193, sections 5 and 9
        (KL and the Fisher); Dong et al., HAWQ-V2, 2020, arXiv:1911.03852 (sensitivities of second order).

    Examples:
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> measured = sensitivity(model, [torch.randn(8, 16)], {"int8": "W8A8", "none": None})
        >>> [group.names for group in measured.groups], measured.groups[0].sizes
        ([('0',), ('2',)], {'int8': 320, 'none': 1024})
    """
    measured, _ = sensitivity_and_twins(model, batches, schemes, calibration, seed, options)
    return measured


def sensitivity_and_twins(
    model: nn.Module,
    batches: Batches | None,
    schemes: Schemes,
    calibration: Batches | None,
    seed: int,
    options: Mapping[str, Any],
) -> tuple[Sensitivity, Twins]:
    """Return the result of :func:`sensitivity`, whose arguments these are, and the twins that were measured.

    :func:`.choose_observers` calls it, to run its choice as a whole with the qparams of the twins.
    """
    require_at_least(0, seed=seed)
    options = dict(options)
    engines = [engine_of(name) for name in as_names(options.pop("engines", ()))]
    if engines:  # _sessions asks them, and leaves a refused candidate out; a session with engines would raise
        options["engines"] = "unchecked"
    schemes_by_name = _by_name(schemes)
    sessions = _sessions(model, schemes_by_name, engines, options)
    candidates = [name for name, scheme in schemes_by_name.items() if name in sessions or scheme is None]
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
        losses = _weight_errors(twins, measured_sets)
        tokens = 0
    else:
        losses, tokens = divergences(model, measured_batches, twins, measured_sets, seed)
    unplanned = _unplanned_entries(as_names(options.get("ignore", ())), modules)
    measured = Sensitivity(
        groups=[_group(modules, group, candidates, losses, twins) for group in groups],
        layers=_losses_of_modules(candidates, module_names, losses),
        schemes={name: _schemes_of(session) for name, session in sessions.items()},
        ignore=[*unplanned, *_left_out(sessions.values())],
        method="weight error" if measured_batches is None else "divergence",
        tokens=tokens,
        alone=_need_one_scheme(sessions.values(), groups[0], engines),
    )
    return measured, twins


def _all_fused_sets(engine: Engine, own_sets: FusedSets) -> FusedSets:
    """The fused sets of an engine and those of the option ``fused_sets``, no name in two sets.

    A name in the option belongs to the option's set, as in the plan of a session. What it leaves of an engine's set is
    a set if it still has two names.
    """
    own_names = set(chain.from_iterable(own_sets))
    sets: list[Sequence[str]] = []
    for engine_set in engine.fused_sets:
        rest = [name for name in engine_set if name not in own_names]
        if len(rest) > 1:
            sets.append(rest)
    return [*sets, *own_sets]


def _losses_of_modules(
    candidates: Iterable[str], module_names: Sequence[str], losses: Losses
) -> dict[str, dict[str, float]]:
    """By candidate and module, the loss of the module alone; 0 if it was not measured (full precision)."""
    layers: dict[str, dict[str, float]] = {}
    for scheme in candidates:
        layers[scheme] = {name: losses.get((scheme, (name,)), 0.0) for name in module_names}
    return layers


def _schemes_of(session: CalibrationSession) -> dict[str, QuantizationScheme]:
    """By module name, the scheme of each module that the session has calibrated."""
    return {target.name: target.scheme for target in _calibrated_targets(session)}


def _calibrated_targets(session: CalibrationSession) -> list[PlannedModule]:
    """The planned modules of a session, without those that no data reached."""
    return [target for target in session.plan.targets if target.name not in session.skipped]


def _unplanned_entries(ignore: Iterable[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """The entries of the option ``ignore`` that match no module which a candidate quantizes.

    A candidate with its own ``ignore`` may quantize modules that the option names. A plan that chooses this candidate
    must not ignore them.

    Args:
        ignore: names, classes and ``re:`` patterns.
        modules: the modules that at least one candidate quantizes, by name.
    """
    entries = []
    for entry in ignore:
        if not any(is_match(name, module, entry) for name, module in modules.items()):
            entries.append(entry)
    return entries


def _left_out(sessions: Iterable[CalibrationSession]) -> list[str]:
    """Names of the modules that some session's plan selected by their class and could not quantize, each once.

    Sessions with other targets may not have selected these modules. A session that selects one by its name is refused.
    """
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
    """Make a session for each candidate that no engine refuses; :func:`sensitivity` calls this first.

    Each refusal by an engine is a warning. If the engines refuse all candidates, the error shows one refusal of each
    candidate, that of the last engine which refused it.

    Args:
        model: the model that the sessions calibrate.
        schemes: the candidates; full precision gets no session.
        engines: the engines that must accept a candidate.
        options: the options of all candidates.

    Raises:
        CalibrationError: weights are in shards; a candidate does not fit the model; the engines refuse all candidates.
    """
    refuse_uninitialized(model.named_modules())
    with_shards = [name for name, module in model.named_modules() if in_shards(module)]
    refuse(with_shards, "sensitivity needs whole weights, and these modules are sharded")
    sessions: dict[str, CalibrationSession] = {}
    for name, scheme in schemes.items():
        if scheme is None:
            continue
        try:
            candidate = candidate_options(scheme, **options)
            if engines:
                # A checkpoint is written for the first engine, and a calibration with these engines fuses its sets
                # alone.
                fused_sets = _all_fused_sets(engines[0], candidate.fused_sets)
                candidate = replace(candidate, fused_sets=fused_sets)
            sessions[name] = CalibrationSession(model, candidate)
            sessions[name].observation.judge_no_fit()  # keeps no data back to test how well fitted weights hold
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
    """Whether some engine refuses a plan that mixes two of the candidates; :func:`sensitivity` asks this at its end.

    For each pair of candidates, engines are asked about one plan: ``first_group`` has one candidate, all other modules
    have the other. The engines have accepted each candidate for all modules, so a refusal comes from the mixing. One
    plan for each pair is enough, because engines that refuse mixtures count the different schemes of a checkpoint,
    whichever modules have them.
    """
    for first, second in combinations(sessions, 2):
        targets = [target for target in first.plan.targets if target.name in first_group]
        targets += [target for target in second.plan.targets if target.name not in first_group]
        for engine in engines:
            if _refusal(engine, first, targets) is not None:
                return True
    return False


def _refusal(engine: Engine, session: CalibrationSession, targets: list[PlannedModule]) -> CalibrationError | None:
    """The error with which an engine refuses a checkpoint of these planned modules; None: it accepts it."""
    try:
        checkpoint = PlannedCheckpoint(session.model, targets, session.options.fused_sets)
        engine.check(checkpoint)
    except CalibrationError as error:
        return error
    return None


def candidate_options(candidate: Candidate, **options: Any) -> CalibrationOptions:
    """Make the options of one candidate: fields of its dict replace those of all candidates, observers by base name.

    A candidate's own ``observers`` replace only the observers of the same base names. A dict without the key ``scheme``
    is a scheme itself, and gets the options of all candidates.

    Called by :func:`sensitivity` for each candidate's session; by :mod:`.observer_choice`, to see whether a candidate
    fits; and by the command line (``app/tasks/choosing.py``) to refuse wrong candidates before it loads any data.

    Args:
        candidate: a scheme, or a dict of ``scheme`` and other fields.
        **options: fields of :class:`~lightning_obs.CalibrationOptions` for all candidates.

    Raises:
        CalibrationError: a field does not exist, or its value is not valid.
    """
    if not isinstance(candidate, Mapping) or "scheme" not in candidate:
        return CalibrationOptions.of(candidate, **options)
    fields = {**options, **candidate}
    observers_of_all = options.get("observers")
    own_observers = candidate.get("observers")
    if own_observers is None:
        fields["observers"] = observers_of_all
    elif isinstance(observers_of_all, Mapping) and isinstance(own_observers, Mapping):
        fields["observers"] = {**observers_of_all, **own_observers}
    return CalibrationOptions.of(**fields)


def _by_name(schemes: Schemes) -> dict[str, Candidate | None]:
    """The candidates by name; a value of None is full precision.

    Raises:
        CalibrationError: a scheme in a list that is no name, a name twice, or no scheme at all.
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
    """Turn a list of presets into candidates by name; None is full precision, named :data:`FULL_PRECISION`.

    Raises:
        CalibrationError: an entry is no name of a preset, or a name is listed twice.
    """
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
    """Calibrate every candidate in one pass over the data, and return the twins.

    Afterwards the modules have the qparams that they had before.

    Args:
        model: that the batches run through.
        sessions: the candidates' sessions, by name of the candidate.
        batches: the batches of calibration data; None: there are none.
    """
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
            session.finalize()  # also detaches
            for observer in session.data_observers.values():
                observer.reset()  # frees Hessians, which are large
            for target in _calibrated_targets(session):
                twins_of_module = twins.setdefault(target.name, ModuleTwins(target.module))
                twins_of_module.by_scheme[name] = _twin(target.module)
    finally:
        put_back(earlier_calibration)
    return twins


def _observe(model: nn.Module, sessions: Sequence[CalibrationSession], batches: Sequence[Any]) -> None:
    """Run the batches once, in evaluation mode, while all sessions observe; :func:`_calibrate` calls this.

    ``left_as_it_was`` sets the evaluation mode; at the end it restores modes, buffers and random numbers.
    """
    with ExitStack() as stack, left_as_it_was(model), torch.no_grad():
        for session in sessions:
            # All sessions use the first one's cache, so that statistics which several need are computed once.
            session.attach(shares_calls_with=sessions[0])
            stack.callback(session.detach)
        if sessions:
            for batch in batches:
                call_on(model, batch)


def _twin(module: nn.Module) -> nn.Module:
    """A copy of a calibrated module that shares its parameters, and keeps its qparams when the module gets others.

    :func:`_calibrate` makes one for each module that a candidate has calibrated. The twin has buffer tables of its own:
    buffers that its quantized forward registers do not appear in the module. The dict of parameters is the module's
    own, to which nothing is added; ``weights_shared`` sets it anew whenever the twin runs.
    """
    twin = copy.copy(module)
    if is_dispatched(module):
        # weights_shared gives the twin loaded parameters. So the forward that accelerate (_hf_hook, _old_forward) or
        # compressed-tensors (_original_forward_func) has put on the instance to load them is not needed.
        for name in ("_hf_hook", "_old_forward", "_original_forward_func", "forward"):
            vars(twin).pop(name, None)
    twin._buffers = dict(module._buffers)
    twin._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    adapters = adapters_of(module)
    if adapters is not None:  # a copy of a module has no mark, and only a mark tells of the LoRA layer around it
        make_mark(twin).lora_layer = adapters
    return twin


def _planned_modules(model: nn.Module, sessions: Mapping[str, CalibrationSession]) -> dict[str, nn.Module]:
    """By name in the plans, the modules that at least one candidate quantizes, in the model's order."""
    modules: dict[str, nn.Module] = {}
    for session in sessions.values():
        for target in session.plan.targets:
            modules[target.name] = target.module
    positions = {module: position for position, module in enumerate(model.modules())}
    names = sorted(modules, key=lambda name: positions[modules[name]])
    return {name: modules[name] for name in names}


def _groups(module_names: Sequence[str], sessions: Mapping[str, CalibrationSession]) -> list[tuple[str, ...]]:
    """Split the modules into groups that must have one scheme: the unions of overlapping sets of all sessions.

    A set is a fused set, or the experts of a layer.
    """
    sets = {name: {name} for name in module_names}  # by module, the modules that must have its scheme
    for session in sessions.values():
        for inseparable in session.observation.inseparable:
            union: set[str] = set()
            for name in inseparable:
                union |= sets[name]
            sets.update(dict.fromkeys(union, union))
    groups: dict[tuple[str, ...], None] = {}
    for module_name in module_names:
        group = tuple(name for name in module_names if name in sets[module_name])
        groups[group] = None
    return list(groups)


@torch.no_grad()
def _weight_errors(twins: Twins, groups: Iterable[tuple[str, ...]]) -> Losses:
    """By candidate and group, the sum of the relative squared errors of the modules' weights; the loss without data."""
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
    """The sum of squared errors of a twin's quantized weight, relative to the sum of squares of the weight.

    0 for a module without a weight (a ReLU whose output is quantized), and for a weight of zeros.
    """
    parameter = full_weight(twin)
    rounded = quantized_weight(twin)
    if parameter is None or rounded is None:
        return 0.0
    weight = parameter.float()
    squares = float(weight.square().sum())
    if squares == 0:
        return 0.0
    return float((rounded.float() - weight).square().sum()) / squares


@at_rest()  # sizes are read from metadata, so offloaded weights stay where they are
def _group(
    modules: Mapping[str, nn.Module], names: tuple[str, ...], schemes: Iterable[str], losses: Losses, twins: Twins
) -> Group:
    """Make a :class:`Group` of some modules, with the number of their weights, their losses and their stored bytes.

    Args:
        modules: all modules that a candidate quantizes, by name.
        names: the names of the modules of the group.
        schemes: names of the candidates.
        losses: the estimated losses, by candidate and group.
        twins: the twins of all modules, by module name; a module has no twin under full precision.
    """
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
    return Group(names=names, weights=number, losses=losses_of_group, sizes=sizes)
