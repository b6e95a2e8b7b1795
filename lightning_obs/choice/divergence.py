"""Estimate how much each layer's quantization changes the model's predictions, for every candidate scheme at once.

The measure is the Kullback-Leibler divergence of the predicted distributions from those of the unquantized model, if
one layer is quantized. To measure it directly takes a forward pass for each layer and scheme. Its second-order term
takes one forward and one backward pass for all layers and schemes together. A layer whose output changes by ``d``
changes the logits by ``J d``, and

    KL = 1/2 d^T J^T F J d = 1/2 E[(v^T J d)^2],   F = diag(p) - p p^T,   v = sqrt(p) r - p (sqrt(p)^T r).

``p`` are the predicted probabilities, and ``r`` random signs. The probe ``v`` has the covariance F. The gradient of the
log-probability of a label drawn from p has this covariance, too, but more variance in the estimate. ``v^T J`` is the
gradient at the layer's output, which backward from ``v`` gives. No label of the text is used: a layer can lower the
loss on a text by chance, but it cannot lower the divergence.

The signs of two predictions are independent. So ``v^T J d``, summed over a whole sequence and squared, is an unbiased
estimate, whether the errors of neighbouring tokens add up or cancel. But it is noisy: one number for each sequence.
Sums over :data:`BLOCK` tokens, squared and added, are far less noisy, and omit only the interaction of distant tokens.
A position may be a pixel, and a sample may have fewer predictions than positions: a classifier of images has one. Its
positions are summed whole, and nothing is omitted; a block has as many positions as :data:`BLOCK` predictions.

Large changes are not covered by the second-order term; docs/evidence/plans.md measures how far it holds on a real
model.

A *twin* is a copy of a planned module that shares its parameters and computes with the qparams of one candidate scheme.
:func:`~lightning_obs.sensitivity` makes the twins and calls :func:`divergences`.
"""

from __future__ import annotations

import math
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
from lightning_obs.forward.quantized_module import WeightCache, quantization_of
from lightning_obs.model.kinds import channel_axis, holds_parameters, tokens_of
from lightning_obs.model.mark import keep_hook_out, set_attributes
from lightning_obs.model.module_qparams import args_of, read_qparams
from lightning_obs.model.offload import at_rest, brought_in_by, is_offloaded
from lightning_obs.model.weight import adapters_of, onloaded
from lightning_obs.numerics.many_tensors import to_host

#: the number of neighbouring predictions whose errors are summed before they are squared (why: see above)
BLOCK = 16


@dataclass(frozen=True)
class ModuleTwins:
    """A planned module, and its twins by name of the scheme.

    :func:`~lightning_obs.sensitivity` makes one for each module that it calibrated, and passes all of them to
    :func:`divergences`.

    The module is kept beside its name, because ``model.get_submodule(name)`` fails in a model with LoRA adapters or
    wrappers: a plan has the names of the merged model without wrappers.
    """

    module: nn.Module
    by_scheme: dict[str, nn.Module] = field(default_factory=dict)


#: by module name
Twins: TypeAlias = dict[str, ModuleTwins]
#: by (name of the scheme, names of modules): the loss if these modules together have the scheme
Losses: TypeAlias = dict[tuple[str, tuple[str, ...]], float]
#: by (name of the scheme, module name): for each call of the module in a batch, ``v^T J d`` of each position
_Changes: TypeAlias = dict[tuple[str, str], list[torch.Tensor]]


