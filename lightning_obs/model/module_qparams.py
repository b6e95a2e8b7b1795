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
from lightning_obs.numerics.qparams import ATTENTION, SCHEME_FIELDS, scheme_args

#: the attribute of a module that holds the checksums of its own parameters and buffers, by name. A plain dict: copies
#: and pickles of a calibrated module have it, too, and need nothing of this package for it
CHECKSUMS = "calibrated_checksums"
SUFFIXES = ("scale", "zero_point", "global_scale")
#: a weight ``(R, C)`` in the numbers of its format that a rounding chose, where they are not the nearest; like scales,
#: a plain attribute that copies have
ROUNDED = "weight_rounded"


def _qparam_names() -> tuple[str, ...]:
    names = []
    for base_name in (*SCHEME_FIELDS, *ATTENTION):
        for suffix in SUFFIXES:
            names.append(f"{base_name}_{suffix}")
    return (*names, ROUNDED)


_QPARAMS = _qparam_names()
_SCHEME = ("quantization_scheme", "quantization_status", "quantization_enabled")
#: names that calibration sets on a module: plain attributes, or buffers
CALIBRATED = (*_QPARAMS, *_SCHEME)

#: the values that calibration has put on each module of a model, by name
Calibration: TypeAlias = dict[nn.Module, dict[str, Any]]


def args_of(module: nn.Module, base_name: str) -> QuantizationArgs | None:
    """The args that a calibrated module's scheme has for one of its tensors; ``input_activations`` for attention's."""
    scheme = get_scheme(module)
    return None if scheme is None else getattr(scheme, SCHEME_FIELDS.get(base_name, "input_activations"))


def get_scheme(module: nn.Module) -> QuantizationScheme | None:
    """The scheme that a module was calibrated with, or None."""
    return getattr(module, "quantization_scheme", None)


def quantized_states(module: nn.Module) -> tuple[str, ...]:
    """The attention states (q, k, v) for which a module has scales."""
    states = []
    for state in ATTENTION:
        if isinstance(getattr(module, f"{state}_scale", None), torch.Tensor):
            states.append(state)
    return tuple(states)


@at_rest()
def qparams_home(module: nn.Module) -> torch.Tensor | None:
    """The tensor whose dtype scales are stored in, and on whose device they are: the weight, or attention's first.

    The tensor of an offloaded module is at rest; its qparams are on the device on which the module computes.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor):
        return weight
    return next(module.parameters(), None) if is_cached_attention_module(module) else None


def calibrated_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every calibrated module under its first name."""
    with without_wrappers(model):
        named_modules = list(model.named_modules())
    for name, module in named_modules:
        if get_scheme(module) is not None:
            yield name, module


def write_qparams(module: nn.Module, scheme: QuantizationScheme, qparams: dict[str, torch.Tensor]) -> None:
    """Put copies of a scheme and of ``{"weight_scale": ..., "k_scale": ...}`` on a module, in place of earlier ones."""
    scheme = _copy_scheme(scheme)
    qparams = as_stored(module, qparams)
    _clear(module)
    for name, value in qparams.items():
        setattr(module, name, value)
    scheme.format = storage_format(_stored_class(module), scheme)
    module.quantization_scheme = scheme
    module.quantization_status = QuantizationStatus.FROZEN


def _copy_scheme(scheme: QuantizationScheme) -> QuantizationScheme:
    """A copy for one module, into which compressed-tensors may write a format.

    pydantic's deep copy takes longer than the rest of calibrating.
    """
    fields: dict[str, Any] = {"targets": copy(scheme.targets)}
    for base_name, args in scheme_args(scheme):
        fields[SCHEME_FIELDS[base_name]] = args.model_copy(update={"observer_kwargs": copy(args.observer_kwargs)})
    return scheme.model_copy(update=fields)


