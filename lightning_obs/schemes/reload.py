"""What loads back where, as far as it was tried: schemes that a loader cannot take are refused before calibration.

Every case was tried with compressed-tensors 0.20 and transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy
from torch import nn

from lightning_obs.errors import CalibrationError
from lightning_obs.model.experts import (
    GATE_UP_DOWN_MODEL_TYPES,
    W123_MODEL_TYPES,
    LinearExperts,
    fused_experts,
    model_type,
)
from lightning_obs.model.kinds import compressible_type, is_transformers_model
from lightning_obs.schemes.preflight import partly_planned
from lightning_obs.schemes.target import Target, scheme_identity

Reload: TypeAlias = Literal["default", "dequantize", "unchecked"]


def check_reload(model: nn.Module, targets: list[Target], reload: Reload) -> None:
    """Refuse what does not load back with the same numbers (tried: compressed-tensors 0.20, transformers 5.23)."""
    if reload == "unchecked":
        return
    transformers_model = is_transformers_model(model)
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
        if transformers_model and len({scheme_identity(t.scheme) for t in targets}) > 1:
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
    kind = compressible_type(target.module)
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


_UNCHECKED = 'set reload="unchecked" if another engine (vLLM) will load it.'


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
    partly = partly_planned(model, schemes)
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
