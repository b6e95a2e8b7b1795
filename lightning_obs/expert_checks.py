"""What can be known before data is read about a plan for a model with experts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy
from compressed_tensors.utils.match import is_match
from torch import nn

from lightning_obs.errors import CalibrationError, CalibrationWarning, name_list
from lightning_obs.experts import (
    GATE_UP_DOWN_MODEL_TYPES,
    W123_MODEL_TYPES,
    LinearExperts,
    expert_containers,
    fused_experts,
    hub_names,
    model_type,
)

_UNCHECKED = 'set reload="unchecked" if another engine (vLLM) will load it.'


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
    partly = _partly_planned(model, planned)
    if partly:
        warnings.warn(
            f"vLLM runs the experts of a layer in one scheme, but only some of their modules are targeted in: "
            f"{name_list(partly)}",
            CalibrationWarning,
            stacklevel=5,
        )
    gates = []
    for name, experts in expert_containers(model).items():
        parent = name.rpartition(".")[0]
        for child_name, child in model.get_submodule(parent).named_children():
            full = f"{parent}.{child_name}" if parent else child_name
            if isinstance(child, nn.Linear) and full in planned and child.out_features in (1, len(experts)):
                gates.append(full)
    if gates:
        warnings.warn(
            f"these look like routers or gates of experts; vLLM runs most of them in full precision and would not load "
            f"them quantized: {name_list(gates)}. List them in `ignore`.",
            CalibrationWarning,
            stacklevel=5,
        )


def check_experts_reload(model: nn.Module, schemes: Mapping[str, QuantizationScheme], reload: str) -> None:
    """Refuse experts that transformers 5.23 does not load back with the same numbers (each case was tried).

    It has no Linear per expert: it dequantizes every expert while it loads and stacks the weights, also where
    ``dequantize`` was not asked for. So what an expert reads is not quantized there, and only the formats that its
    loader knows can be read. Experts in full precision go through the same loader.

    Args:
        model: a transformers model.
        schemes: of the modules that will be quantized, by name.
        reload: ``"default"`` or ``"dequantize"``.

    Raises:
        CalibrationError: naming the first module, and what loads instead.
    """
    _check_left_experts(model, schemes)
    containers = {n: m for n, m in model.named_modules() if isinstance(m, LinearExperts)}
    inside = {
        name: scheme
        for name, scheme in schemes.items()
        if any(name.startswith(f"{container}.") for container in containers)
    }
    if not inside:
        return
    kinds = {model_type(module) for module in containers.values()}
    unknown = sorted(str(kind) for kind in kinds if kind not in (*W123_MODEL_TYPES, *GATE_UP_DOWN_MODEL_TYPES))
    if unknown:
        raise CalibrationError(
            "it was not tried whether transformers loads experts one by one for this architecture",
            where=unknown,
            expected=f"one of {', '.join(sorted((*W123_MODEL_TYPES, *GATE_UP_DOWN_MODEL_TYPES)))}",
            remedy=_UNCHECKED,
        )
    partly = _partly_planned(model, schemes)
    if partly:
        raise CalibrationError(
            "transformers 5.23 stacks the experts of a layer while it loads them, so all of them have to be quantized",
            where=partly,
            remedy=f"target or ignore all experts of a layer together, or {_UNCHECKED}",
        )
    for name, scheme in inside.items():
        if not _loads_stacked(scheme, model.get_submodule(name)):
            raise CalibrationError(
                "transformers 5.23 cannot load experts in this format",
                where=[name],
                got=str(infer_module_format(nn.Linear, scheme).value),
                expected="FP8 per tensor or channel (FP8, FP8_DYNAMIC), symmetric weight-only integers (W4A16, W8A16)",
                remedy=_UNCHECKED,
            )
        if reload == "default" and (scheme.input_activations is not None or scheme.output_activations is not None):
            raise CalibrationError(
                "transformers 5.23 loads experts dequantized and does not quantize what they read, so the reloaded "
                "model would give other logits",
                where=[name],
                remedy='load it dequantized (reload="dequantize", then CompressedTensorsConfig(dequantize=True): no '
                f"activation is quantized), use a weight-only scheme (W4A16), or {_UNCHECKED}",
            )
    if len({str(scheme.model_dump_json(exclude={"targets"})) for scheme in schemes.values()}) > 1:
        raise CalibrationError(
            "transformers 5.23 loads all experts with one scheme, and dequantizes nothing where there are several",
            where=list(inside)[:1],
            remedy=f"use one scheme, or {_UNCHECKED}",
        )


def _check_left_experts(model: nn.Module, schemes: Mapping[str, QuantizationScheme]) -> None:
    """Only the reader of FP8 weights lets weights without a scale through."""
    stacks = {
        **fused_experts(model),
        **{name: module for name, module in model.named_modules() if isinstance(module, LinearExperts)},
    }
    left = [
        name
        for name, module in stacks.items()
        if model_type(module) in (*W123_MODEL_TYPES, *GATE_UP_DOWN_MODEL_TYPES)
        and not any(planned.startswith(f"{name}.") for planned in schemes)
    ]
    other = [s for s in schemes.values() if s.weights is None or s.weights.type != "float" or s.weights.num_bits != 8]
    if left and other:
        raise CalibrationError(
            "transformers 5.23 cannot load experts in full precision beside other modules in this format",
            where=left,
            got=str(infer_module_format(nn.Linear, other[0]).value),
            remedy="quantize the experts too (linearize_experts(model), nothing of them in `ignore`), use FP8 for the "
            f"other modules, or {_UNCHECKED}",
        )


def _partly_planned(model: nn.Module, planned: Mapping[str, object]) -> list[str]:
    partly = []
    for name, module in model.named_modules():
        if isinstance(module, LinearExperts):
            linears = [f"{name}.{n}" for n, m in module.named_modules() if isinstance(m, nn.Linear)]
            if 0 < sum(linear in planned for linear in linears) < len(linears):
                partly.append(name)
    return partly


def _loads_stacked(scheme: QuantizationScheme, module: nn.Module) -> bool:
    weights = scheme.weights
    if weights is None:
        return True
    format_ = infer_module_format(nn.Linear, scheme)
    if format_ in (CompressionFormat.float_quantized, CompressionFormat.naive_quantized):
        whole = weights.strategy in (QuantizationStrategy.TENSOR, QuantizationStrategy.CHANNEL)
        return weights.type == "float" and weights.num_bits == 8 and whole
    if format_ == CompressionFormat.pack_quantized:
        return bool(weights.symmetric)
    mx = format_.value in ("mxfp4-pack-quantized", "mxfp6-pack-quantized")  # compressed-tensors 0.19 lacks the latter
    return mx and module.weight.dtype == torch.bfloat16  # as which it is decompressed
