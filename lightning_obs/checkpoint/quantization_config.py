"""Write the quantization config by which every reader of a checkpoint finds the quantized modules.

Readers look up different names. transformers looks up the names and classes of its own modules. Another engine may look
up other names, and have other classes. vLLM looks up the names of the stored tensors, which differ in two places:
transformers renames modules while loading (Mixtral's experts are ``mlp.experts`` there and
``block_sparse_moe.experts`` in the file), and experts in one 3-D parameter are stored one by one. vLLM silently reads a
module that it does not find in ``ignore`` as quantized.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Set
from itertools import accumulate
from pathlib import Path

from compressed_tensors import ModelCompressor
from compressed_tensors.modeling import IMPL_ATTR, QuantizedAttentionImpl
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus
from compressed_tensors.utils.helpers import patch_attrs
from compressed_tensors.utils.match import is_match, match_named_modules
from torch import nn

from lightning_obs.engines.engine import ENGINES, Engine
from lightning_obs.model.kinds import holds_parameters, is_transformers_model
from lightning_obs.model.module_qparams import calibrated_modules, get_scheme, quantized_states
from lightning_obs.moe.experts import routers


def write_quantization_config(
    model: nn.Module, folder: Path, tensors: Set[str], unknown: Set[str] = frozenset()
) -> None:
    """Add the quantization config of a calibrated model to ``config.json`` in a checkpoint's folder.

    Every export calls this, of a model in memory or from files.

    Args:
        model: a calibrated model; from files, with the meta tensors of the qparams.
        folder: the checkpoint.
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
        config: from compressed-tensors.
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
    subclasses and patterns, too.

    Args:
        config: from compressed-tensors.
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
        modules: of the model, by name.
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
    """A group's targets, with the names of members that an engine would not find by the class or pattern it has.

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
    """Of ``name`` and the modules around it, the outermost that is not among ``parents``; None if all are."""
    for prefix in _names_on_the_way(name):
        if prefix not in parents:
            return prefix
    return None


def _is_numbered(name: str) -> bool:
    """Whether a module is, or is inside, an item of a list."""
    return any(component.isdecimal() for component in name.split("."))


def _pattern_of(name: str) -> str:
    """A pattern that matches a module and all modules inside it."""
    return f"re:{re.escape(name)}($|\\.)"
