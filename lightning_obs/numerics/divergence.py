"""Compare the predictions of two models, from their logits: Kullback-Leibler divergence and agreement.

Distillation (``callbacks/distillation.py``) trains with :func:`divergence`; the report (``report/predictions.py``)
calls :func:`compare`. The *student* is the quantized model, the *teacher* the original one.

Logits of a language model are its largest tensor: tokens times vocabulary. So they are read in blocks of rows and of
classes that stay in the cache, and no other tensor of their size is made, except the gradient, which the forward
writes already: each block of the teacher's logits is computed once, from the teacher's hidden states and its head
(:class:`HeadLogits`), and waits in the place of its gradient until the sums over its rows are known.

The sums over a row run from block to block relative to the largest logit so far, as in an online softmax (Milakov and
Gimelshein, Online normalizer calculation for softmax, 2018, arXiv:1805.02867).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_obs.errors import CalibrationError

#: rows and classes of a block on a CPU: 2 MB in float32, which its cache holds
_CPU_BLOCK = (256, 2048)
#: on an accelerator: few, large operations of 64 MB
_BLOCK = (1024, 16384)
#: what replaces an infinite difference of two logits [nats], where one model excludes a class: far more than usual
#: differences of finite logits, which are not limited, and small enough that sums stay finite in float32
_FOR_INFINITE = 1e4


@dataclass(frozen=True)
class HeadLogits:
    """Logits that are computed block by block: ``hidden @ weight.T + bias``, without gradient.

    ``forward/predictions_of_teacher.py`` makes one in each training step of a distillation whose teacher ends in a
    plain Linear.

    Attributes:
        hidden: the inputs of the head, ``(..., channels)``.
        weight: the head's weight, ``(classes, channels)``.
        bias: the head's bias, ``(classes,)`` or None.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits; :func:`divergence` compares it with the student's."""
        return torch.Size([*self.hidden.shape[:-1], len(self.weight)])

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the logits; the forward of :func:`divergence` keeps them in it."""
        return self.hidden.dtype

    def flat(self) -> HeadLogits:
        """The same logits as ``(positions, classes)``; :func:`divergence` calls it before it reads blocks."""
        channels = self.hidden.shape[-1]
        return replace(self, hidden=self.hidden.reshape(-1, channels))

    @torch.no_grad()
    def block(self, rows: torch.Tensor | slice, classes: slice) -> torch.Tensor:
        """Compute the logits ``(rows, classes)`` of some rows and classes. The object must be flat (:meth:`flat`).

        Called for each block of the student's logits.
        """
        hidden = self.hidden[rows]
        weight = self.weight[classes].to(hidden.dtype)
        bias = None if self.bias is None else self.bias[classes].to(hidden.dtype)
        return F.linear(hidden, weight, bias)


@dataclass(frozen=True)
class TensorLogits:
    """Logits that are in memory, ``(..., classes)``, on any device; they get no gradient.

    Made by ``callbacks/distillation.py`` in each training step for a teacher whose logits must be computed whole, by
    :func:`divergence` for a teacher that is given as a tensor, and by :func:`compare`.
    """

    tensor: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits; :func:`divergence` compares it with the student's."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the logits; the forward of :func:`divergence` keeps them in it."""
        return self.tensor.dtype

    def flat(self) -> TensorLogits:
        """The same logits as ``(positions, classes)``; :func:`divergence` calls it before it reads blocks."""
        classes = self.tensor.shape[-1]
        flat = self.tensor.detach().reshape(-1, classes)
        return TensorLogits(flat)

    def block(self, rows: torch.Tensor | slice, classes: slice) -> torch.Tensor:
        """The logits ``(rows, classes)`` of some rows and classes. The object must be flat (:meth:`flat`).

        Called for each block of the student's logits.
        """
        if isinstance(rows, torch.Tensor):
            rows = rows.to(self.tensor.device)
        return self.tensor[rows, classes]


Logits: TypeAlias = HeadLogits | TensorLogits


