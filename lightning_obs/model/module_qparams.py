"""Quantization parameters on modules: write, read, remove.

The parameters are plain tensor attributes under compressed-tensors' names (``weight_scale``, ``input_zero_point``,
``weight_global_scale``), beside its ``quantization_scheme`` and ``quantization_status``. They are neither parameters
nor buffers, on purpose: ``state_dict`` and strict loading, DDP's buffer broadcast, FSDP's sharding, the zip of
weight averaging and ``model.to(torch.bfloat16)`` (which would round global scales) never see them. compressed-tensors'
forward reads them by ``getattr``, so it does not mind.

The forward of the model does not change until :func:`~lightning_obs.quantized` is entered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import copy
from typing import Any, TypeAlias

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationMetadata,
    QuantizationScheme,
    QuantizationStatus,
    QuantizationType,
    is_cached_attention_module,
)
from torch import nn

from lightning_obs.model.kinds import is_dispatched, kind_of
from lightning_obs.model.offload import at_rest, execution_device
from lightning_obs.model.wrappers import without_wrappers
from lightning_obs.numerics.qparams import ATTENTION

#: the attribute of a module that holds the checksums of its own parameters and buffers
CHECKSUMS = "calibrated_checksums"
SUFFIXES = ("scale", "zero_point", "global_scale")
_ARGS = {"weight": "weights", "input": "input_activations", "output": "output_activations"}
#: a weight ``(R, C)`` in the numbers of its format that a rounding chose, where they are not the nearest
ROUNDED = "weight_rounded"
_QPARAMS = (*(f"{base}_{suffix}" for base in (*_ARGS, *ATTENTION) for suffix in SUFFIXES), ROUNDED)
_SCHEME = ("quantization_scheme", "quantization_status", "quantization_enabled")
#: names that calibration sets on a module: plain attributes, or buffers
CALIBRATED = (*_QPARAMS, *_SCHEME)

#: the values that calibration has put on each module of a model, by name
Calibration: TypeAlias = dict[nn.Module, dict[str, Any]]


def scheme_args(scheme: QuantizationScheme) -> Iterator[tuple[str, QuantizationArgs]]:
    """The tensors that a scheme quantizes: ``(base name, args)`` of weight, input, output."""
    for base_name, field in _ARGS.items():
        args = getattr(scheme, field)
        if args is not None:
            yield base_name, args


def args_of(module: nn.Module, base_name: str) -> QuantizationArgs | None:
    """The args that a calibrated module's scheme has for one of its tensors; ``input_activations`` for attention's."""
    scheme = get_scheme(module)
    return None if scheme is None else getattr(scheme, _ARGS.get(base_name, "input_activations"))


def get_scheme(module: nn.Module) -> QuantizationScheme | None:
    """The scheme that a module was calibrated with, or None."""
    return getattr(module, "quantization_scheme", None)


def quantized_states(module: nn.Module) -> tuple[str, ...]:
    """The ones of q, k, v for which a module has scales."""
    return tuple(base for base in ATTENTION if isinstance(getattr(module, f"{base}_scale", None), torch.Tensor))


@at_rest()
def qparams_home(module: nn.Module) -> torch.Tensor | None:
    """The tensor whose dtype scales are stored in, and beside which they live: the weight, or attention's first.

    Of an offloaded module it is at rest: qparams live on the device on which the module computes.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor):
        return weight
    return next(module.parameters(), None) if is_cached_attention_module(module) else None