def _stored_class(module: nn.Module) -> type[nn.Module]:
    """The class for which compressed-tensors knows a format: a convolution's weight is stored like a Linear's."""
    stored_class = kind_of(module).stored_as
    if stored_class is not None:
        return stored_class
    return type(module) if is_cached_attention_module(module) else nn.Linear


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
    home = qparams_home(module)
    scale_dtype = home.dtype if home is not None and home.is_floating_point() else None
    qparams_device = _device_of_qparams(module)
    stored = {}
    for name, value in qparams.items():
        is_scale = name.endswith("_scale") and not name.endswith("_global_scale")
        dtype = scale_dtype if is_scale and scale_dtype is not None else value.dtype
        device = qparams_device or value.device
        stored[name] = value.detach().to(device, dtype, non_blocking=device.type != "cpu", copy=True)
    return stored


def read_qparams(module: nn.Module) -> dict[str, torch.Tensor]:
    """The quantization parameters on a module, on its weight's device; empty if it was not calibrated.

    ``model.to(device)`` does not take plain attributes along, so they are moved when they are read.
    """
    qparams: dict[str, torch.Tensor] = {}
    attribute_names = _attribute_names(module)
    for name in _QPARAMS:
        if name in attribute_names:
            value = getattr(module, name)
            if isinstance(value, torch.Tensor):
                qparams[name] = value
    device = _device_of_qparams(module) if qparams else None
    if device is None:
        return qparams
    return {name: value.to(device) for name, value in qparams.items()}


def move_qparams(module: nn.Module) -> None:
    """Move a module's quantization parameters to its weight's device, as :func:`read_qparams` gives them."""
    with torch.inference_mode(False):
        for name, value in read_qparams(module).items():
            setattr(module, name, value)


def _device_of_qparams(module: nn.Module) -> torch.device | None:
    """Where a module computes if it is dispatched, else where its weight is; None: it has neither."""
    if any(is_dispatched(inner) for inner in module.modules()):
        device = execution_device(module)
        if device is not None:
            return device
    home = qparams_home(module)
    return None if home is None else home.device


def _attribute_names(module: nn.Module) -> set[str]:
    """Names of the module's attributes, parameters and buffers; ``getattr`` is slow for a name that a module lacks."""
    return {*vars(module), *module._parameters, *module._buffers}


def clear_qparams(module: nn.Module) -> None:
    """Remove everything that calibration has set on a module."""
    _clear(module)
    vars(module).pop(CHECKSUMS, None)


def _clear(module: nn.Module) -> None:
    """Remove qparams and scheme, but not the checksums."""
    # The parameters that compressed-tensors may have registered. A parameter of another name is the model's own.
    registered_names = QuantizationMetadata.all_qparam_names()
    for name in _attribute_names(module).intersection((*registered_names, *_QPARAMS)):
        if name in registered_names or name not in module._parameters:
            delattr(module, name)
    for name in _SCHEME:
        vars(module).pop(name, None)


def calibration_of(model: nn.Module, only: Collection[nn.Module] | None = None) -> Calibration:
    """The calibration that modules hold now, for :func:`put_back`; its values are not copied.

    Args:
        model: any module.
        only: the modules whose qparams are taken; of all others the checksums are. None: all modules.
    """
    calibration: Calibration = {}
    for module in model.modules():
        names: tuple[str, ...] = (CHECKSUMS,)
        if only is None or module in only:
            names = (*CALIBRATED, CHECKSUMS)
        values = {}
        for name in names:
            if name in vars(module):
                values[name] = vars(module)[name]
            elif name in module._buffers:
                values[name] = module._buffers[name]
        calibration[module] = values
    return calibration


def qparams_of(calibration: Calibration, module: nn.Module) -> dict[str, torch.Tensor]:
    """The quantization parameters of one module in a :func:`calibration_of`; none if it is not in it."""
    qparams = {}
    for name, value in calibration.get(module, {}).items():
        if name in _QPARAMS and isinstance(value, torch.Tensor):
            qparams[name] = value
    return qparams


def put_back(calibration: Calibration) -> None:
    """Restore the calibration that modules had when :func:`calibration_of` was called."""
    for module, values in calibration.items():
        for name in (*CALIBRATED, CHECKSUMS):
            module._buffers.pop(name, None)
            vars(module).pop(name, None)
        vars(module).update(values)
