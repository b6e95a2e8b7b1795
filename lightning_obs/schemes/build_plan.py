"""From a config and a model to the plan: every module that will be quantized, with its scheme, checked without data.

A run that would fail after an hour of calibration is refused here, before it starts. A ``check_`` raises a
CalibrationError that names modules and a remedy. After a ``warn_`` the calibration goes on: its result is right, but
perhaps not intended. Whether an engine loads the checkpoint is asked afterwards (``engines/``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import is_match, match_named_modules, match_targets
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_obs.errors import CalibrationError, name_list, refuse, warn
from lightning_obs.model.kinds import holds_parameters, is_transformers_model, kind_of, require_transformers
from lightning_obs.model.module_qparams import qparams_home
from lightning_obs.model.weight import adapters_of, identity, matrix_shape, unit_of, whole_shape
from lightning_obs.model.wrappers import adopt_adapters, base_of, inside_adapted, is_adapted
from lightning_obs.moe.experts import fused_experts, hub_names
from lightning_obs.observers import Key, Observer
from lightning_obs.schemes.attention_states import find_states
from lightning_obs.schemes.config import config_groups
from lightning_obs.schemes.patterns import check_patterns, leave_out_absent_classes
from lightning_obs.schemes.planned_modules import Plan, PlannedModule, find_fused, scheme_identity

_UNCALLED = "read without a call"
#: modules whose weights the code of a class reads without calling them, beside nn.MultiheadAttention's ``out_proj``
_READS: dict[str, tuple[str, ...]] = {
    "Mamba": ("dt_proj",),
    "WavLMAttention": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "LongcatFlashTopkRouter": ("classifier",),
}


def build_plan(model: nn.Module, config: QuantizationConfig, fused_sets: Sequence[Sequence[str]] = ()) -> Plan:
    """Find the modules to quantize, and check them without data.

    Args:
        model: the module whose ``named_modules`` the targets name.
        config: the user's request; it is copied.
        fused_sets: attribute names, under one parent, of the modules that an engine fuses.

    Raises:
        CalibrationError: see the message; nothing was changed.
    """
    require_transformers(model)
    config, ignore = config.model_copy(deep=True), list(config.ignore or [])
    by_target = {target: group for group in config_groups(config) for target in group.targets}
    written = [target for group in config_groups(config) for target in group.targets]
    refuse(
        sorted(target for target in by_target if written.count(target) > 1),
        "a target stands in two groups",
        remedy="keep it in one of them.",
    )
    by_target = leave_out_absent_classes(model, by_target)
    check_patterns(model, by_target, ignore)
    adopt_adapters(model)
    targets = find_states(model, config, by_target)
    left_alone, by_class = {target.name for target in targets} | inside_adapted(model), set[str]()
    for name, module in match_named_modules(model, by_target, ignore):
        if name not in left_alone:
            pattern, module = match_targets(name, module, by_target)[0], base_of(module)
            if is_meant(pattern, module):
                targets.append(PlannedModule(name, module, by_target[pattern]))
                by_class |= {name} if pattern in {kind.__name__ for kind in type(module).__mro__} else set()
    left_out = unsuited(model, targets, by_class)
    targets = [target for target in targets if target.name not in left_out]
    config.ignore = ignore = [*ignore, *left_out]
    check_stacked_experts(model, list(by_target), ignore)
    if not targets:
        known = sorted({type(module).__name__ for module in model.modules() if matrix_shape(module) is not None})
        raise CalibrationError(
            "nothing is left to quantize",
            got=f"targets {list(by_target)}, all of them matched by ignore {ignore}",
            expected=f"a target that `ignore` leaves, among {', '.join(known)}",
        )
    taken = {id(target.scheme) for target in targets}
    if idle := [pattern for pattern, group in by_target.items() if id(group) not in taken]:
        warn(f"other targets, `ignore` or a tied weight leave no module for {name_list(idle)}")
    check_targets(model, targets)
    fused = find_fused((t.name for t in targets), fused_sets)
    schemes = {t.name: scheme_identity(t.scheme) for t in targets}
    refuse(
        [name for members in fused if len({schemes[name] for name in members}) > 1 for name in members],
        "modules that are fused at inference have different schemes",
        expected="one scheme for all members of a fused set (q, k, v; gate, up; your fused_sets)",
        remedy="target or ignore them together.",
    )
    warn_cast_buffers(model)
    warn_left_in_float(model, targets, by_target, ignore)
    return Plan(config, targets, fused, left_out)


def is_meant(target: str, module: nn.Module) -> bool:
    """Whether a pattern that matches a module is meant for it: ``re:.*mlp.*`` also matches containers and activation
    functions, which hold no parameters."""
    return not target.startswith("re:") or holds_parameters(module)


def check_stacked_experts(model: nn.Module, targets: list[str], ignore: list[str]) -> None:
    """Refuse experts in 3-D parameters whose projections the targets would match, unless ``ignore`` names them."""
    linear, projections = nn.Linear(1, 1, device="meta"), hub_names(model)
    refuse(
        [
            f"{name} ({type(module).__name__})"
            for name, module in fused_experts(model).items()
            if not is_match(name, module, ignore)
            and any(is_match(f"{name}.0.{leaf}", linear, targets, ignore) for leaf in projections[name].values())
        ],
        "experts are stacked in 3-D parameters, so no target reaches them and they would stay in full precision",
        remedy="call lightning_obs.linearize_experts(model) first (in the constructor or configure_model), or list "
        "them in `ignore` (`re:.*experts`) to leave them on purpose.",
    )


# ---------------------------------------------------------------------- the modules that were chosen


def unsuited(model: nn.Module, targets: Sequence[PlannedModule], by_class: Set[str]) -> dict[str, str]:
    """Planned modules that cannot be quantized, by name the reason: their weight is that of an Embedding that is not
    planned, is read without a call, or has no elements.

    Only modules that a target selects by their class (``by_class``): one selected by a name or a pattern is refused
    later.
    """
    planned = {id(t.module) for t in targets if t.scheme.weights is not None}
    tied = {
        name: f"tied to {embedding}"
        for sharing in _shared_weights(model)
        for embedding in [n for n, m in sharing if isinstance(m, nn.Embedding) and id(m) not in planned][:1]
        for name, module in sharing
        if name in by_class and id(module) in planned
    }
    empty = {t.name: "no elements" for t in targets if t.name in by_class and 0 in (matrix_shape(t.module) or ())}
    return tied | empty | {t.name: _UNCALLED for t in _uncalled(model, targets) if t.name in by_class}


def _uncalled(model: nn.Module, targets: Sequence[PlannedModule]) -> list[PlannedModule]:
    """Planned modules whose weights code of PyTorch, transformers or mamba-ssm reads without calling them."""
    read = set[int]()
    for module in model.modules():
        kind = "Mamba" if "Mamba" in type(module).__name__ else type(module).__name__
        names = ("out_proj",) if isinstance(module, nn.MultiheadAttention) else _READS.get(kind, ())
        read.update(id(getattr(module, name, None)) for name in names)
    return [target for target in targets if id(target.module) in read]


def _shared_weights(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """The modules that share each weight, where several do."""
    users: dict[Hashable, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and not is_adapted(module):  # whose weight is that of its base layer
            users.setdefault(identity(module), []).append((name, module))
    return [modules for modules in users.values() if len(modules) > 1]


def check_targets(model: nn.Module, targets: list[PlannedModule]) -> None:
    """Refuse modules that cannot be quantized as their scheme says. The user reads of the first problem."""
    refuse(
        [target.name for target in _uncalled(model, targets)],
        "code of the model reads the weights of these modules without calling them, so they cannot be quantized",
        remedy="target the class (Linear), which leaves them out, or list them in `ignore`.",
    )
    _check_adapters(model, targets)
    others = [t for t in targets if not t.states and kind_of(t.module).stored_as is None]
    refuse(
        [t.name for t in others if "Attention" in type(t.module).__name__],
        "attention that compressed-tensors cannot quantize: it finds no kv cache there",
        expected="a module with k_proj and v_proj that is called with past_key_values",
        remedy="target the Linear modules.",
    )
    refuse(
        [t.name for t in targets if getattr(t.module, "quantization_status", None) in ("compressed", "decompressed")],
        "already quantized, its weights are on another grid",
        expected="a model in full precision",
        remedy="load the checkpoint that was quantized, or this one with CompressedTensorsConfig(dequantize=True).",
    )
    refuse(
        [t.name for t in targets if kind_of(t.module).reads_indices and t.scheme.input_activations is not None],
        "an Embedding's input is token indices and cannot be quantized",
        remedy="give embeddings a weight-only group of their own.",
    )
    weighted = [t for t in targets if t.scheme.weights is not None]
    refuse(
        [str(t) for t in weighted if matrix_shape(t.module) is None],
        "has no weight matrix to quantize",
        expected="a module with a weight of two or more dimensions",
        remedy="list it in `ignore`, or target its input_activations only.",
    )
    refuse(
        [t.name for t in weighted if is_parametrized(t.module, "weight")],
        "the weight is computed at each access (torch.nn.utils.parametrize), so it cannot be quantized in place",
        remedy="torch.nn.utils.parametrize.remove_parametrizations(module, 'weight') first.",
    )
    refuse(
        [t.name for t in weighted if (home := qparams_home(t.module)) is not None and not home.is_floating_point()],
        "the weight is not floating point",
        remedy="list it in `ignore`.",
    )
    _check_shared(model, weighted)
    _check_group_sizes(targets)


def _check_adapters(model: nn.Module, targets: list[PlannedModule]) -> None:
    """Refuse adapters of peft other than LoRA on Linear modules, and any beside weights that FSDP1 shards."""
    layers = [m for m in model.modules() if hasattr(m, "base_layer") and hasattr(m, "merged")]
    others = hasattr(model, "peft_config") and not (layers and all(map(is_adapted, layers)))
    if hasattr(model, "get_base_model") or others:
        raise CalibrationError(
            f"{type(model).__name__} holds adapters beside its weights",
            expected="adapters of LoRA on Linear modules, and the model inside peft's wrapper (get_base_model())",
            remedy="merge them first: model = model.merge_and_unload().",
        )
    refuse(
        [t.name for t in targets if unit_of(t.module) is not None and adapters_of(t.module) is not None],
        "adapters beside weights that FSDP1 shards are not supported",
        remedy="merge them first: model = model.merge_and_unload(), or use FSDP2 or DDP.",
    )


def _check_shared(model: nn.Module, weighted: list[PlannedModule]) -> None:
    """Refuse weights that several modules share (tied)."""
    planned = {id(t.module) for t in weighted}
    for sharing in _shared_weights(model):
        chosen = [name for name, module in sharing if id(module) in planned]
        others = [name for name, _ in sharing if name not in chosen] or chosen[1:]
        refuse(
            chosen,
            f"shares its weight with {name_list(others)} (tied); quantizing it would quantize both or untie them",
            remedy="list it in `ignore`, or untie first (clone the weight, set tie_word_embeddings=False).",
        )


def _check_group_sizes(targets: list[PlannedModule]) -> None:
    """Refuse groups that do not divide the columns."""
    for base_name in ("weight", "input"):
        all_columns = set[int]()
        bad: dict[tuple[int, int], list[str]] = {}
        for target in targets:
            size = getattr(target.args.get(base_name), "group_size", None) or 0
            shape = matrix_shape(target.module)
            if shape is None or size <= 0:
                continue
            all_columns.add(shape[1])
            if shape[1] % size:
                bad.setdefault((size, shape[1]), []).append(target.name)
        for (size, columns), names in bad.items():
            fits = [str(g) for g in (128, 64, 32, 16) if not any(width % g for width in all_columns)]
            refuse(
                names,
                f"{base_name} group size {size} does not divide the columns",
                got=f"{columns} columns",
                expected=f"a multiple of {size}",
                remedy=(f"use a group size of {' or '.join(fits[:2])}, or " if fits else "")
                + "list the modules in `ignore`.",
            )


def check_inputs_fit(targets: Sequence[PlannedModule], observers: Mapping[Key, Observer]) -> None:
    """Refuse an observer that needs one input channel per column of the weight where inputs have other channels."""
    refuse(
        [
            str(target)
            for target in targets
            if getattr(observers.get((target.name, "weight")), "needs_inputs", False)
            and (kind_of(target.module).reads_indices or len(whole_shape(target.module) or ()) != 2)
        ],
        "the observer of the weight needs inputs with one channel per column of the weight",
        expected="Linear modules",
        remedy="give these modules a group of their own with another observer (memoryless_mse), or ignore them.",
    )


# ---------------------------------------------------------------------- warnings


def warn_cast_buffers(model: nn.Module) -> None:
    """Warn of half-precision buffers that no checkpoint holds (rotary frequencies): transformers recreates them in
    float32."""
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


def warn_left_in_float(
    model: nn.Module, targets: Sequence[PlannedModule], by_target: dict[str, QuantizationScheme], ignore: list[str]
) -> None:
    """Warn if more than half of a model's bytes stay in full precision without the user having asked for it.

    ``ignore`` asks for it, and so do targets other than the default, the class ``Linear``, which matches little of a
    convolutional net. Embeddings of a transformers model usually stay, and do not count.
    """
    weighted = [target for target in targets if target.scheme.weights is not None]
    if not weighted or by_target.keys() != {"Linear"} or any(unit_of(target.module) for target in weighted):
        return
    meant = {id(p) for target in weighted for p in target.module.parameters(recurse=False)}
    meant |= {id(p) for n, m in model.named_modules() if is_match(n, m, ignore) for p in m.parameters()}
    if is_transformers_model(model):
        meant |= {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    left: Counter[str] = Counter()
    others: dict[str, list[PlannedModule]] = {}
    for name, module in model.named_modules():
        size = sum(p.nbytes for p in module.parameters(recurse=False) if id(p) not in meant)
        if size:
            left[type(module).__name__] += size
            others.setdefault(type(module).__name__, []).append(PlannedModule(name, module, by_target["Linear"]))
    total = sum(p.nbytes for p in model.parameters())
    if left.total() <= total / 2:
        return
    takeable = [kind for kind in left if _are_taken(model, others[kind])]
    sizes = ", ".join(f"{kind} {size:,}" for kind, size in left.most_common(4))
    more = f"{sum(left[kind] for kind in takeable):,}"
    remedy = f"Set targets={['Linear', *takeable]} to quantize {more} of them, or list" if takeable else "List"
    warn(
        f"{left.total():,} of {total:,} bytes of {type(model).__name__}'s parameters stay in full precision: "
        f"{sizes}. {remedy} in `ignore` the modules that should stay."
    )


def _are_taken(model: nn.Module, targets: list[PlannedModule]) -> bool:
    """Whether a plan with these modules, too, would be accepted."""
    if is_transformers_model(model) and any(kind_of(target.module).stored_as is None for target in targets):
        return False
    try:
        check_targets(model, targets)
    except CalibrationError:
        return False
    return True
