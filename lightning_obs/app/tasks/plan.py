"""Choose a scheme for each layer within a budget, then calibrate with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_obs.app.console import say, step
from lightning_obs.app.job import plain
from lightning_obs.app.tasks.choosing import ChoosingTask
from lightning_obs.app.tasks.finetune import PASSES_OF_A_STEP
from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.choice.mixed_precision import choose_schemes, frontier, plan_of
from lightning_obs.choice.sensitivity import Sensitivity, sensitivity
from lightning_obs.errors import CalibrationError
from lightning_obs.files.write import write_text
from lightning_obs.report.page import as_json
from lightning_obs.report.summary import frontier_table, print_report


class Plan(ChoosingTask):
    """The schemes are those of ``task.candidates``; the group ``scheme`` is not read."""

    @override
    def check_task(self) -> None:
        """Refuse candidates that do not fit the model."""
        super().check_task()
        for scheme in self.candidates.values():
            if scheme is not None:
                CalibrationSession(self.job.model, CalibrationOptions.of(scheme, **self._of_candidates()))

    @override
    def check_scheme(self) -> None:
        """Nothing: the scheme is not known yet."""

    @override
    def choose(self) -> dict[str, Any]:
        """Measure sensitivities, solve for the budget, print the frontier, write the plan."""
        config, at_most = self.config, plain(self.config.task.at_most)
        measured = self._measure()
        plan = choose_schemes(measured, config.budget, at_most=at_most)
        if plan.config is None:
            raise CalibrationError("every module is best left in full precision", got=f"budget {config.budget}")
        plans = frontier(measured, config.task.frontier, at_most=at_most)
        rows = [*(p.row() for p in plans), *(plan_of(measured, name).row(name) for name in measured.schemes)]
        print_report(frontier_table(plans, title=f"estimated {measured.method} against size"))
        counts = ", ".join(f"{name} {count}" for name, count in plan.counts.items())
        say(f"chosen: {plan.bits:.3f} bits per weight ({counts} modules), estimated {measured.method} {plan.loss:.4g}")
        path = self.write_scheme(plan.config, f"{plan.bits:.3f} bits per weight, chosen by task=plan.")
        whole = {
            "bits": plan.bits,
            "size": plan.size,
            "loss": plan.loss,
            "method": measured.method,
            "tokens": measured.tokens,
            "schemes": plan.schemes,
            "frontier": rows,
            "layers": measured.layers,
        }
        write_text(Path(config.output_dir, "plan.json"), as_json(whole))
        say(f"wrote {path}  (scheme=plan)")
        self.calibrate_with(self.job.callback.options.with_config(plan.config))
        worst = {name: max(losses.get(name, 0.0) for losses in measured.layers.values()) for name in plan.schemes}
        unit = f"{measured.method}, worst candidate" + (", nats" if measured.method == "divergence" else "")
        return {"sensitivity": worst, "sensitivity_unit": unit, "choices": plan.schemes, "frontier": rows}

    @override
    def passes(self, needs_data: bool) -> int:
        """Calibrating the candidates, and a step forward and back for each batch that is measured."""
        measured = int(self.config.task.batches) * PASSES_OF_A_STEP
        return super().passes(needs_data) + self.batches("batches") + measured

    def _measure(self) -> Sensitivity:
        batches = self.calibration_batches()
        with step("measuring each layer's sensitivity"):
            return sensitivity(
                self.job.model,
                batches[: self.config.task.batches],
                self.candidates,
                calibration=batches,
                **self._of_candidates(),
            )

    def _of_candidates(self) -> dict[str, Any]:
        options = self.job.callback.options
        given = {"targets": options.targets, "ignore": options.ignore, "observers": options.observers}
        return {**given, **options.beside_scheme}
