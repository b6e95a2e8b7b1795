"""From a config and a model to the plan: every module that will be quantized, with its scheme, checked without data.

A run that would fail after an hour of calibration is refused here, before it starts. A ``check_`` raises a
CalibrationError that names modules and a remedy. After a ``warn_`` the calibration goes on: its result is right, but
perhaps not intended. Whether an engine loads the checkpoint is asked afterwards (``engines/``).
Targets and the entries of ``ignore`` are patterns (:mod:`.patterns`).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, is_cached_attention_module
from compressed_tensors.utils.match import is_match, match_named_modules, match_targets
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_obs.errors import CalibrationError, name_list, refuse, warn
from lightning_obs.forward.linear_attention import LinearAttention
from lightning_obs.model.kinds import (
    LoneWeight,
    base_of,
    holds_parameters,
    inside_adapted,
    is_adapted,
    is_transformers_model,
    kind_of,
    may_hold_experts,
    register_adapters,
    require_transformers,
)
from lightning_obs.model.module_qparams import qparams_home
from lightning_obs.model.weight import adapters_of, identity, matrix_shape, refuse_uninitialized, unit_of, whole_shape
from lightning_obs.moe.experts import fused_experts, hub_names
from lightning_obs.observers import Key, Observer
from lightning_obs.schemes.attention_states import find_states
from lightning_obs.schemes.config import FOLLOWERS, config_groups
from lightning_obs.schemes.patterns import (
    check_patterns,
    leave_out_absent_classes,
    refuse_empty_plan,
    use_first_names,
    warn_ignored_containers,
)
from lightning_obs.schemes.planned_modules import Plan, PlannedModule, find_fused, scheme_identity

_UNCALLED = "read without a call"
#: modules whose weights the code of a class reads without calling them, beside nn.MultiheadAttention's ``out_proj``
_READS: dict[str, tuple[str, ...]] = {
    "Mamba": ("dt_proj",),
    "WavLMAttention": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "LongcatFlashTopkRouter": ("classifier",),
}


def build_plan(model: nn.Module, config: QuantizationConfig, fused_sets: Sequence[Sequence[str]] = ()) -> Plan:
    """Find the modules to quantize, check them without data, and warn of what the user may not have intended.

    Called when an observation begins, before any data; with a recipe also once before that, to see which parts of the
    recipe the model can run.

    Args:
        model: the module whose ``named_modules`` the targets name.
        config: the user's request; it is copied.
        fused_sets: attribute names, under one parent, of the modules that an engine fuses.

    Raises:
        CalibrationError: see the message. Nothing was changed but the package's own mark on the model's LoRA layers.
    """
    require_transformers(model)
    config = config.model_copy(deep=True)
    use_first_names(model, config)
    ignore = list(config.ignore or [])
    groups_by_target = leave_out_absent_classes(model, _groups_by_target(config))
    check_patterns(model, groups_by_target, ignore)
    register_adapters(model)  # each base layer's mark then names the LoRA layer around it: adapters count as its weight
    has_cache = any(map(is_cached_attention_module, model.modules()))
    targets: list[PlannedModule] = []
    if has_cache or config.kv_cache_scheme is not None:
        targets = find_states(model, config, groups_by_target)
    selected_by_class = _add_matching_modules(targets, model, groups_by_target, ignore)
    refuse_uninitialized((target.name, target.module) for target in targets)
    left_out = unsuited(model, targets, selected_by_class)
    targets = [target for target in targets if target.name not in left_out]
    warn_ignored_containers(model, config, groups_by_target, _names(targets))
    ignore += left_out
    config.ignore = ignore
    if may_hold_experts(model):
        check_stacked_experts(model, list(groups_by_target), ignore)
    if not targets:
        refuse_empty_plan(model, groups_by_target, config.ignore or (), left_out)
    _warn_idle_targets(targets, groups_by_target)
    _drop_activations_of_lone_weights(targets)
    check_targets(model, targets)
    targets += _find_blocks(model, config, targets, ignore)
    fused = find_fused(_names(targets), fused_sets)
    _check_fused_schemes(targets, fused)
    warn_cast_buffers(model)
    warn_left_in_float(model, targets, groups_by_target, ignore)
    return Plan(config, targets, fused, left_out)


def _drop_activations_of_lone_weights(targets: list[PlannedModule]) -> None:
    """Give each :class:`.LoneWeight` among the targets a scheme for its weight alone.

    A LoneWeight is a bare parameter as a module, which no input passes. Its new scheme lists the modules by name: a
    target ``Linear`` would match other modules, too.
    """
    schemes: dict[int, QuantizationScheme] = {}
    for index, target in enumerate(targets):
        if not isinstance(target.module, LoneWeight) or target.args.keys() <= {"weight"}:
            continue
        scheme = schemes.get(id(target.scheme))
        if scheme is None:
            changes: dict[str, object] = {"input_activations": None, "output_activations": None, "targets": []}
            scheme = target.scheme.model_copy(update=changes)
            schemes[id(target.scheme)] = scheme
        scheme.targets.append(target.name)
        targets[index] = PlannedModule(target.name, target.module, scheme)


def _names(targets: Iterable[PlannedModule]) -> list[str]:
    """The names of planned modules."""
    return [target.name for target in targets]


def _with_weights(targets: Sequence[PlannedModule]) -> list[PlannedModule]:
    """The planned modules whose weights will be quantized."""
    return [target for target in targets if target.scheme.weights is not None]


def _groups_by_target(config: QuantizationConfig) -> dict[str, QuantizationScheme]:
    """The group of each target. A target that is in two groups, or twice in one, is refused."""
    groups_by_target: dict[str, QuantizationScheme] = {}
    repeated: set[str] = set()
    for group in config_groups(config):
        for target in group.targets:
            if target in groups_by_target:
                repeated.add(target)
            groups_by_target[target] = group
    refuse(sorted(repeated), "a target is in two groups", remedy="keep it in one of them.")
    return groups_by_target


def _add_matching_modules(
    targets: list[PlannedModule],
    model: nn.Module,
    groups_by_target: Mapping[str, QuantizationScheme],
    ignore: Sequence[str],
) -> set[str]:
    """Add the modules that the user's targets match to ``targets``, each with its group as scheme.

    Where several targets match a module, the first by compressed-tensors' order counts: a name before a ``re:``
    pattern, a pattern before a class. Modules that are in ``targets`` already, modules inside LoRA layers, and modules
    without parameters that only a pattern matches (:func:`is_meant`) are not added.

    Returns:
        The names of the added modules that a target matches by their class, not by their name or a ``re:`` pattern.
    """
    planned_or_inner = {*_names(targets), *inside_adapted(model)}
    selected_by_class: set[str] = set()
    for name, module in match_named_modules(model, groups_by_target, ignore):
        if name in planned_or_inner:
            continue
        pattern = match_targets(name, module, groups_by_target)[0]
        module = base_of(module)
        if not is_meant(pattern, module):
            continue
        targets.append(PlannedModule(name, module, groups_by_target[pattern]))
        if pattern in (kind.__name__ for kind in type(module).__mro__):
            selected_by_class.add(name)
    return selected_by_class


def _find_blocks(
    model: nn.Module, config: QuantizationConfig, targets: Sequence[PlannedModule], ignore: Sequence[str]
) -> list[PlannedModule]:
    """The blocks whose outputs a preset with followers may quantize, to be appended to the planned modules.

    Followers are the batch norms and ReLUs that an engine fuses into the layer before them; ``INT8_ONNX`` and
    ``INT8_TENSORRT`` have a group of them (``FOLLOWERS``). Without this group the list is empty.

    A block is a module around convolutions, as the residual block of a ResNet. Its output is quantized if it is a sum
    of quantized outputs, which shows while data run (``calibration/quantized_outputs.py``); torch's own modules never
    return such a sum. Each ``nn.Identity`` in a batch norm is planned, too: a subclass of a batch norm may call it
    between norm and activation, and the range of the convolution's output is then measured there. Batch norms with
    torch's own forward (``is_follower``) call no submodule.
    """
    group = config.config_groups.get(FOLLOWERS)
    if not isinstance(group, QuantizationScheme):
        return []
    parents: set[str] = set()
    for target in targets:
        is_convolution = len(whole_shape(target.module) or ()) > 2
        name = target.name
        while is_convolution and "." in name:
            name = name.rpartition(".")[0]
            parents.add(name)
    scheme = group.model_copy(update={"targets": []})
    blocks = []
    for name in sorted(parents.difference(_names(targets))):
        module = base_of(model.get_submodule(name))
        is_torchs = type(module).__module__.startswith("torch.") or isinstance(module, torch.jit.ScriptModule)
        if not is_torchs and not is_match(name, module, ignore):
            blocks.append(PlannedModule(name, module, scheme, is_block=True))
    for target in targets:
        if not isinstance(target.module, nn.modules.batchnorm._BatchNorm) or target.is_follower:
            continue
        for child_name, child in target.module.named_children():
            name = f"{target.name}.{child_name}"
            if type(child) is nn.Identity and not is_match(name, child, ignore):
                blocks.append(PlannedModule(name, child, scheme))
    return blocks


def _warn_idle_targets(targets: Sequence[PlannedModule], groups_by_target: Mapping[str, QuantizationScheme]) -> None:
    """Warn of targets whose group has no module left, so that they quantize nothing."""
    used_groups = {id(target.scheme) for target in targets}
    idle = [pattern for pattern, group in groups_by_target.items() if id(group) not in used_groups]
    if idle:
        warn(
            "these targets quantize nothing, because each module that they match belongs to another target, is in "
            f"`ignore`, or has a tied weight: {name_list(idle)}"
        )


def _check_fused_schemes(targets: Sequence[PlannedModule], fused: Sequence[Sequence[str]]) -> None:
    """Refuse a fused set whose modules have different schemes."""
    identities = {target.name: scheme_identity(target.scheme) for target in targets}
    mixed: list[str] = []
    for members in fused:
        if len({identities[name] for name in members}) > 1:
            mixed += members
    refuse(
        mixed,
        "modules that are fused at inference have different schemes",
        expected="one scheme for all members of a fused set (q, k, v; gate, up; your fused_sets)",
        remedy="target or ignore them together.",
    )


def is_meant(target: str, module: nn.Module) -> bool:
    """Whether a module that a target matches should be quantized.

    Asked while planning, and when a checkpoint is loaded. ``re:.*mlp.*`` also matches containers and activation
    functions, which hold no parameters and are left out. A target that is a name or a class means every module that it
    matches.
    """
    return not target.startswith("re:") or holds_parameters(module)


def check_stacked_experts(model: nn.Module, targets: list[str], ignore: list[str]) -> None:
    """Refuse experts in 3-D parameters whose projections the targets would match, unless ``ignore`` names them.

    ``build_plan`` calls it for models that may hold experts. No target can match a part of such a parameter, so the
    experts are judged by the names that their Linears would have after ``linearize_experts``.
    """
    linear = nn.Linear(1, 1, device="meta")
    projections = hub_names(model)
    unreached: list[str] = []
    for name, module in fused_experts(model).items():
        if is_match(name, module, ignore):
            continue
        for projection in projections[name].values():
            if is_match(f"{name}.0.{projection}", linear, targets, ignore):
                unreached.append(f"{name} ({type(module).__name__})")
                break
    refuse(
        unreached,
        "experts are stacked in 3-D parameters, so no target reaches them and they would stay in full precision",
        remedy="call lightning_obs.linearize_experts(model) first (in the constructor or configure_model), or list "
        "them in `ignore` (`re:.*experts`) to leave them on purpose.",
    )


# ---------------------------------------------------------------------- the modules that were chosen


def unsuited(model: nn.Module, targets: Sequence[PlannedModule], selected_by_class: Set[str]) -> dict[str, str]:
    """The planned modules that a plan leaves out because they cannot be quantized: by name, the reason.

    ``build_plan`` calls it once it has collected the modules. The weight of such a module is tied to an Embedding that
    is not planned, is read without a call, or has no elements. Only modules that a target selects by their class
    (``selected_by_class``) are left out; a module selected by its name or a pattern is refused later.
    """
    reasons: dict[str, str] = {}
    planned = {id(target.module) for target in _with_weights(targets)}
    for sharing in _shared_weights(model):
        embedding = _unplanned_embedding(sharing, planned)
        for name, module in sharing:
            if embedding is not None and name in selected_by_class and id(module) in planned:
                reasons[name] = f"tied to {embedding}"
    for target in targets:
        if target.name in selected_by_class and 0 in (matrix_shape(target.module) or ()):
            reasons[target.name] = "no elements"
    for target in _uncalled(model, targets):
        if target.name in selected_by_class:
            reasons[target.name] = _UNCALLED
    return reasons


def _unplanned_embedding(sharing: Sequence[tuple[str, nn.Module]], planned: Set[int]) -> str | None:
    """The name of the first Embedding that is not planned, among the modules that share a weight; None without one.

    :func:`unsuited` calls it for each weight that several modules share.

    Args:
        sharing: names and modules.
        planned: ids of the planned modules.
    """
    for name, module in sharing:
        if isinstance(module, nn.Embedding) and id(module) not in planned:
            return name
    return None


def _uncalled(model: nn.Module, targets: Sequence[PlannedModule]) -> list[PlannedModule]:
    """Planned modules whose weights code of PyTorch, transformers or mamba-ssm reads without calling them.

    :func:`unsuited` and the checks of targets ask for them. A :class:`.LinearAttention` calls its ``out_proj``, unlike
    the ``nn.MultiheadAttention`` that it is a subclass of.
    """
    uncalled: set[int] = set()
    for module in model.modules():
        class_name = "Mamba" if "Mamba" in type(module).__name__ else type(module).__name__
        attributes = _READS.get(class_name, ())
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, LinearAttention):
            attributes = ("out_proj",)
        for attribute in attributes:
            uncalled.add(id(getattr(module, attribute, None)))
    return [target for target in targets if id(target.module) in uncalled]


def _shared_weights(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """The modules that share each weight, where several do.

    A weight that is computed at each access is not read: spectral_norm changes its buffers at each access in training.
    """
    users: dict[Hashable, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        if is_parametrized(module, "weight"):
            continue
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and not is_adapted(module):  # an adapted module shows its base's weight
            users.setdefault(identity(module), []).append((name, module))
    return [modules for modules in users.values() if len(modules) > 1]


def check_targets(model: nn.Module, targets: list[PlannedModule]) -> None:
    """Refuse modules that cannot be quantized as their scheme says; the error names the first problem.

    ``build_plan`` calls it for the planned modules. :func:`warn_left_in_float` calls it for modules that it may
    suggest as targets.
    """
    refuse(
        _names(_uncalled(model, targets)),
        "code of the model reads the weights of these modules without calling them, so they cannot be quantized",
        remedy="target the class (Linear), which leaves them out, or list them in `ignore`; of nn.MultiheadAttention, "
        "lightning_obs.linearize_attention(model) makes Linears that can be quantized.",
    )
    _check_adapters(model, targets)
    refuse(
        _names(filter(_is_unhooked_attention, targets)),
        "attention that compressed-tensors cannot quantize: it finds no kv cache there",
        expected="a module with k_proj and v_proj that is called with past_key_values",
        remedy="target the Linear modules.",
    )
    refuse(
        _names(filter(_is_quantized, targets)),
        "already quantized, its weights are on another grid",
        expected="a model in full precision",
        remedy="load the checkpoint that was quantized, or this one with CompressedTensorsConfig(dequantize=True); "
        "lightning_obs.keep_packed trains adapters on this one.",
    )
    refuse(
        _names(filter(_has_quantized_indices, targets)),
        "an Embedding's input is token indices and cannot be quantized",
        remedy="give embeddings a weight-only group of their own.",
    )
    refuse(
        _names(filter(_has_static_groups, targets)),
        "an activation with a calibrated scale per group, which compressed-tensors cannot apply to more than one token",
        expected="scales per group that are computed at run time",
        remedy="`dynamic: true` (of strategy tensor_group: `dynamic: local`), or the strategy tensor.",
    )
    _check_weights(_with_weights(targets))
    _check_shared(model, _with_weights(targets))
    _check_group_sizes(targets)


def _is_unhooked_attention(target: PlannedModule) -> bool:
    """Whether a target is an attention module in which compressed-tensors finds no kv cache."""
    is_known = target.states or kind_of(target.module).stored_as is not None
    return not is_known and "Attention" in type(target.module).__name__


def _is_quantized(target: PlannedModule) -> bool:
    """Whether transformers loaded the module from a quantized checkpoint."""
    return getattr(target.module, "quantization_status", None) in ("compressed", "decompressed")


def _has_quantized_indices(target: PlannedModule) -> bool:
    """Whether the scheme quantizes inputs of a module that reads token indices."""
    return kind_of(target.module).reads_indices and target.scheme.input_activations is not None


def _has_static_groups(target: PlannedModule) -> bool:
    """Whether the scheme quantizes an input or output by calibrated scales, one for each group of columns."""
    for base_name in ("input", "output"):
        args = target.args.get(base_name)
        if args is not None and args.strategy in ("group", "tensor_group") and args.dynamic is False:
            return True
    return False


def _check_weights(weighted: Sequence[PlannedModule]) -> None:
    """Refuse weights that are no matrices, are computed at each access, or hold no floating point numbers."""
    without_matrix = [target for target in weighted if matrix_shape(target.module) is None]
    refuse(
        [str(target) for target in without_matrix if getattr(target.module, "groups", 1) != 1],
        "the weight of a transposed convolution with groups is no matrix, so it cannot be quantized",
        expected="groups=1",
        remedy="list it in `ignore`.",
    )
    refuse(
        [str(target) for target in without_matrix],
        "has no weight matrix to quantize",
        expected="a module with a weight of two or more dimensions",
        remedy="list it in `ignore`, or target its input_activations only.",
    )
    refuse(
        [target.name for target in weighted if is_parametrized(target.module, "weight")],
        "the weight is computed at each access (torch.nn.utils.parametrize), so it cannot be quantized in place",
        remedy="list it in `ignore`, or call torch.nn.utils.parametrize.remove_parametrizations(module, 'weight') "
        "first (after the training, if the training needs it).",
    )
    not_floating: list[str] = []
    for target in weighted:
        # The tensor beside which qparams are stored is the weight itself; None: the attribute ``weight`` is no tensor.
        weight = qparams_home(target.module)
        if weight is not None and not weight.is_floating_point():
            not_floating.append(target.name)
    refuse(not_floating, "the weight is not floating point", remedy="list it in `ignore`.")


def _check_adapters(model: nn.Module, targets: list[PlannedModule]) -> None:
    """Refuse peft's wrapper, adapters other than LoRA on Linear modules, and any beside weights that FSDP1 shards.

    The wrapper (it has ``get_base_model``) is refused whatever its adapters, because the model inside is to be passed.
    A model that was merged or unloaded by peft 0.18 or older still has a ``peft_config``, but no module of peft.
    """
    layers = [module for module in model.modules() if hasattr(module, "base_layer") and hasattr(module, "merged")]
    are_all_lora = bool(layers) and all(map(is_adapted, layers))
    has_modules_of_peft = any(type(module).__module__.startswith("peft.") for module in model.modules())
    has_other_adapters = hasattr(model, "peft_config") and has_modules_of_peft and not are_all_lora
    if hasattr(model, "get_base_model") or has_other_adapters:
        raise CalibrationError(
            f"{type(model).__name__} holds adapters beside its weights",
            expected="adapters of LoRA on Linear modules, and the model inside peft's wrapper (get_base_model())",
            remedy="merge them first: model = model.merge_and_unload().",
        )
    in_shards: list[str] = []
    for target in targets:
        if adapters_of(target.module) is not None and unit_of(target.module) is not None:
            in_shards.append(target.name)
    refuse(
        in_shards,
        "adapters beside weights that FSDP1 shards are not supported",
        remedy="merge them first: model = model.merge_and_unload(), or use FSDP2 or DDP.",
    )


def _check_shared(model: nn.Module, weighted: list[PlannedModule]) -> None:
    """Refuse weights that several modules share (tied)."""
    planned = {id(target.module) for target in weighted}
    for sharing in _shared_weights(model):
        planned_names: list[str] = []
        other_names: list[str] = []
        for name, module in sharing:
            names = planned_names if id(module) in planned else other_names
            names.append(name)
        tied_to = other_names or planned_names[1:]
        refuse(
            planned_names,
            f"shares its weight with {name_list(tied_to)} (tied); quantizing it would quantize both or untie them",
            remedy="list it in `ignore`, or untie first (clone the weight, set tie_word_embeddings=False).",
        )


def _check_group_sizes(targets: list[PlannedModule]) -> None:
    """Refuse group sizes, of weights or inputs, that do not divide the columns of a module's weight matrix."""
    for base_name in ("weight", "input"):
        all_columns: set[int] = set()
        uneven: dict[tuple[int, int], list[str]] = {}  # names by group size and columns
        for target in targets:
            size = getattr(target.args.get(base_name), "group_size", None) or 0
            shape = matrix_shape(target.module)
            if shape is None or size <= 0:
                continue
            _, columns = shape
            all_columns.add(columns)
            if columns % size:
                uneven.setdefault((size, columns), []).append(target.name)
        for (size, columns), names in uneven.items():
            refuse(
                names,
                f"{base_name} group size {size} does not divide the columns",
                got=f"{columns} columns",
                expected=f"a multiple of {size}",
                remedy=_group_size_remedy(all_columns),
            )


