"""Choose the tensors of a model's output that weigh tokens, and start a backward pass from random probes of them.

:mod:`.token_weights` uses this file. A *probe* is a random tensor in the shape of an output tensor, from which backward
begins: the gradient g of ``<probe, output>`` at a module's output tells how much a change there matters.

An output with ``logits`` is probed by the Fisher information of its classes, so that an error counts by how much it
changes the predictions. In every other output (embeddings, regression, boxes, images) each floating-point number counts
alike: the probe holds random signs, and ``E[(g^T d)^2]`` is the squared change of the model's output, to first order,
if the module's output changes by d (Gauss-Newton, estimated as Hutchinson estimates a trace).

If an output has several tensors (boxes in pixels beside scores), each sample's numbers are divided by their root mean
square. This is done sample by sample, so that no sum depends on how the data was cut into batches.

Reference:
    Hutchinson, A stochastic estimator of the trace of the influence matrix for Laplacian smoothing splines, 1989;
    Martens, New Insights and Perspectives on the Natural Gradient Method, 2020, arXiv:1412.1193 (Gauss-Newton, Fisher).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_obs.calibration.probe_signs import ProbeSigns
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.calls import named_logits
from lightning_obs.forward.class_axis import LastLayer
from lightning_obs.forward.probe import fisher_probe

#: the keys, field names and indices that lead to a tensor in a nested output
Path: TypeAlias = tuple[Hashable, ...]

#: fields of transformers' outputs that return inner activations of the model; they are not probed
_INSIDE = {
    "hidden_states",
    "attentions",
    "cross_attentions",
    "past_key_values",
    "encoder_last_hidden_state",
    "encoder_hidden_states",
    "encoder_attentions",
    "decoder_hidden_states",
    "decoder_attentions",
}
#: the prefix of the fields for boxes and masks in the outputs of transformers' detection models, beside ``logits``
_BESIDE_LOGITS = "pred_"


@dataclass(frozen=True)
class ProbedTensor:
    """A tensor of a model's output that is probed.

    :meth:`OutputProbe.tensors_of` makes it; :meth:`OutputProbe.run_backward` and :func:`rows_that_count` read it.

    Attributes:
        number: which random signs it gets (:class:`.ProbeSigns`); tensors at different places of an output have
            different numbers.
        values: ``(samples, C)`` or ``(samples, positions, C)``; logits are ``(samples, ..., classes)``.
        are_logits: whether the last dimension holds the logits of classes.
    """

    number: int
    values: torch.Tensor
    are_logits: bool


class OutputProbe:
    """Runs backward from probes of a model's output; :class:`.TokenWeights` has one.

    For each call of the model it runs a copy of the model, and calls :meth:`watch` before, :meth:`tensors_of` and
    :meth:`run_backward` after the copy's forward. In the first call it also gives the model's own output to
    :meth:`tensors_of`, to compare the two outputs.

    Args:
        model: any model. If its ``config`` says ``problem_type="regression"`` (transformers), its ``logits`` are probed
            as plain numbers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._is_regression = getattr(getattr(model, "config", None), "problem_type", None) == "regression"
        self._signs = ProbeSigns()
        self._last_layer = LastLayer()

    def watch(self, model: nn.Module, stack: ExitStack) -> None:
        """Note the last layer of the next call of ``model`` (the copy), which tells the class dimension of logits.

        Called before each forward of the copy. ``stack`` removes the hooks.
        """
        self._last_layer = LastLayer()
        self._last_layer.watch(model, stack)

    def tensors_of(self, output: Any) -> list[ProbedTensor]:
        """The tensors of an output that are probed; empty if it has no floating-point tensor with a batch dimension.

        Called after the forward of the copy, and once with the output of the model itself (the class says why).

        Logits are probed with the tensors beside them that detection models return (``pred_boxes``); without logits,
        all tensors are probed. Logits of a regression are plain numbers, and so are those of a single class, since a
        softmax over one class is always 1.

        Raises:
            CalibrationError: it cannot be told which dimension of the logits holds the classes.
        """
        logits = named_logits(output)
        if not isinstance(logits, torch.Tensor) or logits.ndim < 2 or not logits.is_floating_point():
            return _numbered(_tensors(output))
        beside = [(path, tensor) for path, tensor in _tensors(output) if str(path[0]).startswith(_BESIDE_LOGITS)]
        if self._is_regression:
            return _numbered([((), logits), *beside])
        classes_last = self._last_layer.classes_last(logits)
        has_one_class = classes_last.shape[-1] == 1
        if has_one_class:
            return _numbered([((), logits), *beside])
        logits_to_probe = ProbedTensor(number=0, values=classes_last, are_logits=True)
        return [logits_to_probe, *_numbered(beside, first=1)]

    def run_backward(
        self,
        tensors: Sequence[ProbedTensor],
        mask: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Run backward once, from a probe of each of an output's tensors.

        Args:
            tensors: of :meth:`tensors_of`, with their autograd graph. Tensors without a graph are left out.
            mask: ``(batch, tokens)`` or ``(batch,)``, on the CPU, nonzero for what counts; None: all counts.
            args, kwargs: of the call, whose values choose the random signs.

        Signs are ``(batch, ..., C)``, or ``(..., C)`` where all samples have the same. Positions of logits have
        the same signs in all samples; of other tensors each sample begins at a row of signs that its input chooses.

        Raises:
            CalibrationError: no tensor has a graph, so no gradient could reach a module.
        """
        connected = [tensor for tensor in tensors if tensor.values.requires_grad]
        if not connected:
            raise CalibrationError(
                "weigh_tokens runs backward from the output of the model, and no gradient leads from it to a module",
                expected="floating-point tensors with a row for each sample, computed from the outputs of modules",
                remedy="return the predictions before they are detached, sorted or rounded, or leave out weigh_tokens.",
            )
        values = [tensor.values for tensor in connected]
        probes = []
        for tensor in connected:
            signs = self._signs.of_call(
                tensor.values, mask, args, kwargs, number=tensor.number, by_sample=not tensor.are_logits
            )
            # `is_single` counts the tensors without a graph, too: the size of a tensor's probe does not depend on which
            # of the other tensors have a graph.
            probes.append(_probe(tensor, signs, mask, is_single=len(tensors) == 1))
        torch.autograd.backward(values, probes)


def _probe(tensor: ProbedTensor, signs: torch.Tensor, mask: torch.Tensor | None, is_single: bool) -> torch.Tensor:
    """The probe of a tensor, in its shape; zero wherever the mask excludes the sample or token.

    Args:
        tensor: of the output.
        signs: in int8, in a shape that broadcasts to the tensor's values.
        mask: of the batch.
        is_single: whether the output has no other probed tensor, so that sizes need not be made comparable.
    """
    values = tensor.values.detach()
    if tensor.are_logits:
        probe = fisher_probe(values, signs)
    else:
        probe = signs.to(values.dtype).expand(values.shape)
        if not is_single:
            probe = probe / _size_of_samples(values)
    counts = _counts_in(values, mask)
    if counts is None:
        return probe.contiguous()
    return probe * counts.to(probe.device)


def _counts_in(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask as booleans in a shape that broadcasts to ``values``; None if it does not fit their first axes."""
    if mask is None or mask.ndim >= values.ndim or mask.shape != values.shape[: mask.ndim]:
        return None
    further = [1] * (values.ndim - mask.ndim)
    return mask.bool().view(*mask.shape, *further)


def _size_of_samples(values: torch.Tensor) -> torch.Tensor:
    """The root mean square of each sample's numbers, but at least 1, in a shape that broadcasts to ``values``.

    Probes are divided by it. Without the lower limit, a sample whose numbers are nearly zero would count most.
    """
    squares = values.float().square()
    dimensions = tuple(range(1, values.ndim))
    return squares.mean(dimensions, keepdim=True).sqrt().clamp_min(1.0).to(values.dtype)


def rows_that_count(tensor: ProbedTensor, mask: torch.Tensor | None, most: int) -> torch.Tensor:
    """Evenly spaced rows ``(n, C)`` of a probed tensor, in float32, without those that the mask excludes.

    :class:`.TokenWeights` takes them from the outputs of the model and of its copy, to compare the two.

    Args:
        tensor: of an output.
        mask: of the batch; None: all rows count.
        most: about how many rows to take, fewer than ``2 * most``; all, if there are fewer.
    """
    values = tensor.values.detach()
    rows = values.flatten(0, -2)
    counts = _counts_in(values, mask)
    if counts is None:
        numbers = torch.arange(len(rows))
    else:
        numbers = counts[..., 0].expand(values.shape[:-1]).flatten().nonzero().flatten()
    step = max(1, len(numbers) // most)
    return rows[numbers[::step].to(rows.device)].float()


# ---------------------------------------------------------------------- the tensors of an output


def _numbered(tensors: Sequence[tuple[Path, torch.Tensor]], first: int = 0) -> list[ProbedTensor]:
    """Make a :class:`ProbedTensor` of each tensor, which counts as a tensor of values, not of logits.

    Args:
        tensors: with their paths; tensors of one path (the samples of a list) get the same number.
        first: the first number.
    """
    numbers: dict[Path, int] = {}
    probed = []
    for path, tensor in tensors:
        number = numbers.setdefault(path, first + len(numbers))
        # to (samples, C) or (samples, positions, C)
        values = tensor.unsqueeze(-1) if tensor.ndim == 1 else tensor
        values = values.flatten(2) if values.ndim > 3 else values
        probed.append(ProbedTensor(number=number, values=values, are_logits=False))
    return probed


def _tensors(output: Any, path: Path = ()) -> list[tuple[Path, torch.Tensor]]:
    """The floating-point tensors of an output that have a batch dimension, with their paths.

    A list of dicts has a dict for each sample (torchvision's detections), so its index is no part of the path.

    Args:
        output: the output, or a part of it.
        path: of the part.
    """
    if isinstance(output, torch.Tensor):
        is_probed = output.is_floating_point() and output.ndim > 0 and output.numel() > 0
        return [(path, output)] if is_probed else []
    has_samples = isinstance(output, list) and all(isinstance(part, Mapping) for part in output)
    tensors = []
    for name, part in _parts(output):
        if name not in _INSIDE:
            tensors += _tensors(part, path if has_samples else (*path, name))
    return tensors


def _parts(output: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a dict, list, tuple or dataclass with their keys, indices or field names.

    Nothing is yielded of any other value.
    """
    if isinstance(output, Mapping):
        yield from output.items()
    elif isinstance(output, (list, tuple)):
        yield from enumerate(output)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield field.name, getattr(output, field.name)
