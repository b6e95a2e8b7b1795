"""A call of a module: with a batch, in evaluation mode, which tensor is its input, which its logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from compressed_tensors.utils.helpers import patch_attrs
from torch import nn

from lightning_obs.errors import CalibrationError


def call_on(model: nn.Module, batch: Mapping[str, Any] | torch.Tensor) -> Any:
    """The model's output for keyword arguments, or for one tensor."""
    return model(**batch) if isinstance(batch, Mapping) else model(batch)


def in_evaluation_mode(
    model: nn.Module, kinds: tuple[type[nn.Module], ...] = (nn.Module,)
) -> AbstractContextManager[None]:
    """A block in which every module of these kinds is in evaluation mode."""
    training = [module for module in model.modules() if module.training and isinstance(module, kinds)]
    return patch_attrs(training, "training", [False] * len(training))


def logits_of(output: Any) -> torch.Tensor:
    """The logits ``(..., classes)`` in a model's output; a CalibrationError if there are none."""
    found = output if isinstance(output, torch.Tensor) else named_logits(output)
    if not isinstance(found, torch.Tensor) or found.ndim < 2 or not found.is_floating_point():
        raise CalibrationError(
            "the divergence of predictions is measured on logits",
            got=type(output).__name__,
            expected="a tensor (..., classes), or an output with `logits`",
            remedy="wrap the model in a module that returns its logits.",
        )
    return found


def named_logits(output: Any) -> Any:
    """The output's ``logits``; None where it has none."""
    found = getattr(output, "logits", None)
    return output.get("logits") if found is None and isinstance(output, Mapping) else found


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The tensor that a module quantizes as its input: the first positional or keyword tensor of a call."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)


def replace_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply ``change`` to the tensor that :func:`first_input` finds."""
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            return (*args[:i], change(value), *args[i + 1 :]), kwargs
    name = next((name for name, value in kwargs.items() if isinstance(value, torch.Tensor)), None)
    return args, kwargs if name is None else {**kwargs, name: change(kwargs[name])}
