"""Modules that hold another module and run it: wrappers, and LoRA layers of peft.

Wrappers come from Fabric, DDP, FSDP1, torch.compile, activation checkpointing, and from peft around a module that it
trains whole (``modules_to_save``), where the wrapper runs a copy of the module. Their attributes are parts of names
(``layers.0._fsdp_wrapped_module.fc1``), so targets would not match and a checkpoint could not be loaded. Code that
reads names, or needs a ``state_dict`` that gathers nothing, runs inside :func:`without_wrappers`.

A LoRA layer is exported as the quantized sum of base weight and adapters, as after peft's ``merge_and_unload``. So a
plan has the base layer, which remains after merging, and its weight is the sum, computed as by peft's ``merge``. peft
is not imported; its layers are recognized by their public attributes.
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
    """The module in a wrapper, which may be a wrapper, too; None if ``module`` is no wrapper."""
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return module.module
    if {"original_module", "modules_to_save"} <= module._modules.keys():
        copies = module._modules["modules_to_save"]
        assert isinstance(copies, nn.ModuleDict)
        active = [name for name in module.active_adapters if name in copies]  # type: ignore[union-attr]
        return copies[active[0]] if active else module._modules["original_module"]
    for attribute in _INSIDE:
        if attribute in module._modules:
            return module._modules[attribute]
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers."""
    wrapped = inside(module)
    return module if wrapped is None else unwrapped(wrapped)


def without_wrappers(model: nn.Module) -> AbstractContextManager[None]:
    """Take all wrappers, and so their names, out of ``model`` inside the ``with`` block, in which it must not run."""

    def core_of(module: nn.Module) -> nn.Module | None:
        return None if inside(module) is None else unwrapped(module)

    return _replaced(model, core_of)


def without_adapters(model: nn.Module) -> AbstractContextManager[None]:
    """Put base layers in the places of LoRA layers inside the ``with`` block, as in the merged model."""

    def base_layer_of(module: nn.Module) -> nn.Module | None:
        return module.get_submodule("base_layer") if is_adapted(module) else None

    return _replaced(model, base_layer_of)


@contextmanager
def _replaced(model: nn.Module, core_of: Callable[[nn.Module], nn.Module | None]) -> Iterator[None]:
    """Inside the ``with`` block, put ``core_of`` of each submodule that has one in the submodule's place."""
    cores: list[tuple[nn.Module, str, nn.Module]] = []
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in model.modules():
        if core_of(parent) is not None:
            continue
        for name, child in parent._modules.items():
            core = None if child is None else core_of(child)
            if child is not None and core is not None:
                cores.append((parent, name, core))
                replaced.append((parent, name, child))
    try:
        for parent, name, core in cores:
            parent._modules[name] = core
        yield
    finally:
        for parent, name, child in replaced:
            parent._modules[name] = child


# ---------------------------------------------------------------------- LoRA


def is_adapted(module: nn.Module) -> bool:
    """Whether the module is a LoRA layer around a Linear."""
    if not isinstance(getattr(module, "base_layer", None), nn.Linear):
        return False
    return all(hasattr(module, name) for name in ("get_delta_weight", "active_adapters", "merged", "lora_A"))


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
    """Whether a LoRA layer drops inputs of its adapters in training, where merged adapters would compute otherwise.

    In evaluation mode nothing is dropped. ``layer`` is None for a module without adapters.
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
    """Names of the modules in LoRA layers (base layers, adapters), which the merged model does not have."""
    names: set[str] = set()
    for layer_name, layer in model.named_modules():
        if not is_adapted(layer):
            continue
        for name, module in layer.named_modules(prefix=layer_name):
            if module is not layer:
                names.add(name)
    return names
