"""Load a checkpoint of :func:`~lightning_obs.export_checkpoint` back into a plain module.

transformers loads its own models. This is for every other module, and for kinds of modules that transformers cannot
load quantized (convolutions, its own Conv1D).
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus
from compressed_tensors.utils.match import match_named_modules, match_targets
from torch import nn

from lightning_obs.checkpoint.entries import Tensors, compressed_layout, compressor_of, meta_qparams
from lightning_obs.checkpoint.names_in_folder import hint_of_names, module_around, prefix_in_folder
from lightning_obs.errors import CalibrationError, refuse, require_kind
from lightning_obs.files.read import naming, read_json
from lightning_obs.files.tensors import WEIGHTS_FILE, TensorReader
from lightning_obs.files.write import clean_up_after_killed_writers, refuse_damage
from lightning_obs.forward.eager import unfuse_for_good
from lightning_obs.forward.linear_attention import linearize_stored
from lightning_obs.forward.linear_recurrent import linearize_stored_recurrent
from lightning_obs.forward.quantized_forward import quantize_for_good
from lightning_obs.model.kinds import from_matrix, unwrapped, without_wrappers
from lightning_obs.model.module_qparams import remember, write_qparams
from lightning_obs.model.offload import is_offloaded
from lightning_obs.model.weight import identities, place_of, refuse_uninitialized
from lightning_obs.schemes.build_plan import is_meant
from lightning_obs.schemes.planned_modules import PlannedModule, find_misfits

CONFIG_FILE = "config.json"
_REMEDY = "give the folder that export_checkpoint wrote for a plain module, or copy or export it again."


def load_checkpoint(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Load a checkpoint of :func:`export_checkpoint` into a module of the same architecture.

    The weights become the dequantized weights, and the forward quantizes activations, so outputs equal the outputs of
    the calibrated model under :func:`~lightning_obs.quantized`, also in copies. Quantized weights cannot be trained: a
    gradient for such a weight is a CalibrationError. For transformers models use ``from_pretrained``.

    A checkpoint of a LightningModule can be loaded into the module that it has as an attribute, for example ``model``:
    if all names in the folder begin with one prefix (``model.``) and continue with names of this module, they are read
    without the prefix.

    If the calibrated model's attention or recurrent layers were made of Linears (``linearize_attention``,
    ``linearize_recurrent``), these layers of ``model`` are replaced in the same way first.

    Wrappers in ``model`` (torch.compile, activation checkpointing) are no part of a name in the folder, and stay.

    The checksums of all loaded tensors are noted on the modules, as after a calibration: an export, or a run under
    ``quantized``, can then tell whether a tensor has changed since.

    Args:
        model: a freshly built, unquantized module; changed in place, layers may be replaced in it.
        folder: written by ``export_checkpoint``.

    Returns:
        ``model``.

    Raises:
        CalibrationError: files are missing or damaged; names, shapes or values do not fit the model or its scheme. The
            model is unchanged then.
    """
    require_kind("model", model, (nn.Module,), "a module to load into: `MyNet()`, not its class or its name")
    module = unwrapped(model)
    with without_wrappers(module):
        _load(module, Path(folder))
    return model


def _load(module: nn.Module, folder: Path) -> None:
    """Load a checkpoint into a module that has no wrappers inside; :func:`load_checkpoint` calls this."""
    refuse(
        [name for name, inner in module.named_modules() if is_offloaded(inner)],
        "a checkpoint cannot be loaded into a model that is offloaded",
        remedy="load it into the whole model, then dispatch that.",
    )
    if not folder.exists():  # a writer that was killed while it replaced the folder has left the old one beside it
        clean_up_after_killed_writers(Path(os.path.realpath(folder)).parent)
    refuse_uninitialized(module.named_modules())
    config = _read_config(folder)
    with ExitStack() as undo:
        with naming(folder / WEIGHTS_FILE, remedy=_REMEDY), closing(TensorReader(folder)) as reader:
            # Both replace layers, and return the function that puts the earlier layers back if an error follows.
            undo.callback(linearize_stored(module, reader))
            undo.callback(linearize_stored_recurrent(module, reader))
            prefix = prefix_in_folder(module, list(reader))
            if prefix:
                module = module_around(module, prefix)
            with naming(folder / CONFIG_FILE, remedy=_REMEDY):
                targets = [] if config is None else _quantized_modules(module, config)
            stored_as = _names_of_tied(module, reader)
            _require_fit(module, targets, reader, folder, stored_as)
            state = {name: reader.read(name) for name in reader}
            qparams_of_module = {target.name: _decompress(target, state) for target in targets}
        for name, stored_name in stored_as.items():
            state[name] = state[stored_name]
        misfits: list[str] = []
        for target in targets:
            misfits += find_misfits(target, qparams_of_module[target.name])
        _refuse_misfits(misfits, folder)
        refuse_damage(folder)  # last: the errors before it say more
        undo.pop_all()
    with torch.inference_mode(False), torch.no_grad():
        module.load_state_dict(module.state_dict() | state)  # extra states that are no tensors stay
        for target in targets:
            _write_loaded_qparams(target, qparams_of_module[target.name])
        unfuse_for_good(module)  # torch's encoder layers must call their Linears, whose forwards quantize now
        remember(module)


