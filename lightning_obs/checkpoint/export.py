"""Write a calibrated model as a compressed-tensors checkpoint.

Files are laid out before any weight is compressed (:mod:`.compress`), and each block of rows is written to its place at
once (:mod:`lightning_obs.files.tensors`). The folder appears under its name when it is complete
(:mod:`lightning_obs.files.write`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Set
from contextlib import ExitStack, closing, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from compressed_tensors import ModelCompressor
from compressed_tensors.modeling import IMPL_ATTR, QuantizedAttentionImpl
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus
from compressed_tensors.utils.helpers import patch_attrs
from compressed_tensors.utils.match import is_match, match_named_modules
from torch import nn

from lightning_obs.checkpoint.compress import StoredTensors, store
from lightning_obs.engines.engine import ENGINES
from lightning_obs.errors import refuse, warn
from lightning_obs.files.tensors import Progress, Tally, TensorWriter
from lightning_obs.files.write import require_room, whole_folder
from lightning_obs.model.checksums import require_ready
from lightning_obs.model.kinds import holds_parameters, is_transformers_model
from lightning_obs.model.module_qparams import ROUNDED, calibrated_modules, get_scheme, quantized_states, read_qparams
from lightning_obs.model.offload import at_rest
from lightning_obs.model.weight import in_shards, model_bytes, register_fsdp_units
from lightning_obs.model.wrappers import adopt_adapters, unwrapped, without_adapters, without_wrappers
from lightning_obs.moe.experts import routers
from lightning_obs.numerics.many_tensors import to_host
from lightning_obs.ranks.collectives import Collectives, on_all_ranks
from lightning_obs.schemes.planned_modules import PlannedModule, find_misfits

#: elements of a tensor that is brought to the host with others
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

    Args:
        model: a transformers model (``from_pretrained(folder)`` and vLLM load the result) or any other module
            (:func:`~lightning_obs.load_checkpoint` does). It can go on training: nothing of it is changed.
        folder: written whole or not at all.
        tokenizer: saved beside the model (anything with ``save_pretrained``).
        overwrite: replace the checkpoint in ``folder``. Files that no export wrote are never deleted.
        max_shard_size: bytes of one file of weights, or ``"5GB"``, as in transformers.
        progress: called with the name of each tensor written, the bytes written so far, and the bytes in all.

    It takes some tens of MB beside the model. Adapters of LoRA are merged into the written weights; the model keeps
    them. If weights are sharded over ranks, every rank must call this; rank 0 writes. Names have no wrappers in them.

    Returns:
        The folder.

    Raises:
        CalibrationError: the model was not calibrated; ``folder`` is not empty and ``overwrite`` is off, or holds other
            files than a checkpoint's; it cannot be written (a mount point, a full disk); a weight is computed from
            others (pruning); a weight, bias, norm... was trained on since the last calibration. ``folder`` is then as
            before.
    """
    register_fsdp_units(model)
    model = unwrapped(model)
    with without_wrappers(model):
        return _export(model, Path(folder), tokenizer, overwrite, max_shard_size, progress)


@at_rest()
def _export(
    model: nn.Module, folder: Path, tokenizer: Any, overwrite: bool, size: int | str, progress: Progress | None
) -> Path:
    refuse(
        [n for n, m in calibrated_modules(model) if "weight" in vars(m)],  # a plain attribute, not a parameter
        "the weight is computed from others (pruning, weight_norm) and cannot be stored",
        remedy="make it permanent first: torch.nn.utils.prune.remove(module, 'weight').",
    )
    refuse(
        adopt_adapters(model),
        "these adapters cannot be merged into a weight here",
        remedy="model.merge_and_unload() of peft first; the quantization parameters stay on the merged layers.",
    )
    sharded = any(map(in_shards, model.modules()))
    require_ready(model, merged_for="a checkpoint of sharded weights" if sharded else None)
    with ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
        stack.enter_context(without_adapters(model))
        partial, writer, ranks = None, None, Collectives.of_group() if sharded else None
        with on_all_ranks(ranks) if ranks else nullcontext():
            _refuse_misfits(model)
            stored = StoredTensors(model)
            if ranks is None or ranks.rank == 0:
                partial = stack.enter_context(whole_folder(folder, overwrite))
                if is_transformers_model(model):  # before the tensors, whose files it would delete
                    _save_without_tensors(model, partial)
                if ranks is None:
                    _warn_if_not_smaller(model, stored.entries)
                tally = Tally(sum(value.nbytes for value in stored.files.values()), progress)
                require_room(partial, tally.total)
                writer = stack.enter_context(closing(TensorWriter(partial, stored.files, size, tally=tally)))
        _write(model, writer, stored, ranks)
        if partial is not None:
            write_quantization_config(model, partial, stored.files.keys())
            if tokenizer is not None:
                tokenizer.save_pretrained(str(partial))
    return folder


