"""Choose the observer of each weight and input by the loss of predictions on batches that were not observed.

Candidates are the same scheme with other observers, that is, with other ranges. So they are scored as schemes are, by
:mod:`.sensitivity`: the change of a layer's output, weighted by its effect on the model's predictions. All candidates
are scored with the same random signs, so that small differences between them are no noise.

Such an estimate adds up what each layer does alone, to second order. A range that clips few, large values does more
harm than that once all layers have such ranges. So nothing is taken by the estimate alone: each candidate for all
tensors, and the choices by tensor among the best two, three... of them, run with the whole model quantized, on batches
that were neither observed nor scored (:mod:`.whole_model`), and the one that moves the predictions least is taken.

Modules that an engine fuses get the same observer for their inputs, and the same for their weights.

:func:`choose_observers` is called by users, by the command line, and by ``CalibrationCallback(observers="auto")``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from rich.table import Table
from torch import nn
from typing_extensions import Unpack

from lightning_obs.calibration.options import CalibrationOptions, OptionKeywords, takes_keywords_of
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.choice.mixed_precision import config_of
from lightning_obs.choice.sensitivity import (
    Batches,
    Group,
    Sensitivity,
    candidate_options,
    sensitivity_and_twins,
)
from lightning_obs.choice.whole_model import Names, combined, whole_divergences
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.schemes.config import SchemeLike, config_groups

#: an observer as a dict: its ``name``, its hyperparameters, and for weights perhaps ``rounding``
_ObserverSpec: TypeAlias = dict[str, Any]
#: The default candidates by base name (input, weight). The first of each list is always tried, the others if they fit
#: the scheme. Observers with Hessians, and signed scales, are tried only for weights of fewer than 8 bits, and only if
#: the format and the engine take them.
CANDIDATES: dict[str, list[_ObserverSpec]] = {
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
#: A group of modules gets another candidate than the overall best only if its own loss with that candidate is below
#: this share of its loss with the overall best. Estimates for one group are noisy, so a smaller gain may be luck.
CLEARLY = 0.8
#: by base name (input, weight), names of observers or dicts of name, hyperparameters and (weight) rounding
Candidates: TypeAlias = Mapping[str, Sequence[str | Mapping[str, Any]]]
#: the fields of a QuantizationScheme, by base name
_FIELDS = {"input": "input_activations", "weight": "weights"}
#: the label of the assignment that chooses among all candidates
BY_TENSOR = "by tensor"


@dataclass(frozen=True)
class Assignment:
    """A candidate for each weight, or for each input: the same one for all modules, or chosen by tensor.

    :func:`choose_observers` measures several for each base name, and takes one.

    Attributes:
        label: the candidate's label if all modules have it; else ``"by tensor"``, or ``"by tensor, best 2"`` where the
            choice was among the two candidates that, for all modules, measured best.
        candidates: by module name, the label of the candidate.
        loss: the estimated loss, in nats per token on the batches that were scored.
        divergence: what was measured with the whole model quantized, in nats per token; infinite if the quantized
            model's logits were not finite.
    """

    label: str
    candidates: dict[str, str]
    loss: float
    divergence: float = float("nan")

    @property
    def is_by_tensor(self) -> bool:
        """Whether the candidates were chosen by tensor; asked where an assignment is compared with the other kind."""
        return self.label.startswith(BY_TENSOR)


#: takes candidates by module and base name, several times, and measures the divergence with each
_Measure: TypeAlias = Callable[[Sequence[Names]], list[float]]


@dataclass(frozen=True)
class ObserverChoice:
    """The result of :func:`choose_observers`: the observer of each tensor, what was estimated, and what was measured.

    Attributes:
        config: the scheme with the chosen observers: a group for each combination that was chosen.
        observers: by module name and base name, the observer's name and hyperparameters.
        assignments: by base name, all assignments that were measured: first one for each candidate.
        taken: by base name, the assignment with the least divergence. Inputs are decided first, with the weights'
            observer that the scheme has; then weights, with the inputs that were taken.
        batches: the number of batches on which divergences were measured.
        are_kept_out: whether these batches were neither observed nor scored. False if there was only one batch beside
            those that were observed: it was scored, too.
    """

    config: QuantizationConfig
    observers: dict[str, dict[str, dict[str, Any]]]
    assignments: dict[str, list[Assignment]]
    taken: dict[str, Assignment]
    batches: int = 0
    are_kept_out: bool = True

    @property
    def losses(self) -> dict[str, dict[str, float]]:
        """By base name and candidate, the estimated loss if all modules have the candidate; for users."""
        losses: dict[str, dict[str, float]] = {}
        for base_name, assignments in self.assignments.items():
            losses[base_name] = {entry.label: entry.loss for entry in assignments if not entry.is_by_tensor}
        return losses

    @property
    def divergences(self) -> dict[str, dict[str, float]]:
        """By base name and label of the assignment, the measured divergence; for users. That of the choice is least."""
        divergences: dict[str, dict[str, float]] = {}
        for base_name, assignments in self.assignments.items():
            divergences[base_name] = {entry.label: entry.divergence for entry in assignments}
        return divergences

    @property
    def counts(self) -> dict[str, Counter[str]]:
        """By base name, how many tensors got each candidate; for :attr:`scores`, and for the callback's message."""
        return {base_name: Counter(taken.candidates.values()) for base_name, taken in self.taken.items()}

    @property
    def lines(self) -> list[str]:
        """A sentence for each base name: what was taken, and what it was compared with.

        The callback and the command line show them at the end of the choice, in the closing lines and on the page.
        """
        return [self._line(base_name) for base_name in self.taken]

    def _line(self, base_name: str) -> str:
        """The sentence about one base name; :attr:`lines` calls it."""
        taken = self.taken[base_name]
        how = taken.label if taken.is_by_tensor else f"{taken.label} for all"
        line = f"{base_name} observers: {how}, divergence {taken.divergence:.3g} nats"
        others = [entry for entry in self.assignments[base_name] if entry.is_by_tensor != taken.is_by_tensor]
        if others:
            other = min(others, key=_divergence)
            name = other.label if other.is_by_tensor else f"the best for all, {other.label}"
            line += f"; {name}: {other.divergence:.3g}"
        if not self.are_kept_out:
            return f"{line}. Measured with all layers quantized, on the batch that was scored, too: give more batches"
        batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        return f"{line}. Measured with all layers quantized, on {batches} kept out of the estimates"

    def table(self) -> Table:
        """The assignments and the choice, as a table for ``rich.print``; the command line prints it."""
        table = Table("of", "observer", title="observers", title_justify="left", box=None, pad_edge=False)
        for title in ("estimated loss", "measured", "tensors"):
            table.add_column(title, justify="right")
        for row in self.scores:
            observer = f"{row['observer']} (chosen)" if row["chosen"] else row["observer"]
            tensors = str(row["tensors"])
            table.add_row(row["of"], observer, f"{row['loss']:.4g}", f"{row['measured']:.4g}", tensors)
        return table

    @property
    def scores(self) -> list[dict[str, Any]]:
        """A dict for each assignment: ``{"of", "observer", "loss", "measured", "tensors", "chosen"}``.

        ``tensors`` is how many tensors the choice gives the candidate; of an assignment by tensor all of them, if it is
        the choice. Read by :meth:`table`, and by the callback (``callbacks/results.py``) and the command line for their
        reports.
        """
        rows = []
        for base_name, assignments in self.assignments.items():
            counts = self.counts[base_name]
            for assignment in assignments:
                is_chosen = assignment is self.taken[base_name]
                row = {
                    "of": base_name,
                    "observer": assignment.label,
                    "loss": assignment.loss,
                    "measured": assignment.divergence,
                    "tensors": counts[assignment.label],
                    "chosen": is_chosen,
                }
                if is_chosen:
                    row["tensors"] = counts.total()
                rows.append(row)
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

    Called by users and by the command line (``app/tasks/choosing.py``) before a calibration, and at the end of a
    validation by ``CalibrationCallback(observers="auto")``, with the batches that it kept.

    Args:
        model: a module whose output is logits; it is not changed.
        batches: batches to observe. Without ``held_out``, every second batch is not observed.
        scheme: the scheme whose observers are chosen: the name of a preset, a config, or all options of a calibration;
            its kv cache stays as it is.
        candidates: by base name (input, weight), names of observers, or dicts of name and hyperparameters. A dict for a
            weight may hold ``rounding``, too: ``{"name": "hessian", "signed": True, "rounding": "gptq"}``; without it,
            weights are rounded as the scheme says. Default: the candidates of :data:`CANDIDATES` that fit the scheme.
        held_out: batches that are not observed. Every second of them is not scored either: on those the assignments
            are measured. If there is only one, it is scored and measured on.
        seed: the seed of the random signs with which losses are estimated; all candidates get the same signs.
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
    choice_options = CalibrationOptions.of(scheme, **options)
    candidates_by_base = fitting_candidates(model, choice_options, candidates)
    split = _SplitBatches.of(batches, held_out)
    schemes: dict[str, Any] = {}
    for base_name, specs in candidates_by_base.items():
        for label, spec in specs.items():
            key = _key(base_name, label)
            schemes[key] = _candidate(choice_options, base_name, spec)
    measured, twins = sensitivity_and_twins(
        model, split.scored, schemes, split.observed, seed, choice_options.beside_scheme
    )

    def measure(names_of_assignments: Sequence[Names]) -> list[float]:
        calibrations = [combined(twins, names) for names in names_of_assignments]
        return whole_divergences(model, split.measured, calibrations)

    choice = _choose(measured, candidates_by_base, choice_options.config, measure)
    return replace(choice, batches=len(split.measured), are_kept_out=split.are_kept_out)