def calibrated_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every calibrated module under its first name."""
    with without_wrappers(model):
        named = [(name, module) for name, module in model.named_modules() if get_scheme(module) is not None]
    yield from named


def write_qparams(module: nn.Module, scheme: QuantizationScheme, qparams: dict[str, torch.Tensor]) -> None:
    """Put copies of a scheme and of ``{"weight_scale": ..., "k_scale": ...}`` on a module, in place of earlier ones."""
    # compressed-tensors writes the format into it. pydantic's deep copy takes longer than the rest of calibrating.
    own: dict[str, Any] = {
        _ARGS[base]: args.model_copy(update={"observer_kwargs": copy(args.observer_kwargs)})
        for base, args in scheme_args(scheme)
    }
    scheme = scheme.model_copy(update={**own, "targets": copy(scheme.targets)})
    qparams = as_stored(module, qparams)
    _clear(module)
    for name, value in qparams.items():
        setattr(module, name, value)
    # compressed-tensors knows no convolutions; their weights are stored like a Linear's.
    kind = kind_of(module).stored_as or (type(module) if is_cached_attention_module(module) else nn.Linear)
    scheme.format = storage_format(kind, scheme)
    module.quantization_scheme = scheme
    module.quantization_status = QuantizationStatus.FROZEN


def storage_format(kind: type[nn.Module], scheme: QuantizationScheme) -> str:
    """The compressed-tensors format in which a module of ``kind`` is stored: the scheme's own, or the one to infer.

    Integer weights below 8 bits are packed, also where inputs are quantized: compressed-tensors would give each a byte
    there (``int-quantized``), twice the size, which vLLM refuses.

    >>> from compressed_tensors.quantization import preset_name_to_scheme
    >>> storage_format(nn.Linear, preset_name_to_scheme("W4A8", ["Linear"]))
    'pack-quantized'
    """
    weights = scheme.weights
    if scheme.format is not None:
        return CompressionFormat(scheme.format).value
    if weights is not None and weights.type == QuantizationType.INT and weights.num_bits < 8:
        return CompressionFormat.pack_quantized.value
    return str(infer_module_format(kind, scheme).value)


def as_stored(module: nn.Module, qparams: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of quantization parameters as the module will hold them.

    They are on its weight's device (attention: its first parameter's; an offloaded module: where it computes). Scales
    are in the weight's dtype, as compressed-tensors stores them, global scales in float32.
    """
    home, stored = qparams_home(module), {}
    device = _device_of_qparams(module)
    for name, value in qparams.items():
        in_weights_dtype = name.endswith("_scale") and not name.endswith("_global_scale")
        dtype = home.dtype if home is not None and home.is_floating_point() and in_weights_dtype else value.dtype
        where = device or value.device
        stored[name] = value.detach().to(where, dtype, non_blocking=where.type != "cpu", copy=True)
    return stored


def read_qparams(module: nn.Module) -> dict[str, torch.Tensor]:
    """The quantization parameters on a module, on its weight's device; empty if it was not calibrated.

    ``model.to(device)`` does not take plain attributes along, so they are moved when they are read.
    """
    own = _own_names(module)
    found = {name: getattr(module, name) for name in _QPARAMS if name in own}
    qparams = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    device = _device_of_qparams(module) if qparams else None
    return qparams if device is None else {n: v.to(device) for n, v in qparams.items()}


def move_qparams(module: nn.Module) -> None:
    """Let a module hold its quantization parameters where :func:`read_qparams` gives them."""
    with torch.inference_mode(False):
        for name, value in read_qparams(module).items():
            setattr(module, name, value)


def _device_of_qparams(module: nn.Module) -> torch.device | None:
    home = qparams_home(module)
    device = execution_device(module) if any(map(is_dispatched, module.modules())) else None
    return home.device if home is not None and device is None else device


def _own_names(module: nn.Module) -> set[str]:
    """The module's own attributes and buffers. ``getattr`` would be slow for names that the module lacks."""
    return {*vars(module), *module._parameters, *module._buffers}


def clear_qparams(module: nn.Module) -> None:
    """Remove everything that calibration has set on a module."""
    _clear(module)
    vars(module).pop(CHECKSUMS, None)


def _clear(module: nn.Module) -> None:
    known = QuantizationMetadata.all_qparam_names()  # of attention's, k_scale and v_scale only
    for name in _own_names(module).intersection((*known, *_QPARAMS)):
        if name in known or name not in module._parameters:  # a parameter of another name would be the model's own
            delattr(module, name)
    for name in _SCHEME:
        vars(module).pop(name, None)


def calibration_of(model: nn.Module, only: Collection[nn.Module] | None = None) -> Calibration:
    """The calibration that modules hold now, for :func:`put_back`, not copied; ``only``: the modules with qparams."""
    calibration: Calibration = {}
    for module in model.modules():
        names = (CHECKSUMS,) if only is not None and module not in only else (*CALIBRATED, CHECKSUMS)
        calibration[module] = {n: own[n] for own in (vars(module), module._buffers) for n in names if n in own}
    return calibration


def qparams_of(calibration: Calibration, module: nn.Module) -> dict[str, torch.Tensor]:
    """The quantization parameters of one module in a :func:`calibration_of`; none if it is not in it."""
    own = calibration.get(module, {})
    return {n: v for n, v in own.items() if n in _QPARAMS and isinstance(v, torch.Tensor)}


def put_back(calibration: Calibration) -> None:
    """Restore the calibration that modules had when :func:`calibration_of` was called."""
    for module, before in calibration.items():
        for name in (*CALIBRATED, CHECKSUMS):
            module._buffers.pop(name, None)
            vars(module).pop(name, None)
        vars(module).update(before)