def _refuse_misfits(model: nn.Module) -> None:
    """Refuse quantization parameters that are not of the shapes and values that the schemes ask for."""
    modules = [(n, m, s) for n, m in calibrated_modules(model) if not quantized_states(m) and (s := get_scheme(m))]
    held = {name: read_qparams(module) for name, module, _ in modules}
    away = [(x, key) for x in held.values() for key in x.keys() - {ROUNDED} if x[key].device.type != "cpu"]
    on_host = to_host([x[key] for x, key in away]) if away else []  # in one transfer
    for (qparams, key), value in zip(away, on_host, strict=True):
        qparams[key] = value
    refuse(
        [x for name, module, s in modules for x in find_misfits(PlannedModule(name, module, s), held[name])],
        "the quantization parameters are not those that the scheme asks for",
        remedy="calibrate again, with data.",
    )


def _warn_if_not_smaller(model: nn.Module, entries: Mapping[str, torch.Tensor]) -> None:
    again = dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
    stored, plain = sum(value.nbytes for name, value in entries.items() if name not in again), model_bytes(model)
    weighted = any((scheme := get_scheme(m)) is not None and scheme.weights for _, m in calibrated_modules(model))
    if weighted and stored >= plain:
        warn(
            f"the checkpoint is not smaller than the model: {stored:,} bytes, {plain:,} in full precision. "
            "Quantize more of it (`targets`), or with fewer scales (a larger group size)."
        )


# ---------------------------------------------------------------------- tensors and config


def _write(model: nn.Module, writer: TensorWriter | None, stored: StoredTensors, ranks: Collectives | None) -> None:
    """Write every tensor, on the rank with a writer; every rank must call this. An error on one is raised on all."""
    small: list[tuple[str, torch.Tensor, int]] = []  # on an accelerator: they come in one transfer

    def put(name: str, rows: torch.Tensor, first: int) -> None:
        assert writer is not None
        if rows.device.type != "cpu" and rows.numel() <= _SMALL and ranks is None:
            small.append((name, rows, first))
        else:
            stored.put(writer, name, rows, first, copy=ranks is not None)

    failure = store(model, stored.entries, None if writer is None else put)
    with on_all_ranks(ranks) if ranks else nullcontext():
        if failure is not None:
            raise failure
        if writer is not None:
            on_host = to_host([rows for _, rows, _ in small]) if small else []
            for (name, _, first), rows in zip(small, on_host, strict=True):
                stored.put(writer, name, rows, first, copy=False)
            stored.finish(writer)


def write_quantization_config(
    model: nn.Module, folder: Path, tensors: Set[str], unknown: Set[str] = frozenset()
) -> None:
    """Add the quantization config of a calibrated model to ``config.json`` in the checkpoint's ``folder``.

    ``tensors`` are the names, in its files, of the model's tensors; ``unknown`` of further ones, in full precision.
    """
    queries = [m for _, m in calibrated_modules(model) if "q" in quantized_states(m) and not hasattr(m, IMPL_ATTR)]
    # By this submodule compressed-tensors knows that q is quantized.
    with patch_attrs(queries, IMPL_ATTR, [QuantizedAttentionImpl(model.config) for _ in queries]):
        compressor = ModelCompressor.from_pretrained_model(model)
    config = compressor.quantization_config
    config.quantization_status = QuantizationStatus.COMPRESSED
    _name_modules(config, model, tensors)
    known = {*dict(model.named_modules()), *(tensor.rpartition(".")[0] for tensor in tensors)}
    inner = {prefix for name in known for prefix in _prefixes(name)}
    outermost = (_subtree_without(tensor.rpartition(".")[0], inner) for tensor in sorted(unknown))
    config.ignore += list(dict.fromkeys(_below(name) for name in outermost if name))
    compressor.update_config(str(folder))


