"""The tensor that a module reads as its input, in the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