class _SplitBatches(NamedTuple):
    """The batches of a choice by their use; :func:`choose_observers` splits them.

    Attributes:
        observed: the observers see them.
        scored: losses are estimated on them.
        measured: the assignments are measured on them.
        are_kept_out: whether ``measured`` are neither observed nor scored; else they are those that are scored.
    """

    observed: list[Any]
    scored: list[Any]
    measured: list[Any]
    are_kept_out: bool

    @classmethod
    def of(cls, batches: Batches, held_out: Batches | None) -> _SplitBatches:
        """Split the batches of :func:`choose_observers`, whose arguments these are.

        Raises:
            CalibrationError: too few batches.
        """
        all_batches = list(batches)
        if held_out is None:
            observed = all_batches[0::2]
            others = all_batches[1::2]
        else:
            observed = all_batches
            others = list(held_out)
        if not observed or not others:
            raise CalibrationError(
                "observers are compared on batches that they did not observe",
                got="too few batches",
                expected="at least two, or held_out",
            )
        scored = others[0::2]
        kept_out = others[1::2]
        return cls(observed, scored, kept_out or scored, bool(kept_out))


def _choose(
    measured: Sensitivity,
    candidates: Mapping[str, Mapping[str, _ObserverSpec]],
    config: QuantizationConfig,
    measure: _Measure,
) -> ObserverChoice:
    """Measure assignments of each base name, and take the one with the least divergence.

    Args:
        measured: the estimated losses of all candidates, whose names are those that :func:`_key` makes.
        candidates: the observers to choose from, by base name and label.
        config: the scheme whose observers are chosen.
        measure: measures divergences.
    """
    assignments: dict[str, list[Assignment]] = {}
    taken: dict[str, Assignment] = {}
    names: Names = {}  # of the candidates that are taken
    for base_name in candidates:
        assignments[base_name] = _measured_assignments(base_name, list(candidates[base_name]), measured, names, measure)
        taken[base_name] = min(assignments[base_name], key=_divergence)
        names = _names_with(names, base_name, taken[base_name])
    observers: dict[str, dict[str, dict[str, Any]]] = {}
    labels: dict[str, dict[str, str]] = {}
    for group in measured.groups:
        for module_name in group.names:
            labels[module_name] = {base_name: taken[base_name].candidates[module_name] for base_name in taken}
            observers[module_name] = {}
            for base_name, label in labels[module_name].items():
                spec = candidates[base_name][label]
                observers[module_name][base_name] = dict(spec)
    chosen_config = _config_with(labels, measured, config)
    return ObserverChoice(config=chosen_config, observers=observers, assignments=assignments, taken=taken)


