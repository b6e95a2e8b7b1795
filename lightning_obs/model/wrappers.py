"""Modules that stand around another one, and run it: of Fabric, DDP, FSDP1, torch.compile, activation
checkpointing, and peft's around a module that it trains whole (``modules_to_save``), which runs its copy of the module.

A wrapper is not a part of the model. It stands in names (``layers.0._fsdp_wrapped_module.fc1``,
``_forward_module.fc1``), so targets would not match and a checkpoint could not be loaded. Whoever reads names, or wants
a ``state_dict`` that gathers nothing, does it :func:`without_wrappers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

#: where they keep the module that they wrap: FSDP1, activation checkpointing, torch.compile, Fabric
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


@contextmanager
def without_wrappers(model: nn.Module) -> Iterator[None]:
    """Take all wrappers out of ``model`` inside the ``with`` block, so that names are those of the model without them.

    The model must not run meanwhile.
    """
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        if inside(parent) is None
        for name, child in parent._modules.items()
        if child is not None and unwrapped(child) is not child
    ]
    try:
        for parent, name, child in wrapped:
            parent._modules[name] = unwrapped(child)
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child
