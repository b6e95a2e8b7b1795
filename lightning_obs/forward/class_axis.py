"""Which dimension of logits holds the classes.

Token models end in a Linear and give ``(batch, tokens, classes)``; segmentation ends in a convolution and gives
``(batch, classes, height, width)``, often enlarged afterwards. Shapes alone do not tell them apart, so the kind of the
layer with a weight that ran last decides: a Linear's channels are last, a convolution's come after the batch.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lightning_obs.errors import CalibrationError
from lightning_obs.model.kinds import channel_axis, kind_of
from lightning_obs.model.mark import keep_hook_out
from lightning_obs.model.offload import at_rest


class LastLayer:
    """Remembers the layer with a weight that ran last: its output's shape, and which dimension holds the channels.

    Made once for each comparison of predictions (``choice/divergence.py``, ``report/predictions.py``) and for the
    weights of tokens (``calibration/output_probe.py``). They let it :meth:`watch` the model, run the model, and pass
    the logits of each call through :meth:`classes_last`.
    """

    def __init__(self) -> None:
        #: the dimension of the last layer's output that holds the channels
        self._axis = 0
        #: the shape of the last layer's output; None: no layer has run
        self._shape: torch.Size | None = None

    def watch(self, model: nn.Module, stack: ExitStack) -> None:
        """Register a forward hook on every layer whose weight has two or more dimensions, except embeddings.

        Called before the model runs.

        Args:
            model: the model whose layers are watched.
            stack: gets a callback that removes each hook.
        """
        with at_rest():
            for module in model.modules():
                weight = getattr(module, "weight", None)
                is_matrix = isinstance(weight, torch.Tensor) and weight.ndim > 1
                if is_matrix and not kind_of(module).reads_indices:
                    stack.callback(keep_hook_out(module, module.register_forward_hook(self._see)))

    def _see(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook of each watched layer: remember this layer's output, as the last one so far.

        A nested tensor, as ``nn.TransformerEncoder`` gives its layers for a padded batch, has no shape and is passed
        over.
        """
        if isinstance(output, torch.Tensor) and not output.is_nested:
            self._axis = channel_axis(module, output)
            self._shape = output.shape

    def classes_last(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits of the model's last call as ``(batch, ..., classes)``: their classes moved to the end.

        Called after each call of the watched model, before predictions are compared or probed.

        Raises:
            CalibrationError: the layer's output does not tell which dimension holds the classes.
        """
        return logits.movedim(self._class_axis(logits), -1)

    def _class_axis(self, logits: torch.Tensor) -> int:
        """The dimension of ``logits`` that holds the classes, by comparing their shape with the last layer's output."""
        last = logits.ndim - 1
        if logits.ndim == 2:
            return last
        if self._shape is None:
            return self._unknown(logits) if logits.ndim > 3 else last
        if self._shape == logits.shape:
            return self._axis
        channels_are_last = self._axis == len(self._shape) - 1
        has_same_tokens = self._shape[:-1] == logits.shape[:-1]
        if channels_are_last and has_same_tokens:
            return last  # some of the classes, or a head without a layer of its own
        channels = self._shape[self._axis]
        if logits.shape[1:].count(channels) == 1:
            return 1 + logits.shape[1:].index(channels)
        return self._unknown(logits)

    def _unknown(self, logits: torch.Tensor) -> int:
        """Raise the CalibrationError of :meth:`classes_last`; nothing is returned."""
        layer = "no layer" if self._shape is None else f"last layer's output {tuple(self._shape)}"
        raise CalibrationError(
            "which dimension of the logits holds the classes cannot be told",
            got=f"logits of shape {tuple(logits.shape)}, {layer}",
            expected="(batch, classes), (batch, tokens, classes), or the layout of the last layer's output",
            remedy="wrap the model in a module whose `logits` are (batch, ..., classes), none of the other sizes the "
            "number of classes.",
        )
