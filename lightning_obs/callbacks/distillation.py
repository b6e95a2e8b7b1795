"""Add the divergence of the quantized model's predictions from a teacher's to the training loss.

No callback hook can replace the loss: ``on_before_backward`` only reads it, and a second ``backward`` there would
miss gradient accumulation and the loss scale. So ``training_step`` is wrapped while fit runs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lightning_obs.callbacks.lightning_package import move_data_to_device
from lightning_obs.callbacks.observed_batches import ObservedBatches
from lightning_obs.errors import CalibrationError, require_choice
from lightning_obs.fine_tuning.quantized_training import QuantizedTraining
from lightning_obs.forward.calls import in_evaluation_mode, logits_of
from lightning_obs.forward.predictions_of_teacher import call_for_head
from lightning_obs.model.mark import keep_hook_out, set_attributes
from lightning_obs.numerics.divergence import HeadLogits, TensorLogits, divergence

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


@dataclass(frozen=True)
class _Call:
    """A call of the student in a training step, kept by :func:`_calls_of` so that the teacher can be called alike.

    Attributes:
        args, kwargs: the arguments of the call.
        output: the student's output, with its autograd graph.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


class Distillation:
    """Trains the quantized model, the student, on the predictions of a teacher.

    `QuantizationAwareTraining` holds one, and wraps the training step with it when fit starts (:meth:`wrap_step`).

    Args:
        weight: factor of the divergence, which is added to the loss that ``training_step`` returns; ``"only"``: the
            divergence is the loss; 0: nothing is distilled.
        teacher: takes the calls that the student takes; ``"original"``: a copy of the student, made before the first
            fit; None: the student itself, unquantized, with its present weights.

    Raises:
        CalibrationError: ``weight`` has another value, or is 0 with a teacher; the teacher is another word.
    """

    def __init__(self, weight: float | Literal["only"], teacher: nn.Module | Literal["original"] | None) -> None:
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if weight != "only" and not (is_number and weight >= 0):
            raise CalibrationError("distill", got=repr(weight), expected="zero or more, or 'only'")
        if teacher is not None and not weight:
            raise CalibrationError("a teacher without distill", remedy="set distill, the weight of its term.")
        if isinstance(teacher, str):
            require_choice("teacher", teacher, ("original",))
        self._weight = weight
        #: whether a copy of the student teaches
        self.copies_student = teacher == "original"
        self._teacher = None if isinstance(teacher, str) else teacher
        #: whether the teacher's logits are its last hidden state times the weight of its head, so that they can be
        #: computed in chunks; True until a call has shown that the teacher changes them further
        self._teaches_by_head = True

    @property
    def is_on(self) -> bool:
        """Whether the divergence is a part of the loss.

        Then `QuantizationAwareTraining` calls :meth:`wrap_step` when fit starts.
        """
        return bool(self._weight)

    def keep_original(self, student: nn.Module) -> None:
        """Copy the student to be the teacher, unless an earlier fit has made the copy.

        Called in ``setup`` of a fit if :attr:`copies_student`, before Lightning loads the weights of a checkpoint to go
        on from.
        """
        if self._teacher is None:
            self._teacher = copy.deepcopy(student).requires_grad_(False).eval()

    def wrap_step(
        self, pl_module: LightningModule, training: QuantizedTraining, batches: ObservedBatches, log: bool
    ) -> Callable[[], None]:
        """Wrap the LightningModule's ``training_step``; called when fit starts.

        If a teacher other than the student is on the CPU, it is moved to the LightningModule's device, and stays there.

        Args:
            pl_module: has the step.
            training: holds the student, and runs it unquantized for its own teaching.
            batches: tell which tokens of a batch count.
            log: log ``quant/distillation``, the mean divergence of a step [nats].

        Returns:
            A function that gives the LightningModule its own step back.

        Raises:
            CalibrationError: the LightningModule optimizes manually.
        """
        if not pl_module.automatic_optimization:
            raise CalibrationError(
                "distill needs automatic optimization",
                remedy="add the divergence in your training_step (lightning_obs.numerics.divergence.divergence), "
                "and leave distill=0.",
            )
        self._bring_teacher_to(pl_module.device)
        training_step = pl_module.training_step
        student = training.session.model

        @functools.wraps(training_step)
        def distilling_step(*args: Any, **kwargs: Any) -> Any:
            """Run the user's step, and return its result with the loss to train with."""
            with _calls_of(student) as calls:
                result = training_step(*args, **kwargs)
            if result is None:  # the user skips this batch
                return None
            if not calls:
                raise CalibrationError(
                    f"training_step did not call {type(student).__name__}, so there are no logits to distill",
                    remedy="name the module that it calls: QuantizationAwareTraining(module='...').",
                )
            mask = batches.mask_of(args[0] if args else kwargs["batch"])
            divergences = [self._divergence_of(call, training, mask) for call in calls]
            mean = torch.stack(divergences).mean()
            if log:
                pl_module.log("quant/distillation", mean.detach())
            if isinstance(result, dict):
                return {**result, "loss": self._loss(result["loss"], mean, training)}
            return self._loss(result, mean, training)

        return set_attributes(pl_module, training_step=distilling_step)

    def _bring_teacher_to(self, device: torch.device) -> None:
        """Move a teacher other than the student to the device of the run, unless the user has put it on another one."""
        if self._teacher is None:
            return
        parameter = next(self._teacher.parameters(), None)
        if parameter is not None and parameter.device.type == "cpu":
            self._teacher.to(device)

    def _divergence_of(self, call: _Call, training: QuantizedTraining, mask: torch.Tensor | None) -> torch.Tensor:
        """Mean divergence of one call's predictions from the teacher's, over the tokens that ``mask`` counts."""
        student_logits = _class_logits(call.output)
        return divergence(student_logits, self._teach(call, training), mask)

    def _teach(self, call: _Call, training: QuantizedTraining) -> HeadLogits | TensorLogits:
        """The teacher's predictions for the arguments of one of the student's calls.

        Args:
            call: of the student.
            training: runs the student unquantized where it is its own teacher.
        """
        args, kwargs = call.args, call.kwargs
        teacher = self._teacher
        if teacher is None:
            teacher = training.session.model
        else:
            parameter = next(teacher.parameters(), None)
            if parameter is not None:
                args, kwargs = move_data_to_device((args, kwargs), parameter.device)
        # Unquantized also if the teacher is another model, which may call modules of the student (a shared encoder).
        with training.unquantized(), in_evaluation_mode(teacher), torch.no_grad():
            if self._teaches_by_head:
                logits = call_for_head(teacher, args, kwargs)
                if logits is not None:
                    return logits
                self._teaches_by_head = False  # it would be called twice in each step
            return TensorLogits(_class_logits(teacher(*args, **kwargs)))

    def _loss(self, loss: torch.Tensor, mean: torch.Tensor, training: QuantizedTraining) -> torch.Tensor:
        """The loss to train with: a step's own ``loss`` plus the weighted ``mean`` divergence, or the latter alone."""
        loss = mean if self._weight == "only" else loss + self._weight * mean
        if not loss.requires_grad and training.learned is not None and not training.is_quantized:
            # Before the first calibration the learned scales are not used, and frozen weights give no gradient either.
            # Backward needs a gradient, so each scale gets one of zeros.
            for factor in training.learned.parameters:
                loss = loss + 0 * factor.sum()
        return loss


