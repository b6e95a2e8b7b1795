"""The result of a calibration, for people and reports.

:func:`.finalize` makes one (:class:`CalibrationResult`) of a whole model, or of a part of it. The calibrations part by
part add up the results of the parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from lightning_obs.calibration.fit_errors import FitErrors, fit_text
from lightning_obs.calibration.observation import Observation
from lightning_obs.engines import Verdict
from lightning_obs.errors import name_list, printable, warn
from lightning_obs.model.module_qparams import ROUNDED
from lightning_obs.numerics.many_tensors import to_host
from lightning_obs.observers import Key, Observer
from lightning_obs.observers.lattice import GridShares, LatticeObserver, grid_text
from lightning_obs.schemes.planned_modules import shares_in_float, shares_text

#: the fields of a result that grow part by part: :meth:`CalibrationResult.add` adds to them, and
#: ``streaming/layerwise.py`` saves them after each block
ADDED = (
    "skipped",
    "fallback",
    "collectives",
    "input_ranges",
    "chosen_input_ranges",
    "expert_tokens",
    "grids",
    "fit_errors",
)
#: facts that are counts, with the noun in the singular
_COUNTED = {"modules": "module", "observers": "observer", "batches": "batch", "collectives": "collective"}


@dataclass
class PlanSummary:
    """What is known of the quantized model before any data, from the plan of the calibration.

    :func:`result_of` makes one for each result; reports and the command line's closing lines read it.

    Attributes:
        observers: how many observers took part.
        is_fitted: whether weights are fitted to data, by their observers or by rounding, and the fit is judged; not if
            weights alone are finalized.
        fused: groups of names of modules that are quantized together or not at all.
        left_out: by name of a targeted module that cannot be quantized, the reason (tied to an embedding, say).
        in_float: by class of module, the share of the model's bytes that stays in float, largest first, without biases
            of quantized modules. None: not known.
        engines: by engine's name, its verdict on the checkpoint; empty if the model is not transformers'.
    """

    observers: int = 0
    is_fitted: bool = False
    fused: list[list[str]] = field(default_factory=list)
    left_out: Mapping[str, str] = field(default_factory=dict)
    in_float: Mapping[str, float] | None = None
    engines: Mapping[str, Verdict] = field(default_factory=dict)


@dataclass(repr=False)
class CalibrationResult:
    """The result of a calibration, for people, reports and the command line: ``session.result``, ``callback.result``.

    :func:`result_of` makes it from the plan, and ``finalize`` fills in the rest.

    Attributes:
        scheme: short name of the scheme.
        modules: names of the modules that were quantized.
        batches: how many batches (calls of the model) this rank observed.
        measurements: how often the statistics of an activation were computed; modules that read the same tensor share
            them.
        seconds: wall time from attaching the hooks to the written qparams, the user's forward passes included.
        qparams: ``{"layer.weight_scale": tensor, ...}`` on the CPU.
        input_ranges: smallest and largest input of each module that was observed, in the units of the activation.
        chosen_input_ranges: the range from which the scale of each module's input was computed, in the same units: an
            observer may choose a smaller range than it observed, or a larger one.
        skipped: modules left in full precision because no data reached them (``on_missing="warn"``, or in a fit).
        expert_tokens: how many tokens the router sent to each expert, by the name of the experts' container. With a
            token mask, padding does not count, except in experts that are not of this package.
        fallback: names of modules in experts that no data reached, whose activations got the ranges of the layer's
            other experts (``on_missing="siblings"``).
        grids: how much of each weight lies on a grid, by the name of its module, where the observer ``lattice`` looked
            for one: the shares of its scales that give a grid, and that store their values bit for bit.
        fit_errors: by name of a few modules with fitted weights, the errors of its outputs if the weight is fitted
            without every fourth batch: :data:`~lightning_obs.calibration.fit_errors.FitErrors`. Empty: no fit is
            judged, or nothing could be kept out.
        plan: what was known of the quantized model before the data.
        ranks: how many ranks took part.
        collectives: how many collectives the calibration used.
    """

    scheme: str
    modules: list[str]
    batches: int = 0
    measurements: int = 0
    seconds: float = 0.0
    qparams: dict[str, torch.Tensor] = field(default_factory=dict)
    input_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    chosen_input_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    expert_tokens: dict[str, list[int]] = field(default_factory=dict)
    fallback: list[str] = field(default_factory=list)
    grids: dict[str, GridShares] = field(default_factory=dict)
    fit_errors: dict[str, FitErrors] = field(default_factory=dict)
    plan: PlanSummary = field(default_factory=PlanSummary)
    ranks: int = 1
    collectives: int = 0

    def add(self, part: CalibrationResult) -> None:
        """Add the result of a part of the model: the fields in :data:`ADDED`.

        Calibrations part by part call this for each part; fields that describe the whole plan stay.
        """
        for name in ADDED:
            total = getattr(self, name)
            addend = getattr(part, name)
            setattr(self, name, total | addend if isinstance(total, dict) else total + addend)

    def facts(self) -> dict[str, str]:
        """The main facts as texts by name, in the order in which they are shown.

        Called by :meth:`line` and ``repr``, by ``report/page.py`` for the report, and by the command line when it has
        quantized files.
        """
        has_ranks = self.ranks > 1
        facts = {
            "scheme": self.scheme,
            "modules": f"{len(self.modules):,}",
            "observers": f"{self.plan.observers:,}",
            "batches": f"{self.batches:,}" + (f" x {self.ranks} ranks" if has_ranks else ""),
        }
        if has_ranks:
            facts["collectives"] = str(self.collectives)
        facts["calibration"] = f"{self.seconds:.1f} s"
        if self.plan.in_float is not None:
            facts["left in float"] = shares_text(self.plan.in_float)
        if self.grids:
            facts["grids"] = grid_text(self.grids)
        if self.plan.is_fitted:
            facts["fit"] = fit_text(self.fit_errors, self.batches * self.ranks)
        return facts

    def line(self, between: str) -> str:
        """The facts without the scheme on one line: 14 modules, 28 observers, 2 batches x 2 ranks, 0.3 s...

        Called for the message at the end of a calibration (``callbacks/trainer_session.py``) and for the closing
        summary (``report/summary.py``).

        Args:
            between: the text between two facts.
        """
        facts = self.facts()
        texts = []
        for plural, singular in _COUNTED.items():
            if plural in facts:
                number, _, ranks = facts[plural].partition(" ")
                noun = singular if number == "1" else plural
                texts.append(f"{number} {noun} {ranks}".strip())
        texts.append(facts["calibration"])
        if "left in float" in facts:
            texts.append(f"left in float: {facts['left in float']}")
        if "grids" in facts:
            texts.append(facts["grids"])
        if "fit" in facts:
            texts.append(f"fit: {facts['fit']}")
        return between.join(texts)

    def __repr__(self) -> str:
        """The facts on about ten lines, without the tensors of :attr:`qparams`."""
        facts = self.facts()
        total = sum(value.nbytes for value in self.qparams.values())
        left_out = [f"{name} ({reason})" for name, reason in self.plan.left_out.items()]
        rows = facts | {
            "modules": f"{facts['modules']}: {name_list(self.modules, 3)}",
            "observers": f"{facts['observers']}, {self.measurements} measurements of activations",
            "qparams": f"{len(self.qparams)} tensors, {total:,} bytes",
            "widest input": self._widest_input(),
            "skipped": name_list(self.skipped, 3),
            "left out": name_list(left_out, 3),
            "fallback": name_list(self.fallback, 3),
        }
        lines = [f"  {key}: {value}" for key, value in rows.items() if value]
        return printable("\n".join(["CalibrationResult", *lines]))

    def _widest_input(self) -> str:
        """The module whose input has the largest magnitude, with the input's range; empty if none was observed."""
        widest = ""
        largest = -1.0
        for name, (low, high) in self.input_ranges.items():
            if max(-low, high) > largest:
                largest = max(-low, high)
                widest = f"{name} [{low:.4g}, {high:.4g}]"
        return widest


