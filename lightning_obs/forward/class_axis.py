"""Which dimension of logits holds the classes.

Token models end in a Linear and give ``(batch, tokens, classes)``; segmentation ends in a convolution and gives
``(batch, classes, height, width)``, often enlarged afterwards. Shapes alone do not tell them apart, so the layer with a
weight that ran last is asked how its output lies.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lightning_obs.errors import CalibrationError
from lightning_obs.model.additions import keep_hook_out
from lightning_obs.model.kinds import channel_axis, kind_of
from lightning_obs.model.offload import at_rest


class LastLayer:
    """Remembers, from :meth:`watch` on, which layer with a weight ran last, and the shape of its output."""

    def __init__(self) -> None:
        self._axis = 0  # the dimension of its output that holds the channels
        self._shape: torch.Size | None = None  # of its output; None: none has run

    def watch(self, model: nn.Module, stack: ExitStack) -> None:
        """Register a hook on every layer that has a matrix as its weight; ``stack`` removes them."""
        with at_rest():
            for module in model.modules():
                weight = getattr(module, "weight", None)
                is_matrix = isinstance(weight, torch.Tensor) and weight.ndim > 1
                if is_matrix and not kind_of(module).reads_indices:
                    stack.callback(keep_hook_out(module, module.register_forward_hook(self._see)))

    def _see(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            self._axis = channel_axis(module, output)
            self._shape = output.shape

    def classes_last(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits as ``(batch, ..., classes)``.

        Raises:
            CalibrationError: the layer's output does not tell which dimension holds the classes.
        """
        return logits.movedim(self._class_axis(logits), -1)

    def _class_axis(self, logits: torch.Tensor) -> int:
        last = logits.ndim - 1
        if logits.ndim == 2:
            return last
        if self._shape is None:
            return self._unknown(logits) if logits.ndim > 3 else last
        if self._shape == logits.shape:
            return self._axis
        is_last = self._axis == len(self._shape) - 1
        if is_last and self._shape[:-1] == logits.shape[:-1]:
            return last  # a part of the classes, or a head without a layer of its own
        channels = self._shape[self._axis]
        fitting = [axis for axis in range(1, logits.ndim) if logits.shape[axis] == channels]
        return fitting[0] if len(fitting) == 1 else self._unknown(logits)

    def _unknown(self, logits: torch.Tensor) -> int:
        shape = None if self._shape is None else tuple(self._shape)
        raise CalibrationError(
            "which dimension of the logits holds the classes cannot be told",
            got=f"logits of shape {tuple(logits.shape)}, " + (f"last layer's output {shape}" if shape else "no layer"),
            expected="(batch, classes), (batch, tokens, classes), or the layout of the last layer's output",
            remedy="wrap the model in a module whose `logits` are (batch, ..., classes), none of the other sizes the "
            "number of classes.",
        )
