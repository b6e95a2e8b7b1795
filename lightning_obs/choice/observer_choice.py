"""Choose the observer of each tensor by the loss of the model's predictions on batches that it did not observe.

An observer is a candidate like any other: the same scheme with another range. So the score is that of
:mod:`.sensitivity`: the change of a layer's output, weighted by what it does to the predictions. Some batches are
observed, others are scored, so each is run once. All candidates are scored under the same random signs, so that small
differences between them count.

Modules that an engine fuses have one scheme, and so one observer for their inputs and one for their weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from rich.table import Column, Table
from torch import nn
from typing_extensions import Unpack

from lightning_obs.calibration.options import CalibrationOptions, OptionKeywords, takes_keywords_of
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.choice.mixed_precision import config_of
from lightning_obs.choice.sensitivity import Batches, Sensitivity, candidate_options, sensitivity
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.schemes.config import SchemeLike, config_groups

#: an observer's ``name``, and its hyperparameters
_Named: TypeAlias = dict[str, Any]
#: the default candidates, tried where they fit the scheme; the first of each list always is. Hessians and signed
#: scales are tried for weights below 8 bits, where format and engine take them
CANDIDATES: dict[str, list[_Named]] = {
    "input": [
        {"name": "static_minmax"},
        {"name": "minmax"},
        {"name": "histogram"},
        {"name": "histogram", "criterion": "entropy"},
    ],
    "weight": [
        {"name": "memoryless_minmax"},
        {"name": "memoryless_mse"},
        {"name": "imatrix_mse"},
        {"name": "imatrix_mse", "norm": 2.0},
        {"name": "local_hessian"},
        {"name": "hessian"},
    ],
}
#: a tensor gets another candidate than the overall best if it loses less than this share of the best one's loss there:
#: estimates for one tensor are noisy, and the least of several noisy ones is often luck
CLEARLY = 0.8
#: by base name (input, weight), names of observers or dicts of name, hyperparameters and (weight) rounding
Candidates: TypeAlias = Mapping[str, Sequence[str | Mapping[str, Any]]]
_FIELDS = {"input": "input_activations", "weight": "weights"}


@dataclass(frozen=True)
class ObserverChoice:
    """The observer that each tensor got, and its gain.

    Attributes:
        config: the scheme with these observers: a group for each combination that was chosen.
        observers: by module and base name, the observer's name and hyperparameters.
        losses: by base name and candidate, its estimated loss over all modules, in nats per token on held-out batches.
        chosen: by base name, the loss of the choice; never above that of any candidate.
    """

    config: QuantizationConfig
    observers: dict[str, dict[str, dict[str, Any]]]
    losses: dict[str, dict[str, float]]
    chosen: dict[str, float]

    @property
    def counts(self) -> dict[str, Counter[str]]:
        """The number of tensors that got each candidate, by base name."""
        chosen = self.observers.values()
        return {base: Counter(_label(of[base]) for of in chosen if base in of) for base in self.losses}

    def table(self) -> Table:
        """Candidates and the choice, as a table for ``rich.print``."""
        numbers = (Column(name, justify="right") for name in ("estimated loss", "tensors"))
        table = Table("of", "observer", *numbers, title="observers", title_justify="left", box=None, pad_edge=False)
        for row in self.scores:
            table.add_row(row["of"], row["observer"], f"{row['loss']:.4g}", str(row["tensors"]))
        return table

    @property
    def scores(self) -> list[dict[str, Any]]:
        """Candidates and the choice, a row each: ``{"of", "observer", "loss", "tensors"}``."""
        rows = []
        for base_name, losses in self.losses.items():
            used = self.counts[base_name]
            for name, loss in [*losses.items(), ("chosen by tensor", self.chosen[base_name])]:
                tensors = used[name] if name in losses else used.total()
                rows.append({"of": base_name, "observer": name, "loss": loss, "tensors": tensors})
        return rows


@takes_keywords_of(CalibrationOptions)
def choose_observers(
    model: nn.Module,
    batches: Batches,
    scheme: SchemeLike | CalibrationOptions,
    candidates: Candidates | None = None,
    *,
    held_out: Batches | None = None,
    seed: int = 0,
    **options: Unpack[OptionKeywords],
) -> ObserverChoice:
    """Find the observer of each weight and each static input that changes the model's predictions least.

    Args:
        model: a module whose output is logits; it is not changed.
        batches: to observe. Without ``held_out`` every second one is scored instead.
        scheme: as for :class:`~lightning_obs.CalibrationSession`; the choice keeps its kv cache as it is.
        candidates: by base name (input, weight), names of observers or dicts of name and hyperparameters, of a weight
            with ``rounding``, too: ``{"name": "hessian", "signed": True, "rounding": "gptq"}``; one that does not say
            is rounded as the scheme says. Default: those of :data:`CANDIDATES` that fit the scheme.
        held_out: batches to score on, if not every second one.
        seed: as for :func:`~lightning_obs.sensitivity`.
        **options: fields of :class:`~lightning_obs.CalibrationOptions` (``ignore``, ``targets``...).

    Raises:
        CalibrationError: nothing to observe; a candidate that does not fit; fewer than two batches; the errors
            of :func:`~lightning_obs.sensitivity`.

    Examples:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(16, 8))
        >>> choice = choose_observers(model, torch.randn(4, 32, 16), "INT8_STATIC", {"input": ["minmax"]})
        >>> sorted(choice.losses["input"]), set(choice.observers["0"])
        (['minmax', 'static_minmax'], {'input'})
    """
    asked = CalibrationOptions.of(scheme, **options)
    tried = fitting_candidates(model, asked, candidates)
    given = list(batches)
    observed, scored = (given[0::2], given[1::2]) if held_out is None else (given, list(held_out))
    if not observed or not scored:
        raise CalibrationError("observers are compared on batches that they did not observe", got="too few batches")
    schemes = {
        _key(base_name, label): _candidate(asked, base_name, one)
        for base_name, ones in tried.items()
        for label, one in ones.items()
    }
    measured = sensitivity(model, scored, schemes, calibration=observed, seed=seed, **asked.beside_scheme)
    return _choose(measured, tried, asked.config)


def _choose(
    measured: Sensitivity, tried: Mapping[str, Mapping[str, _Named]], asked: QuantizationConfig
) -> ObserverChoice:
    """For each group of modules the overall best candidate, or the group's own best where that is clearly better."""
    losses: dict[str, dict[str, float]] = {}
    chosen = dict.fromkeys(tried, 0.0)
    found: dict[str, dict[str, str]] = {name: {} for group in measured.groups for name in group.names}
    for base_name, ones in tried.items():
        of_groups = [{label: group.losses[_key(base_name, label)] for label in ones} for group in measured.groups]
        whole = losses[base_name] = {label: sum(of_group[label] for of_group in of_groups) for label in ones}
        favourite = min(whole, key=whole.__getitem__)
        for group, of_group in zip(measured.groups, of_groups, strict=True):
            best = min(of_group, key=of_group.__getitem__)
            if of_group[best] > CLEARLY * of_group[favourite]:
                best = favourite
            chosen[base_name] += of_group[best]
            for module in group.names:
                found[module][base_name] = best
    modules: dict[str, tuple[str, QuantizationScheme | None]] = {}
    for module, labels in found.items():
        schemes = {base: measured.schemes[_key(base, label)].get(module) for base, label in labels.items()}
        whole_scheme = next(iter(schemes.values()))
        if whole_scheme is not None:  # else no data reached the module
            observed = {_FIELDS[base]: getattr(scheme, _FIELDS[base]) for base, scheme in schemes.items()}
            label = ", ".join(f"{base} {label}" for base, label in labels.items())
            modules[module] = label, whole_scheme.model_copy(update=observed)
    config = config_of(modules, list(dict.fromkeys([*(asked.ignore or ()), *measured.ignore])))
    assert config is not None
    config.kv_cache_scheme = asked.kv_cache_scheme
    observers = {m: {base: dict(tried[base][label]) for base, label in labels.items()} for m, labels in found.items()}
    return ObserverChoice(config, observers, losses, chosen)


