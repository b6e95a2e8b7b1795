"""Write a calibrated model as a compressed-tensors checkpoint.

The files are laid out before any weight is compressed (:mod:`.entries`), and each block of rows is written to
its place at once (:mod:`lightning_obs.files.tensors`). The folder takes its name when it is complete
(:mod:`lightning_obs.files.write`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_obs.checkpoint.compress import Entry
from lightning_obs.checkpoint.entries import StoredTensors, store
from lightning_obs.checkpoint.quantization_config import write_quantization_config
from lightning_obs.errors import refuse, warn
from lightning_obs.files.tensors import Progress, Tally, TensorWriter
from lightning_obs.files.write import require_room, whole_folder
from lightning_obs.model.checksums import require_ready
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.model.module_qparams import ROUNDED, calibrated_modules, get_scheme, quantized_states, read_qparams
from lightning_obs.model.offload import at_rest
from lightning_obs.model.weight import in_shards, model_bytes, register_shards
from lightning_obs.model.wrappers import register_adapters, unwrapped, without_adapters, without_wrappers
from lightning_obs.numerics.many_tensors import to_host
from lightning_obs.ranks.collectives import Collectives, on_all_ranks
from lightning_obs.schemes.planned_modules import PlannedModule, find_misfits

#: tensors on an accelerator with at most this number of elements are brought to the host together
_SMALL = 1 << 16


def export_checkpoint(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    overwrite: bool = False,
    max_shard_size: int | str = "50GB",
    progress: Progress | None = None,
) -> Path:
    """Write a calibrated model to ``folder`` in compressed-tensors' format.

    The export takes some tens of MB beside the model. Adapters of LoRA are merged into the written weights; the model
    keeps them. If weights are sharded over ranks, every rank must call this; rank 0 writes. Names have no wrappers in
    them.

    Args:
        model: a transformers model (``from_pretrained(folder)`` and vLLM load the result) or any other module
            (:func:`~lightning_obs.load_checkpoint` does). It is not changed, and can go on training.
        folder: the new folder, which appears complete or not at all.
        tokenizer: saved beside the model (anything with ``save_pretrained``).
        overwrite: replace the checkpoint in ``folder``. Files that no export wrote are never deleted.
        max_shard_size: bytes of one file of weights, or ``"5GB"``, as in transformers.
        progress: called with the name of each tensor written, the bytes written so far, and the bytes in all.

    Returns:
        The path of the folder.

    Raises:
        CalibrationError: the model was not calibrated; ``folder`` is not empty and ``overwrite`` is off, or holds other
            files than a checkpoint's; it cannot be written (a mount point, a full disk); a weight is computed from
            others (pruning); a weight, bias, norm... was trained on since the last calibration. ``folder`` is then as
            before.
    """
    register_shards(model)
    model = unwrapped(model)
    with without_wrappers(model):
        return _export(model, Path(folder), tokenizer, overwrite, max_shard_size, progress)


@at_rest()
def _export(
    model: nn.Module,
    folder: Path,
    tokenizer: Any,
    overwrite: bool,
    max_shard_size: int | str,
    progress: Progress | None,
) -> Path:
    """Write the checkpoint of :func:`export_checkpoint`, which has taken the model's wrappers away.

    Under ``at_rest`` offloaded tensors stay where they are until they are read.
    """
    _refuse_unmergeable(model)
    is_sharded = any(in_shards(module) for module in model.modules())
    require_ready(model, merged_for="a checkpoint of sharded weights" if is_sharded else None)
    ranks = Collectives.of_group() if is_sharded else None
    with ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
        stack.enter_context(without_adapters(model))
        new_folder = None
        writer = None
        with _raised_on_all(ranks):
            _refuse_misfits(model)
            stored = StoredTensors(model)
            if ranks is None or ranks.rank == 0:
                new_folder = stack.enter_context(whole_folder(folder, overwrite))
                if is_transformers_model(model):
                    _save_without_tensors(model, new_folder)  # first: it would delete files of tensors
                if ranks is None:
                    _warn_if_not_smaller(model, stored.entries)
                tally = Tally(sum(meta.nbytes for meta in stored.files.values()), progress)
                require_room(new_folder, tally.total)
                writer = TensorWriter(new_folder, stored.files, max_shard_size, tally=tally)
                stack.enter_context(closing(writer))
        _write_tensors(model, writer, stored, ranks)
        if new_folder is not None:
            write_quantization_config(model, new_folder, stored.files.keys())
            if tokenizer is not None:
                tokenizer.save_pretrained(str(new_folder))
    return folder


def _raised_on_all(ranks: Collectives | None) -> AbstractContextManager[Any]:
    """For a ``with`` block: a failure on one rank is raised on all; without ranks it is raised as usual."""
    return nullcontext() if ranks is None else on_all_ranks(ranks)


# ---------------------------------------------------------------------- checks before anything is written


def _refuse_unmergeable(model: nn.Module) -> None:
    """Raise a CalibrationError for weights that are computed from other tensors, and cannot be stored as they are."""
    computed = []
    for name, module in calibrated_modules(model):
        if "weight" in vars(module):  # a plain attribute, not a parameter
            computed.append(name)
    refuse(
        computed,
        "the weight is computed from others (pruning, weight_norm) and cannot be stored",
        remedy="make it permanent first: torch.nn.utils.prune.remove(module, 'weight').",
    )
    refuse(
        register_adapters(model),
        "these adapters cannot be merged into a weight here",
        remedy="model.merge_and_unload() of peft first; the quantization parameters stay on the merged layers.",
    )


def _refuse_misfits(model: nn.Module) -> None:
    """Raise a CalibrationError for quantization parameters whose shapes or values do not fit the schemes.

    Those of attention states are not checked here.
    """
    planned = []
    for name, module in calibrated_modules(model):
        scheme = get_scheme(module)
        if scheme is not None and not quantized_states(module):
            planned.append(PlannedModule(name, module, scheme))
    qparams_of_module = _qparams_on_host(planned)
    misfits: list[str] = []
    for target in planned:
        misfits += find_misfits(target, qparams_of_module[target.name])
    refuse(
        misfits,
        "the quantization parameters do not fit the scheme",
        remedy="calibrate again, with data.",
    )


def _qparams_on_host(planned: list[PlannedModule]) -> dict[str, dict[str, torch.Tensor]]:
    """The qparams of each module on the CPU, in one transfer; integers of a rounding stay where they are."""
    qparams_of_module = {}
    places = []
    for target in planned:
        qparams = read_qparams(target.module)
        qparams_of_module[target.name] = qparams
        for key, value in qparams.items():
            if key != ROUNDED and value.device.type != "cpu":
                places.append((qparams, key))
    values = to_host([qparams[key] for qparams, key in places])
    for (qparams, key), value in zip(places, values, strict=True):
        qparams[key] = value
    return qparams_of_module


def _warn_if_not_smaller(model: nn.Module, entries: Mapping[str, torch.Tensor]) -> None:
    """Warn if the checkpoint of a model with quantized weights takes no fewer bytes than the model.

    Args:
        model: in full precision.
        entries: a meta tensor of each stored tensor, by its name in the state dict.
    """
    if not any(_quantizes_weight(module) for _, module in calibrated_modules(model)):
        return
    all_names = dict(model.named_parameters(remove_duplicate=False)).keys()
    second_names = all_names - dict(model.named_parameters()).keys()  # of tied parameters
    stored_bytes = sum(value.nbytes for name, value in entries.items() if name not in second_names)
    float_bytes = model_bytes(model)
    if stored_bytes >= float_bytes:
        warn(
            f"the checkpoint is not smaller than the model: {stored_bytes:,} bytes, {float_bytes:,} in full precision. "
            "Quantize more of it (`targets`), or with fewer scales (a larger group size)."
        )


def _quantizes_weight(module: nn.Module) -> bool:
    scheme = get_scheme(module)
    return scheme is not None and scheme.weights is not None


# ---------------------------------------------------------------------- tensors


def _write_tensors(
    model: nn.Module, writer: TensorWriter | None, stored: StoredTensors, ranks: Collectives | None
) -> None:
    """Write every tensor of the checkpoint. Every rank must call this; a failure on one is raised on all.

    Args:
        model: a calibrated model.
        writer: of the checkpoint's files; None on ranks that only help to gather.
        stored: which tensors are written.
        ranks: that share the weights; None: this process has them all.
    """
    small_entries: list[Entry] = []  # on an accelerator, which one transfer brings to the host

    def put(name: str, rows: torch.Tensor, first: int) -> None:
        """Write rows of a tensor from ``first`` on, or keep small ones; :func:`store` calls this."""
        assert writer is not None
        if rows.device.type != "cpu" and rows.numel() <= _SMALL and ranks is None:
            small_entries.append(Entry(name, rows, first))
        else:
            stored.put(writer, name, rows, first, copy=ranks is not None)

    failure = store(model, stored.entries, None if writer is None else put)
    with _raised_on_all(ranks):
        if failure is not None:
            raise failure
        if writer is not None:
            rows_on_host = to_host([entry.rows for entry in small_entries])
            for entry, rows in zip(small_entries, rows_on_host, strict=True):
                stored.put(writer, entry.name, rows, entry.first, copy=False)
            stored.finish(writer)


def _save_without_tensors(model: Any, folder: Path) -> None:
    """Write the files that transformers saves beside the tensors: configs, and the model's code if it is custom."""
    from transformers.utils import logging

    # With these attributes a model that a quantizer loaded would save that quantizer's config, a model with adapters
    # only the adapters, and an offloaded model would warn of memory.
    attributes = vars(model)
    removed = {}
    for name in ("hf_quantizer", "_hf_peft_config_loaded", "hf_device_map"):
        if name in attributes:
            removed[name] = attributes.pop(name)
    config = vars(model.config).pop("quantization_config", None)
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would show that no tensors are written
    try:
        model.save_pretrained(str(folder), state_dict={})
    finally:
        if shows_bars:
            logging.enable_progress_bar()
        attributes.update(removed)
        if config is not None:
            model.config.quantization_config = config
