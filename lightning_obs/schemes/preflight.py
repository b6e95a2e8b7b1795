"""What can be known to be wrong before data is read: a function for each kind of problem, naming modules and remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from compressed_tensors.utils.match import is_match
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_obs.errors import CalibrationError, name_list, warn
from lightning_obs.model.experts import (
    LinearExperts,
    expert_containers,
    fused_experts,
    hub_names,
)
from lightning_obs.model.kinds import compressible_type, is_transformers_model
from lightning_obs.model.lora import adapters_of, is_adapted
from lightning_obs.model.qparams import qparams_home
from lightning_obs.model.sharding import unit_of, whole_shape
from lightning_obs.model.weights import matrix_shape
from lightning_obs.observers.base import Key, Observer
from lightning_obs.schemes.fused_layers import find_fused
from lightning_obs.schemes.target import Target


def check_experts(model: nn.Module, planned: Mapping[str, nn.Module], targets: list[str], ignore: list[str]) -> None:
    """Refuse stacked experts that the targets mean but cannot reach; warn of a gate that vLLM does not quantize.

    Args:
        model: where the experts are.
        planned: the modules that will be quantized.
        targets: patterns of the config.
        ignore: patterns of the config.

    Raises:
        CalibrationError: experts in 3-D parameters would stay in full precision without having been asked to.
    """
    linear = nn.Linear(1, 1, device="meta")
    left = [
        f"{name} ({type(module).__name__})"
        for name, module in fused_experts(model).items()
        if not any(is_match(name, module, pattern) for pattern in ignore)
        and any(is_match(f"{name}.0.{leaf}", linear, targets, ignore) for leaf in hub_names(module).values())
    ]
    if left:
        raise CalibrationError(
            "experts are stacked in 3-D parameters, so no target reaches them and they would stay in full precision",
            where=left,
            remedy="call lightning_obs.linearize_experts(model) first (in the constructor or configure_model), or list "
            "them in `ignore` (`re:.*experts`) to leave them on purpose.",
        )
    partly = partly_planned(model, planned)
    if partly:
        warn(
            f"vLLM runs the experts of a layer in one scheme, but only some of their modules are targeted in: "
            f"{name_list(partly)}"
        )
    gates = []
    for name, experts in expert_containers(model).items():
        parent = name.rpartition(".")[0]
        for child_name, child in model.get_submodule(parent).named_children():
            full = f"{parent}.{child_name}" if parent else child_name
            if isinstance(child, nn.Linear) and full in planned and child.out_features in (1, len(experts)):
                gates.append(full)
    if gates:
        warn(
            f"these look like routers or gates of experts; vLLM runs most of them in full precision and would not load "
            f"them quantized: {name_list(gates)}. List them in `ignore`."
        )


def partly_planned(model: nn.Module, planned: Mapping[str, object]) -> list[str]:
    """Layers of experts of which some modules will be quantized and some will not."""
    partly = []
    for name, module in model.named_modules():
        if isinstance(module, LinearExperts):
            linears = [f"{name}.{n}" for n, m in module.named_modules() if isinstance(m, nn.Linear)]
            if 0 < sum(linear in planned for linear in linears) < len(linears):
                partly.append(name)
    return partly


def require_matches(model: nn.Module, targets: list[str], ignore: list[str]) -> None:
    """Refuse a target that matches nothing; warn of an entry of ``ignore`` that does."""

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
        warn(f"ignore matches no module of {type(model).__name__}: {name_list(unused)}")


def check_modules(model: nn.Module, targets: list[Target]) -> None:
    """Refuse modules that cannot be quantized, whatever the scheme's numbers."""
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
        if not t.states and compressible_type(t.module) is None and "Attention" in type(t.module).__name__
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


def check_shared(model: nn.Module, targets: list[Target]) -> None:
    """Refuse weights that several modules share (tied)."""
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


def check_shapes(targets: list[Target]) -> None:
    """Refuse groups that do not divide the columns."""
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


def warn_partly_fused(model: nn.Module, targets: list[Target], groups: Sequence[Sequence[str]]) -> None:
    """Warn where an engine fuses modules of which only some are targeted."""
    planned = {t.name for t in targets}
    kinds = {type(t.module) for t in targets}
    split = []
    for group in find_fused((n for n, m in model.named_modules() if type(m) in kinds), groups):
        inside = [name for name in group if name in planned]
        if inside and len(inside) < len(group):
            split.append(f"{'/'.join(n.rpartition('.')[2] for n in group)} in {group[0].rpartition('.')[0]}")
    if split:
        warn(
            "vLLM fuses these modules and wants all of a group quantized or none, but only a part is targeted: "
            f"{name_list(split)}"
        )


def warn_cast_buffers(model: nn.Module) -> None:
    """Buffers that no checkpoint holds (rotary frequencies) are made anew in float32 when transformers loads it."""
    if not is_transformers_model(model):
        return
    cast = [
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key, value in module.named_buffers(recurse=False)
        if key in module._non_persistent_buffers_set and value.dtype in (torch.bfloat16, torch.float16)
    ]
    if cast:
        warn(
            f"these buffers were cast to half precision and come back in float32, so the reloaded model will give "
            f"other logits: {name_list(cast)}. Load the model with dtype=torch.bfloat16 instead of casting it "
            f"(model.to, Trainer(precision='bf16-true'))."
        )


def check_inputs_fit(targets: Sequence[Target], observers: Mapping[Key, Observer]) -> None:
    """An observer that weighs a weight's columns by inputs needs one column per input channel."""
    wrong = [
        f"{target.name} ({type(target.module).__name__})"
        for target in targets
        if (target.name, "weight") in observers
        and observers[target.name, "weight"].needs_inputs
        and (isinstance(target.module, nn.Embedding) or len(whole_shape(target.module, "weight") or ()) != 2)
    ]
    if wrong:
        raise CalibrationError(
            "the observer of the weight needs inputs with one channel per column of the weight",
            where=wrong,
            expected="Linear modules",
            remedy="give these modules a group of their own with another observer (memoryless_mse), or ignore them.",
        )
