"""What a module is, asked in one place: a transformers model, what compressed-tensors can store, cached attention."""

from __future__ import annotations

from compressed_tensors.quantization import is_cached_attention_module
from torch import nn


def is_transformers_model(module: object) -> bool:
    """Whether transformers can save and load it (by what it has; transformers is not imported)."""
    return hasattr(module, "save_pretrained") and hasattr(module, "config")


def compressible_type(module: nn.Module) -> type[nn.Module] | None:
    """The type by which compressed-tensors' readers know the module (Linear, Embedding), or None."""
    return next((cls for cls in (nn.Linear, nn.Embedding) if isinstance(module, cls)), None)


def holds_parameters(module: nn.Module) -> bool:
    """Whether the module has parameters of its own, so that it is no container and no activation function."""
    return next(module.parameters(recurse=False), None) is not None


def has_kv_cache(module: nn.Module) -> bool:
    """Whether compressed-tensors takes the module for attention with a cache, whose states it can quantize."""
    return bool(is_cached_attention_module(module))
