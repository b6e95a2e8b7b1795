"""Kinds of modules: how they hold their weight and read their data; transformers models; attention with a cache.

A kind of module is a row of :data:`KINDS`. A new kind is a new row, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.offload import OffloadCache
from compressed_tensors.utils import get_num_attn_heads, get_num_kv_heads
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from lightning_obs.model.mark import mark_of
from lightning_obs.packages import require_release

# The oldest release of transformers with which models of transformers are tested (`make oldest`).
_OLDEST_TRANSFORMERS = "5.17"


@dataclass(frozen=True)
class ModuleKind:
    """How modules of one kind hold their weight, and which dimension of their data holds the channels.

    The weight's matrix is ``(output channels, inputs of each)``; a scale per channel is one per row. A token (a word, a
    pixel) has one vector of channels.
    """

    name: str
    holds: Callable[[nn.Module], bool]  # whether a module is of this kind
    rows: int = 0  # the dimension of the weight that becomes the rows: 0, or 1 where it is stored transposed
    #: how many dimensions of the data come after the channels; None: as many as the weight has after its first two
    positions: int | None = 0
    reads_indices: bool = False  # its input is indices of rows, not values
    #: the type by which readers of compressed-tensors know it; None: only ``load_checkpoint`` reads it
    stored_as: type[nn.Module] | None = None


def _is_a(*classes: type[nn.Module]) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, classes)


def _is_of_class(module: object, package: str, name: str) -> bool:
    """Whether the module is an instance of a class, by name, so that its package need not be imported."""
    for module_class in type(module).__mro__:
        if module_class.__module__ == package and module_class.__name__ == name:
            return True
    return False


def _is_conv1d_of_transformers(module: nn.Module) -> bool:
    return _is_of_class(module, "transformers.pytorch_utils", "Conv1D")


#: a module is of the first kind that ``holds`` it
KINDS: list[ModuleKind] = [
    ModuleKind("Linear", _is_a(nn.Linear), stored_as=nn.Linear),
    ModuleKind("Embedding", _is_a(nn.Embedding), reads_indices=True, stored_as=nn.Embedding),
    ModuleKind("transposed convolution", _is_a(_ConvTransposeNd), rows=1, positions=None),
    ModuleKind("convolution", _is_a(_ConvNd), positions=None),
    ModuleKind("transformers' Conv1D", _is_conv1d_of_transformers, rows=1),
    ModuleKind("any other with a weight", lambda module: True),
]


def kind_of(module: nn.Module) -> ModuleKind:
    """The row of :data:`KINDS` that says how ``module`` holds its weight."""
    return next(kind for kind in KINDS if kind.holds(module))


def to_matrix(module: nn.Module, weight: torch.Tensor) -> torch.Tensor | None:
    """A tensor of the weight's shape as ``(output channels, inputs of each)``, see :class:`ModuleKind`.

    None where there is no such matrix: a vector, and groups of a transposed convolution.
    """
    if weight.ndim < 2:
        return None
    is_transposed = kind_of(module).rows == 1
    if not is_transposed:
        return weight.flatten(1)
    has_groups = getattr(module, "groups", 1) != 1
    if weight.ndim > 2 and has_groups:
        return None
    return weight.transpose(0, 1).flatten(1)


def from_matrix(module: nn.Module, matrix: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of :func:`to_matrix`, for a weight of this shape."""
    if kind_of(module).rows:
        return matrix.unflatten(1, (shape[0], *shape[2:])).transpose(0, 1)
    return matrix.view(shape)


def tokens_of(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    """A module's input or output as ``(..., tokens, channels)``; ``value`` itself where it has that shape."""
    positions = _positions_of(module)
    if not 0 < positions < value.ndim:
        return value
    return value.flatten(-positions).transpose(-1, -2)


def count_tokens(module: nn.Module, value: torch.Tensor) -> int:
    """How many tokens a module's input or output has; at least 1."""
    channels = max(1, value.shape[-1 - _positions_of(module)])
    return max(1, value.numel() // channels)


def channel_axis(module: nn.Module, value: torch.Tensor) -> int:
    """The dimension of a module's input or output that holds the channels."""
    return value.ndim - 1 - _positions_of(module)


def _positions_of(module: nn.Module) -> int:
    """How many dimensions of the module's data come after the channels."""
    positions = kind_of(module).positions
    if positions is None:
        assert isinstance(module.weight, torch.Tensor)
        positions = module.weight.ndim - 2
    return positions


def is_transformers_model(module: object) -> bool:
    """Whether transformers saves and loads it.

    Its attributes do not tell: models of diffusers and of segmentation-models-pytorch, and every class with
    huggingface_hub's mixin, have a ``save_pretrained`` and a ``config`` of their own.
    """
    return _is_of_class(module, "transformers.modeling_utils", "PreTrainedModel")


def require_transformers(model: object | None = None) -> None:
    """Raise a :class:`CalibrationError` where transformers is too old for its models to be calibrated and stored.

    Args:
        model: a module of any kind; only one of transformers needs it. None: a checkpoint of transformers.
    """
    if model is None or is_transformers_model(model):
        require_release("transformers", _OLDEST_TRANSFORMERS, "a model of transformers")


def is_dispatched(module: nn.Module) -> bool:
    """Whether accelerate or compressed-tensors says on which device the module's own tensors are (:mod:`.offload`)."""
    attributes = vars(module)
    if "_hf_hook" in attributes or isinstance(attributes["_parameters"], OffloadCache):
        return True
    mark = mark_of(module)
    return mark is not None and mark.offload_owner is not None


def holds_parameters(module: nn.Module) -> bool:
    """Whether the module has parameters of its own; containers and activation functions have none."""
    return next(module.parameters(recurse=False), None) is not None


def count_heads(model: Any) -> dict[str, int]:
    """How many heads the q, k and v of a transformers model, or of its attention module, have.

    As compressed-tensors counts them when it loads a checkpoint and allocates scales per head; the shapes of such
    scales are checked by it (``schemes/``).
    """
    configs = (module.config for module in model.modules() if hasattr(module, "config"))
    config = next(configs).get_text_config(decoder=True)
    kv_heads = get_num_kv_heads(config)
    return {"q": get_num_attn_heads(config), "k": kv_heads, "v": kv_heads}
