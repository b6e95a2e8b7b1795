"""Attention states (q, k, v) and the kv cache: reading the user's scheme, and finding the modules that it reaches.

compressed-tensors has two forms. ``kv_cache_scheme`` quantizes k and v of every attention module that has a cache;
``ignore`` does not apply to it. A group that targets an attention class quantizes q, k and v by replacing the attention
function of the whole model, so it applies to all modules or none. Both are checked as compressed-tensors applies them
when it loads the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
    is_cached_attention_module,
)
from compressed_tensors.quantization.utils import KV_CACHE_TARGETS
from compressed_tensors.utils import get_head_dim
from compressed_tensors.utils.match import is_match, is_narrow_match, match_targets
from torch import nn

from lightning_obs.errors import CalibrationError, likely, name_list, refuse, warn
from lightning_obs.model.kinds import count_heads, is_transformers_model
from lightning_obs.numerics.qparams import ATTENTION
from lightning_obs.schemes.planned_modules import PlannedModule

KVCacheLike: TypeAlias = str | Mapping[str, Any] | QuantizationArgs | None

#: k and v in 8-bit float
KV_PRESETS: dict[str, QuantizationArgs] = {
    "FP8": QuantizationArgs(type="float", strategy=QuantizationStrategy.TENSOR, observer="static_minmax"),
    "FP8_HEAD": QuantizationArgs(type="float", strategy=QuantizationStrategy.ATTN_HEAD, observer="static_minmax"),
}


class StatesConfig(QuantizationConfig):
    """A config with separate observers for q, k and v, which share one ``QuantizationArgs`` otherwise.

    ``resolve_config`` makes it where the user names an observer for q, k or v; :func:`state_args` reads it.
    """

    #: by base name (q, k, v), the values of the fields ``observer`` and ``observer_kwargs`` of that state's args
    state_observers: dict[str, dict[str, Any]]


# ---------------------------------------------------------------------- the user's request


def resolve_kv_cache(kv_cache: KVCacheLike, in_config: QuantizationArgs | None) -> QuantizationArgs | None:
    """The ``QuantizationArgs`` of the kv cache; None: the cache is not quantized.

    ``resolve_config`` calls it once, when the options are made.

    Args:
        kv_cache: the user's option: the name of a preset, a dict of fields, or the args themselves.
        in_config: the ``kv_cache_scheme`` of the user's full config; None: it has none.

    Raises:
        CalibrationError: an unknown name or field, or both are given.
    """
    if kv_cache is not None and in_config is not None:
        raise CalibrationError(
            "the kv cache is given twice", got="kv_cache beside kv_cache_scheme", remedy="say it in one place."
        )
    requested = in_config if kv_cache is None else kv_cache
    if isinstance(requested, str):
        requested = KV_PRESETS.get(requested.upper(), requested)
    if requested is None:
        return None
    if isinstance(requested, QuantizationArgs):
        return requested.model_copy(deep=True)
    if isinstance(kv_cache, Mapping):
        try:
            return QuantizationArgs.model_validate(dict(kv_cache))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise CalibrationError(f"compressed-tensors refuses kv_cache: {error}", got=repr(kv_cache)) from error
    raise CalibrationError(
        "kv_cache",
        got=repr(kv_cache) + likely(str(kv_cache).upper(), KV_PRESETS),
        expected=f"{', '.join(KV_PRESETS)}, a dict of fields, or QuantizationArgs",
    )


def quantizes_states(group: QuantizationScheme) -> bool:
    """Whether a group without weights quantizes attention states (q, k, v) rather than inputs, judged without a model.

    Asked while the options are made (``schemes/config.py``), and for the words that describe a scheme.

    >>> quantizes_states(QuantizationScheme(targets=["LlamaAttention"], input_activations=KV_PRESETS["FP8"]))
    True
    """
    args = group.input_activations
    if args is None:
        return False
    return args.strategy == QuantizationStrategy.ATTN_HEAD or all(map(_names_attention, group.targets))


def state_args(config: QuantizationConfig, args: QuantizationArgs, base_name: str) -> QuantizationArgs:
    """A copy of ``args`` with the observer that ``config`` names for q, k or v; if it names none, with its own.

    Called when the options are made, to construct each observer once, and when the states of a model are planned.
    """
    state_observers = config.state_observers if isinstance(config, StatesConfig) else {}
    return args.model_copy(deep=True, update=state_observers.get(base_name))


# ---------------------------------------------------------------------- over one model


def find_states(
    model: nn.Module, config: QuantizationConfig, by_target: Mapping[str, QuantizationScheme]
) -> list[PlannedModule]:
    """The attention modules whose states ``config`` quantizes, checked without data; called by ``build_plan``.

    A group reaches attention modules by compressed-tensors' rule: a pattern that also matches a parent or children
    (``re:.*self_attn.*``) does not target the attention module.

    Args:
        model: the module that will be calibrated.
        config: the user's config.
        by_target: the group of each target in the config.

    Raises:
        CalibrationError: the model has none that compressed-tensors can hook, a scheme that they cannot have, or an
            attention function that would fail.
    """
    cached = {name: module for name, module in model.named_modules() if is_cached_attention_module(module)}
    groups = _groups_of(model, cached, config, by_target)
    kv_args = config.kv_cache_scheme
    if kv_args is None and not groups:
        return []
    _check_model(model, cached)
    _check_schemes(kv_args, groups)
    if groups:
        _check_q(model, cached, groups)
        scheme = next(iter(groups.values()))
        base_names: tuple[str, ...] = ATTENTION
    else:
        _warn_ignored_attention(cached, config.ignore or ())
        scheme = QuantizationScheme(targets=[*KV_CACHE_TARGETS], input_activations=kv_args)
        base_names = ATTENTION[1:]  # k and v
    args = scheme.input_activations
    assert args is not None  # _check_schemes
    _check_scales(model, args, list(cached))
    targets = []
    for name, module in cached.items():
        scheme_of_module = groups.get(name, scheme)
        args = scheme_of_module.input_activations  # groups may differ in their observers
        assert args is not None
        states = {base_name: state_args(config, args, base_name) for base_name in base_names}
        targets.append(PlannedModule(name, module, scheme_of_module, states))
    return targets


def _groups_of(
    model: nn.Module,
    cached: Mapping[str, nn.Module],
    config: QuantizationConfig,
    by_target: Mapping[str, QuantizationScheme],
) -> dict[str, QuantizationScheme]:
    """By name of an attention module, the group that targets it by compressed-tensors' rule (:func:`find_states`).

    Attention modules that no group targets, or that ``ignore`` names, are left out. ``cached``: those with a cache.
    """
    groups: dict[str, QuantizationScheme] = {}
    for name, module in cached.items():
        matching = match_targets(name, module, by_target)
        if not matching or is_match(name, module, config.ignore or ()):
            continue
        group = by_target[matching[0]]
        if is_narrow_match(model, group.targets, name):
            groups[name] = group
    return groups


def _warn_ignored_attention(cached: Mapping[str, nn.Module], ignore: Sequence[str]) -> None:
    """Warn of entries of ``ignore`` that name attention modules, whose cache is quantized all the same."""
    idle: list[str] = []
    for pattern in ignore:
        if _names_attention(pattern) and any(is_match(name, module, pattern) for name, module in cached.items()):
            idle.append(pattern)
    if idle:
        reason = "the kv cache of a model is quantized whole, ignore does not keep attention modules out of it"
        warn(f"{reason}: {name_list(idle)}")


def _attention_names(model: nn.Module) -> list[str]:
    """The names of the modules whose class is an attention by its name."""
    return [name for name, module in model.named_modules() if "attention" in type(module).__name__.lower()]


def _check_model(model: nn.Module, cached: Mapping[str, nn.Module]) -> None:
    """Refuse models that are not of transformers, cross-attention, and attention without a cache."""
    kind = type(model).__name__
    in_full = "leave the kv cache in full precision."
    if not is_transformers_model(model):
        raise CalibrationError(
            "attention states and the kv cache are quantized in transformers models only, through model.config",
            got=kind,
            remedy="give the transformers model itself, not a module around it (in Lightning: "
            'CalibrationCallback(module="...")).',
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise CalibrationError(
            f"{kind} has cross-attention, whose cache compressed-tensors does not hook", remedy=in_full
        )
    if not cached:
        raise CalibrationError(
            f"{kind} has no attention module whose cache compressed-tensors can quantize",
            got=f"attention modules {name_list(_attention_names(model)) or 'none'}",
            expected="a class named ...Attention with k_proj and v_proj (or qkv_proj, kv_b_proj) that is called with "
            "past_key_values",
            remedy=in_full,
        )


def _check_schemes(kv: QuantizationArgs | None, groups: Mapping[str, QuantizationScheme]) -> None:
    """Refuse a group that quantizes weights or outputs or no inputs, and groups and cache of several formats.

    Args:
        kv: the args of the kv cache; None: only groups quantize states.
        groups: the group of each targeted attention module, by the module's name.
    """
    with_weights: list[str] = []
    for name, group in groups.items():
        if group.weights is not None or group.output_activations is not None:
            with_weights.append(name)
    inputs = [group.input_activations for group in groups.values()]
    if with_weights or None in inputs:
        raise CalibrationError(
            "an attention module has states to quantize, no weights and no outputs",
            where=with_weights or list(groups),
            expected="a group of input_activations only, which stand for q, k and v",
            remedy="target its projections (`re:.*self_attn.*_proj$`) with the weights' scheme.",
        )
    formats: set[str] = set()
    for args in (*inputs, kv):
        if args is not None:
            formats.add(args.model_dump_json(exclude={"observer", "observer_kwargs"}))
    if len(formats) > 1:
        raise CalibrationError(
            "attention states are given two schemes, but a checkpoint has room for one",
            where=list(groups),
            got=" and ".join(sorted(formats)),
            remedy="give kv_cache (k and v) or one attention group (q, k and v).",
        )


def _check_q(model: Any, cached: Mapping[str, nn.Module], groups: Mapping[str, QuantizationScheme]) -> None:
    """Refuse a group for some of the attention modules only, eager attention, and several attention functions.

    compressed-tensors replaces the attention function that all modules look up through their ``config``; its
    replacement fails in a module that it has not hooked. A wrapper around an attention module looks up nothing itself.
    """
    with_config = [name for name in _attention_names(model) if hasattr(model.get_submodule(name), "config")]
    innermost = [name for name in with_config if not _has_submodule_in(name, with_config)]
    refuse(
        [name for name in dict.fromkeys([*cached, *innermost]) if name not in groups],
        "q is quantized in every attention module of a model or in none",
        remedy="target them all, or quantize k and v only (kv_cache=...).",
    )
    implementations = {str(model.config._attn_implementation)}
    for module in cached.values():
        config = getattr(module, "config", model.config)
        implementations.add(str(config._attn_implementation))
    used = sorted(implementations)
    if used in (["eager"], ["None"]) or len(used) > 1:
        raise CalibrationError(
            "compressed-tensors quantizes q in models with one attention function of transformers' registry, of which "
            "eager is none",
            got=f"attn_implementation {', '.join(used)}",
            remedy='load the model with attn_implementation="sdpa", or quantize k and v only (kv_cache=...).',
        )


def _has_submodule_in(name: str, names: Sequence[str]) -> bool:
    """Whether one of the names is below the module ``name``."""
    return any(candidate.startswith(f"{name}.") for candidate in names)


def _check_scales(model: Any, args: QuantizationArgs, names: list[str]) -> None:
    """Refuse scales that are dynamic, or not per tensor or per head, and a config without the number of heads."""
    if args.dynamic is not False:
        raise CalibrationError(
            "attention states are quantized with calibrated scales only", where=names, got=f"dynamic={args.dynamic}"
        )
    if args.strategy not in (QuantizationStrategy.TENSOR, QuantizationStrategy.ATTN_HEAD):
        strategy = QuantizationStrategy(args.strategy).value
        raise CalibrationError(
            f"strategy {strategy} cannot be applied to attention states", where=names, expected="tensor or attn_head"
        )
    config = model.config.get_text_config(decoder=True)
    try:
        count_heads(model), get_head_dim(config)
    except (ValueError, RuntimeError) as error:  # compressed-tensors or transformers cannot count the heads
        lacking = "without num_key_value_heads" if "key_value" in str(error) else "without heads"
        if isinstance(error, RuntimeError):  # raised by transformers, such as for Gemma 4
            lacking = "whose layers have heads of different sizes"
        raise CalibrationError(
            "compressed-tensors cannot tell the number of heads, so the checkpoint would not load",
            where=names,
            got=f"{type(config).__name__} {lacking}",
            remedy="leave the kv cache in full precision.",
        ) from error


def _names_attention(pattern: str) -> bool:
    """Whether a target or an entry of ``ignore`` is the name or class of attention modules, by how it ends."""
    return pattern.rstrip("$)").lower().endswith(("attention", "attn"))
