"""Tasks that choose by measurement before they calibrate: a scheme for each layer, or an observer for each tensor.

The choice becomes the job's scheme. It is also written as a config of the group ``scheme``, which a later run takes
like any other: ``--config-dir <output folder>/configs scheme=plan`` (or ``scheme=observers``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationConfig
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from lightning_obs.app.console import say, step
from lightning_obs.app.from_config import plain
from lightning_obs.app.tasks.calibrate import Calibrate, refuse_several_devices
from lightning_obs.app.tasks.finetune import PASSES_OF_A_STEP
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.choice.mixed_precision import (
    MixedPlan,
    budget_in_bytes,
    choose_schemes,
    frontier,
    plan_of,
    require_solver,
)
from lightning_obs.choice.observer_choice import ObserverChoice, choose_observers, fitting_candidates
from lightning_obs.choice.sensitivity import Sensitivity, candidate_options, sensitivity
from lightning_obs.errors import CalibrationError, refuse_unknown
from lightning_obs.files.write import write_text
from lightning_obs.report.page import as_json
from lightning_obs.report.summary import frontier_table, print_report

#: how to use several devices all the same
_CHOOSE_FIRST = "choose with trainer.devices=1, then calibrate with the scheme that it wrote."


class Observers(Calibrate):
    """``task=observers``: choose the observer of each weight and input.

    The candidates observe every second calibration batch. Of the other batches, every second scores them; on the rest
    the assignments of observers are measured.

    Attributes:
        scheme_label: the name of the scheme that the user asked for; :meth:`choose` sets it.
        choice: the observers that :meth:`choose` has chosen.
    """

    may_train = False
    choice: ObserverChoice

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.scheme_label = ""
        #: the number of candidates by base name, for :meth:`passes`; :meth:`check_task` sets it
        self._candidate_counts: list[int] = []

    @override
    def check_task(self) -> None:
        """Refuse several devices, fewer than two batches, and candidates that do not fit the scheme.

        ``Calibrate.check`` calls it, once model and data are loaded.
        """
        refuse_several_devices(self.job.trainer, f"task={self.config.task.name}", _CHOOSE_FIRST)
        batches = self.config.data.get("batches")
        if batches is not None and batches < 2:
            raise CalibrationError(
                "data.batches: every second batch is observed, and the others score and measure",
                got=str(batches),
                expected="at least 2",
                remedy="data.batches=16.",
            )
        fitting = fitting_candidates(self.job.model, self.job.callback.options, self._candidates())
        self._candidate_counts = [len(specs) for specs in fitting.values()]

    @override
    def choose(self) -> None:
        """Choose observers, print and write the choice, and give the job a callback with them.

        ``Calibrate.run`` calls it before the calibration.
        """
        job = self.job
        options = job.callback.options
        batches = job.first_inputs(job.data.val_dataloader())
        with step("choosing observers"):
            self.choice = choose_observers(job.model, batches, options, self._candidates())
        print_report(self.choice.table())
        self.scheme_label = options.label
        _write_scheme(self.config, self.choice.config, "Observers chosen by task=observers.")
        job.use(self.make_callback(options.with_config(self.choice.config)))

    @override
    def passes(self, needs_data: bool) -> int:
        """Add the passes that observe, score and measure to ``Calibrate``'s; ``Calibrate.run`` prints the duration.

        One half of the batches is observed, in one forward pass for all candidates. Of the other half, every second
        batch scores them, in a forward and a backward pass. The rest, or a single batch, runs twice unquantized for
        inputs and twice for weights, once with each candidate, and at most once with each choice among some of them.
        """
        observed = math.ceil(self.job.batches("batches") / 2)
        others = self.job.batches("batches") // 2
        scored = math.ceil(others / 2)
        measured = others // 2 or scored
        forwards_of_a_batch = sum(2 * count + 1 for count in self._candidate_counts)
        passes_of_choice = observed + scored * PASSES_OF_A_STEP + measured * forwards_of_a_batch
        return super().passes(needs_data) + passes_of_choice

    @override
    def label(self) -> str:
        """The name of the scheme, and that observers were chosen; the report and the row have this name."""
        return f"{self.scheme_label} with observers chosen by measurement"

    @override
    def report_facts(self) -> dict[str, Any]:
        """Add what was estimated and measured to the facts of ``Calibrate``; ``Calibrate.report`` calls it last."""
        return {**super().report_facts(), "scores": self.choice.scores, "scored": self.choice.lines}

    @override
    def closing_lines(self) -> list[str]:
        """What was chosen, and what it was compared with; ``Calibrate.report`` calls it at the end."""
        return self.choice.lines

    def _candidates(self) -> dict[str, Any] | None:
        """The observers to choose among, by base name (``input``, ``weight``); None: every observer that fits."""
        return plain(self.config.task.candidates) or None


class Plan(Calibrate):
    """``task=plan``: choose a scheme for each layer among ``task.candidates``, within a budget of bits or bytes.

    The config group ``scheme`` is not read. The loss is an estimate of how far quantization changes the
    predictions. The frontier is the plans with the least loss for their size.

    Attributes:
        sensitivity: the loss of each group of modules with each candidate.
        plan: the plan that :meth:`choose` has chosen.
        points: sizes and estimated losses for the report's picture: of the frontier, of plans with one scheme for all
            layers, and of the choice.
    """

    may_train = False
    sensitivity: Sensitivity
    plan: MixedPlan

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.points: list[dict[str, Any]] = []

    @override
    def check(self) -> None:
        """Also refuse, before loading, a missing solver, a wrong budget and unknown names in ``task.at_most``.

        ``main.run`` calls it first.
        """
        require_solver()
        if self.config.budget is not None:
            budget_in_bytes(self.config.budget, weights=1)  # raises for a budget that cannot be read
        refuse_unknown(self._at_most(), self._candidates(), "task.at_most names no candidate")
        super().check()

    @override
    def check_task(self) -> None:
        """Refuse several devices, and candidates that the model, or the file to write, does not take.

        ``Calibrate.check`` calls it, once model and data are loaded.
        """
        refuse_several_devices(self.job.trainer, f"task={self.config.task.name}", _CHOOSE_FIRST)
        options = self._candidate_options()
        options["engines"] = ()  # a candidate that an engine refuses is no error: it is not measured
        for scheme in self._candidates().values():
            if scheme is not None:  # None: full precision, which fits every model
                session = CalibrationSession(self.job.model, candidate_options(scheme, **options))
                if self.file_export is not None:
                    self.file_export.check_model(self.job, session.plan.schemes)

    @override
    def check_scheme(self) -> None:
        """Check nothing, since the scheme is not known yet when ``Calibrate.check`` calls this."""

    @override
    def choose(self) -> None:
        """Measure sensitivities, solve for the budget, print the frontier, write the plan, and let the job use it.

        ``Calibrate.run`` calls it before the calibration. The frontier has the best plan for each of
        ``task.frontier`` budgets, from the smallest possible size to that of the best plan without a budget.

        Raises:
            CalibrationError: the best plan quantizes no module.
        """
        job = self.job
        self.sensitivity = self._measure()
        self.plan = choose_schemes(self.sensitivity, self.config.budget, at_most=self._at_most())
        if self.plan.config is None:
            raise CalibrationError("every module is best left in full precision", got=f"budget {self.config.budget}")
        method = self.sensitivity.method
        budgets = self.config.task.frontier
        plans = frontier(self.sensitivity, budgets, at_most=self._at_most())
        self.points = self._points(plans)
        print_report(frontier_table(plans, title=f"estimated {method} against size"))
        say(f"chosen: {self.label()}; estimated {method} {self.plan.loss:.4g}")
        self._write_plan()
        headline = f"{self.plan.bits:.3f} bits per weight, chosen by task=plan."
        _write_scheme(self.config, self.plan.config, headline)
        job.use(self.make_callback(job.callback.options.with_config(self.plan.config)))

    @override
    def passes(self, needs_data: bool) -> int:
        """Add calibrating the candidates, and a forward and a backward pass for each batch that is measured.

        ``Calibrate.run`` prints a duration by it before it starts. All candidates are calibrated in one pass over the
        batches, and measured together in one forward and backward pass for each batch. The work that each candidate
        adds to these passes is not estimated.
        """
        measuring = int(self.config.task.batches) * PASSES_OF_A_STEP
        return super().passes(needs_data) + self.job.batches("batches") + measuring

    @override
    def label(self) -> str:
        """The bits per weight of the plan, and how many layers have each scheme: the name in the report and the row."""
        counts = ", ".join(f"{count} {name}" for name, count in self.plan.counts.items())
        return f"plan of {self.plan.bits:.3f} bits per weight, {counts}"

    @override
    def report_facts(self) -> dict[str, Any]:
        """Add the plan, each layer's loss and the frontier to the facts of ``Calibrate``.

        ``Calibrate.report`` calls it at the end of the run.

        If the losses are divergences, the frontier has the chosen point twice: with the estimated divergence, and with
        the measured divergence.
        """
        facts = super().report_facts()
        is_divergence = self.sensitivity.method == "divergence"
        points = self.points
        if is_divergence and self.quantized is not None and self.quantized.moved is not None:
            chosen_point = next(point for point in points if point.get("mark") == "chosen")
            divergence = self.quantized.moved.divergence
            points = [*points, {**chosen_point, "name": "measured", "mark": "measured", "loss": divergence}]
        losses = {}
        worst_losses = {}
        for module_name, scheme in self.plan.schemes.items():
            losses[module_name] = self.sensitivity.layers.get(scheme, {}).get(module_name, 0.0)
            worst_losses[module_name] = max(
                layer_losses.get(module_name, 0.0) for layer_losses in self.sensitivity.layers.values()
            )
        unit = f"{self.sensitivity.method}, worst candidate"
        facts["sensitivity"] = worst_losses
        facts["sensitivity_unit"] = f"{unit}, nats" if is_divergence else unit
        facts["frontier"] = points
        facts["choices"] = self.plan.schemes
        facts["losses"] = losses
        return facts

    def _measure(self) -> Sensitivity:
        """Measure sensitivities on the first batches; candidates are calibrated on the others, if there are any."""
        job = self.job
        batches = job.first_inputs(job.data.val_dataloader())
        count = self.config.task.batches
        with step("measuring each layer's sensitivity"):
            return sensitivity(
                job.model,
                batches[:count],
                self._candidates(),
                calibration=batches[count:] or batches,
                **self._candidate_options(),
            )

    def _points(self, plans: Sequence[MixedPlan]) -> list[dict[str, Any]]:
        """The points of the report's picture: ``plans`` of the frontier, uniform plans, the choice, full precision."""
        points = [plan.row() for plan in plans]
        for name in self.sensitivity.schemes:
            points.append(plan_of(self.sensitivity, name).row(name))
        points.append({**self.plan.row("chosen"), "mark": "chosen"})
        bytes_of_a_weight = next(self.job.model.parameters()).itemsize
        points.append(
            {
                "name": "full precision",
                "mark": "full precision",
                "bits_per_weight": 8.0 * bytes_of_a_weight,
                "bytes": bytes_of_a_weight * self.sensitivity.weights,
                "loss": 0.0,
            }
        )
        return points

    def _write_plan(self) -> None:
        """Write ``plan.json``: the choice, the sensitivities and the frontier."""
        content = {
            "bits": self.plan.bits,
            "size": self.plan.size,
            "loss": self.plan.loss,
            "schemes": self.plan.schemes,
            "method": self.sensitivity.method,
            "tokens": self.sensitivity.tokens,
            "layers": self.sensitivity.layers,
            "frontier": self.points,
        }
        write_text(Path(self.config.output_dir, "plan.json"), as_json(content))

    def _candidates(self) -> dict[str, Any]:
        """The schemes to choose among, by name; None is full precision."""
        return plain(self.config.task.candidates) or {}

    def _at_most(self) -> dict[str, float]:
        """The largest share of the weights (0 to 1) that each candidate may quantize, by its name; empty: no limit."""
        return plain(self.config.task.at_most)

    def _candidate_options(self) -> dict[str, Any]:
        """The options that all candidates share, for :meth:`check_task` and :meth:`_measure`."""
        options = self.job.callback.options
        return {
            "targets": options.targets,
            "ignore": options.ignore,
            "observers": options.observers,
            "rounding": options.rounding,
            **options.beside_scheme,
        }


def _write_scheme(config: DictConfig, choice: QuantizationConfig, headline: str) -> None:
    """Write a choice as a config of the group ``scheme`` that a later run can take, and print where.

    Args:
        config: the config of the run; the new config has the name of its task (``observers`` or ``plan``).
        choice: schemes and observers, by module.
        headline: the first line of the file, a comment.
    """
    name = config.task.name
    folder = Path(config.output_dir) / "configs"
    file = folder / "scheme" / f"{name}.yaml"
    scheme = choice.model_dump(mode="json", include={"config_groups", "ignore"}, exclude_none=True)
    comment = f"# {headline}\n#   python -m lightning_obs --config-dir {folder} scheme={name}\n"
    write_text(file, comment + OmegaConf.to_yaml(OmegaConf.create(scheme)))
    say(f"wrote {file}  (scheme={name})")