def _measured_assignments(
    base_name: str, labels: Sequence[str], measured: Sensitivity, names: Names, measure: _Measure
) -> list[Assignment]:
    """Measure each candidate for all modules; then the choices by tensor among the best two, three... of them.

    A choice by tensor that equals an assignment before it is left out.

    Args:
        base_name: input or weight.
        labels: of the candidates.
        measured: the estimated losses.
        names: of the candidates that are taken for other base names already, which all assignments have.
        measure: measures divergences.
    """

    def with_divergences(assignments: Sequence[Assignment]) -> list[Assignment]:
        all_names = [_names_with(names, base_name, assignment) for assignment in assignments]
        divergences = measure(all_names) if all_names else []
        return list(map(_with_divergence, assignments, divergences))

    singles = [_assignment(label, base_name, [label], measured.groups) for label in labels]
    measured_singles = with_divergences(singles)
    ranked = sorted(measured_singles, key=_divergence)
    by_tensor: list[Assignment] = []
    for count in range(2, len(ranked) + 1):
        best_labels = [assignment.label for assignment in ranked[:count]]
        name = BY_TENSOR if count == len(ranked) else f"{BY_TENSOR}, best {count}"
        assignment = _assignment(name, base_name, best_labels, measured.groups)
        if all(assignment.candidates != other.candidates for other in (*singles, *by_tensor)):
            by_tensor.append(assignment)
    return [*measured_singles, *with_divergences(by_tensor)]