def _read_config(folder: Path) -> QuantizationConfig | None:
    """The quantization config of a checkpoint; None for a checkpoint in full precision."""
    config = read_json(folder / CONFIG_FILE, remedy=_REMEDY).get("quantization_config")
    if config is None:
        return None
    with naming(folder / CONFIG_FILE, remedy=_REMEDY):
        return QuantizationConfig.model_validate(config)


def _quantized_modules(model: nn.Module, config: QuantizationConfig) -> list[PlannedModule]:
    """The modules of ``model`` that the config says are quantized, each with its scheme and under all of its names.

    :func:`load_checkpoint` calls this before tensors are read. Targets and ``ignore`` are matched with a module's first
    name, by which the calibrated model was planned. As in that plan (``is_meant``), a regular expression does not mean
    the containers and activation functions that it matches, which hold no parameters.
    """
    if config.kv_cache_scheme is not None:
        raise CalibrationError(
            "load_checkpoint cannot load a quantized kv cache",
            remedy="load it with from_pretrained(folder).",
        )
    scheme_of_target: dict[str, QuantizationScheme] = {}
    for group in config.config_groups.values():
        assert isinstance(group, QuantizationScheme)
        scheme = group if group.format is not None else group.model_copy(update={"format": config.format})
        scheme_of_target |= dict.fromkeys(group.targets, scheme)
    target_names = list(scheme_of_target)
    # by id: the hash of a torchmetrics' metric, which may be a module of the model, changes with its state
    scheme_of_module: dict[int, QuantizationScheme] = {}
    for first_name, module in match_named_modules(model, target_names, config.ignore):
        target_name = match_targets(first_name, module, target_names)[0]
        if is_meant(target_name, module):
            scheme_of_module[id(module)] = scheme_of_target[target_name]
    planned = []
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in scheme_of_module:
            planned.append(PlannedModule(name, module, scheme_of_module[id(module)]))
    return planned


# ---------------------------------------------------------------------- checks before tensors are read


def _names_of_tied(model: nn.Module, reader: TensorReader) -> dict[str, str]:
    """By name in the model, the stored name of each tied tensor that is not stored under that name.

    transformers stores a tied tensor under one of its names only.
    """
    identity_of_name = identities(model)
    stored_name_of_identity = {}
    for name, identity in identity_of_name.items():
        if name in reader:
            stored_name_of_identity[identity] = name
    stored_as = {}
    for name, identity in identity_of_name.items():
        if name not in reader and identity in stored_name_of_identity:
            stored_as[name] = stored_name_of_identity[identity]
    return stored_as


def _require_fit(
    model: nn.Module,
    targets: list[PlannedModule],
    reader: TensorReader,
    folder: Path,
    tied: Container[str],
) -> None:
    """Raise a CalibrationError for tensors that are missing, left over, or of another shape or format.

    Args:
        model: the module to load into.
        targets: its quantized modules.
        reader: the tensors of the checkpoint.
        folder: the checkpoint's folder, for the error.
        tied: names of tensors that are stored under another name.
    """
    expected_forms = {}
    for name, meta in _expected_layout(model, targets).items():
        if name not in tied:
            expected_forms[name] = _form(meta)
    stored_forms = {name: _form(reader.meta(name)) for name in reader}
    misfits = []
    for name in sorted(stored_forms.keys() | expected_forms.keys()):
        stored_form = stored_forms.get(name, "missing")
        expected_form = expected_forms.get(name, "absent")
        if stored_form != expected_form:
            misfits.append(f"{name} is {stored_form} instead of {expected_form}")
    hint = hint_of_names(model, list(reader)) if misfits else None
    _refuse_misfits(misfits, folder, hint)


