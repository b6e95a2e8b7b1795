"""A config laid over one model: every module that will be quantized, with its scheme, checked without data.

Whatever can be known to be wrong before data is read is refused here, naming modules and remedy: a run that would fail
after an hour of calibration, or a checkpoint that would not load, is not started.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
)
from compressed_tensors.utils.match import is_match, match_named_modules, match_targets
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_obs.adapters import adapters_of, base_of, inside_adapted, is_adapted
from lightning_obs.attention import find_states
from lightning_obs.errors import CalibrationError, CalibrationWarning, name_list
from lightning_obs.expert_checks import check_experts, check_experts_reload
from lightning_obs.flat_shards import unit_of
from lightning_obs.fusion import FUSED_GROUPS, find_fused, require_one_scheme
from lightning_obs.modules import holdable_type, matrix_shape, qparams_home, scheme_args
from lightning_obs.schemes import config_groups

Reload: TypeAlias = Literal["default", "dequantize", "unchecked"]


@dataclass(frozen=True)
class Target:
    """One module that will be quantized.

    Attributes:
        states: of an attention module, ``{"q": args, "k": args, "v": args}`` or k and v only; else empty.
    """

    name: str
    module: nn.Module
    scheme: QuantizationScheme
    states: Mapping[str, QuantizationArgs] = field(default_factory=dict)

    @property
    def args(self) -> dict[str, QuantizationArgs]:
        """What is quantized: ``{base name: args}``."""
        return dict(self.states or scheme_args(self.scheme))


@dataclass(frozen=True)
class Plan:
    """A config laid over a model."""

    config: QuantizationConfig
    targets: list[Target]
    fused: list[list[str]] = field(default_factory=list)

    @property
    def needs_data(self) -> bool:
        """Whether any activation has to be observed."""
        return any(
            base_name != "weight" and args.dynamic is not True
            for target in self.targets
            for base_name, args in target.args.items()
        )


def build_plan(
    model: nn.Module,
    config: QuantizationConfig,
    reload: Reload = "default",
    fused_groups: Sequence[Sequence[str]] = FUSED_GROUPS,
) -> Plan:
    """Find the modules that ``config`` quantizes, and check all that can be checked without data.

    Args:
        model: the module whose ``named_modules`` the targets name.
        config: from :func:`resolve_config`.
        reload: how the checkpoint will be loaded: ``default`` (``from_pretrained``), ``dequantize``
            (``CompressedTensorsConfig(dequantize=True)``) or ``unchecked`` (for another engine). Schemes that
            cannot be loaded that way today are refused. Only asked of transformers models.
        fused_groups: names, under one parent, of modules that are fused at inference.

    Raises:
        CalibrationError: see the message; nothing was changed.
    """
    by_target = {target: group for group in config_groups(config) for target in group.targets}
    written = [target for group in config_groups(config) for target in group.targets]
    twice = sorted({target for target in written if written.count(target) > 1})
    if twice:
        raise CalibrationError("a target stands in two groups", where=twice, remedy="keep it in one of them.")
    ignore = list(config.ignore or [])
    _require_matches(model, list(by_target), ignore)
    attention = find_states(model, config)
    targets = [Target(found.name, found.module, found.scheme, found.states) for found in attention]
    left_alone = {target.name for target in targets} | set(inside_adapted(model))
    for name, module in match_named_modules(model, list(by_target), ignore):
        if name in left_alone:
            continue
        pattern = match_targets(name, module, list(by_target))[0]
        module = base_of(module)
        if not (pattern.startswith("re:") and _holds_nothing(module)):
            targets.append(Target(name, module, by_target[pattern]))
    check_experts(model, {t.name: t.module for t in targets}, list(by_target), ignore)
    if not targets:
        raise CalibrationError(
            "nothing is left to quantize", got=f"targets {list(by_target)}, all of them matched by ignore {ignore}"
        )
    _check_modules(model, targets)
    _check_shared(model, targets)
    _check_shapes(targets)
    fused = find_fused((t.name for t in targets), fused_groups)
    require_one_scheme({t.name: _how(t.scheme) for t in targets}, fused)
    _warn_partly_fused(model, targets, fused_groups)
    _warn_cast_buffers(model)
    _check_reload(model, targets, reload)
    return Plan(config, targets, fused)


def _holds_nothing(module: nn.Module) -> bool:
    """A container or an activation function: a pattern like ``re:.*mlp.*`` matches it beside what it is meant for."""
    return next(module.parameters(recurse=False), None) is None


def _how(scheme: QuantizationScheme) -> str:
    """Equal for schemes that quantize alike, whatever they target."""
    return str(scheme.model_dump_json(exclude={"targets"}))


def _require_matches(model: nn.Module, targets: list[str], ignore: list[str]) -> None:
    def unmatched(patterns: list[str]) -> list[str]:
        return [p for p in patterns if not any(is_match(n, m, p) for n, m in model.named_modules())]

    missing = unmatched(targets)
    if missing:
        kinds = sorted(
            {type(m).__name__ for m in model.modules() if next(m.parameters(recurse=False), None) is not None}
        )
        raise CalibrationError(
            f"a target matches no module of {type(model).__name__}",
            where=missing,
            expected=f"a module name, a `re:` pattern (anchored at the front), or a class: {name_list(kinds)}",
        )
    unused = unmatched(ignore)
    if unused:
        warnings.warn(
            f"ignore matches no module of {type(model).__name__}: {name_list(unused)}", CalibrationWarning, stacklevel=4
        )


def _check_modules(model: nn.Module, targets: list[Target]) -> None:
    uncalled = {id(m.out_proj): n for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    never = [t.name for t in targets if id(t.module) in uncalled]
    if never:
        raise CalibrationError(
            "nn.MultiheadAttention reads the weight of its out_proj without calling it, so it cannot be quantized",
            where=never,
            remedy="list them in `ignore` (`re:.*out_proj$`).",
        )
    if hasattr(model, "get_base_model") or _other_adapters(model):
        raise CalibrationError(
            f"{type(model).__name__} holds adapters beside its weights",
            expected="adapters of LoRA on Linear modules, and the model inside peft's wrapper (get_base_model())",
            remedy="merge them first: model = model.merge_and_unload().",
        )
    attention = [
        t.name
        for t in targets
        if not t.states and holdable_type(t.module) is None and "Attention" in type(t.module).__name__
    ]
    if attention:
        raise CalibrationError(
            "attention that compressed-tensors cannot quantize: it finds no kv cache there",
            where=attention,
            expected="a module with k_proj and v_proj that is called with past_key_values",
            remedy="target the Linear modules.",
        )
    flat = [t.name for t in targets if unit_of(t.module) is not None and adapters_of(t.module) is not None]
    if flat:
        raise CalibrationError(
            "adapters beside weights that FSDP1 shards are not supported",
            where=flat,
            remedy="merge them first: model = model.merge_and_unload(), or use FSDP2 or DDP.",
        )
    done = [t.name for t in targets if _is_compressed(t.module)]
    if done:
        raise CalibrationError(
            "already quantized, its weights are on another grid",
            where=done,
            expected="a model in full precision",
            remedy="load the checkpoint that was quantized, or this one with CompressedTensorsConfig(dequantize=True).",
        )
    indices = [t.name for t in targets if isinstance(t.module, nn.Embedding) and t.scheme.input_activations is not None]
    if indices:
        raise CalibrationError(
            "an Embedding's input is token indices and cannot be quantized",
            where=indices,
            remedy="give embeddings a weight-only group of their own.",
        )
    no_matrix = [t for t in targets if t.scheme.weights is not None and matrix_shape(t.module) is None]
    if no_matrix:
        raise CalibrationError(
            "has no weight matrix to quantize",
            where=[f"{t.name} ({type(t.module).__name__})" for t in no_matrix],
            expected="a module with a weight of two or more dimensions",
            remedy="list it in `ignore`, or target its input_activations only.",
        )
    computed = [t.name for t in targets if t.scheme.weights is not None and is_parametrized(t.module, "weight")]
    if computed:
        raise CalibrationError(
            "the weight is computed at each access (torch.nn.utils.parametrize), so it cannot be quantized in place",
            where=computed,
            remedy="torch.nn.utils.parametrize.remove_parametrizations(module, 'weight') first.",
        )
    weights = {t.name: qparams_home(t.module) for t in targets if t.scheme.weights is not None}
    integer = [name for name, weight in weights.items() if weight is not None and not weight.is_floating_point()]
    if integer:
        raise CalibrationError("the weight is not floating point", where=integer, remedy="list it in `ignore`.")


def _other_adapters(model: nn.Module) -> bool:
    """Whether peft has anything in the model but LoRA on Linear modules."""
    layers = [m for m in model.modules() if hasattr(m, "base_layer") and hasattr(m, "merged")]
    return hasattr(model, "peft_config") and not (layers and all(map(is_adapted, layers)))


def _is_compressed(module: nn.Module) -> bool:
    status = getattr(module, "quantization_status", None)
    return status is not None and str(getattr(status, "value", status)) in ("compressed", "decompressed")


def _check_shared(model: nn.Module, targets: list[Target]) -> None:
    planned = {id(t.module): t for t in targets if t.scheme.weights is not None}
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and not is_adapted(module):  # whose weight is that of its base layer
            users.setdefault(id(weight), []).append((name, module))
    for sharing in users.values():
        chosen = [name for name, module in sharing if id(module) in planned]
        if len(sharing) > 1 and chosen:
            others = [name for name, _ in sharing if name not in chosen] or chosen[1:]
            raise CalibrationError(
                f"shares its weight with {name_list(others)} (tied); quantizing it would quantize both or untie them",
                where=chosen,
                remedy="list it in `ignore`, or untie first (clone the weight, set tie_word_embeddings=False).",
            )


def _check_shapes(targets: list[Target]) -> None:
    for base_name in ("weight", "input"):
        bad: dict[tuple[int, int], list[str]] = {}
        for target in targets:
            args = target.args.get(base_name)
            if args is None or not args.group_size or args.group_size < 1:
                continue
            shape = matrix_shape(target.module)
            columns = None if shape is None else shape[1]
            if columns is not None and columns % args.group_size:
                bad.setdefault((args.group_size, columns), []).append(target.name)
        for (size, columns), names in bad.items():
            fits = [g for g in (256, 128, 64, 32, 16) if columns % g == 0 and g < size]
            raise CalibrationError(
                f"{base_name} group size {size} does not divide the columns",
                where=names,
                got=f"{columns} columns",
                expected=f"a multiple of {size}",
                remedy=(f"use a group size of {fits[0]}, or " if fits else "") + "list the modules in `ignore`.",
            )


def _warn_partly_fused(model: nn.Module, targets: list[Target], groups: Sequence[Sequence[str]]) -> None:
    planned = {t.name for t in targets}
    kinds = {type(t.module) for t in targets}
    split = []
    for group in find_fused((n for n, m in model.named_modules() if type(m) in kinds), groups):
        inside = [name for name in group if name in planned]
        if inside and len(inside) < len(group):
            split.append(f"{'/'.join(n.rpartition('.')[2] for n in group)} in {group[0].rpartition('.')[0]}")
    if split:
        warnings.warn(
            "vLLM fuses these modules and wants all of a group quantized or none, but only a part is targeted: "
            f"{name_list(split)}",
            CalibrationWarning,
            stacklevel=4,
        )


def _warn_cast_buffers(model: nn.Module) -> None:
    """Buffers that no checkpoint holds (rotary frequencies) are made anew in float32 when transformers loads it."""
    if not hasattr(model, "save_pretrained"):
        return
    cast = [
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key, value in module.named_buffers(recurse=False)
        if key in module._non_persistent_buffers_set and value.dtype in (torch.bfloat16, torch.float16)
    ]
    if cast:
        warnings.warn(
            f"these buffers were cast to half precision and come back in float32, so the reloaded model will give "
            f"other logits: {name_list(cast)}. Load the model with dtype=torch.bfloat16 instead of casting it "
            f"(model.to, Trainer(precision='bf16-true')).",
            CalibrationWarning,
            stacklevel=4,
        )


def _check_reload(model: nn.Module, targets: list[Target], reload: Reload) -> None:
    """Refuse what does not load back with the same numbers (tried: compressed-tensors 0.20, transformers 5.23)."""
    if reload == "unchecked":
        return
    transformers_model = hasattr(model, "save_pretrained")
    if transformers_model:
        check_experts_reload(model, {t.name: t.scheme for t in targets}, reload)
    if reload == "dequantize":
        states = [t.name for t in targets if t.states]
        if states:
            raise CalibrationError(
                "transformers drops the quantization of attention states and the kv cache when it dequantizes",
                where=states,
                remedy=f'reload="default", leave the kv cache in full precision, {_ESCAPE}',
            )
        if transformers_model and len({_how(t.scheme) for t in targets}) > 1:
            raise CalibrationError(
                "transformers cannot dequantize a checkpoint with several schemes",
                remedy=f'reload="default", {_ESCAPE}',
            )
        return
    for target in targets:
        if target.scheme.weights is not None:
            _check_float_reload(target, target.scheme.weights, transformers_model)
            if transformers_model:
                _check_packed_reload(target, target.scheme.weights)


_ESCAPE = 'or set reload="unchecked" if another engine (vLLM) will load it.'


def _check_float_reload(target: Target, weights: QuantizationArgs, transformers_model: bool) -> None:
    """4-bit and microscaling floats are decompressed in bfloat16, whatever the model's dtype."""
    dtype = target.module.weight.dtype
    nvfp4 = weights.strategy == QuantizationStrategy.TENSOR_GROUP and dtype != torch.bfloat16
    mx = weights.scale_dtype == torch.uint8 and dtype != torch.bfloat16 and transformers_model
    if weights.type == "float" and (nvfp4 or mx):
        raise CalibrationError(
            f"compressed-tensors loads {'NVFP4' if nvfp4 else 'MX'} weights as bfloat16, which a {dtype} model "
            + ("cannot run" if transformers_model else "would compute with other numbers"),
            where=[target.name],
            remedy=f"load the model in bfloat16 (dtype=torch.bfloat16), {_ESCAPE}",
        )


def _check_packed_reload(target: Target, weights: QuantizationArgs) -> None:
    """4-bit and weight-only integers are packed into int32, which transformers unpacks for symmetric Linear only."""
    kind = holdable_type(target.module)
    packed = weights.type == "int" and (weights.num_bits < 8 or target.scheme.input_activations is None)
    escape = f'load it dequantized (reload="dequantize", then CompressedTensorsConfig(dequantize=True)), {_ESCAPE}'
    if packed and kind is nn.Linear and not weights.symmetric:
        raise CalibrationError(
            "transformers 5.23 cannot load packed asymmetric weights as they are",
            where=[target.name],
            remedy=f"use a symmetric scheme (W4A16), {escape}",
        )
    if packed and kind is nn.Embedding:
        raise CalibrationError(
            "transformers 5.23 cannot load a packed integer Embedding as it is",
            where=[target.name],
            remedy=f"use FP8 for the embedding, {escape}",
        )