def divergences(
    model: nn.Module, batches: Sequence[Any], twins: Twins, groups: Iterable[tuple[str, ...]], seed: int
) -> tuple[Losses, int]:
    """Estimate the KL divergence that each scheme causes in each group of modules.

    The model runs forward and backward once for each batch; hooks run the twins on the inputs of their modules.
    Meanwhile the model runs without the graphs of ``torch.compile``, and torch's encoder layers call their Linears
    instead of computing all in one operation, because neither the graphs nor the one operation would call the hooks.
    Gradients of parameters are not computed. Called by :func:`~lightning_obs.sensitivity` once all candidates are
    calibrated.

    Args:
        model: the unquantized model; it is left as it was.
        batches: the arguments of the model for each call.
        twins: by module name, the twins of all schemes.
        groups: names of the modules of each group. A group gets one estimate for each scheme with which any twin ran;
            0 if the model called none of the group's modules.
        seed: the seed of the random signs of the first batch; each further batch has the next seed.

    Returns:
        The estimates in nats per prediction, by scheme and group, and the number of predictions.

    Raises:
        CalibrationError: the model's logits are not finite.
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
            predictions = logits[..., 0].numel()
            tokens += predictions
            sums.add(changes, predictions)
            changes.clear()
    if finite and not torch.stack(finite).all():
        raise CalibrationError("the model's logits are not finite", remedy="find the NaN in weights or data.")
    losses: Losses = {}
    for key, total in sums.read().items():
        losses[key] = total / (2 * max(1, tokens))
    return losses, tokens


class _SquaredSums:
    """Sums up the squared changes of each scheme and group over batches, on the device, without waiting for it.

    Args:
        groups: sets of modules whose changes are summed before they are squared.
    """

    def __init__(self, groups: Iterable[tuple[str, ...]]) -> None:
        self._groups = list(groups)
        self._totals: dict[tuple[str, tuple[str, ...]], torch.Tensor] = {}

    def add(self, changes: _Changes, predictions: int) -> None:
        """Add the changes of one batch, which has so many predictions; called after its backward pass."""
        by_scheme: dict[str, dict[str, list[torch.Tensor]]] = {}
        for (scheme, name), changes_of_calls in changes.items():
            by_scheme.setdefault(scheme, {})[name] = changes_of_calls
        for scheme, by_module in by_scheme.items():
            for group in self._groups:
                members = [by_module[name] for name in group if name in by_module]
                total = self._totals.get((scheme, group), 0)
                self._totals[scheme, group] = total + _square(members, predictions)

    def read(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """The sums by scheme and group, brought to the host in one transfer after the last batch."""
        totals = to_host(list(self._totals.values()))
        return dict(zip(self._totals, map(float, totals), strict=True))


def _recompute_offloaded(model: nn.Module, stack: ExitStack) -> None:
    """Let offloaded modules compute their forward again in backward; no parameter of the model gets a gradient.

    Otherwise autograd would keep the weights of all offloaded modules on the device until backward. So the forward of
    each module whose hook brings weights in (its own, or those of all modules in it) runs under activation
    checkpointing. :func:`divergences` calls this before it runs the model; ``stack`` undoes it.
    """
    # Otherwise the second forward would be left by an exception as soon as backward has what it needs, and accelerate's
    # hook, which takes the weights off the device after the forward, would not run.
    stack.enter_context(set_checkpoint_early_stop(False))
    owners = set()
    with at_rest():
        for module in model.modules():
            if is_offloaded(module) and holds_parameters(module):
                owners.add(brought_in_by(module))
    stack.enter_context(parameters_without_gradients(model))
    for owner in owners:
        # The model is in evaluation mode, so the second forward draws no random numbers.
        recomputed = partial(checkpoint, owner.forward, use_reentrant=False, preserve_rng_state=False)
        stack.callback(set_attributes(owner, forward=recomputed))


def _watch_twins(name: str, twins: ModuleTwins, changes: _Changes, stack: ExitStack) -> None:
    """Quantize the forwards of a module's twins, and hook the module so that backward runs the twins.

    Args:
        name: the name of the module.
        twins: the module and its twins.
        changes: gets the changes of each twin.
        stack: restores the forwards and removes the hook.
    """
    with weights_shared(twins):
        for twin in twins.by_scheme.values():
            stack.callback(quantize_forward(twin))
    alike = _first_alike(list(twins.by_scheme.values()))
    tap = _tap(name, twins, alike, changes)
    adapters = adapters_of(twins.module)
    # The weights of twins include LoRA adapters, so their output is compared with that of the layer that adds these.
    hooked = twins.module if adapters is None else adapters
    handle = hooked.register_forward_hook(tap, with_kwargs=True)
    stack.callback(keep_hook_out(hooked, handle))


@contextmanager
def weights_shared(twins: ModuleTwins) -> Iterator[None]:
    """Load the parameters of a module, if they are offloaded, and give them to its twins inside the ``with`` block.

    Entered here when the twins' forwards are quantized and each time that twins run, and by :mod:`.sensitivity` to
    compute weight errors. After the block the twins share whatever the module holds (meta tensors, if it is offloaded).
    """
    with onloaded(twins.module):
        _lend_parameters(twins)
        yield
    _lend_parameters(twins)


def _lend_parameters(twins: ModuleTwins) -> None:
    """Let the twins use the dict of parameters that their module has now."""
    for twin in twins.by_scheme.values():
        twin._parameters = twins.module._parameters


def _first_alike(twins: Sequence[nn.Module]) -> list[int]:
    """For each twin, the index of the first twin with the same quantized weight, which then is computed only once.

    Candidates often differ in their activations alone.
    """
    formats = [_weight_format(twin) for twin in twins]
    scales = [_weight_qparams(twin) for twin in twins]
    numbers: list[int] = []
    for number in range(len(twins)):
        first = 0
        while formats[first] != formats[number] or not _are_all_equal(scales[first], scales[number]):
            first += 1  # ends at ``number`` at the latest: a twin equals itself
        numbers.append(first)
    return numbers


def _weight_qparams(twin: nn.Module) -> dict[str, torch.Tensor]:
    """The qparams of a twin's weight, by name."""
    return {name: value for name, value in read_qparams(twin).items() if name.startswith("weight_")}