def _state_tensors(model: nn.Module) -> Tensors:
    """The tensors of the state dict; other values (extra states) are in no checkpoint, and the model keeps its own."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def _expected_layout(model: nn.Module, targets: list[PlannedModule]) -> Tensors:
    """A meta tensor of every tensor that a checkpoint of the model holds, by name.

    Args:
        model: the module to load into.
        targets: its quantized modules.
    """
    layout = {name: value.to("meta") for name, value in _state_tensors(model).items()}
    for target in targets:
        prefix = f"{target.name}." if target.name else ""
        tensors = Tensors()
        for key in _state_tensors(target.module):
            if "." not in key:  # else of a module inside it
                tensors[key] = layout.pop(prefix + key)
        tensors |= meta_qparams(target)
        for key, meta in compressed_layout(target.module, tensors, target.scheme).items():
            layout[prefix + key] = meta
    return layout


def _form(value: torch.Tensor) -> str:
    """A tensor's dtype and shape as a text, to compare tensors and to show them in an error.

    All floats of two bytes and more are ``float``: the model may have another dtype than the checkpoint.
    """
    is_wide_float = value.is_floating_point() and value.itemsize > 1
    dtype = "float" if is_wide_float else str(value.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(value.shape)}"


def _refuse_misfits(misfits: list[str], folder: Path, hint: str | None = None) -> None:
    """Raise a CalibrationError if there are misfits.

    Args:
        misfits: texts, one for each tensor that does not fit the model.
        folder: the checkpoint's folder.
        hint: a remedy that says more than the general remedy; None: the general remedy.
    """
    refuse(
        misfits,
        f"the checkpoint {folder} does not fit the model",
        remedy=hint or "build the model that was exported, or copy or export the checkpoint again.",
    )


# ---------------------------------------------------------------------- from stored tensors to the module


def _decompress(target: PlannedModule, state: Tensors) -> Tensors:
    """Decompress one module, between reading the files and loading the state dict.

    Two kinds of the module's entries are kept: tensors of its state dict, and qparams (names that end with ``scale`` or
    ``zero_point``). Others only serve to decompress the weight, as ``weight_shape`` does, and are dropped.
    ``_require_fit`` has refused unknown entries before.

    Args:
        target: a quantized module.
        state: the tensors of the checkpoint by name; the module's entries become its tensors in the state dict, with
            the dequantized weight.

    Returns:
        The module's qparams, by their names in the module.
    """
    prefix = f"{target.name}." if target.name else ""
    entries = {}
    for name in list(state):
        if name.rpartition(".")[0] == target.name:
            entries[name.removeprefix(prefix)] = state.pop(name)
    if target.scheme.weights is not None:
        entries = _with_dequantized_weight(target, entries)
    qparams = {}
    model_values = target.module.state_dict()
    for key, value in entries.items():
        if key in model_values:
            state[prefix + key] = value.to(model_values[key].dtype)
        elif key.endswith(("scale", "zero_point")):
            qparams[key] = value
    return qparams


def _with_dequantized_weight(target: PlannedModule, entries: Mapping[str, torch.Tensor]) -> Tensors:
    """A module's entries with its weight in the module's own shape, and qparams that are not packed."""
    packed = dict(entries)
    zero_point = packed.get("weight_zero_point")
    if zero_point is not None and zero_point.ndim == 2 and len(zero_point) == 1:
        # compressed-tensors 0.20 views the transpose as bytes, for which its last stride has to be 1.
        packed["weight_zero_point"] = zero_point.reshape(-1, 1).t()
    tensors: Tensors = compressor_of(target.scheme).decompress(packed, target.scheme)
    shape = place_of(target.module).shape
    tensors["weight"] = from_matrix(target.module, tensors["weight"], shape).contiguous()
    return tensors


def _write_loaded_qparams(target: PlannedModule, qparams: Mapping[str, torch.Tensor]) -> None:
    """Put qparams on a module whose weight is loaded, and let its forward quantize activations from now on.

    A gradient for a quantized weight is an error from then on.
    """
    quantizes_weight = target.scheme.weights is not None
    write_qparams(target.module, target.scheme, dict(qparams))
    if quantizes_weight:
        # The weight is on the grid already, it need not be quantized at each forward.
        target.module.quantization_status = QuantizationStatus.DECOMPRESSED
    quantize_for_good(target.module, trainable=not quantizes_weight)
