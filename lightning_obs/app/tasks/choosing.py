"""Tasks that choose by measurement before they calibrate: a scheme for each layer, an observer for each tensor.

The choice becomes the job's scheme, and is written as a config of the group ``scheme``, so that a later run takes it as
it takes any other: ``--config-dir <output folder>/configs scheme=plan`` (or ``observers``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationConfig
from omegaconf import OmegaConf
from typing_extensions import override

from lightning_obs.app.console import say, step
from lightning_obs.app.job import plain
from lightning_obs.app.tasks.calibrate import Calibrate
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
from lightning_obs.choice.observer_choice import choose_observers, fitting_candidates
from lightning_obs.choice.sensitivity import candidate_options, sensitivity
from lightning_obs.errors import CalibrationError, refuse_unknown
from lightning_obs.files.write import write_text
from lightning_obs.numerics.histogram import Support
from lightning_obs.report.page import as_json
from lightning_obs.report.summary import frontier_table, print_report


class ChoosingTask(Calibrate):
    """Chooses on the calibration batches, on one device, then calibrates with the choice."""

    @property
    def candidates(self) -> dict[str, Any]:
        """``task.candidates`` as a dict."""
        return plain(self.config.task.candidates) or {}

    @override
    def check_task(self) -> None:
        if self.trainer.world_size > 1:
            raise CalibrationError(
                f"task={self.config.task.name} runs on one device",
                got=f"{self.trainer.world_size} devices",
                remedy="choose with trainer.devices=1, then calibrate with the scheme that it wrote.",
            )

    def write_scheme(self, config: QuantizationConfig, headline: str) -> None:
        """Write the choice as a config for a later run, and say where."""
        name, folder = self.config.task.name, Path(self.config.output_dir) / "configs"
        scheme = config.model_dump(mode="json", include={"config_groups", "ignore"}, exclude_none=True)
        head = f"# {headline}\n#   python -m lightning_obs --config-dir {folder} scheme={name}\n"
        write_text(folder / "scheme" / f"{name}.yaml", head + OmegaConf.to_yaml(OmegaConf.create(scheme)))
        say(f"wrote {folder / 'scheme' / name}.yaml  (scheme={name})")


class Observers(ChoosingTask):
    """Choose the observer of each weight and input: every second calibration batch is observed, the others score."""

    @override
    def check_task(self) -> None:
        super().check_task()
        batches = self.config.data.get("batches")
        if batches is not None and batches < 2:
            raise CalibrationError(
                "data.batches: every second batch is observed, and the others score",
                got=str(batches),
                expected="at least 2",
                remedy="data.batches=16.",
            )
        fitting_candidates(self.model, self.callback.options, self.candidates or None)

    @property
    @override
    def label(self) -> str:
        return f"{self.asked.label} with observers chosen by measurement"

    @override
    def choose(self) -> Mapping[str, Any]:
        asked, batches = self.callback.options, self.first_inputs(self.data.val_dataloader())
        with step("scoring observers"):
            choice = choose_observers(self.model, batches, asked, self.candidates or None)
        print_report(choice.table())
        self.asked = asked
        self.write_scheme(choice.config, "Observers chosen by task=observers.")
        self.run_with(self.make_callback(asked.with_config(choice.config)))
        return {"scores": choice.scores}

    @override
    def passes(self, needs_data: bool) -> int:
        """Also observing and scoring."""
        return super().passes(needs_data) + 2 * self.batches("batches")


class Plan(ChoosingTask):
    """Choose a scheme for each layer within a budget, of ``task.candidates``; the group ``scheme`` is not read."""

    plan: MixedPlan

    @property
    @override
    def label(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.plan.counts.items())
        return f"plan of {self.plan.bits:.3f} bits per weight, {counts}"

    @override
    def check(self) -> None:
        require_solver()
        if self.config.budget is not None:
            budget_in_bytes(self.config.budget, weights=1)  # one that cannot be read is told before the model is loaded
        refuse_unknown(plain(self.config.task.at_most), self.candidates, "task.at_most names no candidate")
        super().check()

    @override
    def check_task(self) -> None:
        super().check_task()
        options = {**self._of_candidates(), "engines": ()}  # candidates that they refuse are not measured
        for scheme in self.candidates.values():
            if scheme is not None:
                CalibrationSession(self.model, candidate_options(scheme, **options))

    @override
    def check_scheme(self) -> None:
        """Nothing: the scheme is not known yet."""

    @override
    def choose(self) -> Mapping[str, Any]:
        """Measure sensitivities, solve for the budget, print the frontier, write the plan."""
        config, at_most = self.config, plain(self.config.task.at_most)
        batches = self.first_inputs(self.data.val_dataloader())
        scored, observed = batches[: config.task.batches], batches[config.task.batches :] or batches
        with step("measuring each layer's sensitivity"):
            measured = sensitivity(self.model, scored, self.candidates, calibration=observed, **self._of_candidates())
        plan = self.plan = choose_schemes(measured, config.budget, at_most=at_most)
        if plan.config is None:
            raise CalibrationError("every module is best left in full precision", got=f"budget {config.budget}")
        plans = frontier(measured, config.task.frontier, at_most=at_most)
        rows = [*(p.row() for p in plans), *(plan_of(measured, name).row(name) for name in measured.schemes)]
        width = next(self.model.parameters()).itemsize
        full = {"bits_per_weight": 8.0 * width, "bytes": width * measured.weights, "loss": 0.0}
        rows += [{**plan.row("chosen"), "mark": "chosen"}, {"name": "full precision", "mark": "full precision", **full}]
        print_report(frontier_table(plans, title=f"estimated {measured.method} against size"))
        say(f"chosen: {self.label}; estimated {measured.method} {plan.loss:.4g}")
        whole = {name: getattr(plan, name) for name in ("bits", "size", "loss", "schemes")}
        whole |= {name: getattr(measured, name) for name in ("method", "tokens", "layers")}
        write_text(Path(config.output_dir, "plan.json"), as_json({**whole, "frontier": rows}))
        self.write_scheme(plan.config, f"{plan.bits:.3f} bits per weight, chosen by task=plan.")
        self.run_with(self.make_callback(self.callback.options.with_config(plan.config)))
        worst = {name: max(losses.get(name, 0.0) for losses in measured.layers.values()) for name in plan.schemes}
        unit = f"{measured.method}, worst candidate" + (", nats" if measured.method == "divergence" else "")
        losses = {name: measured.layers.get(scheme, {}).get(name, 0.0) for name, scheme in plan.schemes.items()}
        chosen = {"choices": plan.schemes, "losses": losses}
        return {"sensitivity": worst, "sensitivity_unit": unit, "frontier": rows, **chosen}

    @override
    def report(self, counts: Mapping[str, Support], parts: Mapping[str, Any]) -> None:
        """Show the measured divergence beside the estimated one."""
        if self.quantized is not None and self.quantized.moved is not None and "nats" in parts["sensitivity_unit"]:
            chosen = next(point for point in parts["frontier"] if point.get("mark") == "chosen")
            measured = {"name": "measured", "mark": "measured", "loss": self.quantized.moved.divergence}
            parts = {**parts, "frontier": [*parts["frontier"], {**chosen, **measured}]}
        super().report(counts, parts)

    @override
    def passes(self, needs_data: bool) -> int:
        """Also calibrating the candidates, and a forward and a backward pass for each batch that is measured."""
        measured = int(self.config.task.batches) * PASSES_OF_A_STEP
        return super().passes(needs_data) + self.batches("batches") + measured

    def _of_candidates(self) -> dict[str, Any]:
        options = self.callback.options
        names = ("targets", "ignore", "observers", "rounding")
        return {**{name: getattr(options, name) for name in names}, **options.beside_scheme}