def _group_size_remedy(all_columns: Set[int]) -> str:
    """The remedy of an error on group sizes: it names up to two usual sizes that divide the columns of all targets."""
    sizes: list[str] = []
    for size in (128, 64, 32, 16):
        if not any(columns % size for columns in all_columns):
            sizes.append(str(size))
    if not sizes:
        return "list the modules in `ignore`."
    return f"use a group size of {' or '.join(sizes[:2])}, or list the modules in `ignore`."


def check_inputs_fit(targets: Sequence[PlannedModule], observers: Mapping[Key, Observer]) -> None:
    """Refuse observers and roundings that need one input channel per column of the weight where inputs have others.

    Called when an observation begins, once observers are made.

    Args:
        targets: the planned modules.
        observers: of the plan, by module name and base name.

    Raises:
        CalibrationError: a convolution or an embedding is to be rounded, or has an observer that needs its inputs.
    """
    rounded: list[str] = []
    observed: list[str] = []
    for target in targets:
        observer = observers.get((target.name, "weight"))
        is_matrix = len(whole_shape(target.module) or ()) == 2
        if observer is None or (is_matrix and not kind_of(target.module).reads_indices):
            continue
        if observer.rounding is not None:
            rounded.append(str(target))
        if observer.needs_inputs:
            observed.append(str(target))
    refuse(
        observed,
        "the observer of the weight needs inputs with one channel per column of the weight",
        expected="Linear modules",
        remedy="give these modules a group of their own with another observer (memoryless_mse), or ignore them.",
    )
    refuse(
        rounded,
        "the rounding of the weight needs inputs with one channel per column of the weight",
        expected="Linear modules",
        remedy="leave out the option rounding, give it to the group of the Linears alone "
        "(weights: {'observer_kwargs': {'rounding': 'gptq'}}), and give these modules a group of their own; or ignore "
        "these modules.",
    )


