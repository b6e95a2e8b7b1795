"""The names in a checkpoint's quantization config by which each of its readers finds its modules.

transformers looks up the names and classes of its own modules. vLLM looks up the names of the stored tensors and
classes of its own, which differ in three places: transformers renames modules when it loads (Mixtral's experts are
``mlp.experts`` there, ``block_sparse_moe.experts`` in the file); experts in one 3-D parameter are stored one by one;
and vLLM's output embedding is no ``Linear``. A module that vLLM does not find in ``ignore`` is read as quantized,
without a word, so every name that a reader may look for is written down.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import is_match
from torch import nn

from lightning_obs.model.qparams import calibrated_modules, get_scheme

_QUANTIZED = ("weight_packed", "weight_scale")


def add_stored_names(config: QuantizationConfig, model: nn.Module, tensors: Iterable[str]) -> None:
    """Add to ``config`` the names that vLLM looks for.

    Args:
        config: of the checkpoint; its groups are replaced, not changed, since modules hold them.
        model: that was exported.
        tensors: names of the stored tensors.
    """
    tensors, own = set(tensors), dict(model.named_modules())
    modules = {name.removesuffix(".weight") for name in tensors if name.endswith(".weight")}
    unknown = {m for m in modules - set(own) if not any(f"{m}.{key}" in tensors for key in _QUANTIZED)}
    config.ignore = list(dict.fromkeys([*(config.ignore or []), *sorted(unknown)]))
    stored = stored_names(model, [name for name, _ in calibrated_modules(model)])
    output = getattr(model, "get_output_embeddings", lambda: None)()
    for key, group in config.config_groups.items():
        assert isinstance(group, QuantizationScheme)
        config.config_groups[key] = group.model_copy(update={"targets": _targets(group, model, stored, output)})


def _targets(group: QuantizationScheme, model: nn.Module, stored: Mapping[str, str], output: Any) -> list[str]:
    targets = list(group.targets)
    members = [(stored[name], module) for name, module in calibrated_modules(model) if get_scheme(module) == group]
    missed = [name for name, module in members if not is_match(name, module, targets) or module is output]
    return list(dict.fromkeys([*targets, *(name for name in missed if not _is_named(name, targets))]))


def _is_named(name: str, targets: list[str]) -> bool:
    """Whether a target is the module's name or a pattern for it, not its class."""
    return bool(is_match(name, nn.Identity(), targets))


def stored_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The name under which ``save_pretrained`` stores each module; its own for any other model.

    Args:
        model: the model.
        names: of modules with a weight.
    """
    names = list(names)
    # What save_pretrained itself renames with; transformers is not imported here.
    home = sys.modules.get(getattr(type(model), "save_pretrained", stored_names).__module__)
    revert_weight_conversion = getattr(home, "revert_weight_conversion", None)
    if revert_weight_conversion is None:
        return {name: name for name in names}
    # The value says which name a key came from.
    weights = {f"{name}.weight": torch.tensor(index) for index, name in enumerate(names)}
    renamed = {
        int(value): key.removesuffix(".weight") for key, value in revert_weight_conversion(model, weights).items()
    }
    return {name: renamed.get(index, name) for index, name in enumerate(names)}
