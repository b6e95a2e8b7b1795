"""How transformers changes a model's tensors between its modules and its files: it renames, merges and splits them.

Files on the hub may be older than the classes that load them: they may store q, k and v as one matrix. transformers'
loader then splits the weight, but not its scales. This file asks the loader's own functions and tables. It takes them
from ``sys.modules``, and does not import transformers.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from traceback import walk_tb
from types import TracebackType
from typing import Any

import torch
from torch import nn

from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.packages import require_release

#: the first release whose loader has ``apply_converters``, which tells how a name is converted
_OLDEST_TO_ASK = "5.21"


def names_in_files(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """By module name, the name of the module in the files of a checkpoint.

    vLLM's engine calls it while a checkpoint's config is written, and the GGUF writer while it compares the model with
    its base file, because configs and files use these names. A name does not change where transformers does not rename
    the module, and where it merges or splits the weight.
    """
    file_names = dict(zip(names, names, strict=True))
    loading, _ = _converters(model)
    if loading is None:
        return file_names
    changed = set(converted(model, [f"{name}.weight" for name in names]))
    # The loader renames the keys of a dict. The value of a stand-in weight tells which name a new key came from.
    stand_ins: dict[str, torch.Tensor] = {}
    for index, name in enumerate(names):
        if f"{name}.weight" not in changed:
            stand_ins[f"{name}.weight"] = torch.tensor(index)
    for key, index in loading.revert_weight_conversion(model, stand_ins).items():
        file_names[names[int(index)]] = key.removesuffix(".weight")
    return file_names


def converted(model: nn.Module, tensors: Iterable[str], step: str = "") -> list[str]:
    """The names of the tensors that transformers does more than rename: it merges, splits or reorders them.

    Called while engines are asked before any data, for the names of modules in files, and before weights are read from
    files without the model's loader.

    Args:
        model: a model of transformers; of any other model nothing is converted.
        tensors: names of parameters.
        step: a part of the class name of an operation; only conversions with such an operation count.
    """
    loading, converters = _converters(model)
    return _converted_names(loading, tensors, _savers(converters, step))


def stacked_weights(model: nn.Module, parameters: Iterable[str]) -> dict[str, list[str]]:
    """Parameters into which transformers stacks weights of its files, a weight per expert.

    Called for experts: to name their Linears, and to ask whether transformers can load them.

    Args:
        model: a model of transformers, or a module around one.
        parameters: names of the parameters to ask about.

    Returns:
        For each stacked parameter the last parts of the modules' names in files (gate before up).
    """
    module_names: dict[str, list[str]] = {}
    savers_of: dict[nn.Module, tuple[Any, list[Any]]] = {}
    for parameter in parameters:
        inner, name = _transformers_model_of(model, parameter)
        if inner not in savers_of:
            loading, converters = _converters(inner)
            savers_of[inner] = loading, _savers(converters, "MergeModulelist")
        loading, savers = savers_of[inner]
        for saver in savers:
            if _converted_names(loading, [name], [saver]):
                # A saver converts from the model to the files, so its targets are names in files.
                module_names[parameter] = [_module_name(pattern) for pattern in saver._original_target_patterns]
    return module_names


def _transformers_model_of(model: nn.Module, parameter: str) -> tuple[nn.Module, str]:
    """The outermost transformers model on the path to a parameter, and the parameter's name in it."""
    inner = model
    while not is_transformers_model(inner) and "." in parameter:
        child, _, parameter = parameter.partition(".")
        inner = inner.get_submodule(child)
    return inner, parameter


def _module_name(pattern: str) -> str:
    """``"w1"`` of ``"experts.*.w1.weight"``."""
    return pattern.removesuffix(".weight").rpartition(".")[2]


def dequantized_weights(model: nn.Module, planned: Collection[str]) -> tuple[list[str], list[str]]:
    """Parameters that transformers dequantizes while loading a quantized checkpoint, because it merges or splits them.

    Transformers' engine calls it before any data. transformers dequantizes each ``weight`` of the files from which it
    makes other parameters, and looks for scales beside the weight, unless a ``planned`` module holds the result. The
    conditions below are those of its ``HfQuantizer.update_weight_conversions``: it looks at converters all of whose
    sources are weights, and only at the first target of each, to see whether the model has scales for the result.

    Args:
        model: a model of transformers; any other model has no such parameters.
        planned: names of the modules that are quantized.

    Returns:
        The names of the parameters that transformers merges; and the names, in the files, of the weights that it
        splits. Loading a quantized checkpoint fails at weights that are split: with the scale beside the weight, a
        converter would have several sources and several targets, which transformers refuses unless an operation of the
        converter supports it (``supports_many_to_many``).
    """
    loading, converters = _converters(model)
    mergers: list[Any] = []
    split: list[str] = []
    for converter in converters:
        sources = converter._original_source_patterns
        targets = converter._original_target_patterns
        if _is_weight_of(planned, targets[0]) or not all(source.endswith(".weight") for source in sources):
            continue
        if len(targets) == 1:
            mergers.append(converter.reverse_transform())
        elif not any(operation.supports_many_to_many for operation in converter.operations):
            split += sources
    parameter_names = dict(model.named_parameters())
    return _converted_names(loading, parameter_names, mergers), split