# ---------------------------------------------------------------------- warnings


def warn_cast_buffers(model: nn.Module) -> None:
    """Warn of half-precision buffers that no checkpoint holds (rotary frequencies) and that come back in float32.

    transformers makes such buffers anew when it loads the checkpoint, most of them in float32, and some in the dtype of
    the model (the scale of Gemma's embedding). ``build_plan`` calls this for every model; only a model of transformers
    is judged.
    """
    if not is_transformers_model(model):
        return
    half: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        for key, value in module.named_buffers(recurse=False):
            is_half = value.dtype in (torch.bfloat16, torch.float16)
            if is_half and key in module._non_persistent_buffers_set:
                half[f"{name}.{key}" if name else key] = value.dtype
    if not half:
        return
    dtypes = _dtypes_of_loaded_buffers(model)
    cast = [name for name in half if dtypes.get(name, torch.float32) == torch.float32]
    if cast:
        dtype = half[cast[0]]
        precision = "bf16-true" if dtype == torch.bfloat16 else "16-true"
        warn(
            f"these buffers were cast to half precision and come back in float32, so the reloaded model will give "
            f"other logits: {name_list(cast)}. Load the model with dtype={dtype} instead of casting it "
            f"(model.to, Trainer(precision={precision!r}))."
        )


def _dtypes_of_loaded_buffers(model: Any) -> dict[str, torch.dtype]:
    """The dtypes that the buffers of a transformers model have when transformers loads it in its present dtype.

    :func:`warn_cast_buffers` asks this if a model has buffers in half precision.

    Returns:
        The dtypes by the name of the buffer; empty for a model with code of its own, which is not built again.
    """
    model_class = type(model)
    if not model_class.__module__.startswith("transformers."):
        return {}
    with torch.device("meta"):
        twin = model_class._from_config(copy.deepcopy(model.config), dtype=model.dtype)
    return {name: buffer.dtype for name, buffer in twin.named_buffers()}


