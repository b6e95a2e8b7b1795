"""The names in a checkpoint's quantization config by which each of its readers finds its modules.

transformers looks up the names and classes of its own modules. Another engine may look up other names, and have other
classes. vLLM looks up the names of the stored tensors, which differ in two places: transformers renames modules on
loading (Mixtral's experts are ``mlp.experts`` there, ``block_sparse_moe.experts`` in the file), and experts in one 3-D
parameter are stored one by one. vLLM silently reads a module that it does not find in ``ignore`` as quantized, so the
config holds every name that an engine looks up.
"""

from __future__ import annotations

from collections.abc import Iterable

from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import is_match
from torch import nn

from lightning_obs.engines.engine import ENGINES
from lightning_obs.model.qparams import calibrated_modules, get_scheme

_QUANTIZED = ("weight_packed", "weight_scale")


def add_stored_names(config: QuantizationConfig, model: nn.Module, tensors: Iterable[str]) -> None:
    """Add to ``config`` the names that engines look up.

    Args:
        config: of the checkpoint; its groups are replaced, not changed, since modules hold them.
        model: that was exported.
        tensors: names of the stored tensors.
    """
    tensors, own = set(tensors), dict(model.named_modules())
    modules = {name.removesuffix(".weight") for name in tensors if name.endswith(".weight")}
    unknown = {m for m in modules - set(own) if not any(f"{m}.{key}" in tensors for key in _QUANTIZED)}
    config.ignore = list(dict.fromkeys([*(config.ignore or []), *sorted(unknown)]))
    ignored = [name for name in config.ignore if name in own]
    for engine in ENGINES.values():
        config.ignore = list(dict.fromkeys([*config.ignore, *engine.config_names(model, ignored).values()]))
    for key, group in config.config_groups.items():
        assert isinstance(group, QuantizationScheme)
        config.config_groups[key] = group.model_copy(update={"targets": _targets(group, model)})


def _targets(group: QuantizationScheme, model: nn.Module) -> list[str]:
    members = {name: module for name, module in calibrated_modules(model) if get_scheme(module) == group}
    targets = list(group.targets)
    for engine in ENGINES.values():
        for own, name in engine.config_names(model, list(members)).items():
            found = is_match(name, members[own], targets) and engine.matches_class(model, members[own])
            if not found and not _is_named(name, targets):
                targets.append(name)
    return targets


def _is_named(name: str, targets: list[str]) -> bool:
    """Whether a target is the module's name or a pattern for it, not its class."""
    return bool(is_match(name, nn.Identity(), targets))
