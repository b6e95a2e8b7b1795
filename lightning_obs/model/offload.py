"""Weights that rest on the CPU or on disk until their module runs, as accelerate or compressed-tensors dispatched it.

accelerate wraps ``forward`` in a hook that sets the module's parameters before, and leaves them on the meta device
after it; a module's hook may bring in the parameters of all modules below it (``preload_module_classes``).
compressed-tensors puts a cache in the place of ``_parameters`` and ``_buffers``, which fetches a tensor at each access.
Here both are the same: a module is :data:`at_rest`, where metadata cost nothing, or :func:`brought_in` for the length
of a block, on the device on which it computes (:func:`execution_device`).

Dispatched modules are not moved by anybody else: Lightning's ``model.to(device)`` and its ``model.cpu()`` at the end
leave it where it is (:func:`stay_put`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import _GeneratorContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from compressed_tensors.offload import OffloadCache, disable_onloading
from safetensors import SafetensorError
from torch import nn

from lightning_obs.errors import CalibrationError
from lightning_obs.model.additions import set_attributes
from lightning_obs.model.kinds import OWNER, is_dispatched

#: the attribute of a module that holds the parameters it shares with another module, by name
_TIED = "tied_to"

_Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

#: a block in which structure can be read, also by ``parameters()`` and ``state_dict()``, and nothing is loaded; a model
#: that compressed-tensors has dispatched must not run meanwhile
at_rest: Callable[[], _GeneratorContextManager[None]] = disable_onloading


def is_offloaded(module: nn.Module) -> bool:
    """Whether the module's own parameters rest elsewhere while it does not run."""
    return _hook_of(brought_in_by(module)) is not None or bool(_caches_of(module))


def execution_device(module: nn.Module) -> torch.device | None:
    """Where the module computes, or the first module below it; None: where its tensors are."""
    for inner in module.modules():
        hook, caches = _hook_of(brought_in_by(inner)), _caches_of(inner)
        device = next((cache.onload_device for cache in caches.values()), getattr(hook, "execution_device", None))
        if device is not None:
            return torch.device(device)
    return None


def device_of(model: nn.Module) -> torch.device:
    """Where the inputs of a model belong: on its first module's device, wherever its weights rest."""
    device = execution_device(model)
    return next(model.parameters()).device if device is None else device


def brought_in_by(module: nn.Module) -> nn.Module:
    """The module whose hook brings in the module's own parameters, as :func:`register_offload` found it; or itself."""
    owner: nn.Module = vars(module).get(OWNER, module)
    return owner


@contextmanager
def brought_in(module: nn.Module) -> Iterator[None]:
    """The module's own parameters and buffers are there inside the ``with`` block; they are not to be kept.

    Nothing happens where they are there already: blocks of one module nest, and inside one it is not offloaded.
    """
    owner, caches = brought_in_by(module), _caches_of(module)
    hook = _hook_of(owner)
    if hook is not None and any(value.is_meta for value in _own(owner, recurse=hook.place_submodules)):
        modules = list(owner.modules()) if hook.place_submodules else [owner]
        resting = [(inner._parameters, dict(inner._parameters)) for inner in modules]
        try:
            with _reading(owner):
                hook.pre_forward(owner)
            yield
        finally:
            hook.post_forward(owner, None)
            for parameters, before in resting:  # else tied parameters would be two from now on
                parameters.update(before)
    elif caches:
        values = {name: cache.offloaded_values for name, cache in caches.items()}
        with _reading(module):
            here = {n: {key: caches[n].onload(x) for key, x in held.items()} for n, held in values.items()}
        vars(module).update(here)
        try:
            yield
        finally:
            vars(module).update(caches)
    else:
        yield


