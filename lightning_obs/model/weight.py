"""One way to a module's weight: its metadata without its data, and its data for the length of a block.

A parameter is whole on this rank, or a DTensor (FSDP2, tensor parallelism), or a piece of a flat shard of FSDP1
(:mod:`.fsdp1`); it may be offloaded (:mod:`.offload`). :func:`place_of` tells which, without loading or gathering it.
Inside :func:`whole_unit`, FSDP1 has gathered it and offloaded tensors are in memory; :func:`whole_tensor` gathers a
DTensor. :func:`held` does all of this for a weight. LoRA adapters beside a weight are added to it everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parameter import is_lazy

from lightning_obs.errors import refuse
from lightning_obs.model.fsdp1 import gathered, register_fsdp_units
from lightning_obs.model.kinds import is_dispatched, register_adapters, to_matrix
from lightning_obs.model.mark import mark_of, set_attributes
from lightning_obs.model.offload import (
    Conversion,
    apply_in_place,
    at_rest,
    brought_in,
    brought_in_by,
    register_offload,
    source_of,
)
from lightning_obs.model.packed_weight import PackedWeight
from lightning_obs.model.place import Place
from lightning_obs.ranks.collectives import all_ranks_answer


def register_surroundings(model: nn.Module) -> None:
    """Note on the marks of a model's modules which wrapper of FSDP1, hook of accelerate or LoRA layer they belong to.

    A mark (:mod:`.mark`) is the record that this package keeps on a module. A session calls this function for the model
    that it calibrates, before it makes a plan. Copies of a model have no marks, so ``changed_since`` and
    ``refuse_unmerged`` (:mod:`.module_qparams`), which exports call, call it again before they read weights. (A model
    under FSDP1 cannot be copied.)

    Raises:
        CalibrationError: FSDP1 shards parameters in a way that calibration does not support
            (:func:`.register_fsdp_units`).
    """
    register_shards(model)
    if any(map(is_dispatched, model.modules())):
        register_offload(model)
    register_adapters(model)


def register_shards(root: nn.Module) -> None:
    """Note where FSDP1 keeps parameters (:func:`.register_fsdp_units`); nothing without ``torch.distributed``.

    The callbacks call it in each run, with the outermost module that Lightning has wrapped, and an export calls it.
    """
    if dist.is_initialized():
        register_fsdp_units(root)


def stay_put(root: nn.Module) -> Callable[[], None]:
    """Make ``root.to``, ``cpu``, ``half``... leave dispatched modules where they are.

    A dispatched module is one whose tensors accelerate or compressed-tensors moves (:mod:`.offload`). From now on its
    tensors are not moved, and a change of their dtype is a CalibrationError. All other modules are converted as before.
    The callbacks call this for the length of a run, and the command line for a model that it has loaded.

    Returns:
        A function that restores the old behaviour.
    """

    def apply(conversion: Conversion, recurse: bool = True) -> nn.Module:
        if any(map(is_dispatched, root.modules())):
            return apply_in_place(root, conversion, recurse)
        return type(root)._apply(root, conversion, recurse)

    return set_attributes(root, _apply=apply)


# ---------------------------------------------------------------------- metadata of a weight


@at_rest()
def whole_shape(module: nn.Module, name: str = "weight") -> torch.Size | None:
    """The shape of one of the module's own tensors, unsharded; None without such a tensor.

    Asked while a model is planned (``schemes/``), by the ONNX writer and ``forward/tracing.py`` for the kind of a
    layer, by ``moe/experts.py`` and by the report. The tensor is neither loaded (:data:`.at_rest`) nor gathered.
    """
    if not isinstance(getattr(module, name, None), torch.Tensor):
        return None
    return place_of(module, name).shape


def matrix_shape(module: nn.Module) -> torch.Size | None:
    """The shape of the whole weight as a matrix ``(output channels, inputs of each)``; None without such a weight.

    Asked while a model is planned, and by engines and observers before data; the weight is not loaded or gathered.
    """
    shape = whole_shape(module)
    if shape is None:
        return None
    matrix = to_matrix(module, torch.empty(shape, device="meta"))
    return None if matrix is None else matrix.shape


def place_of(module: nn.Module, name: str = "weight") -> Place:
    """Where one of the module's own parameters or buffers is.

    Called for a tensor's whole shape, for checksums, where ranks share out the search for scales, and where files are
    laid out. Nothing is loaded or gathered.
    """
    tensor = getattr(module, name)
    fsdp_place = _fsdp_places_of(module).get(name)
    if fsdp_place is not None:
        return fsdp_place
    if not isinstance(tensor, DTensor):
        return Place(tensor.shape)
    groups = []
    for dimension, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            groups.append(tensor.device_mesh.get_group(dimension))
    return Place(tensor.shape, groups=tuple(groups))


def _fsdp_places_of(module: nn.Module) -> dict[str, Place]:
    """The places of the module's parameters that FSDP1 shards, by name; empty without FSDP1."""
    mark = mark_of(module)
    if mark is None or mark.fsdp_places is None:
        return {}
    return mark.fsdp_places


