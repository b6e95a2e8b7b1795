"""Checkpoints that transformers loads back with the same numbers.

Every case was tried with compressed-tensors 0.20 and transformers 5.23.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
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
from lightning_obs.schemes.planned_modules import PlannedModule, scheme_identity

_UNCHECKED = 'set reload="vllm" if vLLM will load it, or reload="unchecked".'
_DEQUANTIZED = 'load it dequantized (reload="dequantize", then CompressedTensorsConfig(dequantize=True)'


@Engine.register("default")
class Transformers(Engine):
    """``from_pretrained(folder)``; a model that is not of transformers is loaded by ``load_checkpoint``."""

    name = "transformers"
    dequantize: ClassVar[bool] = False

    @override
    def check(self, planned: PlannedCheckpoint) -> Hardware | None:
        targets, in_transformers = planned.targets, is_transformers_model(planned.model)
        packed = {t.name for t in targets if "pack" in storage_format(nn.Linear, t.scheme)}
        if in_transformers:
            # compressed-tensors cannot store these: from_pretrained would give the model unquantized, without a word.
            refuse(
                [str(t) for t in targets if not t.states and not kind_of(t.module).stored_as],
                "transformers loads quantized Linear and Embedding modules only, and would leave these in full "
                "precision",
                remedy='list them in `ignore`, or set reload="unchecked" and load the checkpoint with load_checkpoint.',
            )
            refuse(
                [str(t) for t in targets if not (t.states or self.dequantize) and _takes_more(t.module)],
                "compressed-tensors gives a loaded module one argument, and the forward of these has more",
                remedy=f"list them in `ignore`, or {_UNCHECKED}",
            )
            _check_layout(planned.model, targets, packed)
            _check_experts(planned.model, targets, self.dequantize)
        if self.dequantize:
            _check_dequantized(planned.model, targets, in_transformers)
            return None
        for target in targets:
            if target.scheme.weights is not None:
                _check_weight(target, target.scheme.weights, in_transformers)
        if packed and (fault := initializer_fault(planned.model, packed)) is not None:
            raise CalibrationError(
                f"transformers 5.23 cannot load packed weights of {type(planned.model).__name__}, which initializes "
                "weights while it loads",
                where=[fault[0]],
                got=fault[1],
                remedy=f"list it, or the modules in it, in `ignore`, {_DEQUANTIZED}), use a scheme that is not packed "
                f"(FP8, INT8), or {_UNCHECKED}",
            )
        return None


@Engine.register("dequantize")
class Dequantized(Transformers):
    """``from_pretrained`` with ``CompressedTensorsConfig(dequantize=True)``: the weights in full precision."""

    listed = False
    dequantize = True


def _takes_more(module: nn.Module) -> bool:
    return len(inspect.signature(type(module).forward).parameters) > 2


def _check_dequantized(model: nn.Module, targets: list[PlannedModule], in_transformers: bool) -> None:
    """Refuse attention states, converted weights, several schemes, and zero points in one packed row."""
    refuse(
        [t.name for t in targets if t.states],
        "transformers drops the quantization of attention states and the kv cache when it dequantizes",
        remedy=f'reload="default", leave the kv cache in full precision, or {_UNCHECKED}',
    )
    if not in_transformers:
        return
    refuse(
        [name.rpartition(".")[0] for name in converted(model, [f"{t.name}.weight" for t in targets])],
        "transformers 5.23 cannot dequantize weights that it merges, splits or reorders while it loads them",
        remedy=f'list them in `ignore`, reload="default", or {_UNCHECKED}',
    )
    if len({scheme_identity(t.scheme) for t in targets}) > 1:
        raise CalibrationError(
            "transformers cannot dequantize a checkpoint with several schemes",
            remedy=f'reload="default", or {_UNCHECKED}',
        )
    refuse(
        [t.name for t in targets if _packs_zero_points_into_one_row(t)],
        "compressed-tensors 0.20 cannot unpack 4-bit zero points of groups where there are at most 8 output rows",
        remedy=f"list them in `ignore`, use a symmetric scheme (W4A16), or {_UNCHECKED}",
    )


def _packs_zero_points_into_one_row(target: PlannedModule) -> bool:
    weights, shape = target.scheme.weights, matrix_shape(target.module)
    if weights is None or shape is None or weights.symmetric or number_format(weights) != "int4":
        return False
    packed = storage_format(nn.Linear, target.scheme) == "pack-quantized"
    return packed and shape[0] <= 8 and shape[1] > (weights.group_size or shape[1]) > 0


def _check_weight(target: PlannedModule, weights: QuantizationArgs, in_transformers: bool) -> None:
    """Refuse 4-bit and microscaling floats in models of other dtypes than bfloat16, in which they are decompressed; and
    packed integers (4-bit and weight-only ones) of other modules than symmetric Linear, which are not unpacked."""
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
    what, instead = "packed asymmetric weights as they are", "use a symmetric scheme (W4A16)"
    if kind_of(target.module).stored_as is nn.Embedding:
        what, instead = "a packed integer Embedding as it is", "use FP8 for the embedding"
    elif weights.symmetric:
        return
    if in_transformers and packed:
        raise CalibrationError(
            f"transformers 5.23 cannot load {what}",
            where=[target.name],
            remedy=f"{instead}, {_DEQUANTIZED}), or {_UNCHECKED}",
        )


# ---------------------------------------------------------------------- weights that are merged or split


def _check_layout(model: nn.Module, targets: list[PlannedModule], packed: Collection[str]) -> None:
    """Refuse weights in full precision that transformers merges or splits while it loads them.

    They go through a reader of the scheme's format: FP8's alone takes weights without a scale, and none can split.
    """
    planned = {target.name for target in targets}
    refuse(
        [n.rpartition(".")[0] for n in converted(model, [f"{name}.weight_shape" for name in packed], "Permute")],
        "transformers 5.23 reorders the rows of these weights while it loads them, and cannot if they are packed",
        remedy=f"list them in `ignore`, use a scheme that is not packed (FP8, INT8), or {_UNCHECKED}",
    )
    merged, split = dequantized_weights(model, planned)
    refuse(
        split,
        "transformers 5.23 splits these weights of its files, and cannot do so in a quantized checkpoint where the "
        f"modules they become are in full precision, or {type(model).__name__} has none",
        remedy=f"quantize these modules, too, or {_UNCHECKED}",
    )
    stacked, taken_apart = fused_experts(model), linear_experts(model)
    refuse(
        [name for name, module in stacked.items() if is_replaced(module)],
        "transformers 5.23 expects a Linear per expert in quantized checkpoints of this architecture, and would give "
        "these experts random weights",
        remedy=f"call linearize_experts(model) first (`ignore` may still list them), or {_UNCHECKED}",
    )
    experts = {*stacked, *taken_apart}
    left = [name for name in taken_apart if not any(t.startswith(f"{name}.") for t in planned)]
    merged = [*stacked_weights(model, [f"{name}.down_proj" for name in left]), *merged]
    left = list(dict.fromkeys(name.rpartition(".")[0] for name in merged))
    of_weights = [t.scheme for t in targets if t.scheme.weights is not None] or [t.scheme for t in targets]
    other = [scheme for scheme in of_weights if number_format(scheme.weights) != "float8"]
    if left and other:
        remedy = f"use FP8 for the other modules, or {_UNCHECKED}"
        if experts:
            remedy = f"quantize the experts too (linearize_experts(model), nothing of them in `ignore`), {remedy}"
        raise CalibrationError(
            f"transformers 5.23 cannot load {'experts' if set(left) <= experts else 'weights that it merges'} in "
            "full precision beside other modules in this format",
            where=left,
            got=storage_format(nn.Linear, other[0]),
            remedy=remedy,
        )


# ---------------------------------------------------------------------- experts


def _check_experts(model: nn.Module, targets: list[PlannedModule], dequantize: bool) -> None:
    """Refuse experts that transformers 5.23 does not load back with the same numbers.

    It has no Linear per expert: it dequantizes every expert while it loads and stacks the weights, also where
    ``dequantize`` was not asked for. So experts' inputs are not quantized there, and only the formats that its
    loader knows can be read.
    """
    containers = {n: m for n, m in linear_experts(model).items() if not isinstance(m, SortedExperts)}
    stacked = {name.rpartition(".")[0] for name in stacked_weights(model, [f"{name}.down_proj" for name in containers])}
    refuse(
        [name for name in containers if name not in stacked],
        f"transformers 5.23 loads no experts one by one into {type(model).__name__}",
        remedy="list them in `ignore` and do not call linearize_experts, or " + _UNCHECKED,
    )
    inside = [t for t in targets if t.name.startswith(tuple(f"{name}." for name in containers))]
    if not inside:
        return
    refuse(
        split_experts(model, {t.name for t in targets}),
        "transformers 5.23 stacks the experts of a layer while it loads them, so all of them have to be quantized",
        remedy=f"target or ignore all experts of a layer together, or {_UNCHECKED}",
    )
    for target in inside:
        _check_expert(target, dequantize)
    if len({scheme_identity(t.scheme) for t in targets}) > 1:
        raise CalibrationError(
            "transformers 5.23 loads all experts with one scheme, and dequantizes nothing where there are several",
            where=[inside[0].name],
            remedy=f"use one scheme, or {_UNCHECKED}",
        )


def _check_expert(target: PlannedModule, dequantize: bool) -> None:
    """Refuse a format that the loader of experts cannot read, and quantized activations, which it drops."""
    scheme, weights = target.scheme, target.scheme.weights
    if weights is not None:
        whole_float8 = number_format(weights) == "float8" and weights.strategy in ("tensor", "channel")
        bfloat16 = target.module.weight.dtype == torch.bfloat16  # as which MX is decompressed
        loads = {
            **dict.fromkeys(("float-quantized", "naive-quantized"), whole_float8),
            **dict.fromkeys(("mxfp4-pack-quantized", "mxfp6-pack-quantized"), bfloat16),
            "pack-quantized": weights.symmetric,
        }
        stored = storage_format(nn.Linear, scheme)
        if not loads.get(stored):
            raise CalibrationError(
                "transformers 5.23 cannot load experts in this format",
                where=[target.name],
                got=stored,
                expected="FP8 per tensor or channel (FP8, FP8_DYNAMIC), symmetric weight-only integers (W4A16, W8A16)",
                remedy=_UNCHECKED,
            )
    if not dequantize and (scheme.input_activations is not None or scheme.output_activations is not None):
        raise CalibrationError(
            "transformers 5.23 loads experts dequantized and does not quantize what they read, so the reloaded "
            "model would give other logits",
            where=[target.name],
            remedy=f"{_DEQUANTIZED}: no activation is quantized), use a weight-only scheme (W4A16), or {_UNCHECKED}",
        )
