"""Quantization parameters on modules: write, read, remove.

The parameters are plain tensor attributes under compressed-tensors' names (``weight_scale``, ``input_zero_point``,
``weight_global_scale``), beside its ``quantization_scheme`` and ``quantization_status``. They are neither parameters
nor buffers, on purpose: ``state_dict`` and strict loading, DDP's buffer broadcast, FSDP's sharding, the zip of
weight averaging and ``model.to(torch.bfloat16)`` (which would round global scales) never see them. compressed-tensors'
forward reads them by ``getattr``, so it does not mind.

The forward of the model stays what it was until :func:`~lightning_obs.quantized` is entered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationMetadata,
    QuantizationScheme,
    QuantizationStatus,
    is_cached_attention_module,
)
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_obs.adapters import adapters_of
from lightning_obs.collectives import all_ranks_answer
from lightning_obs.flat_shards import unit_of, whole_shape, without_wrappers
from lightning_obs.numerics.reshape import ATTENTION

SUFFIXES = ("scale", "zero_point", "global_scale")
_OWN_SCHEME = "calibrated_scheme"
_CHECKSUM = "calibrated_weight_checksum"
_ARGS = {"weight": "weights", "input": "input_activations", "output": "output_activations"}


def holdable_type(module: nn.Module) -> type[nn.Module] | None:
    """The type under which compressed-tensors can store the module (Linear, Embedding), or None."""
    return next((cls for cls in (nn.Linear, nn.Embedding) if isinstance(module, cls)), None)


def has_kv_cache(module: nn.Module) -> bool:
    """Whether compressed-tensors takes the module for attention with a cache, whose states it can quantize."""
    return bool(is_cached_attention_module(module))


def scheme_args(scheme: QuantizationScheme) -> Iterator[tuple[str, QuantizationArgs]]:
    """What a scheme quantizes: ``(base name, args)`` of weight, input, output."""
    for base_name, field in _ARGS.items():
        args = getattr(scheme, field)
        if args is not None:
            yield base_name, args


# ---------------------------------------------------------------------- the input of a call


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
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            return args, {**kwargs, name: change(value)}
    return args, kwargs


# ---------------------------------------------------------------------- the weight as a matrix


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


def in_shards(module: nn.Module) -> bool:
    """Whether this rank holds a part of the module's own parameters only (FSDP2, tensor parallelism, FSDP1)."""
    return unit_of(module) is not None or any(map(is_sharded, module.parameters(recurse=False)))


def is_sharded(value: torch.Tensor) -> bool:
    """Whether a DTensor is sharded. What FSDP1 shards are plain tensors: ask :func:`in_shards`."""
    return isinstance(value, DTensor) and any(not placement.is_replicate() for placement in value.placements)


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """Gather a sharded DTensor; every rank must call this. Any other tensor is returned as it is.

    Whatever shards a module, its whole weight is ``whole_tensor(module.weight)`` inside
    :func:`~lightning_obs.flat_shards.whole_unit`.
    """
    value = value.detach()
    if not isinstance(value, DTensor):
        return value
    with all_ranks_answer():
        return value.full_tensor()


def reshard(model: nn.Module) -> None:
    """Free what FSDP2 gathered for a forward (it leaves the outermost module whole, in the compute dtype)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _is_transposed(module: nn.Module) -> bool:
    # transformers' Conv1D stores (in, out); named by class so that transformers need not be imported.
    return getattr(module, "transposed", False) is True or any(
        (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D") for cls in type(module).__mro__
    )


# ---------------------------------------------------------------------- qparams on modules


def get_scheme(module: nn.Module) -> QuantizationScheme | None:
    """The scheme that a module was calibrated with, or None."""
    return getattr(module, "quantization_scheme", None) or getattr(module, _OWN_SCHEME, None)


def quantized_states(module: nn.Module) -> tuple[str, ...]:
    """Which of q, k, v a module has scales for."""
    return tuple(base for base in ATTENTION if isinstance(getattr(module, f"{base}_scale", None), torch.Tensor))


def qparams_home(module: nn.Module) -> torch.Tensor | None:
    """The tensor whose dtype scales are stored in, and beside which they live: the weight, or attention's first."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor):
        return weight
    return next(module.parameters(), None) if has_kv_cache(module) else None