def _towers(ignored: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """The names in ``ignored``, with one pattern for all that are of a part of the model without quantized modules.

    Such a part is a vision tower or a projector. Modules inside a numbered layer are named.
    """
    inner, found = {prefix for name in quantized for prefix in _prefixes(name)}, dict[str, list[str]]()
    for name in ignored:
        tower = None if name.startswith("re:") else _subtree_without(name, inner)
        whole = tower is not None and tower != name and not any(map(str.isdecimal, tower.split(".")))
        found.setdefault(_below(str(tower)) if whole else name, []).append(name)
    return [names[0] if len(names) == 1 else entry for entry, names in found.items()]


def _prefixes(name: str) -> Iterable[str]:
    """The names of the modules that a module is in, from the outermost on, and its own."""
    return accumulate(name.split("."), "{}.{}".format)


def _subtree_without(name: str, inner: Set[str]) -> str | None:
    """The outermost module around ``name``, or itself, that is not among ``inner``."""
    return next((prefix for prefix in _prefixes(name) if prefix not in inner), None)


def _below(name: str) -> str:
    return f"re:{re.escape(name)}($|\\.)"


def _name_modules(config: QuantizationConfig, model: nn.Module, tensors: Set[str]) -> None:
    """Let ``ignore`` and ``targets`` hold the names by which each reader of the checkpoint finds its modules.

    transformers looks up the names and classes of its own modules. Another engine may look up other names, and have
    other classes. vLLM looks up the names of the stored tensors, which differ in two places: transformers renames
    modules on loading (Mixtral's experts are ``mlp.experts`` there, ``block_sparse_moe.experts`` in the file), and
    experts in one 3-D parameter are stored one by one. vLLM silently reads a module that it does not find in ``ignore``
    as quantized. Groups of ``config`` are replaced, not changed, since modules hold them; ``tensors`` are stored names.
    """
    engines = ENGINES.values() if is_transformers_model(model) else ()
    own, calibrated = dict(model.named_modules()), dict(calibrated_modules(model))
    targets = [target for group in config.config_groups.values() for target in getattr(group, "targets", [])]
    # compressed-tensors ignores modules by the classes of quantized ones; readers match by inheritance and patterns.
    left = [
        name
        for name, module in match_named_modules(model, targets, config.ignore or [])
        if name not in calibrated and holds_parameters(module)
    ]
    modules = {name.removesuffix(".weight") for name in tensors if name.endswith(".weight")} - own.keys()
    unknown = [m for m in sorted(modules) if not {f"{m}.weight_packed", f"{m}.weight_scale"} & tensors]
    # Here a router may be a bare parameter; vLLM has a Linear there.
    ignore = dict.fromkeys([*(config.ignore or []), *left, *(routers(model) if engines else ()), *unknown])
    ignored = [name for name in ignore if name in own]
    for engine in engines:
        ignore |= dict.fromkeys(engine.config_names(model, ignored).values())
    elsewhere = (name for engine in engines for name in engine.config_names(model, [*calibrated]).values())
    config.ignore = _towers(ignore, {*calibrated, *elsewhere})
    for key, group in config.config_groups.items():
        assert isinstance(group, QuantizationScheme)
        members, named = [name for name, m in calibrated.items() if get_scheme(m) == group], list(group.targets)
        for engine in engines:
            for name, stored in engine.config_names(model, members).items():
                found = is_match(stored, own[name], named) and engine.matches_class(model, own[name])
                if not found and not is_match(stored, nn.Identity(), named):  # by name or pattern, not by class
                    named.append(stored)
        config.config_groups[key] = group.model_copy(update={"targets": named})


def _save_without_tensors(model: Any, folder: Path) -> None:
    """Files that transformers saves beside the tensors: configs, and the model's code if it is custom."""
    from transformers.utils import logging

    # A model that a quantizer loaded would save that quantizer's config, a model with adapters only the adapters, an
    # offloaded model would warn of memory.
    misleading = ("hf_quantizer", "_hf_peft_config_loaded", "hf_device_map")
    aside = {key: vars(model).pop(key) for key in misleading if key in vars(model)}
    config = vars(model.config).pop("quantization_config", None)
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # of writing no tensors
    try:
        model.save_pretrained(str(folder), state_dict={})
    finally:
        if shows_bars:
            logging.enable_progress_bar()
        vars(model).update(aside)
        if config is not None:
            model.config.quantization_config = config
