"""FSDP1: what a module cannot say about its own parameters while they lie in flat shards.

FSDP1 joins the parameters of a unit (what one wrapper holds, without the wrappers inside it) to one flat tensor and
cuts that into equal lengths, wherever a weight begins or ends. Outside of a forward a module has a one-dimensional
piece of its weight, on many ranks an empty one. Neither its shape nor the unit that would gather it can be found from
there: the wrapper stands above the module, often above the model that is calibrated. So while the outermost wrapper is
at hand, every module gets its unit (:func:`register_fsdp_units`); the rest of the package asks the module.

Only one unit is made whole at a time, never the model (unless it is one unit: then nothing else can be done).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter, FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Shard

from lightning_obs.errors import CalibrationError
from lightning_obs.model.wrappers import inside
from lightning_obs.ranks.collectives import all_ranks_answer

_UNIT = "flat_unit"


@dataclass(eq=False)
class FlatUnit:
    """The parameters that one wrapper of FSDP1 makes whole together.

    Attributes:
        wrapper: of the unit.
        shapes: of the whole parameters, by module and by name in the module.
        firsts: which element of the whole parameter is the first one that this rank holds, likewise.
    """

    wrapper: FullyShardedDataParallel
    shapes: dict[nn.Module, dict[str, torch.Size]] = field(default_factory=dict)
    firsts: dict[nn.Module, dict[str, int]] = field(default_factory=dict)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that a parameter is shared out over."""
        group = self.wrapper.process_group
        assert isinstance(group, dist.ProcessGroup)
        return group


def register_fsdp_units(root: nn.Module) -> None:
    """Tell every module under ``root`` which unit of FSDP1 its parameters are in. Without FSDP1 this does nothing.

    Args:
        root: the outermost wrapper, or a module that holds all of them. A model inside of it, once that was called.

    Raises:
        CalibrationError: parameters that cannot be read (``use_orig_params=False``), that lie on the CPU, or whose
            unit is not under ``root``.
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
        if _UNIT not in vars(wrapper):
            vars(wrapper)[_UNIT] = unit = FlatUnit(wrapper)
            for module, name, shape, first in _flattened(wrapper):
                vars(module)[_UNIT] = unit
                if wrapper.sharding_strategy != ShardingStrategy.NO_SHARD:  # else the module keeps it whole
                    unit.shapes.setdefault(module, {})[name] = shape
                    unit.firsts.setdefault(module, {})[name] = first
    lost = [name for name, module in root.named_modules() if _UNIT not in vars(module) and _is_flattened(module)]
    if lost:
        raise CalibrationError(
            "these parameters are sharded by a wrapper of FSDP1 that is not in the model",
            where=lost,
            remedy="give the outermost FullyShardedDataParallel to CalibrationSession.",
        )


def _is_flattened(module: nn.Module) -> bool:
    return any(getattr(parameter, "_fsdp_flattened", False) for parameter in module.parameters(recurse=False))


def _flattened(wrapper: FullyShardedDataParallel) -> Iterator[tuple[nn.Module, str, torch.Size, int]]:
    """``(module, name, whole shape, first element on this rank)`` of every parameter that the wrapper has flattened."""
    # FSDP has no public word for this; FlatParameter's docstring describes these attributes.
    flat: Any = wrapper._flat_param
    if flat is None:
        return
    known = {}
    for (name, module, _), shape, held in zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True):
        known[module, name] = shape, held.intra_param_start_idx or 0
        yield module, name, *known[module, name]
    for name, module, _, first_name, first_module, _ in flat._shared_param_infos:
        yield module, name, *known[first_module, first_name]


def unit_of(module: nn.Module) -> FlatUnit | None:
    """The unit that holds the module's own parameters, as :func:`register_fsdp_units` found it."""
    unit = vars(module).get(_UNIT)
    return unit if isinstance(unit, FlatUnit) and module in unit.shapes else None


def whole_shape(module: nn.Module, name: str) -> torch.Size | None:
    """The shape of one of the module's own parameters where all of it is; None without such a parameter."""
    unit = unit_of(module)
    value = getattr(module, name, None)
    if unit is not None and name in unit.shapes[module]:
        return unit.shapes[module][name]
    return value.shape if isinstance(value, torch.Tensor) else None


@contextmanager
def whole_unit(module: nn.Module) -> Iterator[None]:
    """Make the parameters of the module's unit whole inside the ``with`` block; every rank must enter it.

    Without a unit of FSDP1 this does nothing.
    """
    unit = unit_of(module)
    with ExitStack() as stack:
        if unit is not None:
            # A first forward in inference mode has left a buffer that can be written to there only.
            buffer = getattr(unit.wrapper._flat_param, "_full_param_padded", None)
            with torch.inference_mode(buffer is not None and buffer.is_inference()):
                stack.enter_context(
                    FullyShardedDataParallel.summon_full_params(unit.wrapper, recurse=False, writeback=False)
                )
        yield


def by_unit(modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Modules that are made whole together, in the order of their first; without a unit each stands alone."""
    units: dict[object, list[nn.Module]] = {}
    for module in modules:
        units.setdefault(unit_of(module) or module, []).append(module)
    return list(units.values())


def in_shards(module: nn.Module) -> bool:
    """Whether this rank holds a part of the module's own parameters only (FSDP2, tensor parallelism, FSDP1)."""
    return unit_of(module) is not None or any(map(is_sharded, module.parameters(recurse=False)))


def is_sharded(value: torch.Tensor) -> bool:
    """Whether a DTensor is sharded. What FSDP1 shards are plain tensors: ask :func:`in_shards`."""
    return isinstance(value, DTensor) and any(not placement.is_replicate() for placement in value.placements)


def first_element(module: nn.Module, name: str) -> int:
    """Which element of one of the module's own parameters is the first that this rank holds (FSDP1; else 0)."""
    unit = unit_of(module)
    return 0 if unit is None else unit.firsts[module].get(name, 0)


def groups_of_shards(module: nn.Module, name: str = "weight") -> tuple[dist.ProcessGroup, ...]:
    """The groups of ranks over which the parts of a parameter add up to all of it; none if this rank has it whole."""
    value, unit = getattr(module, name, None), unit_of(module)
    if isinstance(value, DTensor):
        mesh, placements = value.device_mesh, value.placements
        return tuple(mesh.get_group(dim) for dim, placed in enumerate(placements) if not placed.is_replicate())
    return (unit.group,) if unit is not None and name in unit.shapes[module] else ()


def rows_of_ranks(weight: Any) -> list[tuple[int, int]] | None:
    """First row, and row after the last, of each rank, where ranks have whole rows of a weight in order; else None."""
    if not isinstance(weight, DTensor) or len(weight.placements) != 1:
        return None
    placed, ranks = weight.placements[0], weight.device_mesh.mesh.flatten().tolist()
    # A strided shard (tensor parallelism below FSDP) is a subclass and holds other rows.
    if type(placed) is not Shard or placed.dim != 0 or ranks != sorted(ranks):
        return None
    each = -(-len(weight) // len(ranks))
    return [(min(rank * each, len(weight)), min((rank + 1) * each, len(weight))) for rank in range(len(ranks))]


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """Gather a sharded DTensor; every rank must call this. Any other tensor is returned as it is.

    Whatever shards a module, its whole weight is ``whole_tensor(module.weight)`` inside
    :func:`~lightning_obs.model.sharding.whole_unit`.
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