def _is_weight_of(module_names: Iterable[str], pattern: str) -> bool:
    """Whether a pattern of the loader matches the weight of one of the modules."""
    return any(re.search(f"{pattern}$", f"{name}.weight") for name in module_names)


def is_replaced(module: nn.Module) -> bool:
    """Whether transformers puts a module of another class in the module's place when it loads a quantized checkpoint.

    Transformers' engine asks about stacked experts before any data: the class that transformers puts there expects a
    Linear per expert, so a checkpoint of stacked experts would not fill it.
    """
    quantizers = sys.modules.get("transformers.quantizers.base")
    if quantizers is None or not type(module).__module__.startswith("transformers."):
        return False
    replacement = quantizers.MODULES_TO_PATCH_FOR_QUANTIZATION.get(type(module).__name__, {})
    methods = replacement.get("quantization_methods", ())
    return any(method.value == "compressed-tensors" for method in methods)


def _converters(model: nn.Module) -> tuple[Any, list[Any]]:
    """The module of transformers' loader, and the loader's converters of the model's weights.

    A converter does more than rename: it merges, splits or reorders weights. For a model that is not of transformers,
    the result is None and no converters.

    Raises:
        CalibrationError: the loader converts weights, and this release of transformers cannot tell which.
    """
    loading = sys.modules.get("transformers.core_model_loading")
    mapping = sys.modules.get("transformers.conversion_mapping")
    if loading is None or mapping is None or not is_transformers_model(model):
        return None, []
    # Legacy conversions are renames only. No quantizer is passed, so the conversions are those of a plain checkpoint.
    conversions = mapping.get_model_conversion_mapping(model, add_legacy=False)
    converters = [conversion for conversion in conversions if isinstance(conversion, loading.WeightConverter)]
    if converters:
        purpose = f"{type(model).__name__}, whose weights transformers converts,"
        # transformers of this release needs Python 3.11, which the error then says
        require_release("transformers", _OLDEST_TO_ASK, purpose, python="3.11")
    return loading, converters


def _savers(converters: list[Any], step: str) -> list[Any]:
    """The inverses, from model to files, of the converters with an operation whose class name contains ``step``."""
    savers = []
    for converter in converters:
        if any(step in type(operation).__name__ for operation in converter.operations):
            savers.append(converter.reverse_transform())
    return savers


def _converted_names(loading: Any, names: Iterable[str], savers: list[Any]) -> list[str]:
    """The names of parameters to which one of the savers applies."""
    converted_names = []
    for name in names if savers else ():
        _, saver = loading.apply_converters(name, savers)
        if saver is not None:
            converted_names.append(name)
    return converted_names


# ---------------------------------------------------------------------- initialization while loading


def initializer_fault(model: nn.Module, without: Collection[str]) -> tuple[str, str] | None:
    """Where and how loading fails if the modules ``without`` have no ``weight``, as in a compressed checkpoint.

    Transformers' engine calls it before any data, where weights will be packed. While it loads, transformers lets a
    model's class initialize the modules that it takes for missing, and ``_init_weights`` of some classes reads
    weights without asking whether they are there. That code runs here, on a copy of the architecture on the meta
    device.

    Returns:
        The name and class of the module whose initializer fails, and the error; None if loading does not fail.
    """
    model_class: Any = type(model)
    if not model_class.__module__.startswith("transformers."):
        return None
    if not any(map(_has_initializer, model.modules())):
        return None
    with torch.device("meta"):
        twin = model_class(copy.deepcopy(model.config))
    for name, module in twin.named_modules():
        vars(module).pop("_is_hf_initialized", None)
        if name in without:
            del module.weight
    try:
        twin.initialize_weights()
    except AttributeError as error:
        return _failing_module(twin, error.__traceback__) or model_class.__name__, str(error)
    return None


def _failing_module(model: nn.Module, traceback: TracebackType | None) -> str | None:
    """Name and class of the module in the innermost ``_init_weights`` of a traceback; None if there is none."""
    failing = None
    for frame, _ in walk_tb(traceback):
        if frame.f_code.co_name != "_init_weights":
            continue
        for name, module in model.named_modules():
            if module is frame.f_locals.get("module"):
                failing = f"{name} ({type(module).__name__})"
    return failing


def _has_initializer(module: nn.Module) -> bool:
    """Whether the module's class defines an ``_init_weights`` other than transformers' default."""
    for module_class in type(module).__mro__:
        if "_init_weights" in vars(module_class):
            return module_class.__name__ != "PreTrainedModel"
    return False
