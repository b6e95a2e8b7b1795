"""Measure how much each layer's quantization changes the model's predictions, for every candidate scheme at once.

The measure is the Kullback-Leibler divergence of the next-token distributions from the unquantized model's, with one
layer quantized. Measuring it takes a forward pass per layer and scheme. Its second-order term takes one forward and one
backward pass for all of them: a layer whose output changes by ``d`` changes the logits by ``J d``, and

    KL = 1/2 d^T J^T F J d = 1/2 E[(v^T J d)^2],   F = diag(p) - p p^T,   v = sqrt(p) r - p (sqrt(p)^T r),

where ``p`` are the predicted probabilities and ``r`` random signs: ``v`` has covariance F, as the gradient of the
log-probability of a drawn label has, with less variance. ``v^T J`` is the gradient at the layer's output. No
label of the text is used: a layer can lower the loss on a text by chance, but it cannot lower the divergence.

The signs of two positions are independent, so the square of the sum over a sequence is unbiased whether errors of
neighbouring tokens agree or cancel, but noisy: one number per sequence. Sums over :data:`BLOCK` tokens, squared and
added, are far less noisy, and leave out only the interaction of distant tokens.

Beyond second order the estimate is wrong; how far it holds on a real model is measured in docs/evidence/plans.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from compressed_tensors.utils.helpers import patch_attrs
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_obs.errors import CalibrationError
from lightning_obs.files.tensors import give_back_freed
from lightning_obs.forward.calls import call_on, logits_of
from lightning_obs.forward.class_axis import LastLayer
from lightning_obs.forward.eager import run_eagerly, unfused
from lightning_obs.forward.extra_runs import left_as_it_was
from lightning_obs.forward.probe import fisher_probe, parameters_without_gradients, random_signs, tapped
from lightning_obs.forward.quantized_forward import quantize_forward
from lightning_obs.forward.quantized_tensors import WeightCache, quantization_of
from lightning_obs.model.kinds import holds_parameters
from lightning_obs.model.mark import keep_hook_out, set_attributes
from lightning_obs.model.module_qparams import args_of, read_qparams
from lightning_obs.model.offload import at_rest, brought_in_by, is_offloaded
from lightning_obs.model.weight import adapters_of, onloaded
from lightning_obs.numerics.many_tensors import to_host

#: the errors of this many neighbouring tokens are summed before they are squared
BLOCK = 16


@dataclass(frozen=True)
class ModuleTwins:
    """A planned module, and by scheme a copy of it that shares its parameters and has the scheme's qparams.

    The module itself, as its name leads elsewhere in a model with LoRA adapters or wrappers: a plan has the names of
    the merged model, without wrappers.
    """

    module: nn.Module
    by_scheme: dict[str, nn.Module] = field(default_factory=dict)


#: by module name
Twins: TypeAlias = dict[str, ModuleTwins]
#: by scheme and modules, their loss together
Losses: TypeAlias = dict[tuple[str, tuple[str, ...]], float]
#: by scheme and module name, for each call of a batch, each position's share of the logits' probe
_Changes: TypeAlias = dict[tuple[str, str], list[torch.Tensor]]


def divergences(
    model: nn.Module, batches: Sequence[Any], twins: Twins, groups: Iterable[tuple[str, ...]], seed: int
) -> tuple[Losses, int]:
    """Run the model forward and backward, and each candidate's module on the inputs of the original.

    Called by :func:`~lightning_obs.sensitivity` once all candidates are calibrated.

    Args:
        model: the unquantized model; it is left as it was.
        batches: arguments of the model.
        twins: the calibrated candidates.
        groups: sets of modules whose loss together is estimated.
        seed: of the random signs.

    Returns:
        The KL divergence in nats per token for each scheme and each of ``groups``, and the number of predictions.
    """
    changes: _Changes = defaultdict(list)
    sums = _SquaredSums(groups)
    finite: list[torch.Tensor] = []
    tokens = 0
    with run_eagerly(), unfused(model), left_as_it_was(model), ExitStack() as stack:
        _recompute_offloaded(model, stack)
        for name, twins_of_module in twins.items():
            _watch_twins(name, twins_of_module, changes, stack)
        last_layer = LastLayer()
        last_layer.watch(model, stack)
        for number, batch in enumerate(batches):
            logits = last_layer.classes_last(logits_of(call_on(model, batch)))
            is_finite = torch.isfinite(logits.detach())
            finite.append(is_finite.all())
            signs = random_signs(logits.shape, seed + number, logits.device)
            logits.backward(fisher_probe(logits.detach(), signs))
            tokens += logits[..., 0].numel()
            sums.add(changes)
            changes.clear()
    if finite and not torch.stack(finite).all():
        raise CalibrationError("the model's logits are not finite", remedy="find the NaN in weights or data.")
    losses: Losses = {}
    for key, total in sums.read().items():
        losses[key] = total / (2 * max(1, tokens))
    return losses, tokens


class _SquaredSums:
    """By scheme and modules, the sum of squared changes over batches; it stays on the device until the end."""

    def __init__(self, groups: Iterable[tuple[str, ...]]) -> None:
        self._groups = list(groups)
        self._totals: dict[tuple[str, tuple[str, ...]], torch.Tensor] = {}

    def add(self, changes: _Changes) -> None:
        """Add the changes of one batch."""
        by_scheme: dict[str, dict[str, list[torch.Tensor]]] = {}
        for (scheme, name), changes_of_calls in changes.items():
            by_scheme.setdefault(scheme, {})[name] = changes_of_calls
        for scheme, by_module in by_scheme.items():
            for group in self._groups:
                members = [by_module[name] for name in group if name in by_module]
                total = self._totals.get((scheme, group), 0)
                self._totals[scheme, group] = total + _square(members)

    def read(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """The sums, brought to the host in one transfer."""
        totals = to_host(list(self._totals.values()))
        return dict(zip(self._totals, map(float, totals), strict=True))


def _recompute_offloaded(model: nn.Module, stack: ExitStack) -> None:
    """Run each offloaded module again when backward reaches it; else autograd would keep all weights.

    Parameters need no gradients until ``stack`` is closed.
    """
    stack.enter_context(set_checkpoint_early_stop(False))  # it would leave accelerate's hook before weights go
    owners = set()
    with at_rest():
        for module in model.modules():
            if is_offloaded(module) and holds_parameters(module):
                owners.add(brought_in_by(module))
    stack.enter_context(parameters_without_gradients(model))
    for owner in owners:
        recomputed = partial(checkpoint, owner.forward, use_reentrant=False, preserve_rng_state=False)
        stack.callback(set_attributes(owner, forward=recomputed))


def _watch_twins(name: str, twins: ModuleTwins, changes: _Changes, stack: ExitStack) -> None:
    """Quantize the forward of a module's twins, and hook the module so that backward runs them.

    The weights of twins include LoRA adapters, so of a module with adapters the layer that adds them is hooked.
    """
    with weights_shared(twins):
        for twin in twins.by_scheme.values():
            stack.callback(quantize_forward(twin))
    alike = _first_alike(list(twins.by_scheme.values()))
    tap = _tap(name, twins, alike, changes)
    adapters = adapters_of(twins.module)
    hooked = twins.module if adapters is None else adapters
    handle = hooked.register_forward_hook(tap, with_kwargs=True)
    stack.callback(keep_hook_out(hooked, handle))


@contextmanager
def weights_shared(twins: ModuleTwins) -> Iterator[None]:
    """Let a module and its twins have its parameters inside the ``with`` block, also where these are offloaded."""
    with onloaded(twins.module):
        _lend_parameters(twins)
        yield
    _lend_parameters(twins)


def _lend_parameters(twins: ModuleTwins) -> None:
    for twin in twins.by_scheme.values():
        twin._parameters = twins.module._parameters


def _first_alike(twins: Sequence[nn.Module]) -> list[int]:
    """For each twin, the number of the first twin that quantizes the weight to the same numbers."""
    formats = [_weight_format(twin) for twin in twins]
    scales = [_weight_qparams(twin) for twin in twins]
    numbers: list[int] = []
    for number in range(len(twins)):
        first = 0
        while formats[first] != formats[number] or not _are_all_equal(scales[first], scales[number]):
            first += 1  # ends at the twin itself
        numbers.append(first)
    return numbers


def _weight_qparams(twin: nn.Module) -> dict[str, torch.Tensor]:
    """The qparams of a twin's weight, by name."""
    return {name: value for name, value in read_qparams(twin).items() if name.startswith("weight_")}


