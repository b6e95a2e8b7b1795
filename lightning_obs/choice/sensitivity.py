"""How much each layer's quantization changes what the model says, for every candidate scheme at once.

The truth is the Kullback-Leibler divergence of the quantized model's next-token distributions from the unquantized
model's, with one layer quantized. To measure it takes a forward per layer and scheme. Its second order takes one
forward and one backward for all of them: a layer whose output changes by ``d`` changes the logits by ``J d``, and

    KL = 1/2 d^T J^T F J d = 1/2 E[(v^T J d)^2],   F = diag(p) - p p^T,   v = sqrt(p) r - p (sqrt(p)^T r),

where ``p`` is what the model predicts and ``r`` are random signs: ``v`` has covariance F, as the gradient of the
log-probability of a drawn label has, with less variance. ``v^T J`` is what backward leaves at the layer's output. No
label of the text is used: a layer can lower the loss on a text by chance, but it cannot lower the divergence.

The signs of two positions are independent, so the square of the sum over a sequence is right on average whether errors
of neighbouring tokens agree or cancel. It is also noisy: one number a sequence. Sums over :data:`BLOCK` tokens, squared
and added, are far less noisy, and leave out what only distant tokens do to each other.

Beyond second order the estimate is wrong; how far it holds on a real model is measured in docs/choosing.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import nn

from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.checkpoint.compress import compressed_bytes
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.forward.calls import call_on
from lightning_obs.forward.compile_stance import run_eagerly
from lightning_obs.forward.quantized_forward import quantize_forward, quantized_weight
from lightning_obs.model.additions import keep_hook_out
from lightning_obs.model.qparams import calibration_of, put_back
from lightning_obs.model.sharding import in_shards
from lightning_obs.schemes.config import SchemeLike, as_names

Batches: TypeAlias = "Iterable[Mapping[str, Any] | torch.Tensor]"
#: candidate schemes by name; None is full precision
Schemes: TypeAlias = "Sequence[str | None] | Mapping[str, SchemeLike | None]"
Method: TypeAlias = Literal["divergence", "weight error"]

#: the name of full precision among candidates
FULL_PRECISION = "none"
#: tokens whose errors are taken to add up, not to be independent
BLOCK = 16


@dataclass(frozen=True)
class Group:
    """Modules that get one scheme together: what an engine fuses, the experts of a layer, or one module.

    Attributes:
        names: of the modules.
        weights: how many numbers their weights have.
        losses: by scheme, see :attr:`Sensitivity.method`.
        sizes: by scheme, the bytes of their weights and scales in a checkpoint.
    """

    names: tuple[str, ...]
    weights: int
    losses: dict[str, float]
    sizes: dict[str, int]


@dataclass(frozen=True)
class Sensitivity:
    """What each candidate scheme costs in each layer.

    Attributes:
        groups: modules that choose together, in the model's order.
        layers: by scheme, the loss of each module alone.
        schemes: by name, what it does to each module.
        ignore: what all candidates left out, as it was written.
        method: ``"divergence"``: losses are estimated KL divergences of the model's predictions, in nats per token;
            ``"weight error"``: relative squared errors of the weights, which no data was needed for and which say
            little about the model.
        tokens: predictions that were measured.
    """

    groups: list[Group]
    layers: dict[str, dict[str, float]]
    schemes: dict[str, dict[str, QuantizationScheme]]
    ignore: list[str] = field(default_factory=list)
    method: Method = "divergence"
    tokens: int = 0

    @property
    def weights(self) -> int:
        """How many numbers the weights of all groups have."""
        return sum(group.weights for group in self.groups)


def sensitivity(
    model: nn.Module,
    batches: Batches | None,
    schemes: Schemes,
    *,
    calibration: Batches | None = None,
    seed: int = 0,
    **options: Any,
) -> Sensitivity:
    """Estimate what quantizing each layer alone does to the model's predictions, for every candidate scheme.

    The model is run in evaluation mode, unquantized; afterwards it is as it was. Scales are those that
    :class:`~lightning_obs.CalibrationSession` finds.

    Args:
        model: a module whose output is logits ``(..., classes)``, or has them as ``logits``.
        batches: keyword arguments (or one tensor) for the model, to measure on; a few thousand tokens are enough.
            None: no data; the weights' own error is all there is then.
        schemes: names of presets, or ``{name: scheme}``; None is full precision.
        calibration: batches for candidates that observe data; default: ``batches``.
        seed: of the random signs.
        **options: fields of :class:`~lightning_obs.CalibrationOptions` for all candidates (``ignore``, ``targets``,
            ``observers``, ``fused_groups``...).

    Raises:
        CalibrationError: a scheme that does not fit; no candidates, or the same name twice; weights in shards; a model
            without logits, or with logits that are not finite.

    Reference:
        Martens, New Insights and Perspectives on the Natural Gradient Method, 2020, arXiv:1412.1193, sections 5 and 9
        (KL and the Fisher); Dong et al., HAWQ-V2, 2020, arXiv:1911.03852 (sensitivities of second order).

    Examples:
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> found = sensitivity(model, [torch.randn(8, 16)], {"int8": "W8A8", "none": None})
        >>> [group.names for group in found.groups], found.groups[0].sizes
        ([('0',), ('2',)], {'int8': 320, 'none': 1024})
    """
    candidates = _named(schemes)
    refuse([n for n, m in model.named_modules() if in_shards(m)], "sensitivities need whole weights, on one device")
    measured = None if batches is None else list(batches)
    before = calibration_of(model)
    try:
        sessions = _sessions(model, candidates, options)
        twins = _calibrated_twins(model, sessions, measured if calibration is None else list(calibration))
    finally:
        put_back(before)
    groups = _groups(model, sessions)
    meter = _Meter(twins, groups)
    tokens = 0 if measured is None else meter.measure(model, measured, seed)
    losses = meter.weight_errors() if measured is None else meter.losses(tokens)
    names, ignore = list(candidates), options.get("ignore", ())
    return Sensitivity(
        [_group(model, group, names, losses, twins) for group in groups],
        {scheme: {n: losses.get((scheme, (n,)), 0.0) for group in groups for n in group} for scheme in names},
        {
            name: {t.name: t.scheme for t in session.plan.targets if (name, t.name) in twins}
            for name, session in sessions.items()
        },
        as_names(ignore),
        "weight error" if measured is None else "divergence",
        tokens,
    )


def _named(schemes: Schemes) -> dict[str, SchemeLike | None]:
    if isinstance(schemes, str) or not isinstance(schemes, (Mapping, Sequence)):
        raise CalibrationError("schemes", got=repr(schemes), expected="a list of preset names, or {name: scheme}")
    if isinstance(schemes, Mapping):
        named: dict[str, SchemeLike | None] = dict(schemes)
    else:
        names = [FULL_PRECISION if name is None else name for name in schemes]
        refuse(sorted({n for n in names if names.count(n) > 1}), "a candidate scheme stands twice")
        named = {name: None if name == FULL_PRECISION else name for name in names}
    if all(scheme is None for scheme in named.values()):
        raise CalibrationError("schemes", got=repr(schemes), expected="at least one that quantizes something")
    return named


# ---------------------------------------------------------------------- candidates


def _sessions(
    model: nn.Module, candidates: Mapping[str, SchemeLike | None], options: Mapping[str, Any]
) -> dict[str, CalibrationSession]:
    sessions = {
        name: CalibrationSession(model, CalibrationOptions.of(scheme, **options))
        for name, scheme in candidates.items()
        if scheme is not None
    }
    refuse(
        [t.name for s in sessions.values() for t in s.plan.targets if t.states],
        "attention states have no weights to choose a scheme for",
        remedy="leave them out here, and give kv_cache to the calibration.",
    )
    return sessions


#: (scheme, module name) -> a copy of the module that shares its parameters and has the scheme's qparams
_Twins: TypeAlias = dict[tuple[str, str], nn.Module]


def _calibrated_twins(
    model: nn.Module, sessions: Mapping[str, CalibrationSession], batches: Sequence[Any] | None
) -> _Twins:
    """Calibrate every candidate in one pass over the data. The model keeps the qparams of the last."""
    observing = [session for session in sessions.values() if session.needs_data]
    if observing and not batches:
        raise CalibrationError(
            "candidates that observe data were given none",
            where=[name for name, session in sessions.items() if session.needs_data],
            remedy="give batches, or only schemes that are dynamic or quantize weights alone.",
        )
    with ExitStack() as stack:
        stack.enter_context(_frozen(model))
        stack.enter_context(torch.no_grad())
        for session in observing:
            session.attach()
            stack.callback(session.detach)
        for batch in batches if observing and batches else ():
            call_on(model, batch)
    twins: _Twins = {}
    for name, session in sessions.items():
        session.finalize()  # and detach
        for target in session.plan.targets:
            if target.name not in session.skipped:
                twins[name, target.name] = _twin(target.module)
    return twins


def _twin(module: nn.Module) -> nn.Module:
    """A copy that shares parameters; the qparams that its quantized forward registers are its own."""
    twin = copy.copy(module)
    twin._buffers = dict(module._buffers)
    twin._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    return twin


def _groups(model: nn.Module, sessions: Mapping[str, CalibrationSession]) -> list[tuple[str, ...]]:
    """The modules that any candidate quantizes, by what has to have one scheme, in the model's order."""
    together: dict[str, set[str]] = {t.name: {t.name} for s in sessions.values() for t in s.plan.targets}
    for session in sessions.values():
        for fused in session.result.fused if session.result else ():
            union = set().union(*(together[name] for name in fused))
            together.update(dict.fromkeys(union, union))
    order = [name for name, _ in model.named_modules() if name in together]
    return list(dict.fromkeys(tuple(name for name in order if name in together[first]) for first in order))


