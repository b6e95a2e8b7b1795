"""Say when weights in half precision lose what the optimizer adds to them.

Neighbouring numbers of bfloat16 differ by 0.4 to 0.8 %. An update below half of that distance leaves a weight as it is,
in every step again, so updates never add up. Weights in float32 and optimizers that round stochastically lose nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_obs.errors import warn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: weights of each parameter that are watched
_SAMPLE = 1024
#: a smaller share of changed weights gives the warning
_ENOUGH = 0.5
#: dtypes of the parameters that are watched
_HALF_PRECISION = (torch.bfloat16, torch.float16)


class LostUpdates:
    """Measures in the first step of each optimizer which share of the weights changes, and warns if it is small.

    ``QuantizationAwareTraining`` holds one. Optimizers call its hooks before and after each step of a fit. A step with
    a learning rate of zero (a warm-up) does not count as the first, nor does a step that a loss scaler leaves out.

    Args:
        label: the label of the callback's scheme, which begins the warning.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._warns = False  # whether this rank warns
        self._handles: list[RemovableHandle] = []
        self._waiting: set[torch.optim.Optimizer] = set()  # optimizers whose first step has not run yet
        #: parameters in half precision, each with some of its weights before the step that runs now
        self._earlier: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watch(self, trainer: Trainer) -> None:
        """Measure the first step of each optimizer of a fit that starts, if it has weights in half precision.

        Called in ``on_train_start``.
        """
        self.stop()
        self._warns = trainer.is_global_zero
        for optimizer in trainer.optimizers:
            if not _half_precision_weights(optimizer):
                continue
            self._waiting.add(optimizer)
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def stop(self) -> None:
        """Remove the hooks from the optimizers, if there are any.

        Called when a run ends, however it ends, and before a new fit is watched.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._waiting.clear()
        self._earlier.clear()

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """The hook before an optimizer's step: until its first step has counted, remember some weights.

        Nothing is remembered with a learning rate of zero, or if the optimizer rounds stochastically. Lightning runs
        the backward inside the step, so which weights have a gradient is known only after it.
        """
        self._earlier.clear()
        if optimizer not in self._waiting or _learning_rate(optimizer) == 0:
            return
        if getattr(optimizer, "bf16_stochastic_round", False):
            return
        for parameter in _half_precision_weights(optimizer):
            self._earlier.append((parameter, _sample(parameter).clone()))

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """The hook after an optimizer's step: count the remembered weights with a gradient that have changed.

        Warn if they are less than the share ``_ENOUGH``; after the warning no further optimizer is looked at. If no
        weight has a gradient, the step does not count as the first.
        """
        with_gradient = changed = 0.0
        for parameter, values in self._earlier:
            if parameter.grad is not None:
                has_gradient = _sample(parameter.grad) != 0
                has_changed = _sample(parameter) != values
                weight = parameter.numel() / max(1, values.numel())
                with_gradient += weight * int(has_gradient.sum())
                changed += weight * int((has_changed & has_gradient).sum())
        if not with_gradient:
            return
        self._waiting.discard(optimizer)
        dtype = str(self._earlier[0][0].dtype).removeprefix("torch.")
        self._earlier.clear()
        if changed >= _ENOUGH * with_gradient or not self._warns:
            return
        self._waiting.clear()  # one warning is enough
        warn(
            f"{self._label}: the first step has changed {changed / with_gradient:.1%} of the weights that have a "
            f"gradient. They are in {dtype}, and updates below half the distance between its numbers are lost "
            f"(learning rate {_learning_rate(optimizer):g}). Load the model in float32 and set "
            "Trainer(precision='bf16-mixed'), or give an optimizer that rounds stochastically: "
            "torchao.optim.AdamW8bit(..., bf16_stochastic_round=True)."
        )


def _half_precision_weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer that are in bfloat16 or float16."""
    parameters = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dtype in _HALF_PRECISION:
                parameters.append(parameter)
    return parameters


def _learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The largest learning rate of the optimizer's parameter groups."""
    return max(float(group["lr"]) for group in optimizer.param_groups)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """About ``_SAMPLE`` evenly spaced values of a parameter or its gradient, or of this rank's part of it."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = local.reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)]