def result_of(observation: Observation, skipped: Collection[str] = ()) -> CalibrationResult:
    """Make a result with the fields that follow from the plan alone.

    ``finalize`` calls this at its end, and then fills in the other fields. Calibrations part by part
    (:class:`.StepwiseCalibration`, ``quantize_checkpoint`` and ``calibrate_layerwise``) call it for the whole model,
    and add what the parts give.

    Args:
        observation: has the plan.
        skipped: names of modules that are left in full precision.
    """
    plan = PlanSummary(
        observers=len(observation.observers),
        is_fitted=observation.is_fitted,
        fused=observation.inseparable,
        left_out=observation.plan.left_out,
        in_float=shares_in_float(observation.model, observation.plan.targets, skipped),
        engines=observation.engines,
    )
    return CalibrationResult(
        scheme=observation.options.label,
        modules=[target.name for target in observation.plan.targets],
        ranks=observation.collectives.size,
        plan=plan,
    )


def warn_of_borrowed_ranges(result: CalibrationResult) -> None:
    """Warn of experts that were quantized although no token reached them.

    ``CalibrationSession.finalize`` calls this with each new result, and ``streaming/parts.py`` with that of each part.
    """
    if result.fallback:
        warn(
            f"no token reached these modules; their activations have the range of the layer's other experts: "
            f"{name_list(result.fallback)}"
        )