def _assignment(name: str, base_name: str, labels: Sequence[str], groups: Sequence[Group]) -> Assignment:
    """Give each group the first candidate, or its own best candidate if that is clearly better by the estimate.

    Args:
        name: the label of the assignment.
        base_name: input or weight.
        labels: of the candidates, the overall best one first.
        groups: have the estimated losses.
    """
    keys = {label: _key(base_name, label) for label in labels}
    candidates: dict[str, str] = {}
    loss = 0.0
    for group in groups:
        label = _best_in_group(group, keys, overall_best=labels[0])
        key = keys[label]
        loss += group.losses[key]
        candidates.update(dict.fromkeys(group.names, label))
    return Assignment(name, candidates, loss)


def _best_in_group(group: Group, keys: Mapping[str, str], overall_best: str) -> str:
    """The label of the candidate for a group: ``overall_best``, unless another is clearly better (:data:`CLEARLY`)."""
    losses = {label: group.losses[key] for label, key in keys.items()}
    best = min(losses, key=losses.__getitem__)
    if losses[best] > CLEARLY * losses[overall_best]:
        return overall_best
    return best


def _with_divergence(assignment: Assignment, divergence: float) -> Assignment:
    """The assignment with what was measured; a divergence that is not a number is infinite, so it is never taken."""
    return replace(assignment, divergence=divergence if math.isfinite(divergence) else math.inf)


def _divergence(assignment: Assignment) -> float:
    """The measured divergence, by which assignments are compared."""
    return assignment.divergence


def _names_with(names: Names, base_name: str, assignment: Assignment) -> Names:
    """The names of candidates by module and base name, with those of an assignment in addition."""
    extended: Names = {}
    for module_name, label in assignment.candidates.items():
        extended[module_name] = {**names.get(module_name, {}), base_name: _key(base_name, label)}
    return extended


