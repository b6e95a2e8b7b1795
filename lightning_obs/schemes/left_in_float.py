"""What a plan leaves in float: a share of the model's bytes for each class of module.

"5 of 5 Linear" says nothing of an LSTM, or of an ``nn.MultiheadAttention``, which may hold a third of the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_obs.model.offload import at_rest
from lightning_obs.model.weight import identity, whole_shape
from lightning_obs.model.wrappers import inside_adapted
from lightning_obs.schemes.planned_modules import PlannedModule

#: classes that are named; the others are added up
_NAMED = 4
#: what quantizes the weights of a class after all
_REMEDIES = {nn.MultiheadAttention.__name__: " (linearize_attention makes it Linears)"}


@at_rest()
def shares_in_float(
    model: nn.Module, targets: Sequence[PlannedModule], skipped: Collection[str] = ()
) -> dict[str, float]:
    """The shares of the bytes of all parameters that belong to no module with a quantized weight, by class of module.

    Called by the callback for the line that says what it calibrates, and by finalize for the closing line.

    Args:
        model: the module that is calibrated; tied parameters count once.
        targets: its planned modules.
        skipped: names of those that are left in float after all.

    Returns:
        ``{"LSTM": 0.41, "LayerNorm": 0.01}``, the largest share first; empty where nothing is left. Each part of an
        ``nn.MultiheadAttention`` counts as one.
    """
    quantized: set[int] = set()
    for target in targets:
        if target.scheme.weights is not None and target.name not in skipped:
            quantized.add(id(target.module))
    modules = dict(model.named_modules())
    adapters = inside_adapted(model)
    # A weight that is tied to a quantized one is quantized, so quantized modules are counted first.
    order = sorted(modules, key=lambda name: id(modules[name]) not in quantized)
    counted = set()
    total = 0
    in_float: Counter[str] = Counter()
    for name in order:
        module = modules[name]
        is_quantized = id(module) in quantized
        if name in adapters and not name.endswith("base_layer"):
            continue  # it is a part of the base layer's weight
        for key, parameter in module._parameters.items():
            shape = None if parameter is None else whole_shape(module, key)
            if parameter is None or shape is None or identity(module, key) in counted:
                continue
            counted.add(identity(module, key))
            size = shape.numel() * parameter.itemsize
            total += size
            if not is_quantized:
                in_float[_owner(modules, name)] += size
    return {kind: size / total for kind, size in in_float.most_common() if size}


def _owner(modules: Mapping[str, nn.Module], name: str) -> str:
    """The class that a user knows a module's parameters by."""
    name = name.partition(".parametrizations.")[0]
    parent = modules.get(name.rpartition(".")[0])
    owner = parent if isinstance(parent, nn.MultiheadAttention) else modules[name]
    # FSDP2 gives a module a class of its own, with the module's class as a base.
    return next(cls.__name__ for cls in type(owner).__mro__ if not issubclass(cls, FSDPModule))


def shares_text(shares: Mapping[str, float]) -> str:
    """The shares for a person to read: the largest ones, and the sum of the others.

    >>> shares_text({"LSTM": 0.34, "LayerNorm": 0.012, "ViT": 0.002, "PReLU": 0.001}), shares_text({})
    ('LSTM 34 %, LayerNorm 1 %, others <1 %', 'none')
    >>> shares_text({"MultiheadAttention": 0.34})
    'MultiheadAttention 34 % (linearize_attention makes it Linears)'
    """
    largest = list(shares.items())[:_NAMED]
    named = {kind: share for kind, share in largest if share >= 0.01}
    if not named:
        named = dict(largest[:1])
    texts = [f"{kind} {_percent(share)}{_REMEDIES.get(kind, '')}" for kind, share in named.items()]
    unnamed_share = sum(share for kind, share in shares.items() if kind not in named)
    if unnamed_share:
        texts.append(f"others {_percent(unnamed_share)}")
    return ", ".join(texts) or "none"


def _percent(share: float) -> str:
    """A share in percent, without decimals."""
    if share >= 0.01:
        return f"{100 * share:.0f} %"
    return "<1 %"
