"""The bytes that a plan leaves in full precision, and the ``targets`` that would quantize them.

The default target is the class ``Linear``, which matches little of a convolutional net. That is no error, so it is a
warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils.match import is_match
from torch import nn

from lightning_obs.errors import CalibrationError, warn
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.model.sharding import unit_of
from lightning_obs.schemes.checks_before_data import check_targets
from lightning_obs.schemes.planned_modules import PlannedModule

#: share of the parameters' bytes that may stay in full precision without a warning
_CONSIDERABLE = 0.5


def warn_left_in_float(
    model: nn.Module, targets: Sequence[PlannedModule], by_target: dict[str, QuantizationScheme], ignore: Sequence[str]
) -> None:
    """Warn if more than half of a model's bytes stay in full precision without the user having asked for it.

    ``ignore`` asks for it, and so do targets other than the default. Embeddings of a transformers model usually stay,
    and do not count.
    """
    weighted = [target for target in targets if target.scheme.weights is not None]
    if not weighted or by_target.keys() != {"Linear"} or any(unit_of(target.module) for target in weighted):
        return
    meant = {id(getattr(target.module, "weight", None)) for target in weighted}
    meant |= {id(p) for n, m in model.named_modules() if is_match(n, m, list(ignore)) for p in m.parameters()}
    if is_transformers_model(model):
        meant |= {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    planned = {id(target.module) for target in weighted}
    left: Counter[str] = Counter()
    modules: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        size = sum(p.nbytes for p in module.parameters(recurse=False) if id(p) not in meant)
        if size and id(module) not in planned:
            left[type(module).__name__] += size
            modules.setdefault(type(module).__name__, []).append((name, module))
    total = sum(p.nbytes for p in model.parameters())
    if sum(left.values()) <= _CONSIDERABLE * total:
        return
    takeable = [kind for kind in left if _is_taken(model, modules[kind], by_target["Linear"])]
    sizes = ", ".join(f"{kind} {size:,}" for kind, size in left.most_common(4))
    more = f"{sum(left[kind] for kind in takeable):,}"
    remedy = f"Set targets={['Linear', *takeable]} to quantize {more} of them, or list" if takeable else "List"
    warn(
        f"{sum(left.values()):,} of {total:,} bytes of {type(model).__name__}'s parameters stay in full precision: "
        f"{sizes}. {remedy} in `ignore` the modules that should stay."
    )


def _is_taken(model: nn.Module, modules: Sequence[tuple[str, nn.Module]], scheme: QuantizationScheme) -> bool:
    """Whether a plan with these modules, too, would be accepted."""
    if is_transformers_model(model) and not all(isinstance(module, (nn.Linear, nn.Embedding)) for _, module in modules):
        return False
    try:
        check_targets(model, [PlannedModule(name, module, scheme) for name, module in modules])
    except CalibrationError:
        return False
    return True
