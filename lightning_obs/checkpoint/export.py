"""Write a calibrated model as a compressed-tensors checkpoint.

The live model is not touched (:mod:`lightning_obs.checkpoint.compress`). The folder appears under its final name only
when it is complete (:mod:`lightning_obs.files.write`).

``config.json`` says what is quantized and how, ``model.safetensors`` holds the tensors (:mod:`.compress`), also of what
compressed-tensors' own readers do not know (convolutions...), which :func:`~lightning_obs.load_checkpoint` reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from compressed_tensors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
from compressed_tensors.utils.match import match_named_modules
from safetensors import safe_open
from safetensors.torch import save_file
from torch import distributed as dist
from torch import nn

from lightning_obs.checkpoint.compress import compressed_state_dict
from lightning_obs.checkpoint.engine_names import add_stored_names
from lightning_obs.checkpoint.load import WEIGHTS_FILE
from lightning_obs.errors import CalibrationError, refuse, require_no_failure, warn
from lightning_obs.files.write import require_room, whole_folder
from lightning_obs.forward.attention import marked_as_hooked
from lightning_obs.model.checksums import changed_since
from lightning_obs.model.kinds import holds_parameters, is_transformers_model
from lightning_obs.model.qparams import calibrated_modules, get_scheme, quantized_states, read_qparams
from lightning_obs.model.weight import in_shards, register_fsdp_units
from lightning_obs.model.wrappers import adopt_adapters, refuse_unmerged, unwrapped, without_adapters, without_wrappers
from lightning_obs.moe.experts import routers
from lightning_obs.ranks.collectives import gather_objects
from lightning_obs.schemes.planned_modules import PlannedModule
from lightning_obs.schemes.stored_qparams import find_misfits


def export_checkpoint(
    model: nn.Module, folder: str | os.PathLike[str], *, tokenizer: Any = None, overwrite: bool = False
) -> Path:
    """Write a calibrated model to ``folder`` in compressed-tensors' format.

    Args:
        model: a transformers model (``from_pretrained(folder)`` and vLLM load the result) or any other module
            (:func:`~lightning_obs.load_checkpoint` does). It can go on training: nothing of it is changed.
        folder: written whole or not at all.
        tokenizer: saved beside the model (anything with ``save_pretrained``).
        overwrite: replace the checkpoint in ``folder``. What no export wrote is never deleted.

    Adapters of LoRA are merged into what is written, one layer at a time; the model keeps them.

    If the model's weights are sharded over ranks, every rank must call this; rank 0 writes. Names are those of the
    model without wrappers of FSDP1.

    Returns:
        The folder.

    Raises:
        CalibrationError: the model was not calibrated; ``folder`` is not empty and ``overwrite`` is off, or holds other
            files than a checkpoint's; it cannot be written (a mount point, a full disk); a weight is computed from
            others (pruning); a weight, bias, norm... was trained on since the last calibration. What was in ``folder``
            is there as before.
    """
    register_fsdp_units(model)
    model = unwrapped(model)
    with without_wrappers(model):
        return _export(model, Path(folder), tokenizer, overwrite)


def _export(model: nn.Module, folder: Path, tokenizer: Any, overwrite: bool) -> Path:
    if next(calibrated_modules(model), None) is None:
        raise CalibrationError(
            f"{type(model).__name__} was not calibrated, there is nothing to export",
            remedy="run CalibrationSession or CalibrationCallback on it first.",
        )
    refuse(
        [n for n, m in calibrated_modules(model) if "weight" in vars(m)],  # a plain attribute, no parameter
        "the weight is computed from others (pruning, weight_norm) and cannot be stored",
        remedy="make it permanent first: torch.nn.utils.prune.remove(module, 'weight').",
    )
    refuse(
        adopt_adapters(model),
        "these adapters cannot be merged into a weight here",
        remedy="model.merge_and_unload() of peft first; the quantization parameters stay on the merged layers.",
    )
    stale = changed_since(model)
    refuse(
        stale,
        f"{len(stale)} parameters and buffers have changed since the model was calibrated",
        remedy="calibrate the model as it is now (trainer.validate with the callback), then export.",
    )
    sharded = any(map(in_shards, model.modules()))
    if sharded:
        refuse_unmerged(model, "a checkpoint of sharded weights")
    with ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
        stack.enter_context(without_adapters(model))
        partial = _open(stack, model, folder, overwrite, sharded)
        tensors = compressed_state_dict(model, partial is not None)
        if partial is not None:
            _warn_if_not_smaller(model, tensors, sharded)
            require_room(partial, sum(value.nbytes for value in tensors.values()))
            _write(model, partial, tensors, tokenizer)
    return folder


def _warn_if_not_smaller(model: nn.Module, tensors: Mapping[str, torch.Tensor], sharded: bool) -> None:
    weights = [scheme for _, m in calibrated_modules(model) if (scheme := get_scheme(m)) is not None and scheme.weights]
    stored, plain = _distinct_bytes(tensors), _distinct_bytes(model.state_dict())
    if weights and not sharded and stored >= plain:
        warn(
            f"the checkpoint is not smaller than the model: {stored:,} bytes, {plain:,} in full precision. "
            "Quantize more of it (`targets`), or with fewer scales (a larger group size)."
        )


def _distinct_bytes(tensors: Mapping[str, Any]) -> int:
    """Tied tensors are stored once."""
    places = {t.data_ptr() or name: t.nbytes for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    return sum(places.values())


def _open(stack: ExitStack, model: nn.Module, folder: Path, overwrite: bool, sharded: bool) -> Path | None:
    """What to write into, before any work, on the rank that writes; where ranks gather together, all fail with one."""
    partial, failure = None, None
    try:
        refuse(
            [
                misfit
                for name, module in calibrated_modules(model)
                if not quantized_states(module) and (scheme := get_scheme(module)) is not None
                for misfit in find_misfits(PlannedModule(name, module, scheme), read_qparams(module))
            ],
            "the quantization parameters are not those that the scheme asks for",
            remedy="calibrate again, with data.",
        )
        if not sharded or dist.get_rank() == 0:
            partial = stack.enter_context(whole_folder(folder, overwrite))
    except CalibrationError as error:
        failure = error
    require_no_failure(gather_objects(failure) if sharded else [failure])
    return partial


def _write(model: nn.Module, folder: Path, tensors: dict[str, torch.Tensor], tokenizer: Any) -> None:
    compressor = _model_compressor(model)
    if is_transformers_model(model):
        _save_pretrained(model, folder, tensors)
    else:
        save_file(_unshared(tensors), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    add_stored_names(compressor.quantization_config, model, _tensor_names(folder))
    compressor.update_config(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def _tensor_names(folder: Path) -> list[str]:
    names: list[str] = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names += tensors.keys()
    return names


def _model_compressor(model: nn.Module) -> ModelCompressor:
    with marked_as_hooked(model, [m for _, m in calibrated_modules(model) if "q" in quantized_states(m)]):
        compressor = ModelCompressor.from_pretrained_model(model)
    compressor.quantization_config.quantization_status = QuantizationStatus.COMPRESSED
    compressor.quantization_config.ignore = _ignored(model, compressor.quantization_config)
    return compressor


def _ignored(model: nn.Module, config: QuantizationConfig) -> list[str]:
    """compressed-tensors' list, and what it leaves out although a reader would look for scales there."""
    ignored = list(config.ignore or [])
    targets = [target for group in config.config_groups.values() for target in getattr(group, "targets", [])]
    # It lists by class, of which it knows some quantized module; readers match by inheritance and by patterns, too.
    left = [
        name
        for name, module in match_named_modules(model, targets, ignored)
        if get_scheme(module) is None and holds_parameters(module)
    ]
    # Here a router may be a bare parameter; vLLM has a Linear there.
    return list(dict.fromkeys([*ignored, *left, *routers(model)]))


def _save_pretrained(model: Any, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    # A model that was itself loaded through a quantizer would ignore state_dict=.
    quantizer = getattr(model, "hf_quantizer", None)
    config = vars(model.config).pop("quantization_config", None)
    adapters = vars(model).pop("_hf_peft_config_loaded", None)  # it would save the adapters alone; here they are merged
    try:
        if quantizer is not None:
            model.hf_quantizer = None
        model.save_pretrained(str(folder), state_dict=tensors)
    finally:
        if quantizer is not None:
            model.hf_quantizer = quantizer
        if adapters is not None:
            model._hf_peft_config_loaded = adapters
        if config is not None:
            model.config.quantization_config = config


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """safetensors refuses tensors that share memory (tied weights): each name gets its own copy."""
    seen: set[int] = set()
    result = {}
    for name, value in tensors.items():
        storage = value.untyped_storage().data_ptr()
        result[name] = value.clone().contiguous() if storage in seen else value.contiguous()
        seen.add(storage)
    return result
