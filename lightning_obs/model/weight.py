"""One way to a module's weight: its metadata without its data, and its data for the length of a block.

Where a parameter rests, :func:`place_of` says: whole on this rank, a DTensor (FSDP2, tensor parallelism), a piece of a
flat shard of FSDP1. In :func:`whole_unit` it is whole, and there if it is offloaded (:mod:`.offload`). LoRA
adapters beside a weight are added to it, wherever it rests.

FSDP1 joins the parameters of a unit (those in one wrapper and in no wrapper inside it) to one flat tensor, cut
into equal lengths. Outside of a forward a module has a piece of its weight, perhaps an empty one, and knows neither the
whole shape nor the wrapper that would gather it. So every module is told (:func:`register_fsdp_units`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter, FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.model.kinds import is_dispatched, to_matrix
from lightning_obs.model.offload import at_rest, brought_in, brought_in_by, source_of
from lightning_obs.model.wrappers import ADAPTERS, inside
from lightning_obs.ranks.collectives import all_ranks_answer

#: the attribute of a module that holds the places of its parameters that FSDP1 shards, by name
_FLAT = "flat_places"

# ---------------------------------------------------------------------- metadata and data of a weight


def matrix_shape(module: nn.Module) -> torch.Size | None:
    """The shape of the whole weight as a matrix, wherever it rests; None where the module has no such weight."""
    shape = whole_shape(module)
    matrix = None if shape is None else to_matrix(module, torch.empty(shape, device="meta"))
    return None if matrix is None else matrix.shape


@at_rest()
def whole_shape(module: nn.Module, name: str = "weight") -> torch.Size | None:
    """The shape of one of the module's own tensors where all of it is; None without such a tensor."""
    return place_of(module, name).shape if isinstance(getattr(module, name, None), torch.Tensor) else None


@contextmanager
def held(module: nn.Module) -> Iterator[torch.Tensor | None]:
    """The whole weight as a matrix ``(output channels, inputs of each)`` inside the ``with`` block, adapters merged.

    It is not to be written to or kept; None where the module has none. Every rank must enter a sharded weight's block.
    """
    with whole_unit(module):
        yield whole_matrix(module)


def whole_matrix(module: nn.Module) -> torch.Tensor | None:
    """As :func:`held`, of a module that stands inside :func:`whole_unit`."""
    weight = full_weight(module)
    return None if weight is None else to_matrix(module, whole_tensor(weight))


def full_weight(module: nn.Module) -> torch.Tensor | None:
    """The weight with the active LoRA adapters that stand beside it, with gradients to both; None without a weight."""
    weight, layer = getattr(module, "weight", None), adapters_of(module)
    if not isinstance(weight, torch.Tensor):
        return None
    if layer is None or getattr(layer, "disable_adapters", False):
        return weight
    with torch.autocast(weight.device.type, enabled=False):  # merging happens outside of autocast
        for name in layer.active_adapters:
            if name in layer.lora_A:
                weight = (weight + layer.get_delta_weight(name)).to(weight.dtype)
    return weight


def adapters_of(module: nn.Module) -> Any:
    """The LoRA layer around a base layer whose adapters still stand beside the weight, or None."""
    layer = vars(module).get(ADAPTERS)
    return None if layer is None or layer.merged else layer


@at_rest()
def in_shards(module: nn.Module) -> bool:
    """Whether this rank holds a part of the module's own parameters only (FSDP2, tensor parallelism, FSDP1)."""
    return any(place_of(module, name).groups for name, _ in module.named_parameters(recurse=False))


def onloaded(module: nn.Module) -> AbstractContextManager[None]:
    """A block in which the module's offloaded tensors are in memory; of sharded tensors, this rank's part."""
    return brought_in(module) if is_dispatched(module) else nullcontext()


def identity(module: nn.Module, name: str = "weight") -> Hashable:
    """An identity that tied parameters share, also where each offloaded module makes a tensor of its own."""
    return source_of(module, name) if is_dispatched(module) else id(getattr(module, name))


def identities(model: nn.Module) -> dict[str, Hashable]:
    """The :func:`identity` of each parameter and buffer, under all of its names."""
    return {
        f"{path}.{name}" if path else name: identity(module, name)
        for path, module in model.named_modules(remove_duplicate=False)
        for name in [*module._parameters, *module._buffers]
        if getattr(module, name) is not None
    }


@at_rest()
def model_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers; tied tensors count once."""
    own = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    return sum({one: own[name].nbytes for name, one in identities(model).items()}.values())


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """Gather a sharded DTensor; every rank must call this. Any other tensor is returned as it is."""
    value = value.detach()
    if not isinstance(value, DTensor):
        return value
    with all_ranks_answer():
        if value.itemsize > 1:
            return value.full_tensor()
        bits, mesh, placements = value.to_local().view(torch.uint8), value.device_mesh, value.placements
        whole = DTensor.from_local(bits, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())
        return whole.full_tensor().view(value.dtype)  # gloo knows no float8


def reshard(model: nn.Module) -> None:
    """Free the parameters that FSDP2 gathered for a forward (it leaves the outermost module whole)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# ---------------------------------------------------------------------- where a parameter rests


@dataclass(frozen=True)
class Place:
    """Where one of a module's own parameters or buffers rests; by default whole on this rank."""

    shape: torch.Size  # of the whole
    first: int = 0  # which element of the whole is the first of a piece of a flat shard
    groups: tuple[dist.ProcessGroup, ...] = ()  # of ranks whose parts add up to the whole; none: this rank has it whole
    unit: FullyShardedDataParallel | None = None  # the wrapper of FSDP1 that makes it whole