def _group(
    model: nn.Module,
    group: tuple[str, ...],
    schemes: Sequence[str],
    losses: Mapping[tuple[str, tuple[str, ...]], float],
    twins: _Twins,
) -> Group:
    return Group(
        group,
        sum(_weight(model.get_submodule(name)).numel() for name in group),
        {scheme: losses.get((scheme, group), 0.0) for scheme in schemes},
        {scheme: sum(_bytes(model, twins, scheme, name) for name in group) for scheme in schemes},
    )


def _bytes(model: nn.Module, twins: _Twins, scheme: str, name: str) -> int:
    twin = twins.get((scheme, name))
    return _weight(model.get_submodule(name)).nbytes if twin is None else compressed_bytes(twin)


def _weight(module: nn.Module) -> torch.Tensor:
    assert isinstance(module.weight, torch.Tensor)  # preflight refused the module otherwise
    return module.weight.detach()


# ---------------------------------------------------------------------- measuring


class _Meter:
    """Runs the model forward and backward, and each candidate's module on what its original read."""

    def __init__(self, twins: _Twins, groups: Sequence[tuple[str, ...]]) -> None:
        self._twins, self._groups = twins, groups
        self._schemes = list(dict.fromkeys(scheme for scheme, _ in twins))
        #: (scheme, module name) -> for each call of this batch, what each position adds to the logits' probe
        self._changes: dict[tuple[str, str], list[torch.Tensor]] = {}
        self._sums: dict[tuple[str, tuple[str, ...]], float] = {}

    def measure(self, model: nn.Module, batches: Sequence[Any], seed: int) -> int:
        """Add up the squares of all batches, and return how many predictions there were."""
        tokens = 0
        with ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
            stack.enter_context(run_eagerly())
            stack.enter_context(_frozen(model))
            for twin in self._twins.values():
                stack.callback(quantize_forward(twin))
            for name in dict.fromkeys(name for _, name in self._twins):
                module = model.get_submodule(name)
                handle = module.register_forward_hook(self._hook(name), with_kwargs=True)
                stack.callback(keep_hook_out(module, handle))
            for number, batch in enumerate(batches):
                logits = logits_of(call_on(model, batch))
                generator = torch.Generator(logits.device).manual_seed(seed + number)
                logits.backward(_probe(logits.detach(), generator))
                tokens += logits[..., 0].numel()
                self._add()
        return tokens

    def losses(self, tokens: int) -> dict[tuple[str, tuple[str, ...]], float]:
        """``{(scheme, modules): KL in nats per token}``, of groups and of single modules."""
        return {key: total / (2 * max(1, tokens)) for key, total in self._sums.items()}

    @torch.no_grad()
    def weight_errors(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """``{(scheme, modules): sum of squared relative errors of the weights}``."""
        errors: dict[tuple[str, tuple[str, ...]], float] = {}
        for (scheme, name), twin in self._twins.items():
            weight, rounded = _weight(twin).float(), quantized_weight(twin)
            assert rounded is not None
            errors[scheme, (name,)] = float((rounded.float() - weight).square().sum() / weight.square().sum())
        for scheme in self._schemes:
            for group in self._groups:
                errors[scheme, group] = sum(errors.get((scheme, (name,)), 0.0) for name in group)
        return errors

    def _hook(self, name: str) -> Callable[..., torch.Tensor | None]:
        schemes = [scheme for scheme in self._schemes if (scheme, name) in self._twins]

        def tap(module: nn.Module, args: Any, kwargs: Any, output: Any) -> torch.Tensor | None:
            if not isinstance(output, torch.Tensor) or not output.numel():
                return None
            plain = output.detach()
            tapped = output + torch.zeros((), dtype=output.dtype, device=output.device, requires_grad=True)

            def change(gradient: torch.Tensor) -> None:
                with torch.no_grad():
                    for scheme in schemes:
                        # forward, not the call: the copy has the original's hooks
                        moved: torch.Tensor = self._twins[scheme, name].forward(*args, **kwargs) - plain
                        by_position = moved.mul_(gradient).sum(-1, dtype=torch.float32)
                        self._changes.setdefault((scheme, name), []).append(by_position)

            tapped.register_hook(change)
            return tapped

        return tap

    def _add(self) -> None:
        for scheme in self._schemes:
            for group in dict.fromkeys([*self._groups, *((name,) for names in self._groups for name in names)]):
                members = [self._changes[scheme, name] for name in group if (scheme, name) in self._changes]
                shapes = {tuple(call.shape for call in calls) for calls in members}
                if len(shapes) == 1:  # what fused modules do to one token comes together
                    members = [[torch.stack(calls).sum(0) for calls in zip(*members, strict=True)]]
                total = sum(float(_squared(call)) for calls in members for call in calls)
                self._sums[scheme, group] = self._sums.get((scheme, group), 0.0) + total
        self._changes.clear()


def _squared(changes: torch.Tensor) -> torch.Tensor:
    """The sum of squares of sums over :data:`BLOCK` neighbouring positions of a sequence."""
    rows = changes.flatten(0, -2) if changes.ndim > 1 else changes[:, None]
    padded = nn.functional.pad(rows, (0, -rows.shape[-1] % BLOCK))
    return padded.unflatten(-1, (-1, BLOCK)).sum(-1).double().square().sum()


def _probe(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A random gradient of the logits whose covariance is the Fisher information, ``diag(p) - p p^T``."""
    if not bool(torch.isfinite(logits).all()):
        raise CalibrationError("the model's logits are not finite", remedy="find the NaN in weights or data.")
    p = logits.float().softmax(-1)
    signs = torch.empty(p.shape, dtype=torch.int8, device=p.device).random_(0, 2, generator=generator).mul_(2).sub_(1)
    probe = p.sqrt().mul_(signs)
    return probe.sub_(p * (p.sqrt() * signs).sum(-1, keepdim=True)).to(logits.dtype)


def logits_of(output: Any) -> torch.Tensor:
    """The logits ``(..., classes)`` in a model's output.

    Raises:
        CalibrationError: there are none.
    """
    found = getattr(output, "logits", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("logits")
    found = output if found is None else found
    if not isinstance(found, torch.Tensor) or found.ndim < 2 or not found.is_floating_point():
        raise CalibrationError(
            "the divergence of predictions is measured on logits",
            got=type(output).__name__,
            expected="a tensor (..., classes), or an output with `logits`",
            remedy="wrap the model in a module that returns its logits.",
        )
    return found


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and no gradients of parameters, inside the ``with`` block."""
    training = {module: module.training for module in model.modules()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        model.eval()
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module, mode in training.items():
            module.training = mode
