"""Write a calibrated model as a compressed-tensors checkpoint.

The files are laid out before any weight is compressed (:mod:`.entries`), and each block of rows is written to
its place at once (:mod:`lightning_obs.files.tensors`). The folder takes its name when it is complete
(:mod:`lightning_obs.files.write`).

By the quantization config, which is written last, every reader of the checkpoint finds the quantized modules. Readers
look up different names. transformers looks up the names and classes of its own modules. Another engine may look
up other names, and have other classes. vLLM looks up the names of the stored tensors, which differ in two places:
transformers renames modules while loading (Mixtral's experts are ``mlp.experts`` there and
``block_sparse_moe.experts`` in the file), and experts in one 3-D parameter are stored one by one. vLLM silently reads a
module that it does not find in ``ignore`` as quantized.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Set
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
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

from lightning_obs.checkpoint.entries import Entry, StoredTensors, store
from lightning_obs.engines.engine import ENGINES, Engine
from lightning_obs.errors import name_list, refuse, warn
from lightning_obs.files.tensors import Progress, Tally, TensorWriter
from lightning_obs.files.write import require_room, whole_folder
from lightning_obs.model.kinds import (
    holds_parameters,
    is_transformers_model,
    register_adapters,
    unwrapped,
    without_adapters,
    without_wrappers,
)
from lightning_obs.model.module_qparams import (
    ROUNDED,
    calibrated_modules,
    get_scheme,
    quantized_states,
    read_qparams,
    require_ready,
)
from lightning_obs.model.offload import at_rest
from lightning_obs.model.weight import in_shards, model_bytes, register_shards
from lightning_obs.moe.experts import routers
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

    Raises:
        CalibrationError: as for :func:`export_checkpoint`. A model that was not calibrated, or has changed since, is
            refused by ``require_ready``; where weights are sharded, also a model whose adapters are not merged.
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
                if ranks is None:  # of sharded weights, this rank's bytes are not those of the model
                    _warn_if_not_smaller(model, stored.entries)
                _warn_of_extra_states(model)
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


def _warn_of_extra_states(model: nn.Module) -> None:
    """Warn of values in the state dict that are no tensors, which a checkpoint does not hold."""
    names = [name for name, value in model.state_dict().items() if not isinstance(value, torch.Tensor)]
    if names:
        warn(
            "a checkpoint holds tensors alone, so these extra states (get_extra_state) are not in it: "
            f"{name_list(names)}. Set them on the model that load_checkpoint gives back."
        )


def _refuse_unmergeable(model: nn.Module) -> None:
    """Raise a CalibrationError for weights that cannot be stored as they are.

    They are computed from other tensors, or have LoRA adapters that cannot be merged into them. All other adapters are
    noted on their base layers (:func:`.register_adapters`): the export then reads the merged weights.
    """
    computed = []
    for name, module in calibrated_modules(model):
        if "weight" in vars(module):  # a plain attribute, not a parameter
            computed.append(name)
    refuse(
        computed,
        "the weight is computed from others (pruning, weight_norm, spectral_norm) and cannot be stored",
        remedy="make it permanent first, by the function of torch.nn.utils that fits: prune.remove(module, 'weight'), "
        "remove_weight_norm(module) or remove_spectral_norm(module).",
    )
    unmergeable = register_adapters(model)
    refuse(
        unmergeable,
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
    if places:
        values = to_host([qparams[key] for qparams, key in places])
        for (qparams, key), value in zip(places, values, strict=True):
            qparams[key] = value
    return qparams_of_module


def _warn_if_not_smaller(model: nn.Module, entries: Mapping[str, torch.Tensor]) -> None:
    """Warn if the checkpoint of a model with quantized weights takes no fewer bytes than the model.

    Args:
        model: the calibrated model, whose own tensors are in full precision.
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
    """Whether the module was calibrated by a scheme that quantizes its weight."""
    scheme = get_scheme(module)
    return scheme is not None and scheme.weights is not None


# ---------------------------------------------------------------------- tensors


