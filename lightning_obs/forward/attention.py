"""Put compressed-tensors' hooked modules into attention for a while, and take them out again.

compressed-tensors quantizes k and v where the cache is updated and q where the attention function is called: it adds
two modules to every attention module, a hook that nobody gets a handle of, and an attention function of its own to the
model's config and to a variable of the process. Here all of that has an end: observing and quantizing share the blocks
(:mod:`.shared_blocks`) that put it in, and the last one to leave takes everything out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from compressed_tensors.modeling import (
    IMPL_ATTR,
    KV_CACHE_ATTR,
    QuantizedAttentionImpl,
    initialize_hooked_attention,
    initialize_hooked_kv_cache,
    register_key_hook,
    register_query_hook,
    register_value_hook,
)
from torch import nn

from lightning_obs.errors import CalibrationError
from lightning_obs.forward.shared_blocks import SharedBlocks
from lightning_obs.model.additions import keep_hook_out, keep_out_of_copies, set_attributes, value_before

_REGISTER = {"q": register_query_hook, "k": register_key_hook, "v": register_value_hook}
#: compressed-tensors' switch of an attention module
_ENABLED = "quantization_enabled"


@contextmanager
def hooked_attention(model: nn.Module, modules: Mapping[nn.Module, Collection[str]]) -> Iterator[None]:
    """Let states be observed (:func:`register_state_hook`) or changed (:func:`register_state_change`) inside the block.

    ``modules`` are the attention modules of a transformers model, each with its states (q, k, v). compressed-tensors
    quantizes none of them meanwhile. q of two models with different attention functions is a CalibrationError.
    """
    cache, query = (KV_CACHE_ATTR, initialize_hooked_kv_cache), (IMPL_ATTR, initialize_hooked_attention)
    with ExitStack() as stack:
        if any("q" in states for states in modules.values()):
            stack.enter_context(_functions.around(model, partial(_attention_function, model)))
        for module, states in modules.items():
            for name, initialize in (cache, query) if "q" in states else (cache,):
                stack.enter_context(_hooks[name].around(module, partial(_hooked, model, module, name, initialize)))
            # A module that was calibrated before would quantize while it is observed.
            stack.callback(set_attributes(module, **{_ENABLED: False}))
        yield


def register_state_hook(module: nn.Module, base_name: str, hook: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """Call ``hook`` with q, k (both after rotary embedding) or v, ``(batch, heads, tokens, head_dim)``, unquantized.

    The module is inside :func:`hooked_attention`. Returns a function that removes the hook.
    """
    handle = _REGISTER[base_name](module, lambda _, value: hook(value))
    hooks = handle.hooks_dict_ref()
    assert isinstance(hooks, OrderedDict)
    hooks.move_to_end(handle.id, last=False)  # as torch's own prepend=True, which compressed-tensors does not pass on
    return keep_hook_out(_reader(module, base_name), handle)


def register_state_change(
    module: nn.Module, base_name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[], None]:
    """Let ``change`` replace q, k or v where it is read, after every :func:`register_state_hook` has seen it.

    It is not called if the module's quantization was switched off before. Returns a function that removes the hook.
    """
    was_switched_off = value_before(module, _ENABLED) is False

    def replace(_: nn.Module, value: torch.Tensor) -> torch.Tensor:
        setattr(module, _ENABLED, False)  # whoever wrote other scales meanwhile has cleared it
        return value if was_switched_off else change(value)

    return keep_hook_out(_reader(module, base_name), _REGISTER[base_name](module, replace))


def _reader(module: nn.Module, base_name: str) -> nn.Module:
    """compressed-tensors' module that reads a state, and has its hooks."""
    return module.get_submodule(IMPL_ATTR if base_name == "q" else KV_CACHE_ATTR)


def find_owner(root: nn.Module, module: nn.Module) -> nn.Module:
    """The outermost transformers model inside ``root`` that holds ``module``; a CalibrationError if there is none."""
    for candidate in root.modules():
        if hasattr(candidate, "set_attn_implementation") and any(m is module for m in candidate.modules()):
            return candidate
    raise CalibrationError(
        "attention states are quantized through the transformers model that holds them",
        got=type(root).__name__,
        remedy="pass the whole model.",
    )


# ---------------------------------------------------------------------- entered by the first, left by the last

#: blocks around attention modules (cache, attention function) and around models (the attention that they call)
_hooks, _functions = {KV_CACHE_ATTR: SharedBlocks(), IMPL_ATTR: SharedBlocks()}, SharedBlocks()


@contextmanager
def _hooked(
    model: nn.Module, module: nn.Module, name: str, initialize: Callable[[nn.Module, nn.Module], None]
) -> Iterator[None]:
    """compressed-tensors' module under ``name`` in an attention module."""
    if hasattr(module, name):  # loaded from a quantized checkpoint: not ours to take out
        yield
        return
    before = set(module._forward_pre_hooks)
    initialize(model, module)
    hooks = module._forward_pre_hooks.keys() - before  # compressed-tensors drops their handles

    def take_out(own: dict[str, Any]) -> None:
        own["_modules"].pop(name, None)
        for hook in hooks:
            own["_forward_pre_hooks"].pop(hook, None)
            own["_forward_pre_hooks_with_kwargs"].pop(hook, None)

    undo = keep_out_of_copies(module, take_out)
    try:
        yield
    finally:
        undo()


@contextmanager
def _attention_function(model: Any) -> Iterator[None]:
    """compressed-tensors sets the function of the whole model, and remembers the original one in one place for all."""
    used, original = model.config._attn_implementation, QuantizedAttentionImpl._original_impl
    others = [other for other in _functions.open if other is not model]
    if others and original != used:
        raise CalibrationError(
            "q is observed or quantized in two models with different attention functions at the same time",
            where=[type(other).__name__ for other in others],
            got=f"{original} and {used}",
            remedy="do one after the other, or load both with the same attn_implementation.",
        )
    configs = [(config, config._attn_implementation) for config in _configs(model)]
    plain = {id(config): copy(config) for config, _ in configs}

    def put_plain(own: dict[str, Any]) -> None:
        """Let copies of the modules that share the configs have them with the attention function of before."""
        for config, _ in configs:
            vars(plain[id(config)]).update(vars(config))
        for held in (own, *(config.__dict__ for config in plain.values())):
            held.update({name: plain[id(value)] for name, value in held.items() if id(value) in plain})
        for config, implementation in configs:
            plain[id(config)]._attn_implementation = implementation

    with ExitStack() as stack:
        for module in model.modules():
            if hasattr(module, "config"):
                stack.callback(keep_out_of_copies(module, put_plain, lambda: None))
        try:
            yield
        finally:
            for config, implementation in configs:  # a parent's setter reaches its children, which come after it
                config._attn_implementation = implementation
            QuantizedAttentionImpl._original_impl = original


def _configs(model: Any) -> list[Any]:
    """The configs of a model and of the models in it, parents first."""
    found: dict[int, Any] = {}
    waiting = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop(0)
        if hasattr(config, "_attn_implementation") and id(config) not in found:
            found[id(config)] = config
            waiting = [*(getattr(config, name, None) for name in getattr(config, "sub_configs", {})), *waiting]
    return list(found.values())
