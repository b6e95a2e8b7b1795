"""Checkpoints that transformers loads back with the same numbers.

Every case was tried with compressed-tensors 0.20 and transformers 5.23.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from importlib.metadata import version
from typing import ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from packaging.version import Version
from torch import nn
from typing_extensions import override

from lightning_obs.engines.engine import Engine, Hardware, PlannedCheckpoint
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.model.conversions import (
    converted,
    dequantized_weights,
    initializer_fault,
    is_replaced,
    stacked_weights,
)
from lightning_obs.model.kinds import is_transformers_model, kind_of
from lightning_obs.model.module_qparams import storage_format
from lightning_obs.model.weight import matrix_shape
from lightning_obs.moe.experts import SortedExperts, fused_experts, linear_experts, split_experts
from lightning_obs.schemes.config import number_format
from lightning_obs.schemes.planned_modules import PlannedModule

#: the first release that dequantizes while it loads
_OLDEST_THAT_STAYS_DENSE = "5.23"
_UNCHECKED = 'set engines="vllm" if vLLM will load it, or engines="unchecked".'
_DEQUANTIZED = 'load it dequantized (engines="dequantize", then CompressedTensorsConfig(dequantize=True)'


@Engine.register("transformers")
class Transformers(Engine):
    """transformers, which loads a checkpoint of its models by ``from_pretrained(folder)``.

    A checkpoint of another model is judged as ``load_checkpoint`` loads it. ``ask_engines`` calls ``check`` before any
    data; the answer names no hardware. ``Engine.register`` makes the one instance when this module is imported.
    :class:`.Engine` has the other attributes: ``fused_sets``, ``remarks_on_others`` and ``listed``.
    """

    name = "transformers"
    dequantize: ClassVar[bool] = False  # whether the weights are loaded in full precision

    @override
    def check(self, planned: PlannedCheckpoint) -> Hardware | None:
        """Refuse a checkpoint that would not load with the same numbers; :func:`ask_engines` calls it before any data.

        The rules of architectures (kinds of modules, layout, experts) are for models of transformers only. Then come
        the rules of a load that dequantizes, or else those of each weight; and where weights are packed, the rule of
        the initializer, unless this release of transformers dequantizes each weight as it reads it.

        Returns:
            Always None: which hardware runs the model is not judged.
        """
        in_transformers = is_transformers_model(planned.model)
        packed = _packed_modules(planned)
        if in_transformers:
            _check_kinds(planned)
            if not self.dequantize:
                _check_arguments(planned)
            _check_layout(planned, packed)
            _check_experts(planned, self.dequantize)
        if self.dequantize:
            _check_dequantized(planned, in_transformers)
            if packed and not _dequantizes_while_loading():
                _check_initializer(planned.model, packed)
            return None
        for target in planned.targets:
            if target.scheme.weights is not None:
                _check_weight(target, target.scheme.weights, in_transformers)
        if packed:
            _check_initializer(planned.model, packed)
        return None


@Engine.register("dequantize")
class Dequantized(Transformers):
    """``from_pretrained`` with ``CompressedTensorsConfig(dequantize=True)``: the weights in full precision."""

    name = "transformers with dequantize=True"
    listed = False  # a run reports it only where ``engines`` names it
    dequantize = True


def _packed_modules(planned: PlannedCheckpoint) -> set[str]:
    """Names of the modules whose weights will be stored packed, several numbers to a word.

    The packed formats of compressed-tensors have "pack" in their names (``pack-quantized``, ``nvfp4-pack-quantized``).
    The format is asked for ``nn.Linear``, whatever the module is, since every weight is stored like a Linear's.
    """
    packed = set()
    for target in planned.targets:
        if "pack" in storage_format(nn.Linear, target.scheme):
            packed.add(target.name)
    return packed


def _check_kinds(planned: PlannedCheckpoint) -> None:
    """Refuse modules that compressed-tensors cannot store: from_pretrained would silently leave them unquantized."""
    not_stored = [str(target) for target in planned.modules if not kind_of(target.module).stored_as]
    refuse(
        not_stored,
        "transformers loads quantized Linear and Embedding modules only, and would leave these in full precision",
        remedy='list them in `ignore`, or set engines="unchecked" and load it with load_checkpoint.',
    )


def _check_arguments(planned: PlannedCheckpoint) -> None:
    """Refuse modules whose forward takes several arguments: its quantized form takes one."""
    with_several = []
    for target in planned.modules:
        signature = inspect.signature(type(target.module).forward)
        if len(signature.parameters) > 2:  # self and the input
            with_several.append(str(target))
    refuse(
        with_several,
        "compressed-tensors gives a loaded module one argument, and the forward of these has more",
        remedy=f"list them in `ignore`, or {_UNCHECKED}",
    )


def _dequantizes_while_loading() -> bool:
    """Whether transformers dequantizes each weight as it reads it; older releases load it packed first."""
    return Version(version("transformers")) >= Version(_OLDEST_THAT_STAYS_DENSE)


def _check_initializer(model: nn.Module, packed: Collection[str]) -> None:
    """Refuse packed weights if the model's class reads weights to initialize others while it loads.

    Args:
        model: the module that is calibrated.
        packed: names of the modules whose weights will be stored packed, so that they have no ``weight`` then.
    """
    fault = initializer_fault(model, packed)
    if fault is None:
        return
    module_name, problem = fault
    dequantized = f"{_DEQUANTIZED})"
    if not _dequantizes_while_loading():
        dequantized += f" with transformers>={_OLDEST_THAT_STAYS_DENSE}"
    raise CalibrationError(
        f"transformers {version('transformers')} cannot load packed weights of {type(model).__name__}, which "
        "initializes weights while it loads",
        where=[module_name],
        got=problem,
        remedy=f"list it, or the modules in it, in `ignore`, {dequantized}, use a scheme that is not packed "
        f"(FP8, INT8), or {_UNCHECKED}",
    )


def _owners(tensor_names: Iterable[str]) -> list[str]:
    """The names of the modules that have these tensors, each once."""
    owners: dict[str, None] = {}
    for tensor_name in tensor_names:
        owner, _, _ = tensor_name.rpartition(".")
        owners[owner] = None
    return list(owners)


def _check_dequantized(planned: PlannedCheckpoint, in_transformers: bool) -> None:
    """Refuse what transformers cannot load with ``dequantize=True``.

    That is attention states and, in a model of transformers, converted weights, several schemes, and 4-bit zero points
    that fit into one packed row.
    """
    refuse(
        planned.attention_names,
        "transformers drops the quantization of attention states and the kv cache when it dequantizes",
        remedy=f'engines="transformers", leave the kv cache in full precision, or {_UNCHECKED}',
    )
    if not in_transformers:
        return
    weight_names = [f"{target.name}.weight" for target in planned.targets]
    refuse(
        _owners(converted(planned.model, weight_names)),
        "transformers 5.23 cannot dequantize weights that it merges, splits or reorders while it loads them",
        remedy=f'list them in `ignore`, engines="transformers", or {_UNCHECKED}',
    )
    if planned.has_several_schemes:
        raise CalibrationError(
            "transformers cannot dequantize a checkpoint with several schemes",
            remedy=f'engines="transformers", or {_UNCHECKED}',
        )
    refuse(
        [target.name for target in planned.targets if _packs_zero_points_into_one_row(target)],
        "compressed-tensors 0.20 cannot unpack 4-bit zero points of groups where there are at most 8 output rows",
        remedy=f"list them in `ignore`, use a symmetric scheme (W4A16), or {_UNCHECKED}",
    )


def _packs_zero_points_into_one_row(target: PlannedModule) -> bool:
    """Whether the 4-bit zero points of a weight's groups fit into one packed row: 8 integers make a word."""
    weights = target.scheme.weights
    shape = matrix_shape(target.module)
    if weights is None or shape is None or weights.symmetric or number_format(weights) != "int4":
        return False
    if storage_format(nn.Linear, target.scheme) != "pack-quantized":
        return False
    rows, columns = shape
    has_groups = 0 < (weights.group_size or columns) < columns
    return rows <= 8 and has_groups


