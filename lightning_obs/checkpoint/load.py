"""Load a checkpoint of :func:`~lightning_obs.export_checkpoint` back into a plain module.

transformers loads its own models; this is for every other module, and for kinds that transformers cannot load quantized
(convolutions, its own Conv1D).
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus
from compressed_tensors.utils.match import match_named_modules, match_targets
from torch import nn

from lightning_obs.checkpoint.compress import compressed_layout, compressor_of
from lightning_obs.checkpoint.names_in_folder import held_at, hint_of_names, prefix_in_folder
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.files.read import naming, read_json
from lightning_obs.files.tensors import WEIGHTS_FILE, TensorReader
from lightning_obs.files.write import clean_up_after_killed_writers, refuse_damage
from lightning_obs.forward.quantized_forward import quantize_for_good
from lightning_obs.model.checksums import remember
from lightning_obs.model.kinds import from_matrix
from lightning_obs.model.module_qparams import write_qparams
from lightning_obs.model.offload import is_offloaded
from lightning_obs.model.weight import identities, place_of
from lightning_obs.model.wrappers import unwrapped
from lightning_obs.schemes.build_plan import is_meant
from lightning_obs.schemes.planned_modules import PlannedModule, expected_shapes, find_misfits

CONFIG_FILE = "config.json"
_REMEDY = "give the folder that export_checkpoint wrote for a plain module, or copy or export it again."

_Tensors = dict[str, torch.Tensor]


def load_checkpoint(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Load a checkpoint of :func:`export_checkpoint` into a module of the same architecture.

    The weights become the dequantized ones, and the forward quantizes activations, so outputs equal the
    calibrated model under :func:`~lightning_obs.quantized`, also in copies. Quantized weights cannot be
    trained: a gradient for one is a CalibrationError. For transformers models use ``from_pretrained``.

    A checkpoint of a LightningModule can be loaded into the module that it held as ``model``, say: where all names in
    the folder begin with one prefix (``model.``) and the rest are names of ``model``'s modules, they are read without
    the prefix.

    Args:
        model: a freshly built, unquantized module; changed in place.
        folder: written by ``export_checkpoint``.

    Returns:
        ``model``.

    Raises:
        CalibrationError: files are missing or damaged; names, shapes or values do not fit the model or its scheme. The
            model is unchanged then.
    """
    given, model, folder = model, unwrapped(model), Path(folder)
    refuse(
        [name for name, module in model.named_modules() if is_offloaded(module)],
        "a checkpoint cannot be loaded into a model that is offloaded",
        remedy="load it into the whole model, then dispatch that.",
    )
    if not folder.exists():
        clean_up_after_killed_writers(Path(os.path.realpath(folder)).parent)
    raw = read_json(folder / CONFIG_FILE, remedy=_REMEDY).get("quantization_config")
    with naming(folder / CONFIG_FILE, remedy=_REMEDY):
        config = None if raw is None else QuantizationConfig.model_validate(raw)
    with naming(folder / WEIGHTS_FILE, remedy=_REMEDY), closing(TensorReader(folder)) as tensors:
        prefix = prefix_in_folder(model, list(tensors))
        model = held_at(prefix, model) if prefix else model
        with naming(folder / CONFIG_FILE, remedy=_REMEDY):
            targets = [] if config is None else _compressed_targets(model, config)
        stored_as = _require_fit(model, targets, tensors, folder)
        state = {name: tensors.read(name) for name in tensors}
        qparams = {target.name: _decompress(target, state) for target in targets}
    state |= {name: state[other] for name, other in stored_as.items()}
    _refuse_misfits([m for target in targets for m in find_misfits(target, qparams[target.name])], folder)
    refuse_damage(folder)  # last: earlier errors say more
    with torch.inference_mode(False), torch.no_grad():
        model.load_state_dict(state)
        for target in targets:
            write_qparams(target.module, target.scheme, qparams[target.name])
            if target.scheme.weights is not None:
                # The weight is on the grid already, it need not be quantized at each forward.
                target.module.quantization_status = QuantizationStatus.DECOMPRESSED
            quantize_for_good(target.module, trainable=target.scheme.weights is None)
        remember(model)
    return given


