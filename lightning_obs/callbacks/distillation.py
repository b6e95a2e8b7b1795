"""Add to the user's loss how far the quantized model's logits are from an unquantized one's.

A callback has no say in the loss: ``on_before_backward`` gets it and cannot replace it, and a second ``backward`` there
would count twice under gradient accumulation and miss the loss scale. So ``training_step`` is wrapped while fit runs.
What it returns is what Lightning scales, accumulates and logs, and the user's code stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

from lightning_obs.errors import CalibrationError
from lightning_obs.forward.calls import logits_of
from lightning_obs.model.additions import keep_hook_out, set_attributes


def distill_in_training_step(
    pl_module: LightningModule,
    student: nn.Module,
    weight: float,
    teacher: Callable[..., Any],
    mask: Callable[[Any], torch.Tensor | None],
    log: bool,
) -> Callable[[], None]:
    """Let ``training_step`` return its loss plus ``weight`` times the divergence, and return what undoes it.

    Args:
        pl_module: its ``training_step`` calls ``student``.
        student: the quantized model; every call of it in a step is compared.
        weight: of the mean divergence over calls, in nats per token.
        teacher: called with the same arguments, without gradient.
        mask: finds in a batch which tokens count, ``(batch, tokens)``; None: all.
        log: log the mean divergence as ``quant/distillation``.
    """
    if not pl_module.automatic_optimization:
        raise CalibrationError(
            "distill needs automatic optimization",
            remedy="add the divergence in your training_step (callbacks.distillation.divergence), and leave distill=0.",
        )
    training_step = pl_module.training_step

    @functools.wraps(training_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        calls: list[tuple[Any, Any, Any]] = []
        remember = student.register_forward_hook(lambda m, a, k, out: calls.append((a, k, out)), with_kwargs=True)
        forget = keep_hook_out(student, remember)
        try:
            result = training_step(*args, **kwargs)
        finally:
            forget()
        if result is None:  # the user skips this batch
            return None
        if not calls:
            raise CalibrationError(
                f"training_step did not call {type(student).__name__}, so there are no logits to distill",
                remedy="name the module that it calls: QuantizationAwareTraining(module='...').",
            )
        counts = mask(args[0] if args else kwargs["batch"])
        terms = [divergence(_logits_of(out), _logits_of(teacher(*a, **k)), counts) for a, k, out in calls]
        mean = torch.stack(terms).mean()
        if log:
            pl_module.log("quant/distillation", mean.detach())
        extra = weight * mean
        return {**result, "loss": result["loss"] + extra} if isinstance(result, dict) else result + extra

    return set_attributes(pl_module, training_step=step)


def divergence(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Kullback-Leibler divergence of the student's distribution from the teacher's, in nats, mean over tokens.

    Args:
        student: logits ``(..., classes)``.
        teacher: logits of the same shape; no gradient goes there.
        mask: ``(...)``, nonzero for tokens that count.

    Returns:
        A scalar in float32.

    Reference:
        Hinton et al., Distilling the Knowledge in a Neural Network, 2015, arXiv:1503.02531, at temperature 1.

    >>> round(divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[100.0, 0.0]])).item(), 4)
    0.6931
    """
    if mask is not None and mask.shape == student.shape[:-1]:
        chosen = mask.to(student.device).bool()
        student, teacher = student[chosen], teacher[chosen]
    log_p, log_q = (F.log_softmax(x.float(), dim=-1).flatten(0, -2) for x in (teacher.detach(), student))
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def _logits_of(output: Any) -> torch.Tensor:
    """As :func:`logits_of`, of a tuple those in its first tensor."""
    is_tuple = isinstance(output, (tuple, list))
    return logits_of(next((x for x in output if isinstance(x, torch.Tensor)), None) if is_tuple else output)