def _check_weight(target: PlannedModule, weights: QuantizationArgs, in_transformers: bool) -> None:
    """Refuse weights that would be loaded with other numbers; called for each target with a weight, in order.

    compressed-tensors decompresses NVFP4 and microscaling floats (MX) as bfloat16. That rounds NVFP4's numbers, so the
    model must be bfloat16. It does not change MX numbers, each a small float times a power of two. So only a model of
    transformers must be bfloat16 for MX: it would run with weights of two dtypes.

    Packed integers (below 8 bits, and 8 bits with inputs in full precision) are unpacked by transformers for symmetric
    Linear modules only; ``load_checkpoint`` unpacks all.

    Args:
        target: the module and its scheme.
        weights: the scheme's arguments of the weight.
        in_transformers: whether the model is one of transformers; ``load_checkpoint`` loads all others.
    """
    dtype = target.module.weight.dtype
    nvfp4 = weights.strategy == "tensor_group"
    mx = weights.scale_dtype == torch.uint8 and in_transformers
    if weights.type == "float" and (nvfp4 or mx) and dtype != torch.bfloat16:
        raise CalibrationError(
            f"compressed-tensors loads {'NVFP4' if nvfp4 else 'MX'} weights as bfloat16, which a {dtype} model "
            + ("cannot run" if in_transformers else "would compute with other numbers"),
            where=[target.name],
            remedy=f"load the model in bfloat16 (dtype=torch.bfloat16), or {_UNCHECKED}",
        )
    packed = weights.type == "int" and (weights.num_bits < 8 or target.scheme.input_activations is None)
    if kind_of(target.module).stored_as is nn.Embedding:
        weights_text = "a packed integer Embedding as it is"
        instead = "use FP8 for the embedding"
    elif not weights.symmetric:
        weights_text = "packed asymmetric weights as they are"
        instead = "use a symmetric scheme (W4A16)"
    else:
        return
    if in_transformers and packed:
        raise CalibrationError(
            f"transformers 5.23 cannot load {weights_text}",
            where=[target.name],
            remedy=f"{instead}, {_DEQUANTIZED}), or {_UNCHECKED}",
        )