def _write_tensors(
    model: nn.Module, writer: TensorWriter | None, stored: StoredTensors, ranks: Collectives | None
) -> None:
    """Write every tensor of the checkpoint. Every rank must call this; a failure on one is raised on all.

    Args:
        model: a calibrated model.
        writer: the writer of the checkpoint's files; None on ranks that only help to gather.
        stored: the tensors that are written.
        ranks: the ranks that share the weights; None: this process has all weights.
    """
    # Entries on an accelerator, kept until one transfer brings all of them to the host: each transfer waits for the
    # accelerator. With several ranks none is kept, because gathered memory is used again for the next weights.
    small_entries: list[Entry] = []

    def put(name: str, rows: torch.Tensor, first: int) -> None:
        """Write rows of a tensor from ``first`` on, or keep small ones; :func:`store` calls this."""
        assert writer is not None
        if rows.device.type != "cpu" and rows.numel() <= _SMALL and ranks is None:
            small_entries.append(Entry(name, rows, first))
        else:
            is_gathered = ranks is not None  # then the memory of ``rows`` may be that of the next weights
            stored.put(writer, name, rows, first, copy=is_gathered)

    failure = store(model, stored.entries, None if writer is None else put)
    with _raised_on_all(ranks):
        if failure is not None:
            raise failure
        if writer is not None and small_entries:
            rows_on_host = to_host([entry.rows for entry in small_entries])
            for entry, rows in zip(small_entries, rows_on_host, strict=True):
                stored.put(writer, entry.name, rows, entry.first, copy=False)
        if writer is not None:
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


# ---------------------------------------------------------------------- the quantization config


def write_quantization_config(
    model: nn.Module, folder: Path, tensors: Set[str], unknown: Set[str] = frozenset()
) -> None:
    """Add the quantization config of a calibrated model to ``config.json`` in a checkpoint's folder.

    ``export_checkpoint`` calls it once the tensors are written. ``streaming/``, which quantizes a checkpoint from its
    files, calls it when it writes the files beside the tensors.

    Args:
        model: a calibrated model; when it is quantized from files, its qparams are meta tensors.
        folder: the checkpoint's folder.
        tensors: names of the model's tensors in the checkpoint's files.
        unknown: names of further tensors there, in full precision, that the model's class does not know.
    """
    compressor = _compressor_of(model)
    config = compressor.quantization_config
    config.quantization_status = QuantizationStatus.COMPRESSED
    engines = list(ENGINES.values()) if is_transformers_model(model) else []
    config.ignore = _ignored_names(config, model, tensors, engines)
    calibrated = dict(calibrated_modules(model))
    for key, group in config.config_groups.items():
        assert isinstance(group, QuantizationScheme)
        members = [name for name, module in calibrated.items() if get_scheme(module) == group]
        targets = _targets_of(group, model, members, engines)
        config.config_groups[key] = group.model_copy(update={"targets": targets})  # modules have the group as well
    known_modules = {*dict(model.named_modules()), *map(_module_of, tensors)}
    config.ignore += _patterns_of_unknown(unknown, known_modules)
    compressor.update_config(str(folder))


def _compressor_of(model: nn.Module) -> ModelCompressor:
    """compressed-tensors' compressor of a calibrated model, which collects the schemes of its modules."""
    attentions = []
    for _, module in calibrated_modules(model):
        if "q" in quantized_states(module) and not hasattr(module, IMPL_ATTR):
            attentions.append(module)
    # By this submodule compressed-tensors knows that q is quantized.
    implementations = [QuantizedAttentionImpl(model.config) for _ in attentions]
    with patch_attrs(attentions, IMPL_ATTR, implementations):
        return ModelCompressor.from_pretrained_model(model)


# ---------------------------------------------------------------------- modules in full precision


def _ignored_names(
    config: QuantizationConfig, model: nn.Module, tensors: Set[str], engines: Collection[Engine]
) -> list[str]:
    """The config's ``ignore``: modules in full precision, under every name that a reader looks up.

    Args:
        config: the config that compressed-tensors made of the modules' schemes.
        model: a calibrated model.
        tensors: names of the model's tensors in the checkpoint's files.
        engines: readers that may look up names of their own.
    """
    modules = dict(model.named_modules())
    calibrated = dict(calibrated_modules(model))
    ignored = list(config.ignore or [])
    ignored += _targeted_in_float(config, model, calibrated)
    if engines:
        ignored += routers(model)  # a bare parameter here may be a Linear in vLLM
    ignored += _stored_in_float(tensors, modules)
    names = dict.fromkeys(ignored)
    known_names = [name for name in names if name in modules]
    quantized_names = set(calibrated)
    for engine in engines:
        names |= dict.fromkeys(engine.config_names(model, known_names).values())
        quantized_names.update(engine.config_names(model, list(calibrated)).values())
    return _as_towers(names, quantized_names)