def calibrated_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every calibrated module under its first name."""
    with without_wrappers(model):
        found = [(name, module) for name, module in model.named_modules() if get_scheme(module) is not None]
    yield from found


def write_qparams(
    module: nn.Module, scheme: QuantizationScheme, qparams: dict[str, torch.Tensor], checksum: int | None = None
) -> None:
    """Put scheme and quantization parameters on a module, in place of any it had.

    Args:
        module: the module; its forward is not changed.
        scheme: copied, so that modules do not share one (compressed-tensors writes the format into it).
        qparams: ``{"weight_scale": ..., "input_scale": ...}``, of an attention module ``{"k_scale": ...}``. Scales are
            stored in the weight's dtype as compressed-tensors does (attention: in that of its first parameter),
            global scales in float32. They are copied to its device.
        checksum: of the weight that the scale was found for (:func:`weight_checksum`); default: the weight as it is.
    """
    clear_qparams(module)
    scheme = scheme.model_copy(deep=True)
    home = qparams_home(module)
    for name, value in qparams.items():
        setattr(module, name, _stored(name, value, home))
    if scheme.weights is not None:
        setattr(module, _CHECKSUM, weight_checksum(module) if checksum is None else checksum)
    kind = holdable_type(module) or (type(module) if has_kv_cache(module) else None)
    if kind is None:
        setattr(module, _OWN_SCHEME, scheme)
        return
    if scheme.format is None:
        scheme.format = infer_module_format(kind, scheme).value
    module.quantization_scheme = scheme
    module.quantization_status = QuantizationStatus.FROZEN


def _stored(name: str, value: torch.Tensor, home: torch.Tensor | None) -> torch.Tensor:
    value = value.detach()
    if home is None:
        return value.clone()
    dtype = home.dtype if name.endswith("_scale") and not name.endswith("_global_scale") else value.dtype
    if not dtype.is_floating_point and name.endswith("_scale"):
        dtype = value.dtype
    return value.to(device=home.device, dtype=dtype, copy=True)


def read_qparams(module: nn.Module) -> dict[str, torch.Tensor]:
    """The quantization parameters on a module, on its weight's device; empty if it was not calibrated.

    ``model.to(device)`` does not take plain attributes along, so they are moved when they are read.
    """
    names = (f"{base}_{suffix}" for base in (*_ARGS, *ATTENTION) for suffix in SUFFIXES)
    found = {name: getattr(module, name) for name in names if isinstance(getattr(module, name, None), torch.Tensor)}
    home = qparams_home(module) if found else None
    return found if home is None else {n: v.to(home.device) for n, v in found.items()}


def clear_qparams(module: nn.Module) -> None:
    """Remove scheme and quantization parameters from a module."""
    QuantizationMetadata.clear_all_qparams(module)  # knows k_scale and v_scale, no other states
    for name in (f"{base}_{suffix}" for base in ATTENTION for suffix in SUFFIXES):
        if hasattr(module, name) and name not in module._parameters:  # a parameter would be the model's own
            delattr(module, name)
    for name in ("quantization_scheme", "quantization_status", "quantization_enabled", _OWN_SCHEME, _CHECKSUM):
        if name in vars(module):
            delattr(module, name)


def weight_checksum(module: nn.Module) -> int | None:
    """Sum of the weight's bits as integers: equal on any device, and different after a training step."""
    return weight_checksums([module])[0]


def weight_checksums(modules: Sequence[nn.Module]) -> list[int | None]:
    """:func:`weight_checksum` of several. Of a sharded weight, that of the whole: all ranks must call this alike."""
    found = [_local_checksum(module) for module in modules]
    sharded: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for at, module in enumerate(modules):
        groups = _groups_of_shards(module)
        if groups and found[at] is not None:
            sharded.setdefault(groups, []).append(at)
    for groups, places in sharded.items():
        home = modules[places[0]].weight
        assert isinstance(home, torch.Tensor)
        sums = torch.tensor([found[at] for at in places], device=home.device)
        for group in groups:  # one reduction for all modules
            with all_ranks_answer():
                dist.all_reduce(sums, group=group)
        for at, checksum in zip(places, sums.tolist(), strict=True):
            found[at] = checksum
    return found


def _groups_of_shards(module: nn.Module) -> tuple[dist.ProcessGroup, ...]:
    """The groups of ranks over which the parts of a weight add up to all of it; none if this rank has it whole."""
    weight, unit = getattr(module, "weight", None), unit_of(module)
    if isinstance(weight, DTensor):
        mesh, placements = weight.device_mesh, weight.placements
        return tuple(mesh.get_group(dim) for dim, placed in enumerate(placements) if not placed.is_replicate())
    return (unit.group,) if unit is not None and "weight" in unit.shapes[module] else ()


def _local_checksum(module: nn.Module) -> int | None:
    if matrix_shape(module) is None:
        return None
    matrix = module.weight if unit_of(module) is not None else weight_matrix(module)
    assert isinstance(matrix, torch.Tensor)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[matrix.element_size()]
    return int(matrix.detach().contiguous().view(bits).sum(dtype=torch.int64))


def trained_since(model: nn.Module) -> list[str]:
    """Names of modules whose weight is no longer the one that its scale was found for.

    Where weights are sharded, all ranks must call this.
    """
    reshard(model)
    modules = [(n, m) for n, m in calibrated_modules(model) if getattr(m, _CHECKSUM, None) is not None]
    checksums = weight_checksums([module for _, module in modules])
    return [n for (n, m), now in zip(modules, checksums, strict=True) if getattr(m, _CHECKSUM) != now]
