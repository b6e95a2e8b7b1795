"""Modules that stand around another one and run it: wrappers, and LoRA layers of peft.

Wrappers come from Fabric, DDP, FSDP1, torch.compile, activation checkpointing, and peft's around a module that it
trains whole (``modules_to_save``), which runs its copy of the module. They stand in names
(``layers.0._fsdp_wrapped_module.fc1``), so targets would not match and a checkpoint could not be loaded. Whoever reads
names, or wants a ``state_dict`` that gathers nothing, does it :func:`without_wrappers`.

A LoRA layer is exported as the sum of base weight and adapters (``merge_and_unload``), quantized. So the base layer is
planned, which remains after merging, and its weight is the sum, computed as by peft's ``merge``. peft is not imported;
its layers are known by their public attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lightning_obs.errors import CalibrationError
from lightning_obs.model.mark import make_mark

#: the submodule that is wrapped: of FSDP1, activation checkpointing, torch.compile, Fabric
_INSIDE = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module")


def inside(module: nn.Module) -> nn.Module | None:
    """The module that a wrapper stands around, itself perhaps a wrapper; None if the module is none."""
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return module.module
    if {"original_module", "modules_to_save"} <= module._modules.keys():
        copies = module._modules["modules_to_save"]
        assert isinstance(copies, nn.ModuleDict)
        active = [name for name in module.active_adapters if name in copies]  # type: ignore[union-attr]
        return copies[active[0]] if active else module._modules["original_module"]
    return next((module._modules[key] for key in _INSIDE if key in module._modules), None)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers."""
    wrapped = inside(module)
    return module if wrapped is None else unwrapped(wrapped)


def without_wrappers(model: nn.Module) -> AbstractContextManager[None]:
    """Take all wrappers, and so their names, out of ``model`` inside the ``with`` block, in which it must not run."""
    return _replaced(model, lambda module: unwrapped(module) if inside(module) is not None else None)


def without_adapters(model: nn.Module) -> AbstractContextManager[None]:
    """As :func:`without_wrappers`: base layers stand in the places of LoRA layers, as in the merged model."""
    return _replaced(model, lambda module: module.get_submodule("base_layer") if is_adapted(module) else None)


@contextmanager
def _replaced(model: nn.Module, core_of: Callable[[nn.Module], nn.Module | None]) -> Iterator[None]:
    places = [
        (parent, name, child, core)
        for parent in model.modules()
        if core_of(parent) is None
        for name, child in parent._modules.items()
        if child is not None and (core := core_of(child)) is not None
    ]
    try:
        for parent, name, _, core in places:
            parent._modules[name] = core
        yield
    finally:
        for parent, name, child, _ in places:
            parent._modules[name] = child


# ---------------------------------------------------------------------- LoRA


def is_adapted(module: nn.Module) -> bool:
    """Whether the module is a LoRA layer around a Linear."""
    return isinstance(getattr(module, "base_layer", None), nn.Linear) and all(
        hasattr(module, name) for name in ("get_delta_weight", "active_adapters", "merged", "lora_A")
    )


def register_adapters(model: nn.Module) -> list[str]:
    """Note on the mark of every base layer which LoRA layer surrounds it.

    From then on the adapters count as a part of the base layer's weight (:func:`~lightning_obs.model.weight.held`).

    Returns:
        Names of LoRA layers whose adapters cannot be added to the weight, each with the reason. Nothing is noted there.
    """
    refused = []
    for name, layer in model.named_modules():
        if not is_adapted(layer):
            continue
        reason = _why_not_mergeable(layer)
        if reason is None:
            make_mark(layer.base_layer).lora_layer = layer
        else:
            refused.append(f"{name} ({reason})")
    return refused


def base_of(module: nn.Module) -> nn.Module:
    """The base layer of a LoRA layer, any other module itself; an error if its adapters cannot be merged."""
    if not is_adapted(module):
        return module
    reason = _why_not_mergeable(module)
    if reason is not None:
        raise CalibrationError(f"adapters with {reason} cannot be a part of the quantized weight")
    assert isinstance(module.base_layer, nn.Linear)
    return module.base_layer


def drops_inputs(layer: nn.Module | None) -> bool:
    """Whether a LoRA layer drops inputs of its adapters in training, where it then is no sum with the base weight.

    In evaluation mode nothing is dropped. None, in place of a layer, has no adapters.
    """
    dropouts = getattr(layer, "lora_dropout", nn.ModuleDict())
    return any(getattr(dropout, "p", 0) > 0 for dropout in dropouts.values())


def _why_not_mergeable(layer: nn.Module) -> str | None:
    """The option of a LoRA layer that makes its output another one than with the sum of the weights; None: no such."""
    if getattr(layer, "lora_variant", None):
        return "a variant of LoRA (DoRA...)"
    if any(getattr(layer, "lora_bias", {}).values()):
        return "lora_bias"
    return None


def inside_adapted(model: nn.Module) -> set[str]:
    """Names of the modules that LoRA layers are made of; they are not modules of the merged model."""
    adapted = [(name, module) for name, module in model.named_modules() if is_adapted(module)]
    return {inner for name, module in adapted for inner, m in module.named_modules(prefix=name) if m is not module}