def divergence(student: torch.Tensor, teacher: Logits | torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over tokens of the divergence of a student's predictions from its teacher's, in nats; a loss to train with.

    ``sum_i p_i (log p_i - log q_i)``, with the probabilities ``p`` of the teacher and ``q`` of the student. The
    gradient of the loss with respect to the student's logits is ``(q - p) / tokens``. Called by
    ``callbacks/distillation.py`` in each training step.

    Args:
        student: logits ``(..., classes)``.
        teacher: logits of the same shape; they get no gradient.
        mask: ``(...)``, nonzero for tokens that count. All tokens count if it is None or of another shape.

    Returns:
        A scalar in float32, on the student's device.

    Raises:
        CalibrationError: student and teacher have logits of different shapes.

    Reference:
        Hinton et al., Distilling the Knowledge in a Neural Network, 2015, arXiv:1503.02531, at temperature 1.

    >>> round(divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[100.0, 0.0]])).item(), 4)
    0.6931
    """
    if isinstance(teacher, torch.Tensor):
        teacher = TensorLogits(teacher)
    if teacher.shape != student.shape:
        raise CalibrationError(
            "a divergence compares logits of the same tokens and classes",
            got=f"student {tuple(student.shape)}, teacher {tuple(teacher.shape)}",
            expected="equal shapes",
            remedy="give a teacher with the student's vocabulary; resize the embeddings of one of them.",
        )
    counted = None
    if mask is not None and mask.shape == student.shape[:-1]:
        flags = mask.to(student.device).flatten()
        counted = flags.nonzero().squeeze(-1)
    rows = student.reshape(-1, student.shape[-1])
    mean: torch.Tensor = _MeanDivergence.apply(rows, teacher.flat(), counted)
    return mean


@torch.no_grad()
def compare(logits: torch.Tensor, original: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over positions the divergence of a quantized model's predictions from the original's, and the agreement.

    Called by ``report/predictions.py`` for each validation batch that is compared.

    Args:
        logits: the logits of the quantized model, ``(positions, classes)``.
        original: logits of the original model at the same positions, on any device.

    Returns:
        Two scalars in float64, on the device of ``logits``: the sum of the divergences [nats], and the number of
        positions at which both models have the same most likely class.
    """
    divergence_sum = torch.zeros((), dtype=torch.float64, device=logits.device)
    agreeing = torch.zeros((), dtype=torch.float64, device=logits.device)
    for rows in _blocks_of_rows(logits, None):
        sums = _RowSums.of(logits, TensorLogits(original), rows)
        divergence_sum += sums.divergences().sum()
        agrees = sums.student.best == sums.teacher.best
        agreeing += agrees.sum()
    return divergence_sum, agreeing


class _MeanDivergence(torch.autograd.Function):
    """The mean divergence of :func:`divergence`, for a student ``(rows, classes)``; only the student gets a gradient.

    ``teacher`` is flat. ``counted`` holds the indices of the rows that count; None: all rows.

    The forward computes the gradient, too, where one is asked for: the backward would have to compute the teacher's
    logits once more. A second backward through the same forward (``retain_graph=True``) does so.
    """

    @staticmethod
    def forward(ctx: Any, student: torch.Tensor, teacher: Logits, counted: torch.Tensor | None) -> torch.Tensor:
        gradient = None
        if ctx.needs_input_grad[0]:
            gradient = _empty_gradient(student, teacher, counted)
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        for rows in _blocks_of_rows(student, counted):
            sums = _RowSums.of(student, teacher, rows, kept=gradient)
            total += sums.divergences().sum()
            if gradient is not None:
                _replace_by_gradient(gradient, student, sums, rows)
        ctx.save_for_backward(student, counted)
        ctx.teacher = teacher
        ctx.gradient = gradient
        positions = student if counted is None else counted
        ctx.positions = max(1, len(positions))
        return total / ctx.positions

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        student, counted = ctx.saved_tensors
        gradient = ctx.gradient
        ctx.gradient = None
        if gradient is None:
            gradient = _empty_gradient(student, ctx.teacher, counted)
            for rows in _blocks_of_rows(student, counted):
                sums = _RowSums.of(student, ctx.teacher, rows, kept=gradient)
                _replace_by_gradient(gradient, student, sums, rows)
        grad_of_position = grad / ctx.positions
        gradient.mul_(grad_of_position)
        return gradient.to(student.dtype), None, None


def _empty_gradient(student: torch.Tensor, teacher: Logits, counted: torch.Tensor | None) -> torch.Tensor:
    """What the teacher's logits are kept in, and the gradient of a row's divergence afterwards, ``(rows, classes)``.

    Rows that do not count have zeros. It is in bfloat16 where student and teacher are, else in float32: in float16,
    small gradients would be lost before a loss scaler enlarges them.
    """
    are_bfloat16 = student.dtype == teacher.dtype == torch.bfloat16
    dtype = torch.bfloat16 if are_bfloat16 else torch.float32
    if counted is None:
        return torch.empty_like(student, dtype=dtype)
    return torch.zeros_like(student, dtype=dtype)


def _replace_by_gradient(
    gradient: torch.Tensor, student: torch.Tensor, sums: _RowSums, rows: torch.Tensor | slice
) -> None:
    """Write ``q - p`` of these rows in the place of the teacher's logits, which ``gradient`` holds there.

    Args:
        gradient: of :func:`_empty_gradient`; changed in place.
        student: logits ``(rows, classes)``.
        sums: over all classes of these rows.
        rows: the block of rows.
    """
    of_student = sums.student.normalizer()[:, None]
    of_teacher = sums.teacher.normalizer()[:, None]
    for classes in _blocks_of_classes(student):
        q = student[rows, classes].float().sub(of_student).exp_()
        p = gradient[rows, classes].float().sub(of_teacher).exp_()
        gradient[rows, classes] = q.sub_(p).to(gradient.dtype)


