"""Targets and ``ignore``: the patterns by which a user names modules, and what is said of those that match none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils.match import is_match
from torch import nn

from lightning_obs.errors import CalibrationError, likely, name_list, warn
from lightning_obs.model.kinds import holds_parameters, is_transformers_model, kind_of
from lightning_obs.model.weight import matrix_shape


def leave_out_absent_classes(
    model: nn.Module, by_target: Mapping[str, QuantizationScheme]
) -> dict[str, QuantizationScheme]:
    """The targets without the classes of which the model has no module, so that one list serves many models.

    A group keeps them if none of its targets matches a module, unless it quantizes outputs alone, and every target that
    is no class of torch's or transformers' own: it is misspelt, perhaps. They are also taken out of the groups'
    ``targets``.
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
    """Refuse a target that matches nothing; warn of an entry of ``ignore`` that does."""
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
    known_names = [*classes, *dict(model.named_modules())]
    return [pattern + likely(pattern, known_names) for pattern in patterns if not _matches_any(model, pattern)]


def _matches_any(model: nn.Module, pattern: str) -> bool:
    """Whether a name, class or ``re:`` pattern matches any module of the model."""
    return any(is_match(name, module, pattern) for name, module in model.named_modules())


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


def _quantizable_classes(model: nn.Module, scheme: QuantizationScheme) -> list[str]:
    """The classes of the model's modules that a scheme can quantize: they have a weight that is a matrix."""
    classes = set()
    for module in model.modules():
        kind = kind_of(module)
        reads_values = not (kind.reads_indices and scheme.input_activations is not None)
        is_loaded = kind.stored_as is not None or not is_transformers_model(model)
        if matrix_shape(module) is not None and reads_values and is_loaded:
            classes.add(type(module).__name__)
    return sorted(classes)