def _weight_format(twin: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for twins whose weights have the same number format and the same dtypes of qparams."""
    args = args_of(twin, "weight")
    number_format = args and args.model_dump(exclude={"observer", "observer_kwargs"})
    dtypes = {name: value.dtype for name, value in _weight_qparams(twin).items()}
    return number_format, dtypes


def _are_all_equal(qparams: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    """Whether two dicts of qparams with the same keys are known to hold equal values.

    Values on the meta device (offloaded) are not known, so they count as different.
    """
    for name, value in qparams.items():
        other = others[name]
        if value is other:
            continue
        if value.is_meta or other.is_meta or not torch.equal(value, other):
            return False
    return True


def _tap(name: str, twins: ModuleTwins, alike: Sequence[int], changes: _Changes) -> Callable[..., torch.Tensor | None]:
    """Make a forward hook that runs a module's twins when backward reaches the module's output.

    For each twin, the difference between its output and the module's is multiplied by the gradient, summed over the
    channels, and appended to ``changes``. :func:`_watch_twins` registers the hook. A call whose output is empty, or is
    not a tensor, is skipped.

    Args:
        name: the name of the module.
        twins: the module and its twins.
        alike: the result of :func:`_first_alike`; twins with the same index share their quantized weight.
        changes: added to, by scheme and ``name``.
    """
    quantizations = [quantization_of(twin) for twin in twins.by_scheme.values()]

    def tap(module: nn.Module, args: Any, kwargs: Any, output: Any) -> torch.Tensor | None:
        """The forward hook: return the output, tapped so that backward calls ``change``; None: the call is skipped."""
        if not isinstance(output, torch.Tensor) or not output.numel():
            return None
        plain = output.detach()

        @torch.no_grad()
        def change(gradient: torch.Tensor) -> None:
            """Run the twins, and add their changes of the logits, once backward has the gradient at the output."""
            # The first of alike twins puts its quantized weight into the cache, and the others take it from there.
            caches_of_twins: list[WeightCache] = []
            for number, first in enumerate(alike):
                cache = WeightCache() if first == number else caches_of_twins[first]
                caches_of_twins.append(cache)
            with (
                weights_shared(twins),
                patch_attrs(quantizations, "weight_cache", caches_of_twins),
            ):
                for scheme, twin in twins.by_scheme.items():
                    args_of_twin, kwargs_of_twin = _arguments_of(twin, args, kwargs)
                    # Not twin(...): the copied module has the hooks of the original.
                    difference: torch.Tensor = twin.forward(*args_of_twin, **kwargs_of_twin) - plain
                    change_of_logits = _sum_of_channels(twin, difference.mul_(gradient))
                    changes[scheme, name].append(change_of_logits)
            give_back_freed()  # to the system: quantized weights of many sizes were made and freed here

        return tapped(output, change)

    return tap


def _arguments_of(twin: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments for a twin; copies if the module works in place, since backward needs the originals."""
    if not getattr(twin, "inplace", False):
        return args, kwargs
    copies: tuple[Any, Any] = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    return copies


def _sum_of_channels(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    """The sum over the channels of a module's output, in float32; :func:`_tap` calls this for each twin.

    Returns:
        ``(samples, ..., positions)``; of an output without positions ``(samples,)``, or ``()`` if it is one vector. An
        image or signal alone, which a convolution also takes, is one sample.
    """
    is_one_sample = value.ndim > 1 and channel_axis(module, value) == 0
    sums = tokens_of(module, value).sum(-1, dtype=torch.float32)
    return sums.unsqueeze(0) if is_one_sample else sums


def _square(members: list[list[torch.Tensor]], predictions: int) -> torch.Tensor:
    """Sum the changes of some modules over blocks of neighbouring positions, square the sums, and add them up.

    Args:
        members: for each module, the changes ``(samples, ..., positions)`` of each of its calls. Changes
            ``(samples,)``, of an output ``(samples, channels)`` without positions, have no neighbours, nor has the
            change ``()`` of an output ``(channels,)``. If the modules have calls of equal shapes (a fused set), their
            changes are added before they are squared; otherwise the squares of the modules are added.
        predictions: how many predictions the batch has. A block has as many positions as :data:`BLOCK` predictions, at
            least :data:`BLOCK` and at most those of a sample.
    """
    shapes = set()
    for changes_of_calls in members:
        shapes_of_calls = [changes.shape for changes in changes_of_calls]
        shapes.add(tuple(shapes_of_calls))
    if len(shapes) == 1:
        summed = []
        for changes_of_modules in zip(*members, strict=True):
            stacked = torch.stack(changes_of_modules)
            summed.append(stacked.sum(0))
        members = [summed]
    total = torch.zeros((), dtype=torch.float64)
    for changes in chain.from_iterable(members):
        if changes.ndim < 2:
            changes = changes.reshape(-1, 1)  # one position in each sample
        rows = changes.flatten(1)
        positions_of_block = math.ceil(BLOCK * rows.numel() / max(1, predictions))
        block = max(BLOCK, min(positions_of_block, rows.shape[-1]))
        missing_positions = -rows.shape[-1] % block
        padded = nn.functional.pad(rows, (0, missing_positions))
        blocks = padded.unflatten(-1, (-1, block))
        block_sums = blocks.sum(-1).double()
        total = total + block_sums.square().sum()
    return total
