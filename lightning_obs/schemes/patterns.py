"""Targets and entries of ``ignore`` are patterns: which modules of a model they match, and what they may be meant to.

A pattern is a module's name, a class, or ``re:`` and an expression, and compressed-tensors says what it matches
(``utils/match.py``). It knows a module by its first name alone, and so do engines. A module that the model holds twice
(tied) has two names, and a user may know it by either, so patterns are translated to first names before a plan is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, is_cached_attention_module
from compressed_tensors.utils.match import is_match, match_name
from torch import nn

from lightning_obs.errors import CalibrationError, likely, name_list, warn
from lightning_obs.model.kinds import holds_parameters, is_transformers_model, kind_of
from lightning_obs.model.weight import matrix_shape
from lightning_obs.schemes.config import FOLLOWERS, QUANTIZED_CLASSES, config_groups


def use_first_names(model: nn.Module, config: QuantizationConfig) -> None:
    """Let the targets and ``ignore`` of ``config`` also reach modules by the further names that the model has for them.

    ``build_plan`` calls this first. The first name of such a module is added, since compressed-tensors, transformers
    and vLLM know no other; an entry that matches further names only is replaced by it. A target ``re:`` does not reach
    a module by a further name if any target matches its first name: that one says more.

    Args:
        model: the module whose names the patterns give.
        config: the plan's own copy, which is changed.
    """
    first_names = _first_names(model)
    if not first_names:
        return
    config.ignore = _with_first_names(model, config.ignore or (), first_names)
    groups = config_groups(config)
    all_targets = [target for group in groups for target in group.targets]
    reached_by_pattern: dict[str, str] = {}
    for further_name, first_name in first_names.items():
        if not any(match_name(first_name, target) for target in all_targets):
            reached_by_pattern[further_name] = first_name
    for group in groups:
        targets: list[str] = []
        for target in group.targets:
            reached = reached_by_pattern if target.startswith("re:") else first_names
            targets += _with_first_names(model, [target], reached)
        group.targets = list(dict.fromkeys(targets))


def _first_names(model: nn.Module) -> dict[str, str]:
    """By each further name of a module that the model holds more than once, its first name; mostly empty."""
    names = {module: name for name, module in model.named_modules()}
    first_names: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name != names[module]:
            first_names[name] = names[module]
    return first_names


def _with_first_names(model: nn.Module, patterns: Iterable[str], first_names: Mapping[str, str]) -> list[str]:
    """The patterns, with the first names of the modules that they match by a further name alone.

    A pattern that matches no first name is left out, once it is replaced.

    Args:
        model: the model.
        patterns: targets, or entries of ``ignore``.
        first_names: by further names, those that :func:`use_first_names` considers.
    """
    named: list[str] = []
    for pattern in patterns:
        replacements: dict[str, None] = {}
        for further_name, first_name in first_names.items():
            if match_name(further_name, pattern) and not match_name(first_name, pattern):
                replacements[first_name] = None
        if not replacements or any(is_match(name, module, pattern) for name, module in model.named_modules()):
            named.append(pattern)
        named += replacements
    return named


def warn_ignored_containers(
    model: nn.Module, config: QuantizationConfig, targets: Iterable[str], planned_names: Sequence[str]
) -> None:
    """Warn of entries of ``ignore`` that name modules around planned ones, which they do not exclude.

    compressed-tensors and all engines match each module by itself, so ``model.layers.0`` is the layer without what is
    in it. ``build_plan`` calls this once the modules are planned; the warning names the pattern for what is inside. An
    entry that also matches a module which would be quantized itself has its effect, and nothing is said.

    Args:
        model: the module that will be calibrated.
        config: its ``ignore``, and whether it quantizes the outputs of blocks.
        targets: the targets of all groups.
        planned_names: the modules that will be quantized.
    """
    targets = list(targets)
    has_blocks = FOLLOWERS in config.config_groups
    patterns: dict[str, None] = {}
    idle: list[str] = []
    for entry in config.ignore or ():
        matched = {name: module for name, module in model.named_modules() if is_match(name, module, entry)}
        inside: list[str] = []
        for name, module in matched.items():
            is_block = has_blocks and not type(module).__module__.startswith("torch.")
            if is_block or is_cached_attention_module(module) or is_match(name, module, targets):
                inside.clear()
                break
            if name and any(planned_name.startswith(f"{name}.") for planned_name in planned_names):
                inside.append(name)
        if inside:
            idle.append(entry)
            patterns.update(dict.fromkeys(map(_pattern_of_contents, inside)))
    if idle:
        warn(
            f"`ignore` excludes a module, not the modules inside it, so what is in these will be quantized: "
            f"{name_list(idle)}. To leave out all that is inside, list {name_list(list(patterns))} in `ignore`."
        )


def _pattern_of_contents(name: str) -> str:
    """The pattern for all modules inside one: ``re:model[.]layers[.]0[.]``."""
    return "re:" + re.escape(f"{name}.").replace(r"\.", "[.]")


def leave_out_absent_classes(
    model: nn.Module, by_target: Mapping[str, QuantizationScheme]
) -> dict[str, QuantizationScheme]:
    """Leave out targets that name a class of which the model has no module, so that one list fits many models.

    The class is one of ``torch.nn``, or ``Conv1D`` of transformers. ``build_plan`` calls this before
    :func:`check_patterns`. Two kinds of targets stay, so that :func:`check_patterns` refuses them: a name that is no
    such class, which may be misspelt; and all targets of a group in which none matches. A group that quantizes outputs
    alone may match nothing.

    Args:
        model: the module that will be calibrated.
        by_target: the group of each target; targets that are left out are also removed from their group's ``targets``.

    Returns:
        ``by_target`` without them.
    """
    matched = {target for target in by_target if _matches_any(model, target)}
    kept: dict[str, QuantizationScheme] = {}
    for target, group in by_target.items():
        is_class = target == "Conv1D" or isinstance(getattr(nn, target, None), type)
        is_optional = group.weights is None and group.input_activations is None
        is_last = not is_optional and matched.isdisjoint(group.targets)
        if target in matched or not is_class or is_last:
            kept[target] = group
    for group in by_target.values():
        group.targets = [target for target in group.targets if target in kept]
    return kept


def check_patterns(model: nn.Module, by_target: Mapping[str, QuantizationScheme], ignore: list[str]) -> None:
    """Refuse a target that matches no module; warn of an entry of ``ignore`` that matches none.

    ``build_plan`` calls it after :func:`leave_out_absent_classes`.
    """
    missing = [target for target in by_target if not _matches_any(model, target)]
    if missing:
        _refuse_unmatched(model, missing, by_target[missing[0]])
    unused = unmatched(model, ignore)
    if unused:
        warn(f"ignore matches no module of {type(model).__name__}: {name_list(unused)}")


def unmatched(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The patterns that match no module, each with the nearest name or class of the model.

    Called for the entries of ``ignore``, and by the command line for words that a user typed.
    """
    classes = sorted({type(module).__name__ for module in model.modules() if holds_parameters(module)})
    known_names = [*classes, *dict(model.named_modules(remove_duplicate=False))]
    return [pattern + likely(pattern, known_names) for pattern in patterns if not _matches_any(model, pattern)]


