"""Weights that are on the CPU or on disk until their module runs, as accelerate or compressed-tensors dispatched it.

accelerate wraps ``forward`` in a hook that sets the module's parameters before, and leaves them on the meta device
after it; a module's hook may bring in the parameters of all modules below it (``preload_module_classes``).
compressed-tensors puts a cache in the place of ``_parameters`` and ``_buffers``, which fetches a tensor at each access.
Here both are the same: a module is :data:`at_rest`, where metadata cost nothing, or :func:`brought_in` for the length
of a block, on the device on which it computes (:func:`execution_device`).

Nobody else moves dispatched modules: Lightning calls ``model.to(device)`` before a run and ``model.cpu()`` after it,
and both leave them where they are (:func:`~lightning_obs.model.weight.stay_put`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from compressed_tensors.offload import OffloadCache, disable_onloading
from safetensors import SafetensorError
from torch import nn

from lightning_obs.errors import CalibrationError
from lightning_obs.model.kinds import is_dispatched
from lightning_obs.model.mark import make_mark, mark_of

#: converts one tensor: the argument of ``nn.Module._apply``
Conversion: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

#: a block in which structure can be read, also by ``parameters()`` and ``state_dict()``, and nothing is loaded; a model
#: that compressed-tensors has dispatched must not run meanwhile
at_rest: Callable[[], _GeneratorContextManager[None]] = disable_onloading


def is_offloaded(module: nn.Module) -> bool:
    """Whether the module's own parameters are elsewhere while it does not run.

    Its tensors are then meta tensors, or in a cache of compressed-tensors. Asked before training, loading or tracing,
    which refuse such modules, and to tell their meta tensors from meta tensors that have no data.
    """
    return _hook_of(brought_in_by(module)) is not None or bool(_caches_of(module))


def execution_device(module: nn.Module) -> torch.device | None:
    """The device on which the module, or else the first dispatched module in it, computes; None: none is dispatched.

    Asked where quantization parameters are stored or read, and where inputs are moved: both belong on this device.
    """
    for inner in module.modules():
        for cache in _caches_of(inner).values():
            return torch.device(cache.onload_device)
        device = getattr(_hook_of(brought_in_by(inner)), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return None


def device_of(model: nn.Module) -> torch.device:
    """The device on which the inputs of a model or module belong.

    It is the device on which its first dispatched module computes, else the device of its first parameter. Called by
    the command line for its inputs, and by fine-tuning for learned scales.
    """
    device = execution_device(model)
    return next(model.parameters()).device if device is None else device


def brought_in_by(module: nn.Module) -> nn.Module:
    """The module whose hook brings in the module's own parameters, as :func:`register_offload` noted; or itself.

    Modules whose parameters one hook brings in are loaded together. Called wherever offloaded tensors are read or
    modules are sorted by what is loaded together.
    """
    mark = mark_of(module)
    if mark is None or mark.offload_owner is None:
        return module
    return mark.offload_owner


def brought_in(module: nn.Module) -> AbstractContextManager[None]:
    """A ``with`` block inside which the module's own parameters and buffers are in memory; they are not to be kept.

    :func:`~lightning_obs.model.weight.onloaded` calls it for dispatched modules. Nothing happens where the tensors are
    in memory already, so blocks of one module may be nested.
    """
    owner = brought_in_by(module)
    hook = _hook_of(owner)
    if hook is not None:
        for tensor in _own_tensors(owner, recurse=hook.place_submodules):
            if tensor.is_meta:
                return _brought_in_by_hook(owner, hook)
    caches = _caches_of(module)
    if caches:
        return _brought_in_by_caches(module, caches)
    return nullcontext()


@contextmanager
def _brought_in_by_hook(owner: nn.Module, hook: Any) -> Iterator[None]:
    """Run accelerate's hook before and after the block, as around a forward of ``owner``; called by ``brought_in``."""
    modules = list(owner.modules()) if hook.place_submodules else [owner]
    at_rest_parameters = [dict(module._parameters) for module in modules]
    try:
        with _read_errors_named(owner):
            hook.pre_forward(owner)
        yield
    finally:
        hook.post_forward(owner, None)
        # The hook makes new parameters: without this, tied ones would be two from now on.
        for module, parameters in zip(modules, at_rest_parameters, strict=True):
            module._parameters.update(parameters)


@contextmanager
def _brought_in_by_caches(module: nn.Module, caches: dict[str, Any]) -> Iterator[None]:
    """Put plain dicts of loaded tensors in the places of compressed-tensors' caches."""
    loaded: dict[str, dict[str, torch.Tensor]] = {}
    with _read_errors_named(module):
        for table, cache in caches.items():
            loaded[table] = {name: cache.onload(value) for name, value in cache.offloaded_values.items()}
    vars(module).update(loaded)
    try:
        yield
    finally:
        vars(module).update(caches)


