"""Quantization parameters on modules: write, read, remove, and run the model through them.

The parameters are plain tensor attributes under compressed-tensors' names (``weight_scale``, ``input_zero_point``,
``weight_global_scale``), beside its ``quantization_scheme`` and ``quantization_status``. They are neither parameters
nor buffers, on purpose: ``state_dict`` and strict loading, DDP's buffer broadcast, FSDP's sharding, the zip of
weight averaging and ``model.to(torch.bfloat16)`` (which would round global scales) never see them. compressed-tensors'
forward reads them by ``getattr``, so it does not mind.

The forward of the model stays what it was until :func:`quantized` is entered.

Modules that compressed-tensors can hold are Linear and Embedding. Others that have a weight matrix (convolutions,
transformers' Conv1D) are fake-quantized here, with compressed-tensors' arithmetic on the weight seen as a matrix.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationMetadata,
    QuantizationScheme,
    QuantizationStatus,
    forward_quantize,
    set_forward_quantized,
)
from torch import nn
from torch.distributed.tensor import DTensor

SUFFIXES = ("scale", "zero_point", "global_scale")
_OWN_SCHEME = "calibrated_scheme"
_CHECKSUM = "calibrated_weight_checksum"
_ARGS = {"weight": "weights", "input": "input_activations", "output": "output_activations"}


def holdable_type(module: nn.Module) -> type[nn.Module] | None:
    """The type under which compressed-tensors can store the module (Linear, Embedding), or None."""
    return next((cls for cls in (nn.Linear, nn.Embedding) if isinstance(module, cls)), None)


def scheme_args(scheme: QuantizationScheme) -> Iterator[tuple[str, QuantizationArgs]]:
    """What a scheme quantizes: ``(base name, args)`` of weight, input, output."""
    for base_name, field in _ARGS.items():
        args = getattr(scheme, field)
        if args is not None:
            yield base_name, args


# ---------------------------------------------------------------------- the weight as a matrix


def weight_matrix(module: nn.Module) -> torch.Tensor | None:
    """The weight as ``(output channels, inputs of each)``, or None where the module has no such weight.

    Convolution kernels are flattened; transposed convolutions (groups=1) and transformers' Conv1D are transposed.
    A local shard stands for a DTensor.
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    if isinstance(weight, DTensor):
        weight = weight.to_local()
    return _to_matrix(module, weight.detach())


def _to_matrix(module: nn.Module, weight: torch.Tensor) -> torch.Tensor | None:
    if weight.ndim < 2:
        return None
    if _is_transposed(module):
        if weight.ndim > 2 and getattr(module, "groups", 1) != 1:
            return None
        weight = weight.transpose(0, 1)
    return weight.flatten(1)


