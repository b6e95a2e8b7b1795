"""A call of a module: with a batch, and which tensor of its arguments is its input."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def call_on(model: nn.Module, batch: Mapping[str, Any] | torch.Tensor) -> Any:
    """The model's output for keyword arguments, or for one tensor."""
    return model(**batch) if isinstance(batch, Mapping) else model(batch)


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


def arguments_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``module``, by name; those given by name, where its forward says no names."""
    try:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):  # a call that fails, or a forward that is compiled
        return kwargs
    return {**given.arguments, **given.kwargs}
