"""Put compressed-tensors' hooked modules into attention for a while, and take them out again.

compressed-tensors quantizes k and v where the cache is updated and q where the attention function is called: it adds
two modules to every attention module, a hook without giving its handle to anybody, and an attention function of its own
to the model's config and to a variable of the process. Here all of these are removed again: observing and quantizing
share the blocks (:mod:`.eager`) that put them in, and the last user takes them out. The hooks that observe are
in ``calibration/hooks.py``, the ones that quantize in ``quantized_forward.py``; both enter :func:`hooked_attention`.
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
from lightning_obs.forward.eager import SharedBlocks
from lightning_obs.model.mark import keep_hook_out, keep_out_of_copies, set_attributes, value_before

#: by base name of a state, the function of compressed-tensors that registers a hook on it
_REGISTER = {"q": register_query_hook, "k": register_key_hook, "v": register_value_hook}
#: compressed-tensors' switch of an attention module: False keeps it from quantizing the states itself
_ENABLED = "quantization_enabled"


@contextmanager
def hooked_attention(model: nn.Module, modules: Mapping[nn.Module, Collection[str]]) -> Iterator[None]:
    """Put compressed-tensors' modules into attention, so that its states can be hooked inside the ``with`` block.

    Observers' hooks (``calibration/hooks.py``) and the quantized forward enter it. :func:`register_state_hook` then
    observes a state, :func:`register_state_change` replaces it. compressed-tensors itself quantizes no state meanwhile.

    Args:
        model: a model of transformers.
        modules: its attention modules, each with its states (q, k, v).

    Raises:
        CalibrationError: q of another model, with another attention function, is in such a block now.
    """
    with ExitStack() as stack:
        if any("q" in states for states in modules.values()):
            stack.enter_context(_function_blocks.around(model, partial(_attention_function, model)))
        for module, states in modules.items():
            make_block = partial(_hooked, model, module, KV_CACHE_ATTR, initialize_hooked_kv_cache)
            stack.enter_context(_cache_blocks.around(module, make_block))
            if "q" in states:
                make_block = partial(_hooked, model, module, IMPL_ATTR, initialize_hooked_attention)
                stack.enter_context(_query_blocks.around(module, make_block))
            # A module that was calibrated before would quantize while it is observed.
            stack.callback(set_attributes(module, **{_ENABLED: False}))
        yield


def register_state_hook(module: nn.Module, base_name: str, hook: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """Let ``hook`` be called with a state at each forward, before the state is quantized: to observe it.

    ``calibration/hooks.py`` calls this for each observed state when a session is attached.

    Args:
        module: an attention module inside :func:`hooked_attention`.
        base_name: ``"q"``, ``"k"`` (both after rotary embedding) or ``"v"``.
        hook: takes the state ``(batch, heads, tokens, head_dim)``.

    Returns:
        A function that removes the hook.
    """
    handle = _REGISTER[base_name](module, lambda _, value: hook(value))
    hooks = handle.hooks_dict_ref()
    assert isinstance(hooks, OrderedDict)
    hooks.move_to_end(handle.id, last=False)  # as torch's own prepend=True, which compressed-tensors does not pass on
    return keep_hook_out(_reader(module, base_name), handle)


def register_state_change(
    module: nn.Module, base_name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[], None]:
    """Let ``change`` replace a state at each forward, to quantize it; hooks that observe see the state before.

    ``quantized_forward.fake_quantized_states`` calls this for each quantized state, when a block or a fit begins.

    Args:
        module: an attention module inside :func:`hooked_attention`.
        base_name: ``"q"``, ``"k"`` or ``"v"``.
        change: takes and returns a state; not called if the module's quantization was switched off by the user.

    Returns:
        A function that removes the hook.
    """
    was_switched_off = value_before(module, _ENABLED) is False

    def replace(_: nn.Module, value: torch.Tensor) -> torch.Tensor:
        # A calibration that wrote scales meanwhile has deleted the attribute, and a module without it would quantize.
        setattr(module, _ENABLED, False)
        return value if was_switched_off else change(value)

    return keep_hook_out(_reader(module, base_name), _REGISTER[base_name](module, replace))


def _reader(module: nn.Module, base_name: str) -> nn.Module:
    """The module of compressed-tensors through which a state passes, and which has the state's hooks.

    The functions above register hooks, which have to be kept out of copies of this module.
    """
    return module.get_submodule(IMPL_ATTR if base_name == "q" else KV_CACHE_ATTR)


def find_owner(root: nn.Module, module: nn.Module) -> nn.Module:
    """Find the transformers model whose config decides the attention function of ``module``; ``quantized`` calls this.

    Args:
        root: the user's model.
        module: an attention module inside it.

    Returns:
        The outermost transformers model that holds ``module``: ``root`` itself, or a model inside it.

    Raises:
        CalibrationError: there is none.
    """
    for candidate in root.modules():
        is_transformers_model = hasattr(candidate, "set_attn_implementation")
        if is_transformers_model and any(inner is module for inner in candidate.modules()):
            return candidate
    raise CalibrationError(
        "attention states are quantized through the transformers model that holds them",
        got=type(root).__name__,
        remedy="pass the whole model.",
    )


# ---------------------------------------------------------------------- blocks that users share

_cache_blocks = SharedBlocks()  # around attention modules: the cache of k and v
_query_blocks = SharedBlocks()  # around attention modules: the attention function, for q
_function_blocks = SharedBlocks()  # around models: the attention function that their modules call


@contextmanager
def _hooked(
    model: nn.Module, module: nn.Module, name: str, initialize: Callable[[nn.Module, nn.Module], None]
) -> Iterator[None]:
    """Put one of compressed-tensors' modules into an attention module for the length of the ``with`` block.

    :func:`hooked_attention` enters it once for each attention module and attribute, shared by all users. Copies of the
    attention module that are made in the block do not have compressed-tensors' module. Nothing happens if the attention
    module already has the attribute.

    Args:
        model: a model of transformers.
        module: its attention module.
        name: the attribute under which compressed-tensors puts its module.
        initialize: the function of compressed-tensors that puts it there.
    """
    if hasattr(module, name):  # loaded from a quantized checkpoint: not ours to take out
        yield
        return
    earlier_hooks = set(module._forward_pre_hooks)
    initialize(model, module)
    hooks = module._forward_pre_hooks.keys() - earlier_hooks  # compressed-tensors drops their handles

    def take_out(attributes: dict[str, Any]) -> None:
        """Delete compressed-tensors' module and its hooks from the ``__dict__`` of the attention module, or of a copy.

        Called for each copy, and by ``undo`` for the attention module itself.
        """
        attributes["_modules"].pop(name, None)
        for hook in hooks:
            attributes["_forward_pre_hooks"].pop(hook, None)
            attributes["_forward_pre_hooks_with_kwargs"].pop(hook, None)

    undo = keep_out_of_copies(module, take_out)
    try:
        yield
    finally:
        undo()


@contextmanager
def _attention_function(model: Any) -> Iterator[None]:
    """Restore the attention function of a model after the ``with`` block, in which compressed-tensors replaces it.

    compressed-tensors sets another function in the configs of the whole model, and remembers the original function in
    one place for all models. Copies that are made inside the block have the original function.
    :func:`hooked_attention` enters it, shared by all users, if q is observed or quantized.
    """
    original = QuantizedAttentionImpl._original_impl
    _refuse_other_function(model, original)
    implementations = [(config, config._attn_implementation) for config in _configs(model)]
    plain = {id(config): copy(config) for config, _ in implementations}

    def put_plain(attributes: dict[str, Any]) -> None:
        """Replace the configs among a copied module's attributes by configs with the original attention function.

        Called while a module that has a config is copied, with the copy's ``__dict__``.
        """
        for config, _ in implementations:  # other fields may have changed since the block began
            vars(plain[id(config)]).update(vars(config))
        # A config may hold further configs (of a text and a vision model), which are replaced, too.
        for holder in (attributes, *(vars(config) for config in plain.values())):
            for name, value in holder.items():
                if id(value) in plain:
                    holder[name] = plain[id(value)]
        for config, implementation in implementations:
            plain[id(config)]._attn_implementation = implementation

    with ExitStack() as stack:
        for module in model.modules():
            if hasattr(module, "config"):
                # Only copies get plain configs. The module keeps its config, which is restored below: nothing to undo.
                stack.callback(keep_out_of_copies(module, put_plain, lambda: None))
        try:
            yield
        finally:
            for config, implementation in implementations:  # a parent's setter reaches its children, which come later
                config._attn_implementation = implementation
            QuantizedAttentionImpl._original_impl = original


def _refuse_other_function(model: Any, original: str) -> None:
    """Refuse a model while another model, with a different attention function, is in a block.

    Args:
        model: about to enter its block.
        original: the name of the function that compressed-tensors remembers, for all models that are in blocks.
    """
    used = model.config._attn_implementation
    other_models = [other_model for other_model in _function_blocks.open if other_model is not model]
    if other_models and original != used:
        raise CalibrationError(
            "q is observed or quantized in two models with different attention functions at the same time",
            where=[type(other_model).__name__ for other_model in other_models],
            got=f"{original} and {used}",
            remedy="do one after the other, or load both with the same attn_implementation.",
        )


def _configs(model: Any) -> list[Any]:
    """The configs of a model and of the models in it, parents first."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        _add_configs(configs, getattr(module, "config", None))
    return list(configs.values())


def _add_configs(configs: dict[int, Any], config: Any) -> None:
    """Add a config and the configs in it to ``configs``, by their ids; nothing happens for one without attention."""
    if not hasattr(config, "_attn_implementation") or id(config) in configs:
        return
    configs[id(config)] = config
    for name in getattr(config, "sub_configs", {}):
        _add_configs(configs, getattr(config, name, None))