def _config_with(
    labels: Mapping[str, Mapping[str, str]], measured: Sensitivity, config: QuantizationConfig
) -> QuantizationConfig:
    """The config of the choice; ``_choose`` calls this last.

    A module's weight and input get the arguments that they have in the scheme of the chosen candidate, observer and
    ``rounding`` included. A module that no data reached is left out. At least one module was reached, so the config
    is not None: the calibration of the candidates refuses data that reach no module.

    Args:
        labels: by module name and base name, the label of the chosen candidate.
        measured: has the scheme of each module under each candidate.
        config: the scheme whose observers are chosen; its ``ignore`` and kv cache are taken over.
    """
    modules: dict[str, tuple[str, QuantizationScheme | None]] = {}
    for module_name, labels_by_base in labels.items():
        arguments: dict[str, Any] = {}
        scheme: QuantizationScheme | None = None
        for base_name, label in labels_by_base.items():
            key = _key(base_name, label)
            candidate = measured.schemes[key].get(module_name)
            if candidate is None:  # no data reached the module
                continue
            scheme = scheme or candidate
            field = _FIELDS[base_name]
            arguments[field] = getattr(candidate, field)
        if scheme is not None:
            name = ", ".join(f"{base_name} {label}" for base_name, label in labels_by_base.items())
            scheme_with_observers = scheme.model_copy(update=arguments)
            modules[module_name] = name, scheme_with_observers
    ignore = dict.fromkeys(config.ignore or ())
    ignore |= dict.fromkeys(measured.ignore)
    with_observers = config_of(modules, list(ignore))
    assert with_observers is not None
    with_observers.kv_cache_scheme = config.kv_cache_scheme
    return with_observers


def _key(base_name: str, label: str) -> str:
    """The name of a candidate in the :class:`.Sensitivity`: base name and label."""
    return f"{base_name}: {label}"


def _candidate(options: CalibrationOptions, base_name: str, spec: _ObserverSpec) -> dict[str, Any]:
    """The scheme with another observer of one base name, as a candidate for :func:`~lightning_obs.sensitivity`.

    The kv cache is left out, as sensitivities are for modules with weights.
    """
    scheme = options.config.model_copy(update={"kv_cache_scheme": None})
    return {"scheme": scheme, "observers": {base_name: spec}}


def fitting_candidates(
    model: nn.Module, options: CalibrationOptions, candidates: Candidates | None = None
) -> dict[str, dict[str, _ObserverSpec]]:
    """Return the candidates that fit scheme, model and engines, by base name and label.

    Called by :func:`choose_observers`. ``CalibrationCallback(observers="auto")`` and the command line also call it
    before a run, to refuse wrong candidates before any data, and ``callbacks/possible_steps.py`` calls it for the
    report, to decide whether to propose a choice of observers.

    Args:
        model: the module that is calibrated; it is not changed.
        options: the options of the calibration whose observers are chosen.
        candidates: the user's candidates, all of which must fit, and the first of :data:`CANDIDATES` for comparison;
            None: those of :data:`CANDIDATES` that fit.

    Raises:
        CalibrationError: a candidate of the user, or the first of :data:`CANDIDATES`, does not fit; there is nothing to
            observe.
    """
    require_candidates(candidates)
    refuse(sorted(set(candidates or {}) - set(_FIELDS)), "observers are chosen for input and weight")
    fitting: dict[str, dict[str, _ObserverSpec]] = {}
    for base_name in CANDIDATES:
        observed_arguments = _observed_arguments(options.config, base_name)
        specs_by_candidate = _specs(base_name, observed_arguments, candidates)
        for specs, is_required in specs_by_candidate if observed_arguments else ():
            for spec in specs:
                if _fits(model, options, base_name, spec, is_required):
                    fitting_specs = fitting.setdefault(base_name, {})
                    fitting_specs[_label(spec)] = spec
                    break
    if not fitting:
        raise CalibrationError(
            "there is no observer to choose", got=f"candidates {candidates}", remedy="choose a scheme that observes."
        )
    return fitting