@contextmanager
def _read_errors_named(module: nn.Module) -> Iterator[None]:
    """Raise a CalibrationError with the module's class where files of offloaded weights are gone or damaged."""
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
    """A value that is equal for tied parameters of dispatched modules only, while these are :data:`at_rest`.

    :func:`~lightning_obs.model.weight.identity` calls it. accelerate makes a new parameter at each call, so its
    source identifies it: memory, or a tensor of a file. Files that accelerate wrote itself hold every tied weight
    once more; there the ties that the model declares count (:func:`register_offload`).
    """
    mark = mark_of(module)
    if mark is not None and name in mark.tied_parameters:
        module, name = mark.tied_parameters[name]
    owner = brought_in_by(module)
    weights = getattr(_hook_of(owner), "weights_map", None)
    if weights is None:
        return id(getattr(module, name))
    path = next(path for path, inner in owner.named_modules() if inner is module)
    key = f"{path}.{name}" if path else name
    # A module of a larger model has a PrefixedDataset: a view, by a prefix, of the whole model's map.
    key = getattr(weights, "prefix", "") + key
    weights = getattr(weights, "dataset", weights)
    # The map is a dict of tensors, or an OffloadedWeightsLoader: tensors in memory (``state_dict``), and for those in
    # files their places (``index``).
    in_memory = getattr(weights, "state_dict", weights).get(key)
    if in_memory is not None:
        return "memory", in_memory.data_ptr()
    in_file = getattr(weights, "index", {}).get(key, {})
    if in_file.get("safetensors_file") is not None:
        return in_file["safetensors_file"], in_file.get("weight_name", key)
    # A file of accelerate's own, which no other parameter shares.
    return id(getattr(module, name))


def register_offload(model: nn.Module) -> None:
    """Note on the marks of accelerate's offloaded modules whose hook brings them in, and which parameters are tied.

    :func:`~lightning_obs.model.weight.register_surroundings` calls it when a model is taken up. A hook with
    ``place_submodules`` brings in all modules below its own; these cannot tell by themselves. accelerate makes a
    new tensor of each tied parameter, so only the model's declaration says that they are one.
    """
    for owner in model.modules():
        if getattr(_hook_of(owner), "place_submodules", False):
            for module in owner.modules():
                make_mark(module).offload_owner = owner
    for holder in model.modules():
        for tied_name, source_name in _declared_ties(holder).items():
            tied_path, _, tied_parameter = tied_name.rpartition(".")
            source_path, _, source_parameter = source_name.rpartition(".")
            tied = holder.get_submodule(tied_path)
            source = holder.get_submodule(source_path)
            if _is_hooked(tied) and _is_hooked(source):
                make_mark(tied).tied_parameters.setdefault(tied_parameter, (source, source_parameter))


def _declared_ties(holder: nn.Module) -> dict[str, str]:
    """The tied parameters that a transformers model declares: name -> name of the parameter that it is tied to."""
    # Asked of the class: peft's wrappers pass on the attributes of the model in them, which has other names.
    declaration = getattr(type(holder), "get_expanded_tied_weights_keys", None)
    return {} if declaration is None else declaration(holder)


def _is_hooked(module: nn.Module) -> bool:
    """Whether a hook of accelerate brings in the module's parameters."""
    return _hook_of(brought_in_by(module)) is not None


def _hook_of(module: nn.Module) -> Any:
    """The hook of accelerate on a module that brings in parameters, or None."""
    hook = vars(module).get("_hf_hook")
    for single in getattr(hook, "hooks", (hook,)):
        if getattr(single, "offload", False):
            return single
    return None


def _caches_of(module: nn.Module) -> dict[str, Any]:
    """The caches that compressed-tensors has put in the places of the module's ``_parameters`` and ``_buffers``."""
    caches = {}
    for table in ("_parameters", "_buffers"):
        if isinstance(vars(module)[table], OffloadCache):
            caches[table] = vars(module)[table]
    return caches


def _own_tensors(module: nn.Module, recurse: bool) -> Iterator[torch.Tensor]:
    # Its parameters and buffers; with ``recurse`` also those of the modules inside it.
    return chain(module.parameters(recurse), module.buffers(recurse))


# ---------------------------------------------------------------------- dispatched modules are not moved


def apply_in_place(root: nn.Module, conversion: Conversion, recurse: bool) -> nn.Module:
    """``nn.Module._apply`` of a model with dispatched modules, which stay where they are.

    ``model.to``, ``cpu`` or ``half`` ends here, as long as :func:`.stay_put` has replaced the model's ``_apply``.

    Args:
        root: the model.
        conversion: converts one tensor.
        recurse: whether the modules inside the model are converted, too.

    Raises:
        CalibrationError: the conversion would change the dtype of a dispatched module's tensors.
    """
    register_offload(root)
    dispatched = [module for module in root.modules() if module is not root and is_dispatched(module)]
    for module in dispatched:
        vars(module)["_apply"] = partial(_apply_below, module)
    try:
        with at_rest():
            apply_to = _apply_below if is_dispatched(root) else type(root)._apply
            return apply_to(root, conversion, recurse)
    finally:
        for module in dispatched:
            del vars(module)["_apply"]


def _apply_below(module: nn.Module, conversion: Conversion, recurse: bool = True) -> nn.Module:
    """``nn.Module._apply`` of a dispatched module: its own tensors stay, the modules below it are asked.

    Raises:
        CalibrationError: the conversion would change the dtype of the module's tensors.
    """
    for dtype in {tensor.dtype for tensor in _own_tensors(module, recurse=False)}:
        cast = conversion(torch.empty(0, dtype=dtype)).dtype
        if cast != dtype:
            raise CalibrationError(
                "an offloaded model cannot be cast to another dtype",
                where=[type(module).__name__],
                got=f"{cast} for {dtype}",
                remedy="load it in that dtype (from_pretrained(..., dtype=...)), with Trainer(precision='32-true').",
            )
    for child in module.children() if recurse else ():
        child._apply(conversion)
    return module