def _targeted_in_float(config: QuantizationConfig, model: nn.Module, calibrated: Mapping[str, nn.Module]) -> list[str]:
    """Names of modules in full precision that a reader would take for quantized, because a target matches them.

    compressed-tensors lists in ``ignore`` only modules whose class is exactly that of a quantized one. Readers match
    subclasses and patterns, too. A target that is a name or a class means every module that it matches. A pattern
    (``re:.*mlp.*``) also matches containers and activation functions; without parameters, these are not listed, since
    no reader quantizes them.

    Args:
        config: the config that compressed-tensors made of the modules' schemes.
        model: a calibrated model.
        calibrated: its quantized modules by name.
    """
    targets: list[str] = []
    for group in config.config_groups.values():
        targets += getattr(group, "targets", [])
    classes = [target for target in targets if not target.startswith("re:")]
    names = []
    for name, module in match_named_modules(model, targets, config.ignore or []):
        is_meant = holds_parameters(module) or is_match(name, module, classes)
        if name not in calibrated and is_meant:
            names.append(name)
    return names


def _stored_in_float(tensors: Set[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """Names of modules that only the files have and that are stored in full precision: experts of a stack, say.

    Args:
        tensors: names of the model's tensors in the checkpoint's files.
        modules: the model's modules, by name.
    """
    names = set()
    for tensor in tensors:
        if tensor.endswith(".weight"):
            names.add(tensor.removesuffix(".weight"))
    in_float = []
    for name in sorted(names - modules.keys()):
        if f"{name}.weight_packed" not in tensors and f"{name}.weight_scale" not in tensors:
            in_float.append(name)
    return in_float


def _as_towers(ignored: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """Shorten ``ignore``: one pattern in place of all names in a part of the model without quantized modules.

    Such a part (a tower) is a vision tower or a projector. Modules inside a numbered layer keep their names.

    Args:
        ignored: names and patterns of modules in full precision.
        quantized: names of quantized modules.
    """
    parents = _names_and_parents(quantized)
    names_of_entry: dict[str, list[str]] = {}
    for name in ignored:
        entry = name
        tower = None if name.startswith("re:") else _outermost_outside(name, parents)
        if tower is not None and tower != name and not _is_numbered(tower):
            entry = _pattern_of(tower)
        names_of_entry.setdefault(entry, []).append(name)
    entries = []
    for entry, names in names_of_entry.items():
        entries.append(names[0] if len(names) == 1 else entry)
    return entries


def _patterns_of_unknown(unknown: Set[str], known_modules: Iterable[str]) -> list[str]:
    """Patterns of ``ignore`` for tensors that the model's class does not know: one for each outermost unknown module.

    Args:
        unknown: names of these tensors in the files.
        known_modules: names of the modules that the model or the files have otherwise.
    """
    parents = _names_and_parents(known_modules)
    patterns: dict[str, None] = {}
    for tensor in sorted(unknown):
        outermost = _outermost_outside(_module_of(tensor), parents)
        if outermost:
            patterns[_pattern_of(outermost)] = None
    return list(patterns)


# ---------------------------------------------------------------------- quantized modules


def _targets_of(
    group: QuantizationScheme, model: nn.Module, members: list[str], engines: Iterable[Engine]
) -> list[str]:
    """A group's targets, and the names of members that an engine would not find by these targets.

    Args:
        group: a group of the config.
        model: a calibrated model.
        members: names of the modules that are quantized as the group says.
        engines: readers that may look up names of their own.
    """
    targets = list(group.targets)
    for engine in engines:
        for name, name_in_engine in engine.config_names(model, members).items():
            module = model.get_submodule(name)
            is_matched = is_match(name_in_engine, module, targets) and engine.matches_class(model, module)
            is_matched_by_name = is_match(name_in_engine, nn.Identity(), targets)  # an Identity has no target's class
            if not is_matched and not is_matched_by_name:
                targets.append(name_in_engine)
    return targets


# ---------------------------------------------------------------------- names of modules


def _module_of(tensor: str) -> str:
    """The name of the module that has a tensor."""
    return tensor.rpartition(".")[0]


def _names_on_the_way(name: str) -> Iterable[str]:
    """The names of the modules around a module, from the outermost on, and its own name."""
    return accumulate(name.split("."), "{}.{}".format)


def _names_and_parents(names: Iterable[str]) -> set[str]:
    """The names, and the names of all modules around them."""
    on_the_way: set[str] = set()
    for name in names:
        on_the_way.update(_names_on_the_way(name))
    return on_the_way


def _outermost_outside(name: str, parents: Set[str]) -> str | None:
    """The outermost of the module ``name`` and the modules around it that is not in ``parents``; None: all are."""
    for prefix in _names_on_the_way(name):
        if prefix not in parents:
            return prefix
    return None


def _is_numbered(name: str) -> bool:
    """Whether a part of a module's name is a number, because the module is an item of a list or inside one."""
    return any(component.isdecimal() for component in name.split("."))


def _pattern_of(name: str) -> str:
    """A pattern that matches a module and all modules inside it."""
    return f"re:{re.escape(name)}($|\\.)"