# ---------------------------------------------------------------------- weights that are merged or split


def _check_layout(planned: PlannedCheckpoint, packed: Collection[str]) -> None:
    """Refuse weights that transformers would reorder, merge, split or replace, and cannot in a quantized checkpoint.

    These are, in the order of the checks: packed weights whose rows it reorders; full-precision weights that it splits;
    stacked experts in full precision for which it expects a Linear per expert, so that they would get random weights;
    and full-precision weights that it merges beside modules of another format than FP8
    (:func:`_check_formats_beside`). Merged and split weights pass a reader of the scheme's format while they are
    loaded: only FP8's reader takes weights without a scale, and no reader can split weights.

    Args:
        planned: a checkpoint of a transformers model.
        packed: names of the modules whose weights will be stored packed.
    """
    model = planned.model
    # A packed weight is stored as several tensors, one of them "weight_shape". Some of transformers' converters that
    # reorder rows ("Permute" is in the class name of their operation) match all tensors of a module
    # ("attention.q_proj."), so packed ones, too, which they cannot reorder.
    packed_shapes = [f"{name}.weight_shape" for name in packed]
    refuse(
        _owners(converted(model, packed_shapes, "Permute")),
        "transformers 5.23 reorders the rows of these weights while it loads them, and cannot if they are packed",
        remedy=f"list them in `ignore`, use a scheme that is not packed (FP8, INT8), or {_UNCHECKED}",
    )
    # those of no planned module, so they are in full precision in the files
    merged, split = dequantized_weights(model, planned.target_names)
    refuse(
        split,
        "transformers 5.23 splits these weights of its files, and cannot do so in a quantized checkpoint where the "
        f"modules they become are in full precision, or {type(model).__name__} has none",
        remedy=f"quantize these modules, too, or {_UNCHECKED}",
    )
    stacked = fused_experts(model)
    linearized = linear_experts(model)
    refuse(
        [name for name, module in stacked.items() if is_replaced(module)],
        "transformers 5.23 expects a Linear per expert in quantized checkpoints of this architecture, and would give "
        "these experts random weights",
        remedy=f"call linearize_experts(model) first (`ignore` may still list them), or {_UNCHECKED}",
    )
    merged_weights = [*_stacked_down_projections(model, _experts_in_float(planned)), *merged]
    _check_formats_beside(_owners(merged_weights), planned.targets, experts={*stacked, *linearized})


def _experts_in_float(planned: PlannedCheckpoint) -> list[str]:
    """The names of linearized experts of which nothing is quantized."""
    target_names = planned.target_names
    in_float = []
    for container in linear_experts(planned.model):
        prefix = f"{container}."
        if not any(name.startswith(prefix) for name in target_names):
            in_float.append(container)
    return in_float


def _stacked_down_projections(model: nn.Module, containers: Iterable[str]) -> list[str]:
    """The parameters ``container.down_proj`` into which transformers stacks the experts' weights of its files.

    One stacked parameter is enough to tell that transformers stacks a container's experts, and every architecture has a
    ``down_proj``. In a linearized model the parameter does not exist, so its name is formed here, and the loader is
    asked about it.

    Args:
        model: a transformers model.
        containers: names of linearized experts.
    """
    return list(stacked_weights(model, [f"{container}.down_proj" for container in containers]))