def _compressed_targets(model: nn.Module, config: QuantizationConfig) -> list[PlannedModule]:
    """The modules that the config says are quantized."""
    if config.kv_cache_scheme is not None:
        raise CalibrationError(
            "the checkpoint has a quantized kv cache, which transformers loads", remedy="from_pretrained(folder)."
        )
    by_target: dict[str, QuantizationScheme] = {}
    for group in config.config_groups.values():
        assert isinstance(group, QuantizationScheme)
        own_format = group if group.format is not None else group.model_copy(update={"format": config.format})
        by_target |= dict.fromkeys(group.targets, own_format)
    matched = {id(m) for _, m in match_named_modules(model, list(by_target), config.ignore)}
    return [
        PlannedModule(name, module, by_target[target])
        for name, module in model.named_modules(remove_duplicate=False)
        if id(module) in matched and is_meant(target := match_targets(name, module, list(by_target))[0], module)
    ]


def _decompress(target: PlannedModule, state: _Tensors) -> _Tensors:
    """Put the dequantized weight into ``state``, in place of the compressed entries, and return the qparams."""
    prefix = f"{target.name}." if target.name else ""
    own = {key: value for key, value in target.module.state_dict().items() if "." not in key}
    keys = [key for key in state if key.rpartition(".")[0] == target.name]
    local = {key.removeprefix(prefix): state.pop(key) for key in keys}
    if target.scheme.weights is not None:
        packed = local.get("weight_zero_point")
        if packed is not None and packed.ndim == 2 and len(packed) == 1:
            # compressed-tensors 0.20 views the transpose as bytes, for which its last stride has to be 1.
            local["weight_zero_point"] = packed.reshape(-1, 1).t()
        local = compressor_of(target.scheme).decompress(local, target.scheme)
        local["weight"] = from_matrix(target.module, local["weight"], place_of(target.module).shape).contiguous()
    state.update({prefix + key: local[key].to(own[key].dtype) for key in own.keys() & local.keys()})
    return {key: value for key, value in local.items() if key not in own and key.endswith(("scale", "zero_point"))}


def any_qparams(target: PlannedModule) -> dict[str, torch.Tensor]:
    """Quantization parameters as the module will have them, as meta tensors."""
    qparams = {}
    for base, args in target.args.items():
        for name, shape in expected_shapes(target, base).items():
            dtype = args.zp_dtype if name.endswith("zero_point") else None
            qparams[name] = torch.empty(shape or (1,), dtype=dtype, device="meta")
    return qparams


def _form(value: torch.Tensor) -> str:
    # Weights in full precision may have another dtype than the model's.
    dtype = "float" if value.is_floating_point() and value.itemsize > 1 else str(value.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(value.shape)}"


def _require_fit(model: nn.Module, targets: list[PlannedModule], tensors: TensorReader, folder: Path) -> dict[str, str]:
    """Refuse tensors that are missing, left over, or of another shape or format.

    Returns the stored name for each other name of a tied weight, which transformers stores once.
    """
    expected = {name: value.to("meta") for name, value in model.state_dict().items()}
    own = identities(model)
    held = {one: name for name, one in own.items() if name in tensors}
    stored_as = {name: held[one] for name, one in own.items() if one in held and name not in tensors}
    for target in targets:
        prefix = f"{target.name}." if target.name else ""
        plain = {key: expected.pop(prefix + key) for key in target.module.state_dict() if "." not in key}
        entries = compressed_layout(target.module, plain | any_qparams(target), target.scheme)
        expected |= {prefix + key: value for key, value in entries.items()}
    there = {name: _form(value) for name, value in expected.items() if name not in stored_as}
    here = {name: _form(tensors.meta(name)) for name in tensors}
    other = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    _refuse_misfits(
        [f"{name} is {here.get(name, 'missing')} instead of {there.get(name, 'absent')}" for name in other],
        folder,
        hint_of_names(model, list(tensors)) if other else None,
    )
    return stored_as


def _refuse_misfits(misfits: list[str], folder: Path, hint: str | None = None) -> None:
    refuse(
        misfits,
        f"the checkpoint {folder} does not fit the model",
        remedy=hint or "build the model that was exported, or copy or export the checkpoint again.",
    )