def _matches_any(model: nn.Module, pattern: str) -> bool:
    """Whether a name, class or ``re:`` pattern matches any module of the model, by any of the module's names."""
    return any(is_match(name, module, pattern) for name, module in model.named_modules(remove_duplicate=False))


def _refuse_unmatched(model: nn.Module, targets: Sequence[str], scheme: QuantizationScheme) -> None:
    """Raise the error for targets that match no module; it offers the classes that the scheme can quantize."""
    classes = _quantizable_classes(model, scheme)
    known_names = [*classes, *dict(model.named_modules())]
    expected = f"a module name, a `re:` pattern (anchored at the front), or a class: {name_list(classes)}"
    if not classes:
        expected = f"another model: {type(model).__name__} has no module that this scheme could quantize"
    raise CalibrationError(
        f"a target matches no module of {type(model).__name__}",
        where=[target + likely(target, known_names) for target in targets],
        expected=expected,
        remedy=f"targets={classes}." if classes and "Linear" in targets else None,
    )


def refuse_empty_plan(
    model: nn.Module,
    by_target: Mapping[str, QuantizationScheme],
    ignore: Sequence[str],
    left_out: Mapping[str, str],
) -> NoReturn:
    """Raise the error for a plan without modules; ``build_plan`` calls it.

    The error names the classes that could be quantized. If only kinds of modules are left that transformers does not
    load quantized (GPT-2's ``Conv1D``), the remedy says what loads them.

    Args:
        model: the module that will be calibrated.
        by_target: the group of each target.
        ignore: entries that exclude modules; the names in ``left_out`` may be among them.
        left_out: the reason for each module of a targeted class that cannot be quantized.
    """
    classes: set[str] = set()
    for scheme in by_target.values():
        classes.update(_quantizable_classes(model, scheme))
    excluded = [f"matched by ignore {[entry for entry in ignore if entry not in left_out]}"]
    excluded += [f"left out: {name} ({reason})" for name, reason in left_out.items()]
    class_names = {type(module).__name__ for module in model.modules()}
    not_loaded = [name for name in QUANTIZED_CLASSES if name in class_names and name not in classes]
    remedy = None
    if not_loaded and is_transformers_model(model):
        remedy = (
            f"transformers loads no quantized {' or '.join(not_loaded)}. For load_checkpoint alone, set "
            f"targets={not_loaded} and engines='unchecked'."
        )
    raise CalibrationError(
        "nothing is left to quantize",
        got=f"targets {list(by_target)}, all of them {', or '.join(excluded)}",
        expected=f"a target that `ignore` leaves, among {', '.join(sorted(classes))}" if classes else None,
        remedy=remedy,
    )


def _quantizable_classes(model: nn.Module, scheme: QuantizationScheme) -> list[str]:
    """The classes of the model's modules that a scheme can quantize; errors that say what could be a target name them.

    A module of such a class has a weight that is a matrix. It does not read token indices if the scheme quantizes
    inputs. In a model of transformers it is of a kind that transformers loads quantized.
    """
    classes = set()
    for module in model.modules():
        kind = kind_of(module)
        reads_values = not (kind.reads_indices and scheme.input_activations is not None)
        # transformers loads only kinds with ``stored_as`` quantized.
        is_loaded = kind.stored_as is not None or not is_transformers_model(model)
        if matrix_shape(module) is not None and reads_values and is_loaded:
            classes.add(type(module).__name__)
    return sorted(classes)
