"""What of a model's output tokens are weighed by, and the gradients there from which a backward pass begins.

An output that has ``logits`` is probed by the Fisher information of its classes: errors count as they move the
predictions. Of every other output (embeddings, regression, boxes, images) each floating-point number counts alike: a
probe of random signs s gives gradients g of ``<s, output>``, and ``E[(g^T d)^2]`` is the squared change of the output
that a change d of a module's output causes, to first order (Gauss-Newton, estimated as Hutchinson estimates a trace).

Several tensors (boxes in pixels beside scores) are made comparable sample by sample, so that no sum depends on how the
data was cut into batches.

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

#: names and positions that lead to a tensor in an output
Path: TypeAlias = tuple[Hashable, ...]

#: fields of transformers' outputs that repeat what is inside of the model
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
#: the beginning of the names of boxes and masks beside the logits of transformers' detection models
_BESIDE_LOGITS = "pred_"


@dataclass(frozen=True)
class ProbedTensor:
    """A tensor of a model's output that is probed.

    Attributes:
        number: of the signs: tensors with signs of their own have different numbers.
        values: ``(samples, C)`` or ``(samples, positions, C)``; of logits ``(samples, ..., classes)``.
        are_logits: whether the last dimension holds the logits of classes.
    """

    number: int
    values: torch.Tensor
    are_logits: bool


class OutputProbe:
    """Begins the backward pass of a call of a model, at its output.

    Args:
        model: of transformers, or any other; its ``config`` may say that its logits are a regression's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._is_regression = getattr(getattr(model, "config", None), "problem_type", None) == "regression"
        self._signs = ProbeSigns()
        self._last_layer = LastLayer()

    def watch(self, model: nn.Module, stack: ExitStack) -> None:
        """Watch the layers of the model whose call comes next; ``stack`` removes the hooks."""
        self._last_layer = LastLayer()
        self._last_layer.watch(model, stack)

    def tensors_of(self, output: Any) -> list[ProbedTensor]:
        """The tensors of an output that are probed; none where it has no floating-point tensor with samples.

        Raises:
            CalibrationError: which dimension of the logits holds the classes cannot be told.
        """
        logits = named_logits(output)
        if not isinstance(logits, torch.Tensor) or logits.ndim < 2 or not logits.is_floating_point():
            return _numbered(_tensors(output))
        beside = [(path, tensor) for path, tensor in _tensors(output) if str(path[0]).startswith(_BESIDE_LOGITS)]
        if self._is_regression:
            return _numbered([((), logits), *beside])
        classes_last = self._last_layer.classes_last(logits)
        if classes_last.shape[-1] == 1:
            return _numbered([((), logits), *beside])
        return [ProbedTensor(0, classes_last, True), *_numbered(beside, first=1)]

    def run_backward(
        self,
        tensors: Sequence[ProbedTensor],
        mask: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Run backward from the probes of an output's tensors.

        Args:
            tensors: with their history.
            mask: ``(batch, tokens)`` or ``(batch,)``, on the CPU, nonzero for what counts; None: all counts.
            args, kwargs: of the call.

        Raises:
            CalibrationError: no tensor has a history: no output depends on a module that is watched.
        """
        connected = [tensor for tensor in tensors if tensor.values.requires_grad]
        if not connected:
            raise CalibrationError(
                "weigh_tokens runs backward from the output of the model, and no gradient leads from it to a module",
                expected="an output with floating-point tensors of a row for each sample, computed from the modules'",
                remedy="return the predictions before they are detached, sorted or rounded, or leave out weigh_tokens.",
            )
        values = [tensor.values for tensor in connected]
        probes = []
        for tensor in connected:
            signs = self._signs.of_call(
                tensor.values, mask, args, kwargs, number=tensor.number, by_sample=not tensor.are_logits
            )
            probes.append(_probe(tensor, signs, mask, is_single=len(tensors) == 1))
        torch.autograd.backward(values, probes)


def _probe(tensor: ProbedTensor, signs: torch.Tensor, mask: torch.Tensor | None, is_single: bool) -> torch.Tensor:
    """The gradient of a tensor from which backward begins; zero where the mask says that nothing counts."""
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
    """What of ``values`` the mask lets count, in a shape that broadcasts to them; None: it is no mask of theirs."""
    if mask is None or mask.ndim >= values.ndim or mask.shape != values.shape[: mask.ndim]:
        return None
    further = [1] * (values.ndim - mask.ndim)
    return mask.bool().view(*mask.shape, *further)


def _size_of_samples(values: torch.Tensor) -> torch.Tensor:
    """The root mean square of each sample's numbers, at least 1, in a shape that broadcasts to ``values``.

    Numbers below 1 are left as they are: a number that is nearly zero in one sample does not make it count most.
    """
    squares = values.float().square()
    dimensions = tuple(range(1, values.ndim))
    return squares.mean(dimensions, keepdim=True).sqrt().clamp_min(1.0).to(values.dtype)


def rows_that_count(tensor: ProbedTensor, mask: torch.Tensor | None, most: int) -> torch.Tensor:
    """At most about ``most`` rows ``(n, C)`` of a probed tensor, in float32, none of padding."""
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
    """Tensors that are no logits, in the shapes of a :class:`ProbedTensor`, numbered by their paths."""
    numbers: dict[Path, int] = {}
    probed = []
    for path, tensor in tensors:
        number = numbers.setdefault(path, first + len(numbers))
        values = tensor.unsqueeze(-1) if tensor.ndim == 1 else tensor
        probed.append(ProbedTensor(number, values.flatten(2) if values.ndim > 3 else values, False))
    return probed


def _tensors(output: Any, path: Path = ()) -> list[tuple[Path, torch.Tensor]]:
    """The floating-point tensors of an output that have samples, with their paths.

    A list of dicts is one of samples (torchvision's detections): its dicts have the same paths.
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
    """The parts of a dict, a list, a tuple or a dataclass, with their names; none of anything else."""
    if isinstance(output, Mapping):
        yield from output.items()
    elif isinstance(output, (list, tuple)):
        yield from enumerate(output)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield field.name, getattr(output, field.name)
