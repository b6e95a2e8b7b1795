"""A module's weight as a matrix, whatever the module."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_obs.model.lora import adapters_of
from lightning_obs.model.sharding import whole_shape


def weight_matrix(module: nn.Module) -> torch.Tensor | None:
    """The weight as ``(output channels, inputs of each)``, or None where the module has no such weight.

    Convolution kernels are flattened; transposed convolutions (groups=1) and transformers' Conv1D are transposed.
    A local shard stands for a DTensor. LoRA adapters count as merged.
    """
    weight = full_weight(module)
    if weight is None:
        return None
    if isinstance(weight, DTensor):
        weight = weight.to_local()
    return to_matrix(module, weight.detach())


def full_weight(module: nn.Module) -> torch.Tensor | None:
    """The weight with the LoRA adapters that stand beside it, with gradients to both; None without a weight."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    adapters = adapters_of(module)
    return weight if adapters is None else adapters.add_to(weight)


def to_matrix(module: nn.Module, weight: torch.Tensor) -> torch.Tensor | None:
    """A tensor of the weight's shape as a matrix, see :func:`weight_matrix`."""
    if weight.ndim < 2:
        return None
    if _is_transposed(module):
        if weight.ndim > 2 and getattr(module, "groups", 1) != 1:
            return None
        weight = weight.transpose(0, 1)
    return weight.flatten(1)


def from_matrix(module: nn.Module, matrix: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of :func:`to_matrix`."""
    if _is_transposed(module):
        return matrix.unflatten(1, (shape[0], *shape[2:])).transpose(0, 1)
    return matrix.view(shape)


def matrix_shape(module: nn.Module) -> torch.Size | None:
    """The shape of the whole weight as a matrix, also where this rank holds a shard of it."""
    shape = whole_shape(module, "weight")
    matrix = None if shape is None else to_matrix(module, torch.empty(shape, device="meta"))
    return None if matrix is None else matrix.shape


def rows_come_first(module: nn.Module) -> bool:
    """Whether the rows of the matrix are the weight's first dimension."""
    return not _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    # transformers' Conv1D stores (in, out); named by class so that transformers need not be imported.
    return getattr(module, "transposed", False) is True or any(
        (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D") for cls in type(module).__mro__
    )