def place_of(module: nn.Module, name: str = "weight") -> Place:
    """Where one of the module's own parameters or buffers rests."""
    value, flat = getattr(module, name), vars(module).get(_FLAT, {}).get(name)
    if flat is not None or not isinstance(value, DTensor):
        return flat or Place(value.shape)
    mesh, placements = value.device_mesh, value.placements
    groups = tuple(mesh.get_group(dim) for dim, placed in enumerate(placements) if not placed.is_replicate())
    return Place(value.shape, 0, groups)


def part_here(module: nn.Module, name: str) -> tuple[torch.Tensor, int]:
    """This rank's part of a tensor (of a weight, adapters merged), and the place of its first element in the whole."""
    value = full_weight(module) if name == "weight" else getattr(module, name)
    assert isinstance(value, torch.Tensor)
    value = value.detach()
    if not isinstance(value, DTensor):
        return value, place_of(module, name).first
    local = value.to_local()
    _, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if local.shape[1:] == value.shape[1:]:
        return local, start[0] * value.shape[1:].numel() if start else 0
    whole = local.new_zeros(value.shape)  # columns of a row lie apart
    whole[tuple(slice(at, at + size) for at, size in zip(start, local.shape, strict=True))] = local
    return whole, 0


# ---------------------------------------------------------------------- units of FSDP1


@at_rest()
def register_fsdp_units(root: nn.Module) -> None:
    """Tell every module under ``root`` where FSDP1 has put its parameters. Without FSDP1 this does nothing.

    ``root`` is the outermost wrapper, or a module that holds all of them; a model inside of it, once that was called.

    Raises:
        CalibrationError: parameters that cannot be read, that lie on the CPU, or whose wrapper is not under ``root``.
    """
    wrappers = [module for module in root.modules() if isinstance(module, FullyShardedDataParallel)]
    if any(isinstance(parameter, FlatParameter) for parameter in root.parameters()):
        raise CalibrationError(
            "under FSDP1 with use_orig_params=False a module has no weight of its own that could be observed",
            got=f"{len(wrappers)} units of FSDP1",
            remedy="FSDPStrategy(use_orig_params=True), which is Lightning's default.",
        )
    if any(wrapper.cpu_offload.offload_params for wrapper in wrappers):
        raise CalibrationError(
            "calibration under FSDP1 with parameters on the CPU is not supported",
            got="cpu_offload=True",
            remedy="FSDPStrategy(cpu_offload=False), or FSDP2: ModelParallelStrategy.",
        )
    outermost: nn.Module | None = root
    while outermost is not None and not isinstance(outermost, FullyShardedDataParallel):
        outermost = inside(outermost)
    if outermost is not None:
        # Else the first unit that is made whole would take itself for the root. Buffers made here are written to later.
        with torch.inference_mode(False):
            outermost.check_is_root()
    for wrapper in wrappers:
        if _FLAT not in vars(wrapper):
            vars(wrapper)[_FLAT] = {}
            for module, name, place in _flattened(wrapper):
                places = vars(module).setdefault(_FLAT, {})
                if wrapper.sharding_strategy != ShardingStrategy.NO_SHARD:  # else the module keeps it whole
                    places[name] = place
    refuse(
        [
            name
            for name, module in root.named_modules()
            if _FLAT not in vars(module) and any(getattr(p, "_fsdp_flattened", False) for p in module.parameters(False))
        ],
        "these parameters are sharded by a wrapper of FSDP1 that is not in the model",
        remedy="give the outermost FullyShardedDataParallel to CalibrationSession.",
    )


def _flattened(wrapper: FullyShardedDataParallel) -> Iterator[tuple[nn.Module, str, Place]]:
    # FSDP has no public word for this; FlatParameter's docstring describes these attributes.
    flat: Any = wrapper._flat_param
    if flat is None:
        return
    known, group = {}, wrapper.process_group
    assert isinstance(group, dist.ProcessGroup)
    for (name, module, _), shape, here in zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True):
        known[module, name] = Place(shape, here.intra_param_start_idx or 0, (group,), unit=wrapper)
        yield module, name, known[module, name]
    for name, module, _, first_name, first_module, _ in flat._shared_param_infos:
        yield module, name, known[first_module, first_name]


def unit_of(module: nn.Module) -> FullyShardedDataParallel | None:
    """The wrapper of FSDP1 that makes the module's own parameters whole, as :func:`register_fsdp_units` found it."""
    return next((place.unit for place in vars(module).get(_FLAT, {}).values()), None)


@contextmanager
def whole_unit(module: nn.Module) -> Iterator[None]:
    """Make the module's parameters whole inside the ``with`` block: its unit of FSDP1, or its offloaded tensors.

    Every rank must enter it.
    """
    unit = unit_of(module)
    with ExitStack() as stack:
        stack.enter_context(onloaded(module))
        if unit is not None:
            # A first forward in inference mode has left a buffer that can be written to there only.
            buffer = getattr(unit._flat_param, "_full_param_padded", None)
            with torch.inference_mode(buffer is not None and buffer.is_inference()):
                stack.enter_context(unit.summon_full_params(unit, recurse=False, writeback=False))
        yield


def by_unit(modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Modules that are made whole together, in the order of their first; without a unit each stands alone."""
    units: dict[object, list[nn.Module]] = {}
    for module in modules:
        owner = brought_in_by(module) if is_dispatched(module) else module
        units.setdefault(unit_of(module) or owner, []).append(module)
    return list(units.values())