def _weight_format(twin: nn.Module) -> tuple[Any, ...]:
    """Equal for twins whose weights have the same number format and dtypes of qparams."""
    args = args_of(twin, "weight")
    number_format = args and args.model_dump(exclude={"observer", "observer_kwargs"})
    dtypes = {name: value.dtype for name, value in _weight_qparams(twin).items()}
    return number_format, dtypes


def _are_all_equal(qparams: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    """Whether qparams of the same names are known to be equal; an offloaded module's values are not known."""
    for name, value in qparams.items():
        other = others[name]
        if value is other:
            continue
        if value.is_meta or other.is_meta or not torch.equal(value, other):
            return False
    return True


def _tap(name: str, twins: ModuleTwins, alike: Sequence[int], changes: _Changes) -> Callable[..., torch.Tensor | None]:
    """A forward hook that runs a module's twins once backward has reached its output.

    Args:
        name: of the module.
        twins: of the module.
        alike: :func:`_first_alike` of the twins; each different weight is quantized once.
        changes: is added to, by scheme and name.
    """
    quantizations = [quantization_of(twin) for twin in twins.by_scheme.values()]

    def tap(module: nn.Module, args: Any, kwargs: Any, output: Any) -> torch.Tensor | None:
        if not isinstance(output, torch.Tensor) or not output.numel():
            return None
        plain = output.detach()

        @torch.no_grad()
        def change(gradient: torch.Tensor) -> None:
            caches_of_twins: list[WeightCache] = []
            for number, first in enumerate(alike):
                cache = WeightCache() if first == number else caches_of_twins[first]
                caches_of_twins.append(cache)
            with (
                weights_shared(twins),
                patch_attrs(quantizations, "weight_cache", caches_of_twins),
            ):
                for scheme, twin in twins.by_scheme.items():
                    # forward, not the call: the copy has the original's hooks
                    difference: torch.Tensor = twin.forward(*_inputs_of(twin, args), **kwargs) - plain
                    change_of_logits = difference.mul_(gradient).sum(-1, dtype=torch.float32)
                    changes[scheme, name].append(change_of_logits)
            give_back_freed()

        return tapped(output, change)

    return tap


def _inputs_of(twin: nn.Module, args: Any) -> Any:
    """The positional arguments for a twin: copies where it would change them in place, as backward needs them."""
    if not getattr(twin, "inplace", False):
        return args
    return tree_map_only(torch.Tensor, torch.clone, args)


def _square(members: list[list[torch.Tensor]]) -> torch.Tensor:
    """The sum, over all calls of some modules, of squared sums over :data:`BLOCK` neighbouring positions.

    Args:
        members: by module, the changes ``(..., positions)`` of each call.
    """
    shapes = set()
    for changes_of_calls in members:
        shapes_of_calls = [changes.shape for changes in changes_of_calls]
        shapes.add(tuple(shapes_of_calls))
    if len(shapes) == 1:  # fused: their changes of a token add up
        summed = []
        for changes_of_modules in zip(*members, strict=True):
            stacked = torch.stack(changes_of_modules)
            summed.append(stacked.sum(0))
        members = [summed]
    total = torch.zeros((), dtype=torch.float64)
    for changes in chain.from_iterable(members):
        rows = changes.flatten(0, -2) if changes.ndim > 1 else changes[:, None]
        missing_positions = -rows.shape[-1] % BLOCK
        padded = nn.functional.pad(rows, (0, missing_positions))
        blocks = padded.unflatten(-1, (-1, BLOCK))
        block_sums = blocks.sum(-1).double()
        total = total + block_sums.square().sum()
    return total
