"""A module's weight as a matrix, whatever the module."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_obs.model.kinds import to_matrix
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


def matrix_shape(module: nn.Module) -> torch.Size | None:
    """The shape of the whole weight as a matrix, also where this rank holds a shard of it."""
    shape = whole_shape(module, "weight")
    matrix = None if shape is None else to_matrix(module, torch.empty(shape, device="meta"))
    return None if matrix is None else matrix.shape
