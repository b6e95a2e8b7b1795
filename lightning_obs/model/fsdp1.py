"""Where FSDP1 keeps the parameters of each module.

FSDP1 joins the parameters of a unit (one wrapper, without the wrappers inside it) to one flat tensor, cut into equal
lengths. Outside of a forward a module has a piece of its weight, perhaps an empty one, and knows neither the whole
shape nor the wrapper that would gather it. :func:`register_fsdp_units` reads both from the wrappers, and notes them on
the mark of every module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel, ShardingStrategy

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.model.kinds import inside
from lightning_obs.model.mark import make_mark, mark_of
from lightning_obs.model.offload import at_rest
from lightning_obs.model.place import Place


@at_rest()
def register_fsdp_units(root: nn.Module) -> None:
    """Note on the marks of all modules under ``root`` where FSDP1 keeps their parameters.

    :func:`.register_shards` calls it for a session, an export and the callbacks, before they read weights. A second
    call for a wrapper does nothing, nor does a call for a model without FSDP1.

    Args:
        root: the outermost wrapper, or a module that holds it (a LightningModule). A module inside of the outermost
            wrapper is taken only if an earlier call had the wrapper.

    Raises:
        CalibrationError: parameters are flattened beyond recognition or on the CPU, or the wrapper that shards them is
            not under ``root``.
    """
    wrappers = [module for module in root.modules() if isinstance(module, FullyShardedDataParallel)]
    _refuse_unreadable(root, wrappers)
    _initialize_root(root)
    for wrapper in wrappers:
        if not _is_registered(wrapper):
            _register(wrapper)
    unregistered = []
    for name, module in root.named_modules():
        if _has_shards(module) and not _is_registered(module):
            unregistered.append(name)
    refuse(
        unregistered,
        "these parameters are sharded by a wrapper of FSDP1 that is not in the model",
        remedy="give the outermost FullyShardedDataParallel to CalibrationSession.",
    )


def _refuse_unreadable(root: nn.Module, wrappers: list[FullyShardedDataParallel]) -> None:
    # Refuse flat parameters without the original ones beside them, and parameters that FSDP1 keeps on the CPU.
    for parameter in root.parameters():
        if isinstance(parameter, FlatParameter):
            raise CalibrationError(
                "under FSDP1 with use_orig_params=False a module has no weight of its own that could be observed",
                got=f"{len(wrappers)} units of FSDP1",
                remedy="FSDPStrategy(use_orig_params=True), which is Lightning's default.",
            )
    for wrapper in wrappers:
        if wrapper.cpu_offload.offload_params:
            raise CalibrationError(
                "calibration under FSDP1 with parameters on the CPU is not supported",
                got="cpu_offload=True",
                remedy="FSDPStrategy(cpu_offload=False), or FSDP2: ModelParallelStrategy.",
            )


def _initialize_root(root: nn.Module) -> None:
    """Tell the outermost wrapper of FSDP1 that it is the root, as its first forward would.

    Else the first unit that is gathered would take itself for the root. Nothing happens unless ``root`` is this
    wrapper, or a wrapper of another kind around it (torch.compile's, say; :func:`.inside` steps into these). So nothing
    happens for a LightningModule that holds the wrapper. :func:`register_fsdp_units` calls this before it reads units.
    """
    outermost: nn.Module | None = root
    while outermost is not None and not isinstance(outermost, FullyShardedDataParallel):
        outermost = inside(outermost)  # None: no wrapper of any kind
    if outermost is not None:
        with torch.inference_mode(False):  # FSDP1 makes buffers here that it writes to later
            outermost.check_is_root()


def _register(wrapper: FullyShardedDataParallel) -> None:
    """Note on the marks of one unit's wrapper and modules where the modules' parameters are.

    The wrapper's own dict of places is empty. So is that of every module if each rank has the parameters whole
    (``NO_SHARD``). An empty dict says that the module is known (:func:`_is_registered`). :func:`register_fsdp_units`
    calls this for each wrapper that is not known yet.
    """
    make_mark(wrapper).fsdp_places = {}
    is_sharded = wrapper.sharding_strategy != ShardingStrategy.NO_SHARD
    for module, name, place in _flattened(wrapper):
        mark = make_mark(module)
        if mark.fsdp_places is None:
            mark.fsdp_places = {}
        if is_sharded:
            mark.fsdp_places[name] = place


def _flattened(wrapper: FullyShardedDataParallel) -> Iterator[tuple[nn.Module, str, Place]]:
    """Module, name and place of each parameter in the flat tensor of a wrapper; a tied one once for each module."""
    # FSDP has no public word for this; FlatParameter's docstring describes these attributes.
    flat: Any = wrapper._flat_param
    if flat is None:
        return
    group = wrapper.process_group
    assert isinstance(group, dist.ProcessGroup)
    places: dict[tuple[nn.Module, str], Place] = {}
    for info, shape, shard in zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True):
        name, module, _ = info
        place = Place(shape, shard.intra_param_start_idx or 0, (group,), unit=wrapper)
        places[module, name] = place
        yield module, name, place
    for name, module, _, first_name, first_module, _ in flat._shared_param_infos:
        yield module, name, places[first_module, first_name]


def _is_registered(module: nn.Module) -> bool:
    """Whether :func:`register_fsdp_units` has met a wrapper, or a module with parameters of one, before."""
    mark = mark_of(module)
    return mark is not None and mark.fsdp_places is not None


def _has_shards(module: nn.Module) -> bool:
    """Whether FSDP1 says that it has flattened one of the module's own parameters."""
    return any(getattr(parameter, "_fsdp_flattened", False) for parameter in module.parameters(recurse=False))


@contextmanager
def gathered(unit: FullyShardedDataParallel) -> Iterator[None]:
    """Gather the parameters of one unit of FSDP1 for the length of a ``with`` block, which every rank must enter.

    :func:`.whole_unit` enters it before weights are read. What is written to the parameters inside is lost at its end.
    """
    # A forward in inference mode has left a buffer that can be written to in inference mode only.
    buffer = getattr(unit._flat_param, "_full_param_padded", None)
    with ExitStack() as stack:
        with torch.inference_mode(buffer is not None and buffer.is_inference()):
            stack.enter_context(unit.summon_full_params(unit, recurse=False, writeback=False))
        yield