class _Maximum:
    """The largest logit of each row, its class, and the sum of ``exp(logit - largest)``, over the blocks added so far.

    :class:`_RowSums` holds one for the student and one for the teacher.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.largest = torch.full((rows,), -torch.inf, dtype=torch.float32, device=device)
        self.best = torch.zeros(rows, dtype=torch.long, device=device)
        self.total = torch.zeros(rows, dtype=torch.float32, device=device)

    def add(self, logits: torch.Tensor, first_class: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a block of classes; :class:`_RowSums` calls it for one block after the other.

        Args:
            logits: ``(rows, classes)`` in float32.
            first_class: index of the block's first class among all classes.

        Returns:
            ``exp(logit - largest)`` of the block, with the largest logit so far, and the factor ``(rows,)`` that
            rescales earlier sums of such exponentials to this largest logit.
        """
        block_largest, block_best = logits.max(-1)
        is_larger = block_largest > self.largest
        self.best = torch.where(is_larger, block_best + first_class, self.best)
        largest = torch.maximum(self.largest, block_largest)
        reference = largest.clamp_min(torch.finfo(largest.dtype).min)  # all excluded so far: exp(-inf), not NaN
        exponentials = logits.sub(reference[:, None]).exp_()
        shrinkage = self.largest.sub(reference).exp_()
        earlier_total = self.total * shrinkage
        self.total = earlier_total + exponentials.sum(-1)
        self.largest = largest
        return exponentials, shrinkage

    def normalizer(self) -> torch.Tensor:
        """The logarithm of the sum of ``exp(logit)`` over all classes, ``(rows,)``; the gradient subtracts it."""
        log_total = self.total.log()
        return self.largest + log_total


class _RowSums:
    """The sums over classes from which the divergences of some rows are computed; made for each block of rows."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.student = _Maximum(rows, device)
        self.teacher = _Maximum(rows, device)
        #: sum of ``exp(t - largest) * (t - s)`` with the logits t of the teacher and s of the student
        self.difference = torch.zeros(rows, dtype=torch.float32, device=device)

    @classmethod
    def of(
        cls,
        student: torch.Tensor,
        teacher: Logits,
        rows: torch.Tensor | slice,
        kept: torch.Tensor | None = None,
    ) -> _RowSums:
        """Add up all classes of the rows with these indices; called for each block of rows.

        Args:
            student: logits ``(rows, classes)``.
            teacher: flat.
            rows: the block of rows.
            kept: if given, these rows of it become the teacher's logits.
        """
        sums: _RowSums | None = None
        for classes in _blocks_of_classes(student):
            student_logits = student[rows, classes].float()
            teacher_logits = teacher.block(rows, classes).to(student.device)
            if kept is not None:
                kept[rows, classes] = teacher_logits.to(kept.dtype)
            teacher_logits = teacher_logits.float()
            if sums is None:
                sums = cls(len(student_logits), student.device)
            exponentials, shrinkage = sums.teacher.add(teacher_logits, classes.start)
            sums.student.add(student_logits, classes.start)
            difference = teacher_logits - student_logits
            # NaN is inf - inf: both models exclude the class. A NaN logit still shows in the totals.
            difference.nan_to_num_(nan=0.0, posinf=_FOR_INFINITE, neginf=-_FOR_INFINITE)
            earlier_difference = sums.difference * shrinkage
            sums.difference = earlier_difference + exponentials.mul_(difference).sum(-1)
        assert sums is not None
        return sums

    def divergences(self) -> torch.Tensor:
        """The divergence of each row, ``(rows,)``, in nats, from the sums over all classes.

        Equal logits give exactly zero. Called by :func:`compare` and by the forward of :func:`divergence`.
        """
        expected_difference = self.difference / self.teacher.total
        of_largest = self.teacher.largest - self.student.largest
        of_totals = (self.teacher.total / self.student.total).log()
        return expected_difference - of_largest - of_totals


def _blocks_of_rows(student: torch.Tensor, counted: torch.Tensor | None) -> Iterator[torch.Tensor | slice]:
    """Cut the rows that count into blocks: index tensors, or slices if ``counted`` is None (all rows count)."""
    at_a_time, _ = _block_shape(student)
    if counted is not None:
        yield from counted.split(at_a_time)
        return
    for first in range(0, len(student), at_a_time):
        yield slice(first, min(first + at_a_time, len(student)))


def _blocks_of_classes(student: torch.Tensor) -> Iterator[slice]:
    """Cut all classes into blocks."""
    _, at_a_time = _block_shape(student)
    for first in range(0, student.shape[-1], at_a_time):
        yield slice(first, first + at_a_time)


def _block_shape(student: torch.Tensor) -> tuple[int, int]:
    """The number of rows and the number of classes of a block."""
    return _CPU_BLOCK if student.device.type == "cpu" else _BLOCK
