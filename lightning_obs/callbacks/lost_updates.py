"""Say when weights in half precision lose what the optimizer adds to them.

The numbers of bfloat16 near a weight are 0.4 to 0.8 % of it apart. An update below half of that leaves the weight as it
is, in every step again: nothing adds up. Weights in float32 and optimizers that round stochastically lose nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from lightning_obs.errors import warn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: weights of each parameter that are watched
_SAMPLE = 1024
#: below this share of changed weights the warning comes
_ENOUGH = 0.5
_HALF_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Watched:
    """Some weights of a parameter that have a gradient, before a step."""

    parameter: torch.Tensor
    values: torch.Tensor
    has_gradient: torch.Tensor


class LostUpdates:
    """Measures in the first optimizer step of a fit which share of the weights changes, and warns if it is small.

    ``QuantizationAwareTraining`` holds one. A step whose learning rate is zero is not the first (a warm-up).

    Args:
        label: of the callback, to begin the warning with.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._is_done = False
        self._watched: list[_Watched] = []
        self._learning_rate = 0.0

    def begin_fit(self) -> None:
        """Measure the next fit."""
        self._is_done = False

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember some of the weights in half precision; called before every optimizer step."""
        learning_rate = max(float(group["lr"]) for group in optimizer.param_groups)
        if self._is_done or learning_rate == 0 or getattr(optimizer, "bf16_stochastic_round", False):
            return
        self._learning_rate = learning_rate
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.dtype in _HALF_PRECISION and parameter.grad is not None:
                    values = _sample(parameter).clone()
                    has_gradient = _sample(parameter.grad) != 0
                    self._watched.append(_Watched(parameter, values, has_gradient))

    @torch.no_grad()
    def after_step(self, trainer: Trainer) -> None:
        """Compare them, if there was a step; called after every batch."""
        if not self._watched:
            return
        self._is_done = True
        with_gradient = changed = 0.0
        for watched in self._watched:
            has_changed = _sample(watched.parameter) != watched.values
            weight = watched.parameter.numel() / max(1, watched.values.numel())
            with_gradient += weight * int(watched.has_gradient.sum())
            changed += weight * int((has_changed & watched.has_gradient).sum())
        dtype = str(self._watched[0].parameter.dtype).removeprefix("torch.")
        self._watched.clear()
        if not with_gradient or changed >= _ENOUGH * with_gradient or not trainer.is_global_zero:
            return
        warn(
            f"{self._label}: the first step has changed {changed / with_gradient:.1%} of the weights that have a "
            f"gradient. They are in {dtype}, and updates below half the distance of its numbers are lost (learning "
            f"rate {self._learning_rate:g}). Load the model in float32 and set Trainer(precision='bf16-mixed'), or "
            "give an optimizer that rounds stochastically: torchao.optim.AdamW8bit(..., bf16_stochastic_round=True)."
        )

    def stop(self) -> None:
        """Forget the weights of a step that did not end."""
        self._watched.clear()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Evenly spaced values of a parameter, or of this rank's part of it."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = local.reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)]