def _observed_arguments(config: QuantizationConfig, base_name: str) -> list[QuantizationArgs]:
    """The number formats of weights or inputs, one for each group of the scheme whose ranges are observed.

    Groups in full precision, or quantized dynamically, have none.
    """
    observed: list[QuantizationArgs] = []
    for group in config_groups(config):
        field = _FIELDS[base_name]
        arguments = getattr(group, field)
        if arguments is not None and arguments.dynamic is not True:
            observed.append(arguments)
    return observed


def _specs(
    base_name: str, observed_arguments: Sequence[QuantizationArgs], candidates: Candidates | None
) -> list[tuple[list[_ObserverSpec], bool]]:
    """The candidates for a base name, each as a list of forms and whether one of the forms must fit.

    The first form that fits is used. Empty if the user gives candidates, but none for this base name.

    Args:
        base_name: input or weight.
        observed_arguments: the number formats in the scheme.
        candidates: the user's; None: the default candidates.
    """
    default, *alternatives = CANDIDATES[base_name]
    if candidates is None:
        is_small = all(arguments.num_bits < 8 for arguments in observed_arguments)
        specs = [([default], True)]
        for spec in alternatives:
            forms = _default_forms(base_name, spec, is_small)
            specs.append((forms, False))
        return specs
    named: Any = candidates.get(base_name, ())
    if not named:
        return []
    specs = [([default], True)]
    for candidate in [named] if isinstance(named, (str, Mapping)) else named:
        spec = {"name": candidate} if isinstance(candidate, str) else dict(candidate)
        specs.append(([spec], True))
    return specs


def _default_forms(base_name: str, spec: _ObserverSpec, is_small: bool) -> list[_ObserverSpec]:
    """The forms of a default candidate: below 8 bits (``is_small``), a weight's with signed scales, then without.

    Empty for an observer with a Hessian and weights of 8 bits or more.
    """
    if base_name != "weight":
        return [spec]
    if is_small:
        return [{**spec, "signed": True}, spec]
    if "hessian" in spec["name"]:
        return []
    return [spec]


def _fits(
    model: nn.Module, options: CalibrationOptions, base_name: str, spec: _ObserverSpec, is_required: bool
) -> bool:
    """Whether a session with this observer can be made; if ``is_required``, the error is raised instead of False."""
    try:
        candidate = _candidate(options, base_name, spec)
        CalibrationSession(model, candidate_options(candidate, **options.beside_scheme))
    except CalibrationError:
        if is_required:
            raise
        return False
    return True


def require_candidates(candidates: Any) -> None:
    """Raise a CalibrationError for candidates of another form than ``{"input": ["minmax", {"name": "mse"}]}``.

    Called by :func:`fitting_candidates`, and by the constructor of ``CalibrationCallback``.
    """
    expected = "{'input': ['minmax', {'name': 'mse', 'norm': 2.0}]}"
    if candidates is not None and not isinstance(candidates, Mapping):
        raise CalibrationError("candidates", got=repr(candidates), expected=expected)
    for base_name, named in (candidates or {}).items():
        is_list = isinstance(named, Sequence) and not isinstance(named, str)
        for candidate in named if is_list else [named]:
            has_name = isinstance(candidate, Mapping) and isinstance(candidate.get("name"), str)
            if not isinstance(candidate, str) and not has_name:
                raise CalibrationError(f"candidates of {base_name!r}", got=repr(candidate), expected=expected)


def _label(spec: Mapping[str, Any]) -> str:
    """An observer as text, the label of a candidate.

    >>> _label({"name": "imatrix_mse", "norm": 2.0})
    'imatrix_mse(norm=2.0)'
    """
    hyperparameters = [f"{key}={value}" for key, value in spec.items() if key != "name"]
    if hyperparameters:
        return f"{spec['name']}({', '.join(hyperparameters)})"
    return str(spec["name"])
