"""How transformers changes a model's tensors between its modules and its files: it renames, merges and splits them.

Layouts on the hub are older than its modules: one matrix for q, k and v, say. Its loader knows that for weights, and
not for the scales beside them. What it does is asked of its own functions and tables; this file imports none of it.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from traceback import walk_tb
from typing import Any

import torch
from torch import nn

from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.packages import require_release

#: the first release whose loader has ``apply_converters``, which says what becomes of a name
_OLDEST_TO_ASK = "5.21"


def names_in_files(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """The names of modules in files; the same where transformers has no other, or merges or splits the weight."""
    loading, _ = _converters(model)
    if loading is None:
        return dict(zip(names, names, strict=True))
    changed = {*converted(model, [f"{name}.weight" for name in names])}
    alone = [name for name in names if f"{name}.weight" not in changed]
    # The value of a stand-in weight says which name its key came from.
    stand_ins = {f"{name}.weight": torch.tensor(index) for index, name in enumerate(alone)}
    renamed = loading.revert_weight_conversion(model, stand_ins)
    found = {alone[int(value)]: key.removesuffix(".weight") for key, value in renamed.items()}
    return {name: found.get(name, name) for name in names}


def converted(model: nn.Module, tensors: Iterable[str], step: str = "") -> list[str]:
    """The names of those tensors that transformers does more than rename: it merges, splits or reorders them.

    ``step``: a part of the class name of an operation; only conversions with such an operation count.
    """
    loading, converters = _converters(model)
    back = [one.reverse_transform() for one in converters if _has(one, step)]
    return [name for name in tensors if back and loading.apply_converters(name, back)[1] is not None]


def stacked_weights(model: nn.Module, parameters: Iterable[str]) -> dict[str, list[str]]:
    """Parameters into which transformers stacks weights of its files, a weight per expert.

    Args:
        model: of transformers, or a module around one.
        parameters: candidates, by name.

    Returns:
        By parameter the last parts of the modules' names in files (gate before up); without those that it does not
        stack.
    """
    found = {}
    known: dict[nn.Module, tuple[Any, list[Any]]] = {}
    for parameter in parameters:
        inner, name = model, parameter
        while not is_transformers_model(inner) and "." in name:
            child, _, name = name.partition(".")
            inner = inner.get_submodule(child)
        if inner not in known:
            loading, converters = _converters(inner)
            known[inner] = loading, [one.reverse_transform() for one in converters if _has(one, "MergeModulelist")]
        loading, stacks = known[inner]
        for back in stacks:
            if loading.apply_converters(name, [back])[1] is not None:
                sources = back._original_target_patterns
                found[parameter] = [source.removesuffix(".weight").rpartition(".")[2] for source in sources]
    return found


def dequantized_weights(model: nn.Module, planned: Collection[str]) -> tuple[list[str], list[str]]:
    """What the loader of a quantized checkpoint dequantizes before it merges, or splits, it.

    It does so with each ``weight`` that becomes another one, unless a ``planned`` module holds the result, and looks
    for scales beside it.

    Returns:
        Names of parameters that it merges; names in files of weights that it splits, at which it fails.
    """
    loading, converters = _converters(model)
    merges, split = [], list[str]()
    for one in converters:
        sources, targets = one._original_source_patterns, one._original_target_patterns
        held = any(re.search(f"{targets[0]}$", f"{name}.weight") for name in planned)
        if held or not all(source.endswith(".weight") for source in sources):
            continue
        if len(targets) == 1:
            merges.append(one.reverse_transform())
        elif not any(operation.supports_many_to_many for operation in one.operations):
            split += sources
    names = [name for name, _ in model.named_parameters()] if merges else []
    return [name for name in names if loading.apply_converters(name, merges)[1] is not None], split


def is_replaced(module: nn.Module) -> bool:
    """Whether transformers puts a module of another class in its place when it loads a quantized checkpoint."""
    quantizers = sys.modules.get("transformers.quantizers.base")
    if quantizers is None or not type(module).__module__.startswith("transformers."):
        return False
    replacement = quantizers.MODULES_TO_PATCH_FOR_QUANTIZATION.get(type(module).__name__, {})
    return "compressed-tensors" in [method.value for method in replacement.get("quantization_methods", ())]


def _converters(model: nn.Module) -> tuple[Any, list[Any]]:
    """The module of transformers' loader, and what it does to weights beyond renaming; None: not of transformers.

    Raises:
        CalibrationError: it converts weights, and this release of transformers cannot tell which.
    """
    loading, mapping = (
        sys.modules.get(f"transformers.{name}") for name in ("core_model_loading", "conversion_mapping")
    )
    if loading is None or mapping is None or not is_transformers_model(model):
        return None, []
    found = mapping.get_model_conversion_mapping(model, add_legacy=False)  # without those of a quantizer
    converters = [conversion for conversion in found if isinstance(conversion, loading.WeightConverter)]
    if converters:
        require_release("transformers", _OLDEST_TO_ASK, f"{type(model).__name__}, whose weights transformers converts,")
    return loading, converters


def _has(converter: Any, step: str) -> bool:
    return any(step in type(operation).__name__ for operation in converter.operations)


def initializer_fault(model: nn.Module, without: Collection[str]) -> tuple[str, str] | None:
    """Where loading fails if the modules ``without`` have no ``weight``, and the error; None: it does not.

    While it loads, transformers lets a model's class initialize what it takes for missing, and ``_init_weights`` of
    some classes reads weights of modules without asking whether they are there. That code runs here, on a copy of the
    architecture on the meta device.
    """
    kind: Any = type(model)
    if not kind.__module__.startswith("transformers.") or not any(map(_initializes, model.modules())):
        return None
    with torch.device("meta"):
        twin = kind(copy.deepcopy(model.config))
    for name, module in twin.named_modules():
        vars(module).pop("_is_hf_initialized", None)
        if name in without:
            del module.weight
    try:
        twin.initialize_weights()
    except AttributeError as error:
        names = {module: f"{name} ({type(module).__name__})" for name, module in twin.named_modules()}
        frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == "_init_weights"]
        read = [names[frame.f_locals["module"]] for frame in frames if frame.f_locals.get("module") in names]
        return (read or [kind.__name__])[-1], str(error)
    return None


def _initializes(module: nn.Module) -> bool:
    """Whether its class has an ``_init_weights`` of its own, not the one of all models."""
    defined = next((cls for cls in type(module).__mro__ if "_init_weights" in vars(cls)), None)
    return defined is not None and defined.__name__ != "PreTrainedModel"