@contextmanager
def _reading(module: nn.Module) -> Iterator[None]:
    """Say of offloaded weights whose files are gone or damaged which module they are of."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CalibrationError(
            "offloaded weights cannot be read",
            where=[type(module).__name__],
            got=f"{type(error).__name__}: {error}",
            expected="the files that the model was loaded from, and its offload_folder, until the end",
            remedy="load and calibrate the model again, and keep these files.",
        ) from error


def source_of(module: nn.Module, name: str) -> Hashable:
    """An identity that tied parameters of dispatched modules share, :data:`at_rest`.

    accelerate makes a new parameter at each call, so its source is asked: memory, or a tensor of a file. Files that it
    wrote itself hold every tied weight once more; there the model's own word is taken (:func:`register_offload`).
    """
    module, name = vars(module).get(_TIED, {}).get(name, (module, name))
    owner = brought_in_by(module)
    source = getattr(_hook_of(owner), "weights_map", None)
    if source is not None:
        key = next(key for key, inner in owner.named_modules() if inner is module)
        key = getattr(source, "prefix", "") + (f"{key}.{name}" if key else name)
        source = getattr(source, "dataset", source)
        held = getattr(source, "state_dict", source).get(key)
        place = getattr(source, "index", {}).get(key, {})
        if held is not None:
            return "memory", held.data_ptr()
        if place.get("safetensors_file") is not None:
            return place["safetensors_file"], place.get("weight_name", key)
    return id(getattr(module, name))


def register_offload(model: nn.Module) -> None:
    """Tell modules below a hook that brings in all of their parameters of it, and tied ones of each other."""
    for owner in model.modules():
        if getattr(_hook_of(owner), "place_submodules", False):
            for module in owner.modules():
                vars(module)[OWNER] = owner
    for holder in model.modules():
        # Of transformers; peft's wrappers have its attributes, under other names.
        of = getattr(type(holder), "get_expanded_tied_weights_keys", None)
        declared: dict[str, str] = of(holder) if of else {}
        for names in declared.items():
            tied, first = ((holder.get_submodule(path), name) for path, _, name in (n.rpartition(".") for n in names))
            if all(_hook_of(brought_in_by(module)) is not None for module, _ in (tied, first)):
                vars(tied[0]).setdefault(_TIED, {})[tied[1]] = first


def _hook_of(module: nn.Module) -> Any:
    """The hook of accelerate that brings in parameters, or None."""
    hook = vars(module).get("_hf_hook")
    return next((one for one in getattr(hook, "hooks", (hook,)) if getattr(one, "offload", False)), None)


def _caches_of(module: nn.Module) -> dict[str, Any]:
    own = vars(module)
    return {name: own[name] for name in ("_parameters", "_buffers") if isinstance(own[name], OffloadCache)}


def _own(module: nn.Module, recurse: bool) -> Iterator[torch.Tensor]:
    return chain(module.parameters(recurse), module.buffers(recurse))


# ---------------------------------------------------------------------- dispatched modules are not moved


def stay_put(root: nn.Module) -> Callable[[], None]:
    """Let ``root.to``, ``cpu``, ``half``... skip dispatched submodules, or refuse to cast them; returns the undoing."""

    def apply(function: _Change, recurse: bool = True) -> nn.Module:
        register_offload(root)
        kept = [module for module in root.modules() if module is not root and is_dispatched(module)]
        for module in kept:
            vars(module)["_apply"] = partial(_apply_below, module)
        try:
            with at_rest():
                apply_to = _apply_below if is_dispatched(root) else type(root)._apply
                return apply_to(root, function, recurse)
        finally:
            for module in kept:
                del vars(module)["_apply"]

    return set_attributes(root, _apply=apply)


def _apply_below(module: nn.Module, function: _Change, recurse: bool = True) -> nn.Module:
    for dtype in {value.dtype for value in _own(module, recurse=False)}:
        cast = function(torch.empty(0, dtype=dtype)).dtype
        if cast != dtype:
            raise CalibrationError(
                "an offloaded model cannot be cast to another dtype",
                where=[type(module).__name__],
                got=f"{cast} for {dtype}",
                remedy="load it in that dtype (from_pretrained(..., dtype=...)), with Trainer(precision='32-true').",
            )
    for child in module.children() if recurse else ():
        child._apply(function)
    return module