def warn_left_in_float(
    model: nn.Module,
    targets: Sequence[PlannedModule],
    groups_by_target: Mapping[str, QuantizationScheme],
    ignore: list[str],
) -> None:
    """Warn if more than half of a model's bytes stay in full precision without the user having asked for it.

    The last step of ``build_plan``. A user asks for it by ``ignore``, or by targets other than the default, the class
    ``Linear``, which matches little of a convolutional net. Embeddings of a transformers model usually stay, and do not
    count. Under FSDP1 nothing is said: there a module has only a piece of its weight, perhaps an empty one
    (``model/fsdp1.py``), so the bytes that it holds say nothing.
    """
    weighted = _with_weights(targets)
    has_default_targets = groups_by_target.keys() == {"Linear"}
    if not weighted or not has_default_targets or any(unit_of(target.module) for target in weighted):
        return
    intended = _parameters_in_intended_precision(model, weighted, ignore)
    sizes: Counter[str] = Counter()  # bytes by class
    candidates: dict[str, list[PlannedModule]] = {}
    for name, module in model.named_modules():
        size = 0
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in intended:
                size += parameter.nbytes
        if size:
            class_name = type(module).__name__
            sizes[class_name] += size
            candidate = PlannedModule(name, module, groups_by_target["Linear"])
            candidates.setdefault(class_name, []).append(candidate)
    total = sum(parameter.nbytes for parameter in model.parameters())
    if sizes.total() <= total / 2:
        return
    quantizable = [class_name for class_name in sizes if _are_taken(model, candidates[class_name])]
    remedy = "List"
    if quantizable:
        quantizable_bytes = sum(sizes[class_name] for class_name in quantizable)
        remedy = f"Set targets={['Linear', *quantizable]} to quantize {quantizable_bytes:,} of them, or list"
    largest = ", ".join(f"{class_name} {size:,}" for class_name, size in sizes.most_common(4))
    warn(
        f"{sizes.total():,} of {total:,} bytes of {type(model).__name__}'s parameters stay in full precision: "
        f"{largest}. {remedy} in `ignore` the modules that should stay."
    )


def _parameters_in_intended_precision(
    model: nn.Module, weighted: Sequence[PlannedModule], ignore: list[str]
) -> set[int]:
    """Ids of the parameters that are quantized, or stay in full precision as the user asked."""
    keeps_embeddings = is_transformers_model(model)
    parameters: set[int] = set()
    for name, module in model.named_modules():
        is_usual = keeps_embeddings and isinstance(module, nn.Embedding)
        if is_usual or is_match(name, module, ignore):
            parameters.update(map(id, module.parameters()))
    for target in weighted:
        parameters.update(map(id, target.module.parameters(recurse=False)))
    return parameters


def _are_taken(model: nn.Module, targets: list[PlannedModule]) -> bool:
    """Whether these modules of one class could be planned, too: the warning then offers the class as a target."""
    if is_transformers_model(model) and any(kind_of(target.module).stored_as is None for target in targets):
        return False
    try:
        check_targets(model, targets)
    except CalibrationError:
        return False
    return True