# ---------------------------------------------------------------------- fields of a result


def observed_ranges(observers: Mapping[Key, Observer]) -> dict[str, tuple[float, float]]:
    """By module name, the smallest and largest input that was observed; for the result.

    Modules are left out if no observer of their inputs keeps these values. ``finalize`` calls this, and the other
    functions for fields of a result, at its end.
    """
    ranges = {}
    for (name, _), observer in observers.items():
        if observer.base_name == "input" and observer.keeps_extremes and observer.has_statistics:
            ranges[name] = (float(observer.min_vals.min()), float(observer.max_vals.max()))
    return ranges


def chosen_ranges(observers: Mapping[Key, Observer]) -> dict[str, tuple[float, float]]:
    """By module name, the range from which the scale of its input was computed; for the result."""
    ranges = {}
    for (name, base), observer in observers.items():
        if base == "input" and observer.has_statistics:
            low, high = observer.get_min_max()
            ranges[name] = (float(low.min()), float(high.max()))
    return ranges


def grids_of_weights(observers: Mapping[Key, Observer]) -> dict[str, GridShares]:
    """By module name, how much of the weight lies on a grid, if its observer is ``lattice``; for the result."""
    grids = {}
    for (name, _), observer in observers.items():
        if isinstance(observer, LatticeObserver) and observer.has_statistics:
            grids[name] = observer.grid_shares
    return grids


def qparams_for_result(qparams: Mapping[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """Leave the rounded weights, which are as large as the weights, out of qparams by module name.

    ``finalize`` calls this at its end, for the ``qparams`` of the result.
    """
    without_weights = {}
    for name, of_module in qparams.items():
        without_weights[name] = {key: value for key, value in of_module.items() if key != ROUNDED}
    return without_weights


def on_host(qparams: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copy qparams ``{"layer": {"weight_scale": tensor}}`` to the CPU, as ``{"layer.weight_scale": tensor}``.

    ``finalize`` calls this for the result, and :attr:`.CalibrationSession.qparams` whenever it is read.
    """
    by_full_name: dict[str, torch.Tensor] = {}
    for name, of_module in qparams.items():
        for key, value in of_module.items():
            by_full_name[f"{name}.{key}"] = value
    return dict(zip(by_full_name, to_host(list(by_full_name.values())), strict=True))
