"""One way to a module's weight: its metadata without its data, and its data for the length of a block.

Where the weight rests is not the caller's business: a parameter, a shard of FSDP1 or FSDP2, the base of LoRA adapters.
Another resting place (offload, a file) is another case of :func:`held` and :func:`matrix_shape`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_obs.model.kinds import to_matrix
from lightning_obs.model.lora import adapters_of
from lightning_obs.model.sharding import whole_shape, whole_tensor, whole_unit


def matrix_shape(module: nn.Module) -> torch.Size | None:
    """The shape of the whole weight as a matrix, wherever it rests; None where the module has no such weight."""
    shape = whole_shape(module, "weight")
    matrix = None if shape is None else to_matrix(module, torch.empty(shape, device="meta"))
    return None if matrix is None else matrix.shape


@contextmanager
def held(module: nn.Module) -> Iterator[torch.Tensor | None]:
    """The whole weight as a matrix ``(output channels, inputs of each)`` inside the ``with`` block.

    LoRA adapters count as merged. Where the weight is sharded, every rank must enter the block.

    Yields:
        The matrix, not to be written to or kept; None where the module has no such weight.
    """
    with whole_unit(module):
        weight = full_weight(module)
        yield None if weight is None else to_matrix(module, whole_tensor(weight))


def rows_here(module: nn.Module) -> torch.Tensor | None:
    """The rows of the matrix that this rank holds (FSDP2), without talking to others; all of them if it is whole."""
    weight = full_weight(module)
    if isinstance(weight, DTensor):
        weight = weight.to_local()
    return None if weight is None else to_matrix(module, weight.detach())


def full_weight(module: nn.Module) -> torch.Tensor | None:
    """The weight with the LoRA adapters that stand beside it, with gradients to both; None without a weight."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    adapters = adapters_of(module)
    return weight if adapters is None else adapters.add_to(weight)