def _check_formats_beside(in_float: list[str], targets: list[PlannedModule], experts: Collection[str]) -> None:
    """Refuse weights in full precision that are merged beside modules of another format than FP8.

    transformers passes the merged weights to a reader with a scheme of the checkpoint's config. The reader of FP8
    leaves weights without a scale as they are; the others need packed weights. A scheme without weights makes the
    reader fail, so if no scheme quantizes weights, all schemes count.

    Args:
        in_float: names of the modules whose weights are merged and in full precision.
        targets: the modules that will be quantized.
        experts: names of all stacked and linearized experts of the model, for the text of the error.
    """
    all_schemes = [target.scheme for target in targets]
    weight_schemes = [scheme for scheme in all_schemes if scheme.weights is not None]
    deciding_schemes = weight_schemes or all_schemes
    schemes = [scheme for scheme in deciding_schemes if number_format(scheme.weights) != "float8"]
    if not in_float or not schemes:
        return
    remedy = f"use FP8 for the other modules, or {_UNCHECKED}"
    if experts:
        remedy = f"quantize the experts too (linearize_experts(model), nothing of them in `ignore`), {remedy}"
    merged = "experts" if set(in_float) <= set(experts) else "weights that it merges"
    raise CalibrationError(
        f"transformers 5.23 cannot load {merged} in full precision beside other modules in this format",
        where=in_float,
        got=storage_format(nn.Linear, schemes[0]),
        remedy=remedy,
    )


# ---------------------------------------------------------------------- experts


def _check_experts(planned: PlannedCheckpoint, dequantize: bool) -> None:
    """Refuse experts that transformers 5.23 does not load back with the same numbers.

    transformers has no Linear per expert: it dequantizes every expert while it loads and stacks the weights, with or
    without ``dequantize``. So the loaded model does not quantize experts' inputs, and experts can be in those formats
    only that transformers' loader of experts knows. Llama 4 is the exception: in a quantized checkpoint transformers
    gives it a Linear per expert, which is loaded as any other.

    Args:
        planned: a checkpoint of a transformers model.
        dequantize: whether the user asks for weights in full precision, so that no input is quantized anyway.
    """
    model = planned.model
    containers = []
    for name, experts in linear_experts(model).items():
        if not isinstance(experts, SortedExperts):  # the experts of Llama 4
            containers.append(name)
    stacked = _owners(_stacked_down_projections(model, containers))
    refuse(
        [name for name in containers if name not in stacked],
        f"transformers 5.23 loads no experts one by one into {type(model).__name__}",
        remedy="list them in `ignore` and do not call linearize_experts, or " + _UNCHECKED,
    )
    prefixes = tuple(f"{name}." for name in containers)
    expert_targets = [target for target in planned.targets if target.name.startswith(prefixes)]
    if not expert_targets:
        return
    refuse(
        split_experts(model, planned.target_names),
        "transformers 5.23 stacks the experts of a layer while it loads them, so all of them have to be quantized",
        remedy=f"target or ignore all experts of a layer together, or {_UNCHECKED}",
    )
    for target in expert_targets:
        _check_expert(target, dequantize)
    if planned.has_several_schemes:
        raise CalibrationError(
            "transformers 5.23 loads all experts with one scheme, and dequantizes nothing where there are several",
            where=[expert_targets[0].name],
            remedy=f"use one scheme (a quantized kv cache is another one), or {_UNCHECKED}",
        )


def _check_expert(target: PlannedModule, dequantize: bool) -> None:
    """Refuse a format that the loader of experts cannot read, and quantized activations, which it drops."""
    scheme = target.scheme
    stored = storage_format(nn.Linear, scheme)
    if scheme.weights is not None and not _loads_expert(target, scheme.weights, stored):
        raise CalibrationError(
            "transformers 5.23 cannot load experts in this format",
            where=[target.name],
            got=stored,
            expected="FP8 per tensor or channel (FP8, FP8_DYNAMIC), symmetric weight-only integers (W4A16, W8A16), or "
            "MXFP4 and MXFP6 in bfloat16 (MXFP4A16, MXFP6A16)",
            remedy=_UNCHECKED,
        )
    if not dequantize and (scheme.input_activations is not None or scheme.output_activations is not None):
        raise CalibrationError(
            "transformers 5.23 loads experts dequantized and does not quantize what they read, so the reloaded "
            "model would give other logits",
            where=[target.name],
            remedy=f"{_DEQUANTIZED}: no activation is quantized), use a weight-only scheme (W4A16), or {_UNCHECKED}",
        )


def _loads_expert(target: PlannedModule, weights: QuantizationArgs, stored: str) -> bool:
    """Whether transformers' loader of experts reads a weight in a format of compressed-tensors (``stored``)."""
    if stored in ("float-quantized", "naive-quantized"):
        return number_format(weights) == "float8" and weights.strategy in ("tensor", "channel")
    if stored in ("mxfp4-pack-quantized", "mxfp6-pack-quantized"):
        return target.module.weight.dtype == torch.bfloat16  # the dtype that MX is decompressed to
    return stored == "pack-quantized" and bool(weights.symmetric)