@contextmanager
def _calls_of(module: nn.Module) -> Iterator[list[_Call]]:
    """Collect the module's calls inside the ``with`` block, in which the wrapped step runs the user's own step."""
    calls: list[_Call] = []

    def collect(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The module's forward hook: keep a call and its output."""
        calls.append(_Call(args, kwargs, output))

    remove_hook = keep_hook_out(module, module.register_forward_hook(collect, with_kwargs=True))
    try:
        yield calls
    finally:
        remove_hook()


def _class_logits(output: Any) -> torch.Tensor:
    """The logits in a model's output, or in the first tensor of a tuple; read from student and teacher alike.

    Returns:
        ``(batch, classes)`` or ``(batch, tokens, classes)``.

    Raises:
        CalibrationError: there are no logits, or logits of another number of dimensions.
    """
    if isinstance(output, (tuple, list)):
        tensors = [value for value in output if isinstance(value, torch.Tensor)]
        output = tensors[0] if tensors else None
    logits = logits_of(output)
    if logits.ndim > 3:
        raise CalibrationError(
            "distill reads logits whose last dimension holds the classes",
            got=f"logits of shape {tuple(logits.shape)}",
            expected="(batch, classes) or (batch, tokens, classes)",
            remedy="wrap the model in a module that returns (batch, positions, classes), or leave distill=0.",
        )
    return logits
