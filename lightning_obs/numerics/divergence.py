"""Kullback-Leibler divergence between the predictions of two models, from their logits."""

from __future__ import annotations

import torch

#: The log-probability of a class whose probability is 0. With minus infinity a divergence would be NaN.
LEAST_LOG_PROBABILITY = -1e4


def summed_divergence(logits: torch.Tensor, original_logits: torch.Tensor) -> torch.Tensor:
    """Sum over positions of the divergence of a model's predictions from the original's, in nats.

    ``sum_i p_i (log p_i - log q_i)``, with the probabilities ``p`` of the original and ``q`` of the model.

    Args:
        logits: of the model, ``(..., classes)``.
        original_logits: of the original at the same positions, ``(..., classes)``, on the same device.

    Returns:
        A scalar in float32.

    >>> round(summed_divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[100.0, 0.0]])).item(), 4)
    0.6931
    """
    log_p = original_logits.float().log_softmax(-1).clamp_min(LEAST_LOG_PROBABILITY)
    log_q = logits.float().log_softmax(-1).clamp_min(LEAST_LOG_PROBABILITY)
    return (log_p.exp() * (log_p - log_q)).sum()


def divergence(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over tokens of the divergence of a student's predictions from its teacher's, in nats; a loss to train with.

    Args:
        student: logits ``(..., classes)``.
        teacher: logits ``(..., classes)``, on any device; it gets no gradient.
        mask: ``(...)``, nonzero for tokens that count; None, or of another shape: all count.

    Returns:
        A scalar in float32, on the student's device.

    Reference:
        Hinton et al., Distilling the Knowledge in a Neural Network, 2015, arXiv:1503.02531, at temperature 1.

    >>> round(divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[100.0, 0.0]])).item(), 4)
    0.6931
    """
    teacher = teacher.detach().to(student.device)
    if mask is not None and mask.shape == student.shape[:-1]:
        counts = mask.to(student.device).bool()
        student = student[counts]
        teacher = teacher[counts]
    positions = student[..., 0].numel()
    return summed_divergence(student, teacher) / positions