def _from_matrix(module: nn.Module, matrix: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if _is_transposed(module):
        return matrix.unflatten(1, (shape[0], *shape[2:])).transpose(0, 1)
    return matrix.view(shape)


def _is_transposed(module: nn.Module) -> bool:
    # transformers' Conv1D stores (in, out); named by class so that transformers need not be imported.
    return getattr(module, "transposed", False) is True or any(
        (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D") for cls in type(module).__mro__
    )


# ---------------------------------------------------------------------- qparams on modules


def get_scheme(module: nn.Module) -> QuantizationScheme | None:
    """The scheme that a module was calibrated with, or None."""
    return getattr(module, "quantization_scheme", None) or getattr(module, _OWN_SCHEME, None)


def calibrated_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every calibrated module under its first name."""
    for name, module in model.named_modules():
        if get_scheme(module) is not None:
            yield name, module


def write_qparams(
    module: nn.Module, scheme: QuantizationScheme, qparams: dict[str, torch.Tensor], checksum: int | None = None
) -> None:
    """Put scheme and quantization parameters on a module, in place of any it had.

    Args:
        module: the module; its forward is not changed.
        scheme: copied, so that modules do not share one (compressed-tensors writes the format into it).
        qparams: ``{"weight_scale": ..., "input_scale": ...}``. Scales are stored in the weight's dtype as
            compressed-tensors does, global scales in float32. They are copied to the weight's device.
        checksum: of the weight that the scale was found for (:func:`weight_checksum`); default: the weight as it is.
    """
    clear_qparams(module)
    scheme = scheme.model_copy(deep=True)
    weight = getattr(module, "weight", None)
    for name, value in qparams.items():
        setattr(module, name, _stored(name, value, weight))
    if scheme.weights is not None:
        setattr(module, _CHECKSUM, weight_checksum(module) if checksum is None else checksum)
    kind = holdable_type(module)
    if kind is None:
        setattr(module, _OWN_SCHEME, scheme)
        return
    if scheme.format is None:
        scheme.format = infer_module_format(kind, scheme).value
    module.quantization_scheme = scheme
    module.quantization_status = QuantizationStatus.FROZEN


def _stored(name: str, value: torch.Tensor, weight: Any) -> torch.Tensor:
    value = value.detach()
    if not isinstance(weight, torch.Tensor):
        return value.clone()
    dtype = weight.dtype if name.endswith("_scale") and not name.endswith("_global_scale") else value.dtype
    if not dtype.is_floating_point and name.endswith("_scale"):
        dtype = value.dtype
    return value.to(device=weight.device, dtype=dtype, copy=True)


def read_qparams(module: nn.Module) -> dict[str, torch.Tensor]:
    """The quantization parameters on a module: ``{"weight_scale": ..., ...}``, empty if it was not calibrated."""
    names = (f"{base}_{suffix}" for base in _ARGS for suffix in SUFFIXES)
    return {name: getattr(module, name) for name in names if isinstance(getattr(module, name, None), torch.Tensor)}


def clear_qparams(module: nn.Module) -> None:
    """Remove scheme and quantization parameters from a module."""
    QuantizationMetadata.clear_all_qparams(module)
    for name in ("quantization_scheme", "quantization_status", "quantization_enabled", _OWN_SCHEME, _CHECKSUM):
        if name in vars(module):
            delattr(module, name)


def weight_checksum(module: nn.Module) -> int | None:
    """Sum of the weight's bits as integers: equal on any device, and different after a training step."""
    matrix = weight_matrix(module)
    if matrix is None:
        return None
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[matrix.element_size()]
    return int(matrix.contiguous().view(bits).sum(dtype=torch.int64))


def trained_since(model: nn.Module) -> list[str]:
    """Names of modules whose weight is no longer the one that its scale was found for."""
    modules = ((name, module, getattr(module, _CHECKSUM, None)) for name, module in calibrated_modules(model))
    return [name for name, module, checksum in modules if checksum not in (None, weight_checksum(module))]


# ---------------------------------------------------------------------- running quantized


@contextmanager
def quantized(model: nn.Module) -> Iterator[nn.Module]:
    """Run a calibrated model through fake quantization inside the ``with`` block.

    Weights and activations of calibrated modules are quantized and dequantized at each forward by compressed-tensors'
    own functions, so what comes out is what the exported checkpoint gives. Weights are not changed. Blocks nest; the
    forward of every module is back as it was afterwards, also after an exception.

    >>> from lightning_obs import CalibrationSession
    >>> model = nn.Sequential(nn.Linear(4, 4, bias=False))
    >>> _ = nn.init.constant_(model[0].weight, 0.3)
    >>> with CalibrationSession(model, "W8A8"):
    ...     pass
    >>> with quantized(model):
    ...     _ = model(torch.ones(1, 4))
    """
    saved: list[tuple[nn.Module, Any]] = []
    try:
        for _, module in calibrated_modules(model):
            saved.append((module, vars(module).get("forward")))
            quantize_forward(module)
        with torch.compiler.set_stance("force_eager"):  # a graph compiled before would not see the new forward
            yield model
    finally:
        for module, forward in saved:
            if forward is None:
                vars(module).pop("forward", None)
            else:
                module.forward = forward


def quantize_forward(module: nn.Module) -> None:
    """Replace a calibrated module's forward by its fake-quantized one."""
    if not hasattr(module.forward, "__func__"):  # a torch.compile'd or otherwise wrapped callable
        vars(module).pop("forward", None)
    if holdable_type(module) is not None:
        set_forward_quantized(module)
    elif not getattr(module.forward, "quantizes", False):  # quantizing twice is not the same for dynamic ranges
        module.forward = types.MethodType(_quantized_forward(module.forward), module)


def _quantized_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    def quantized_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        scheme = get_scheme(self)
        if scheme is None:
            return forward(*args, **kwargs)
        if scheme.input_activations is not None:
            args, kwargs = replace_input(args, kwargs, lambda x: fake_quantize(self, x, "input"))
        weight = getattr(self, "weight", None)
        if scheme.weights is None or not isinstance(weight, torch.Tensor):
            output = forward(*args, **kwargs)
        else:
            original = weight.data
            try:
                weight.data = fake_quantized_weight(self)
                output = forward(*args, **kwargs)
            finally:
                weight.data = original
        if scheme.output_activations is not None and isinstance(output, torch.Tensor):
            output = fake_quantize(self, output, "output")
        return output

    quantized_forward.quantizes = True  # type: ignore[attr-defined]
    return quantized_forward


def fake_quantize(module: nn.Module, value: torch.Tensor, base_name: str) -> torch.Tensor:
    """Quantize and dequantize one tensor with the module's parameters. Shapes as compressed-tensors expects them."""
    scheme = get_scheme(module)
    args = None if scheme is None else getattr(scheme, _ARGS[base_name])
    if args is None or value.numel() == 0:
        return value
    # forward_quantize reads the status; modules of our own have none.
    had_status = hasattr(module, "quantization_status")
    if not had_status:
        module.quantization_status = QuantizationStatus.FROZEN
    try:
        return forward_quantize(module, value, base_name, args)
    finally:
        if not had_status:
            del module.quantization_status


def fake_quantized_weight(module: nn.Module) -> torch.Tensor:
    """The weight after quantize and dequantize, in its own shape."""
    weight = getattr(module, "weight", None)
    matrix = weight_matrix(module)
    assert isinstance(weight, torch.Tensor)  # preflight refused the module otherwise
    assert matrix is not None
    return _from_matrix(module, fake_quantize(module, matrix, "weight"), weight.shape).contiguous()


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The tensor that a module quantizes as its input: the first positional or keyword tensor of a call."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)


def replace_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply ``change`` to the tensor that :func:`first_input` finds."""
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            return (*args[:i], change(value), *args[i + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            return args, {**kwargs, name: change(value)}
    return args, kwargs