def _key(base_name: str, label: str) -> str:
    """The name of an observer among the candidates of a sensitivity."""
    return f"{base_name}: {label}"


def _candidate(asked: CalibrationOptions, base_name: str, one: _Named) -> dict[str, Any]:
    """The scheme with this observer, without the kv cache, which has no weights."""
    return {"scheme": asked.config.model_copy(update={"kv_cache_scheme": None}), "observers": {base_name: one}}


def fitting_candidates(
    model: nn.Module, asked: CalibrationOptions, candidates: Candidates | None = None
) -> dict[str, dict[str, _Named]]:
    """Candidates by base name and label. The user's have to fit the scheme; default ones that do not are left out."""
    require_candidates(candidates)
    refuse(sorted(set(candidates or {}) - set(_FIELDS)), "observers are chosen for input and weight")
    tried: dict[str, dict[str, _Named]] = {}
    for base_name, (first, *others) in CANDIDATES.items():
        given: Sequence[Any] = others if candidates is None else candidates.get(base_name, ())
        quantized = [args for group in config_groups(asked.config) if (args := getattr(group, _FIELDS[base_name]))]
        observed = [args for args in quantized if args.dynamic is not True]
        if not observed or not given:
            continue
        is_small = base_name == "weight" and all(args.num_bits < 8 for args in observed)
        for one in [first, *([given] if isinstance(given, (str, Mapping)) else given)]:
            named = {"name": one} if isinstance(one, str) else dict(one)
            is_asked, forms = candidates is not None or one is first, [named]
            if not is_asked and base_name == "weight":
                forms = [named | {"signed": True}, named] if is_small else [named] * ("hessian" not in named["name"])
            for form in forms:
                try:
                    candidate = candidate_options(_candidate(asked, base_name, form), **asked.beside_scheme)
                    CalibrationSession(model, candidate)
                except CalibrationError:
                    if is_asked:
                        raise
                    continue
                tried.setdefault(base_name, {})[_label(form)] = form
                break
    if not tried:
        raise CalibrationError(
            "there is no observer to choose", got=f"candidates {candidates}", remedy="choose a scheme that observes."
        )
    return tried


def require_candidates(candidates: Any) -> None:
    """Refuse candidates of another form than ``{"input": ["minmax", {"name": "mse", "norm": 2.0}]}``."""
    expected = "{'input': ['minmax', {'name': 'mse', 'norm': 2.0}]}"
    if candidates is not None and not isinstance(candidates, Mapping):
        raise CalibrationError("candidates", got=repr(candidates), expected=expected)
    for base_name, given in (candidates or {}).items():
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        for one in given if is_list else [given]:
            has_name = isinstance(one, Mapping) and isinstance(one.get("name"), str)
            if not (isinstance(one, str) or has_name):
                raise CalibrationError(f"candidates of {base_name!r}", got=repr(one), expected=expected)


def _label(one: Mapping[str, Any]) -> str:
    """An observer as a person writes it.

    >>> _label({"name": "imatrix_mse", "norm": 2.0})
    'imatrix_mse(norm=2.0)'
    """
    hyperparameters = ", ".join(f"{key}={value}" for key, value in one.items() if key != "name")
    return f"{one['name']}({hyperparameters})" if hyperparameters else str(one["name"])
