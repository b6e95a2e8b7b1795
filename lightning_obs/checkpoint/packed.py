"""Keep the weights of a compressed checkpoint packed after transformers has loaded them.

transformers loads a compressed-tensors checkpoint as it is stored, and compressed-tensors decompresses all of it at the
first forward. :func:`keep_packed` takes that step away and gives every Linear a
:class:`~lightning_obs.model.packed_weight.PackedWeight`, so that adapters can be trained in the memory that the
checkpoint takes on disk.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationMetadata, QuantizationScheme, is_cached_attention_module
from torch import nn

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.model.kinds import is_transformers_model, unwrapped
from lightning_obs.model.module_qparams import calibrated_modules, get_scheme
from lightning_obs.model.offload import is_offloaded
from lightning_obs.model.packed_weight import PackedWeight, unpickled

_Model = TypeVar("_Model", bound=nn.Module)

_HOW_TO_LOAD = "model = keep_packed(AutoModelForCausalLM.from_pretrained(folder)), before the model runs."
_DEQUANTIZED = "load it with quantization_config=CompressedTensorsConfig(dequantize=True), which keeps nothing packed."
#: parameters of a module that are no part of its quantized weight, and stay parameters
_OWN_TENSORS = ("bias",)


def keep_packed(model: _Model) -> _Model:
    """Let the quantized weights of a model that transformers has loaded stay packed, to train adapters on it.

    Each quantized Linear keeps what the checkpoint stores, and decompresses its weight, by compressed-tensors' own
    function, for the length of each product and once more in the backward. Outputs equal those of the model as
    transformers runs it, quantized activations included; gradients pass through these. To peft, Lightning and
    :class:`~lightning_obs.QuantizationAwareTraining` the modules are Linears like any other. Their weights are frozen,
    nothing can be merged into them, and the whole model cannot be saved by ``save_pretrained``.

    Args:
        model: a model of transformers from a folder in compressed-tensors' format, as ``from_pretrained(folder)`` gives
            it; changed in place. It has not run yet.

    Returns:
        ``model``.

    Raises:
        CalibrationError: the model was not loaded from a compressed checkpoint, or has run since and so was
            decompressed; the checkpoint quantizes embeddings, attention or the kv cache, which cannot stay packed or
            give no gradient; weights are offloaded. The model is unchanged then.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> keep_packed(LlamaForCausalLM(LlamaConfig(vocab_size=8, num_hidden_layers=0)))
        Traceback (most recent call last):
        lightning_obs.errors.CalibrationError: LlamaForCausalLM was not loaded from a compressed checkpoint...
    """
    module = unwrapped(model)
    quantized = dict(calibrated_modules(module))
    _require_compressed(module, quantized)
    dtypes = {name: _dtype_of(module, inner) for name, inner in quantized.items()}
    for name, inner in quantized.items():
        _pack(inner, dtypes[name])
    _forget_quantizer(module)
    torch.serialization.add_safe_globals([unpickled])  # so that Lightning resumes a fit from its checkpoint
    return model


def _require_compressed(model: nn.Module, quantized: dict[str, nn.Module]) -> None:
    """Raise a CalibrationError unless all quantized modules can stay packed (:func:`keep_packed`)."""
    class_name = type(model).__name__
    compressor = getattr(getattr(model, "hf_quantizer", None), "compressor", None)
    if not quantized or compressor is None or not is_transformers_model(model):
        raise CalibrationError(
            f"{class_name} was not loaded from a compressed checkpoint of transformers",
            expected="the folder of a model that was quantized, in compressed-tensors' format",
            remedy=_HOW_TO_LOAD,
        )
    refuse(
        [name for name, inner in quantized.items() if is_cached_attention_module(inner)],
        "the checkpoint quantizes attention or the kv cache, where training has no gradient",
        remedy="export the checkpoint without kv_cache, train its adapters, and serve them beside this one.",
    )
    refuse(
        [name for name, inner in quantized.items() if type(inner).forward is not nn.Linear.forward],
        "only the weights of Linear modules can stay packed",
        remedy=_DEQUANTIZED,
    )
    refuse(
        [name for name, inner in quantized.items() if _is_dense(inner)],
        f"{class_name} is decompressed already: it has run, or its checkpoint is stored dense",
        remedy=_HOW_TO_LOAD,
    )
    refuse(
        [name for name, inner in model.named_modules() if is_offloaded(inner)],
        "weights that are offloaded cannot stay packed",
        remedy='device_map={"": device}, which puts the whole model on one device.',
    )


def _is_dense(module: nn.Module) -> bool:
    """Whether the weight of a quantized module is in full precision, because it was decompressed or stored dense."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.is_floating_point() and weight.itemsize > 1


def _dtype_of(model: nn.Module, module: nn.Module) -> torch.dtype:
    """The dtype in which the rest of the model computes.

    It is the dtype of the module's scales if these are floats of two bytes or more, else the dtype in the model's
    config.
    """
    scale = module._parameters.get("weight_scale")
    if scale is not None and scale.is_floating_point() and scale.itemsize > 1:
        return scale.dtype
    dtype: torch.dtype = model.config.dtype  # type: ignore[assignment]
    return dtype


def _pack(module: nn.Module, dtype: torch.dtype) -> None:
    """Put one packed weight in the place of all that compressed-tensors has registered on a Linear.

    Args:
        module: a Linear as transformers has loaded it from a compressed checkpoint.
        dtype: the dtype of the decompressed weight.
    """
    scheme = get_scheme(module)
    assert isinstance(scheme, QuantizationScheme)
    scheme.format = CompressionFormat(scheme.format or infer_module_format(nn.Linear, scheme)).value
    tensors = {}
    for name, parameter in list(module._parameters.items()):
        if parameter is not None and name not in _OWN_TENSORS:
            tensors[name] = parameter.data
            del module._parameters[name]
    tensors.pop("weight_shape", None)
    shape = (module.out_features, module.in_features)
    QuantizationMetadata.clear_quantization(module)  # the forward of the class again
    vars(module).pop("forward", None)
    vars(module).pop("quantization_status", None)
    module.weight = nn.Parameter(PackedWeight(tensors, scheme, shape, dtype), requires_grad=False)


def _forget_quantizer(model: Any) -> None:
    """Remove the hook that would decompress the whole model at its first forward, and transformers' quantizer."""
    model.hf_quantizer.compressor.remove_decompression_hook(model)
    model.hf_quantizer = None
    del model.quantization_method
    del model.config.quantization_config
