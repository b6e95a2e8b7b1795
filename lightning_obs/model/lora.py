"""LoRA adapters of peft, seen as the weight that they will be merged into.

Quantizing the base weight and adding the adapters in full precision is not what is shipped: ``merge_and_unload`` adds
them to the weight, and that sum is quantized. So here the module that is planned is the base layer (it is what remains
after merging, with all that was written on it), and its weight is the sum, computed as peft's ``merge`` computes it.

peft is not imported; its layers are known by their public attributes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lightning_obs.errors import CalibrationError, refuse

#: the attribute of a base layer that holds them; peft has none of this name
_ADAPTERS = "lightning_obs_adapters"


class Adapters:
    """The adapters of one layer. Kept on the base layer as a plain attribute, so no module contains another twice.

    Args:
        layer: peft's LoRA layer around a Linear.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    @property
    def are_apart(self) -> bool:
        """Whether they still stand beside the weight."""
        return not self.layer.merged

    def add_to(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` with all active adapters added, with gradients; itself where none is to be added."""
        if not self.are_apart or getattr(self.layer, "disable_adapters", False):
            return weight
        # Merging happens outside of autocast.
        with torch.autocast(weight.device.type, enabled=False):
            for name in self.layer.active_adapters:  # type: ignore[union-attr]
                if name in self.layer.lora_A:  # type: ignore[operator]
                    weight = (weight + self.layer.get_delta_weight(name)).to(weight.dtype)  # type: ignore[operator]
        return weight


def is_adapted(module: nn.Module) -> bool:
    """Whether the module is a LoRA layer around a Linear."""
    return isinstance(getattr(module, "base_layer", None), nn.Linear) and all(
        hasattr(module, name) for name in ("get_delta_weight", "active_adapters", "merged", "lora_A")
    )


def adopt_adapters(model: nn.Module) -> list[str]:
    """Let every base layer know its adapters, so that they count as a part of its weight.

    Returns:
        Names of the adapted layers whose adapters are no sum with the weight, and why; these are left alone.
    """
    adapted = [(name, module) for name, module in model.named_modules() if is_adapted(module)]
    for _, layer in adapted:
        if not _not_a_sum(layer):
            vars(layer.base_layer)[_ADAPTERS] = Adapters(layer)
    return [f"{name} ({wrong})" for name, layer in adapted if (wrong := _not_a_sum(layer))]


def base_of(module: nn.Module) -> nn.Module:
    """The base layer of an adapted layer; any other module itself.

    Raises:
        CalibrationError: the adapters cannot be merged into a weight as they are trained.
    """
    if not is_adapted(module):
        return module
    wrong = "dropout (set lora_dropout=0)" if _has_dropout(module) else _not_a_sum(module)
    if wrong:
        raise CalibrationError(f"adapters with {wrong} cannot be trained as a part of the quantized weight")
    base = module.base_layer
    assert isinstance(base, nn.Linear)
    return base


def _has_dropout(layer: nn.Module) -> bool:
    return any(getattr(p, "p", 0) > 0 for p in getattr(layer, "lora_dropout", nn.ModuleDict()).values())


def _not_a_sum(layer: nn.Module) -> str | None:
    if getattr(layer, "lora_variant", None):
        return "a variant of LoRA (DoRA...)"
    if any(getattr(layer, "lora_bias", {}).values()):
        return "lora_bias"
    return None


def adapters_of(module: nn.Module) -> Adapters | None:
    """The adapters of a base layer that still stand beside its weight, or None."""
    adapters = vars(module).get(_ADAPTERS)
    return adapters if isinstance(adapters, Adapters) and adapters.are_apart else None


def inside_adapted(model: nn.Module) -> set[str]:
    """Names of the modules that adapted layers are made of; they are not modules of the merged model."""
    adapted = [(name, module) for name, module in model.named_modules() if is_adapted(module)]
    return {inner for name, module in adapted for inner, m in module.named_modules(prefix=name) if m is not module}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let names be those of the merged model inside the ``with`` block: base layers stand in adapted layers' places.

    The model must not run meanwhile.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and is_adapted(child)
    ]
    try:
        for parent, name, layer in places:
            parent._modules[name] = layer.base_layer  # type: ignore[assignment]
        yield
    finally:
        for parent, name, layer in places:
            parent._modules[name] = layer


def refuse_unmerged(model: nn.Module, what: str) -> None:
    """Raise a CalibrationError if adapters still stand beside weights of the model."""
    refuse(
        [name for name, module in model.named_modules() if adapters_of(module) is not None],
        f"{what} needs adapters merged into their weights",
        remedy="model.merge_and_unload() of peft first; the quantization parameters stay on the merged layers.",
    )
