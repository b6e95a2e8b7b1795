"""Load a checkpoint of :func:`~lightning_obs.export_checkpoint` back into a plain module.

transformers loads its own models; this is for every other module, and for what compressed-tensors cannot hold.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus
from compressed_tensors.utils.match import match_named_modules, match_targets
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from lightning_obs.checkpoint.compressed_rows import compressor_of
from lightning_obs.errors import CalibrationError
from lightning_obs.model.checksums import remember
from lightning_obs.model.kinds import compressible_type
from lightning_obs.model.qparams import write_qparams
from lightning_obs.model.quantized_forward import quantize_forward

WEIGHTS_FILE = "model.safetensors"
QPARAMS_FILE = "qparams.safetensors"
CONFIG_FILE = "config.json"


def load_checkpoint(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Load a checkpoint of :func:`export_checkpoint` into a module of the same architecture.

    The weights become the dequantized ones, and the forward quantizes activations, so outputs equal those of the
    calibrated model under :func:`~lightning_obs.quantized`. For transformers models use ``from_pretrained``.

    Args:
        model: a freshly built, unquantized module; changed in place.
        folder: what ``export_checkpoint`` wrote.

    Returns:
        ``model``.

    Raises:
        CalibrationError: files missing, names that do not fit the model. The model is unchanged then.
    """
    folder = Path(folder)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise CalibrationError(
                f"{folder} has no {name}", remedy="give the folder that export_checkpoint wrote for a plain module."
            )
    state = load_file(folder / WEIGHTS_FILE)
    quantized_modules = _compressible_qparams(model, folder, state) | _own_qparams(model, folder)
    keys = set(model.state_dict())
    missing, unexpected = sorted(keys - set(state)), sorted(set(state) - keys)
    if missing or unexpected:
        raise CalibrationError(
            f"the checkpoint does not fit {type(model).__name__}",
            where=missing or unexpected,
            got=f"{len(missing)} missing and {len(unexpected)} unexpected tensors",
            remedy="build the model that was exported.",
        )
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    wrong = [name for name, value in state.items() if value.shape != shapes[name]]
    if wrong:
        raise CalibrationError(
            f"the checkpoint does not fit {type(model).__name__}: other shapes",
            where=[f"{name} {tuple(state[name].shape)} instead of {tuple(shapes[name])}" for name in wrong],
        )
    with torch.inference_mode(False), torch.no_grad():
        model.load_state_dict(state)
        for module, scheme, qparams in quantized_modules.values():
            write_qparams(module, scheme, qparams)
            if compressible_type(module) is not None and scheme.weights is not None:
                # The weight is on the grid already, it need not be quantized at each forward.
                module.quantization_status = QuantizationStatus.DECOMPRESSED
            quantize_forward(module)
        remember(model)
    return model


_QuantizedModules = dict[str, tuple[nn.Module, QuantizationScheme, dict[str, torch.Tensor]]]


def _compressible_qparams(model: nn.Module, folder: Path, state: dict[str, torch.Tensor]) -> _QuantizedModules:
    """Take the compressed entries out of ``state``, put the dequantized weights in, return the qparams."""
    raw = json.loads((folder / CONFIG_FILE).read_text()).get("quantization_config")
    if raw is None:
        return {}
    config = QuantizationConfig.model_validate(raw)
    by_target: dict[str, QuantizationScheme] = {}
    for group in config.config_groups.values():
        assert isinstance(group, QuantizationScheme)
        by_target |= dict.fromkeys(group.targets, group)
    if config.kv_cache_scheme is not None:
        raise CalibrationError(
            "the checkpoint has a quantized kv cache, which transformers loads", remedy="from_pretrained(folder)."
        )
    by_name: _QuantizedModules = {}
    matched = {id(m) for _, m in match_named_modules(model, list(by_target), config.ignore)}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) not in matched or compressible_type(module) is None:
            continue
        scheme = by_target[match_targets(name, module, list(by_target))[0]]
        prefix = f"{name}." if name else ""
        own = [key for key in state if key.startswith(prefix) and "." not in key[len(prefix) :]]
        local = {key[len(prefix) :]: state.pop(key) for key in own}
        if scheme.weights is not None:
            try:
                local = compressor_of(scheme.format or config.format).decompress(local, scheme)
            except KeyError as error:
                raise CalibrationError(
                    f"the checkpoint does not fit {type(model).__name__}",
                    where=[f"{prefix}{error.args[0]} is missing"],
                    remedy="build the model that was exported.",
                ) from error
        keep = {*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))}
        for key in keep & set(local):
            dtype = getattr(module, key).dtype
            state[prefix + key] = local[key].to(dtype)
        qparams = {k: v for k, v in local.items() if k not in keep and k.endswith(("scale", "zero_point"))}
        by_name[name] = (module, scheme, qparams)
    return by_name


def _own_qparams(model: nn.Module, folder: Path) -> _QuantizedModules:
    path = folder / QPARAMS_FILE
    if not path.is_file():
        return {}
    with safe_open(path, "pt") as file:
        schemes = json.loads(file.metadata()["schemes"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (it is no dict)
    modules = dict(model.named_modules())
    unknown = sorted(set(schemes) - set(modules))
    if unknown:
        raise CalibrationError(f"{path} names modules that {type(model).__name__} has not", where=unknown)
    return {
        name: (
            modules[name],
            QuantizationScheme.model_validate(scheme),
            {key.rpartition(".")[2]: value for key, value in tensors.items() if key.rpartition(".")[0] == name},
        )
        for name, scheme in schemes.items()
    }