def unit_of(module: nn.Module) -> FullyShardedDataParallel | None:
    """The wrapper of FSDP1 that shards the module's own parameters; None if they are not sharded by FSDP1.

    A *unit* is such a wrapper with all weights that it gathers together. Called by :func:`whole_unit`, :func:`by_unit`
    and ``calibration/sharded_weights.py`` before weights are gathered, and by the checks of ``schemes/build_plan.py``.
    """
    for place in _fsdp_places_of(module).values():
        return place.unit
    return None


@at_rest()
def in_shards(module: nn.Module) -> bool:
    """Whether this rank holds a part of the module's own parameters only (FSDP2, tensor parallelism, FSDP1).

    Asked before work that needs whole weights: GGUF files, traced graphs, sensitivities, learned scales and a
    calibration block by block (``calibration/stepwise.py``) cannot take such modules. If a model has one, all ranks
    take part in its export. No tensor is loaded (:data:`.at_rest`).
    """
    for name, parameter in module.named_parameters(recurse=False):
        if not is_lazy(parameter) and place_of(module, name).groups:
            return True
    return False


def refuse_uninitialized(named_modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise a CalibrationError for modules whose parameters have no shape yet (``nn.LazyLinear``).

    Called when modules were chosen to be quantized, before a model is measured or smoothed, which runs copies of it,
    and before a checkpoint is loaded into it.
    """
    uninitialized: list[str] = []
    for name, module in named_modules:
        if any(map(is_lazy, chain(module.parameters(recurse=False), module.buffers(recurse=False)))):
            uninitialized.append(f"{name} ({type(module).__name__})")
    refuse(
        uninitialized,
        "parameters have no shape before the first forward pass",
        remedy="run the model once on an example before this, such as model(x) under torch.no_grad() (of a "
        "LightningModule before it is given to the Trainer, or in its configure_model).",
    )


def adapters_of(module: nn.Module) -> Any:
    """The LoRA layer around a base layer, as long as its adapters are not merged into the weight; else None.

    Called wherever a weight is read, trained or watched, since these adapters count as a part of it, and by exports
    that cannot merge adapters.
    """
    mark = mark_of(module)
    if mark is None or mark.lora_layer is None or mark.lora_layer.merged:
        return None
    return mark.lora_layer


def identity(module: nn.Module, name: str = "weight") -> Hashable:
    """A value that is equal for tied parameters only, also where each offloaded module makes a tensor of its own.

    Called wherever a tied parameter must count once: in plans, checksums, sizes and checkpoints.
    """
    return source_of(module, name) if is_dispatched(module) else id(getattr(module, name))


def identities(model: nn.Module) -> dict[str, Hashable]:
    """The :func:`identity` of each parameter and buffer, under all of its names.

    Called when a checkpoint is written or loaded, since transformers stores each identity once, and for sizes.
    """
    by_name: dict[str, Hashable] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name in [*module._parameters, *module._buffers]:
            if getattr(module, name) is not None:
                by_name[f"{path}.{name}" if path else name] = identity(module, name)
    return by_name


@at_rest()
def model_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers; tied tensors count once, and packed weights as if they were decompressed.

    A packed weight (``PackedWeight``) has the shape and dtype that it has when it is decompressed. Of weights in shards
    the shards of all ranks count. So it is the size of the model before quantization. Called for the sizes in a report,
    and for the warning that an export is not smaller than the model. No tensor is loaded (:data:`.at_rest`) or
    gathered.
    """
    bytes_of: dict[Hashable, int] = {}
    for module in model.modules():
        for name in [*module._parameters, *module._buffers]:
            tensor = getattr(module, name)
            if tensor is not None:
                bytes_of[identity(module, name)] = place_of(module, name).shape.numel() * tensor.element_size()
    return sum(bytes_of.values())


# ---------------------------------------------------------------------- data of a weight


@contextmanager
def held(module: nn.Module) -> Iterator[torch.Tensor | None]:
    """The whole weight as a matrix ``(output channels, inputs of each)`` inside the ``with`` block, adapters merged.

    Entered for the errors of a report, and by fine-tuning; finalize and the writers call :func:`whole_unit` and
    :func:`whole_matrix` by themselves. The matrix is not to be written to or kept. It is None if the module has no such
    weight. Every rank must enter the block of a sharded weight.
    """
    with whole_unit(module):
        yield whole_matrix(module)


def whole_matrix(module: nn.Module) -> torch.Tensor | None:
    """The whole weight as a matrix, adapters merged, of a module that is inside :func:`whole_unit`; None without one.

    Called when finalize searches scales and when a weight is written. A DTensor is gathered: every rank must call it.
    """
    weight = full_weight(module)
    return None if weight is None else to_matrix(module, whole_tensor(weight))


@contextmanager
def whole_unit(module: nn.Module) -> Iterator[None]:
    """Gather the module's unit of FSDP1, and bring in its offloaded tensors, inside the ``with`` block.

    Entered before the weights of a unit are read, by :func:`held`, by finalize and by the writer of checkpoints.
    DTensors stay sharded. Every rank must enter it.
    """
    unit = unit_of(module)
    with onloaded(module), nullcontext() if unit is None else gathered(unit):
        yield


def by_unit(modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Group modules by what is gathered or loaded together: one :func:`whole_unit` makes a whole group readable.

    A group has the modules of one unit of FSDP1; or the modules that one hook of accelerate brings in; or one module.
    Called where weights are read one after the other, so that each unit is gathered once: for checksums
    (:mod:`.module_qparams`), for searches (``calibration/sharded_weights.py``), by the writer of checkpoints
    (``checkpoint/entries.py``).

    Returns:
        Lists of modules, in the order of their first modules.
    """
    units: dict[nn.Module, list[nn.Module]] = {}
    for module in modules:
        key: nn.Module | None = unit_of(module)
        if key is None:
            key = brought_in_by(module) if is_dispatched(module) else module  # the module that has the hook
        units.setdefault(key, []).append(module)
    return list(units.values())


def onloaded(module: nn.Module) -> AbstractContextManager[None]:
    """A ``with`` block in which the module's offloaded tensors are in memory; of sharded tensors, this rank's part.

    Entered before tensors are read for a search, for checksums, or for a copy that shares the weights.
    """
    return brought_in(module) if is_dispatched(module) else nullcontext()


def full_weight(module: nn.Module) -> torch.Tensor | None:
    """The weight plus its active LoRA adapters, with gradients to both; None without a weight.

    Called by the quantized forward, and where a weight is stored.
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    return AddedAdapters.of(module)(weight)


@dataclass(frozen=True)
class AddedAdapters:
    """A function that adds LoRA adapters to a weight: the adapters that were active when :meth:`of` made it.

    :func:`full_weight` calls it at once. The quantized forward in training keeps it, and calls it in the forward and
    again in the backward.

    Attributes:
        layer: the LoRA layer around the weight's module; None: there is none, and nothing is added to the weight.
        names: the names of the adapters in ``layer``.
    """

    layer: Any = None
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: nn.Module) -> AddedAdapters:
        """Make the function for the adapters that are a part of a module's weight now; none if they are disabled."""
        layer = adapters_of(module)
        if layer is None or getattr(layer, "disable_adapters", False):
            return cls()
        return cls(layer, tuple(name for name in layer.active_adapters if name in layer.lora_A))

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight plus the adapters, with gradients to both; decompressed, where it rests packed."""
        if isinstance(weight, PackedWeight):
            weight = weight.dequantize()
        for name in self.names:
            with torch.autocast(weight.device.type, enabled=False):  # peft merges outside of autocast
                weight = (weight + self.layer.get_delta_weight(name)).to(weight.dtype)
        return weight

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the adapters; the quantized forward in training asks, since they get gradients, too."""
        parameters: list[torch.Tensor] = []
        for name in self.names:
            for part in (self.layer.lora_A, self.layer.lora_B):
                parameters.extend(part[name].parameters())
        return parameters


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """Gather a sharded DTensor; every rank must call this. Any other tensor is returned detached, but not copied.

    Called when a weight is made whole for finalize, or written to a checkpoint.

    Raises:
        CalibrationError: another rank ended, or did not call this in time.
    """
    value = value.detach()
    if not isinstance(value, DTensor):
        return value
    with all_ranks_answer():
        if value.itemsize > 1:
            return value.full_tensor()
        # gloo does not know float8: bytes are gathered as integers.
        whole = DTensor.from_local(
            value.to_local().view(torch.uint8),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
        return whole.full_tensor().view(value.dtype)


def part_here(module: nn.Module, name: str) -> tuple[torch.Tensor, int]:
    """This rank's part of one of the module's tensors, adapters merged into a weight.

    ``checksums`` (:mod:`.module_qparams`) calls it for each tensor; the checksums of the ranks' parts are added up.

    Returns:
        The part, and the index of its first element in the flattened whole. A shard that is no run of rows comes as a
        tensor of the whole shape, with zeros where the other ranks have the values.
    """
    value = full_weight(module) if name == "weight" else getattr(module, name)
    assert isinstance(value, torch.Tensor)
    value = value.detach()
    if not isinstance(value, DTensor):
        return value, place_of(module, name).first
    local = value.to_local()
    _, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if local.shape[1:] == value.shape[1:]:
        elements_per_row = value.shape[1:].numel()
        return local, start[0] * elements_per_row if start else 0
    whole = local.new_zeros(value.shape)
    block = [slice(first, first + size) for first, size in zip(start, local.shape, strict=True)]
    whole[tuple(block)] = local
    return whole, 0


def reshard(model: nn.Module) -> None:
    """Free the parameters that FSDP2 gathered for a forward; FSDP2 itself leaves the outermost module gathered.

    Called after the model has run and before its weights are read: by ``remember`` and ``changed_since``
    (:mod:`.module_qparams`), by finalize, by the callbacks at the end of a validation and before an export, and by
    ``report/layer_errors.py``.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
