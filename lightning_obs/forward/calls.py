"""Call a model, and find the input tensor in the arguments of a call and the logits in an output.

Used wherever this package runs a user's model, hooks a module, or compares predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.utils.helpers import patch_attrs
from torch import nn

from lightning_obs.errors import CalibrationError


def call_on(model: nn.Module, batch: Mapping[str, Any] | torch.Tensor) -> Any:
    """Call a model with a batch and return its output: a mapping gives keyword arguments, a tensor the only argument.

    Called wherever this package runs a model outside of Lightning's loops: choices, layer errors, streaming by blocks.
    """
    return model(**batch) if isinstance(batch, Mapping) else model(batch)


def in_evaluation_mode(
    model: nn.Module, kinds: tuple[type[nn.Module], ...] = (nn.Module,)
) -> AbstractContextManager[None]:
    """For a ``with`` block in which modules are in evaluation mode; afterwards each is in its former mode.

    Entered by runs outside of Lightning's loops (:mod:`.extra_runs`), around each call of a distillation's teacher, and
    while a fit trains scales alone (for dropout and batch norms, by ``kinds``).

    Args:
        model: the model whose modules are switched.
        kinds: classes of the modules to switch; by default all modules.
    """
    in_training = []
    for module in model.modules():
        if module.training and isinstance(module, kinds):
            in_training.append(module)
    return patch_attrs(in_training, "training", [False] * len(in_training))


@dataclass(frozen=True)
class Autocast:
    """The state of autocast at a call, by which ``calibration/kept_calls.py`` repeats the call later.

    Attributes:
        device_type: the kind of device: ``"cpu"``, ``"cuda"``...
        is_on: whether autocast was on.
        dtype: the dtype in which autocast computes when it is on.
    """

    device_type: str
    is_on: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, device: torch.device | None) -> Autocast:
        """Read the state of autocast for a device (None: the CPU); ``KeptCalls`` does so when it keeps a call."""
        device_type = "cpu" if device is None else device.type
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def entered(self) -> AbstractContextManager[None]:
        """For a ``with`` block with this state of autocast; ``KeptCalls.run`` repeats a call in it."""
        context: AbstractContextManager[None] = torch.autocast(self.device_type, self.dtype, enabled=self.is_on)
        return context


def logits_of(output: Any) -> torch.Tensor:
    """Return the logits ``(..., classes)`` in a model's output, to compare the predictions of two models.

    Called for each output by distillation and by the choices of observers and schemes that compare predictions.

    Raises:
        CalibrationError: the output has no logits, or they have fewer than two dimensions or no floats.
    """
    logits = output if isinstance(output, torch.Tensor) else named_logits(output)
    is_tensor = isinstance(logits, torch.Tensor)
    if not is_tensor or logits.ndim < 2 or not logits.is_floating_point():
        got = f"a {logits.dtype} tensor of shape {tuple(logits.shape)}" if is_tensor else type(output).__name__
        raise CalibrationError(
            "the divergence of predictions is measured on logits",
            got=got,
            expected="a tensor (..., classes) of floats, two dimensions or more, or an output with such `logits`",
            remedy="wrap the model in a module that returns its logits.",
        )
    return logits


def named_logits(output: Any) -> Any:
    """Return the output's ``logits``, an attribute or a key; None if the output has neither.

    :func:`logits_of` calls it; code that can do without logits (``report/predictions.py``) calls it directly.
    """
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, Mapping):
        return output.get("logits")
    return logits


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the tensor that a module quantizes as its input: the first positional or keyword tensor of a call.

    Hooks that watch the inputs of modules call it at each call of a module: for experts, rounding, weights of tokens
    and layer errors. None if no argument is a tensor.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    return None


def replace_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the input of a call: the tensor that :func:`first_input` finds.

    The quantized forward of every module but a plain Linear calls it, to put the quantized input in its place.

    Args:
        args, kwargs: the arguments of the call.
        change: takes the input tensor, and returns the tensor to put in its place.

    Returns:
        The new arguments.
    """
    for position, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            args_after = args[position + 1 :]
            return (*args[:position], change(value), *args_after), kwargs
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            return args, {**kwargs, name: change(value)}
    return args, kwargs
