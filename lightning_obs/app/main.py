"""One run: load, check, measure, calibrate, measure again, export, load back in a new process, report.

Where the task asks for it, a plan or observers are chosen before calibration, and fine-tuning follows it.
On several ranks all of them run this; only rank 0 prints and writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import distributed as dist

from lightning_obs.app.calibrate import calibrate, evaluate, layer_errors
from lightning_obs.app.causal_lm import DEFAULT_MODEL
from lightning_obs.app.console import quiet_lightning
from lightning_obs.app.finetune import fine_tune, quality_of_checkpoint
from lightning_obs.app.job import Job, make_job, plain
from lightning_obs.app.measure import compare_runs, evaluate_checkpoint
from lightning_obs.app.plan import choose_plan, choose_tensor_observers
from lightning_obs.app.preflight import preflight, say_duration
from lightning_obs.app.quality import Quality
from lightning_obs.app.sigterm import ended_by_sigterm
from lightning_obs.app.write import write_checkpoint
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.callbacks.quantization_aware_training import QuantizationAwareTraining
from lightning_obs.numerics.histogram import Support
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.page import Report, write_report
from lightning_obs.report.quality import quality_row
from lightning_obs.report.summary import better_inputs, folder_size, poor_layers, print_report, summary

#: share of the model's quality that calibration has to lose for a share of it to mean something
_LOST = 1e-3


def run(config: DictConfig) -> dict[str, Any]:
    """Run the composed config and return what a comparison shows.

    Raises:
        CalibrationError: whatever is wrong with scheme, model or data; the exported checkpoint does not give the
            calibrated model's logits.
    """
    quiet_lightning()
    with ended_by_sigterm():
        return _run(config)


def _run(config: DictConfig) -> dict[str, Any]:
    if config.task.name in ("evaluate", "compare"):
        return evaluate_checkpoint(config) if config.task.name == "evaluate" else compare_runs(config)
    job = make_job(config)
    preflight(job)
    say_duration(job)
    full = evaluate(job, "in full precision", as_quantized=False)
    planned: dict[str, Any] = {}
    if config.task.name == "plan":
        job, planned = choose_plan(job)
    elif config.task.name == "observers":
        job = choose_tensor_observers(job)
    outcome = Outcome(calibrate(job), full, planned=planned)
    if isinstance(job.callback, QuantizationAwareTraining):
        outcome.calibrated = evaluate(job, "as calibrated")
        outcome.seconds_trained = fine_tune(job)
        outcome.result = job.callback.result or outcome.result
    outcome.errors = layer_errors(job, outcome.counts)
    outcome.quantized = evaluate(job, "quantized")
    if job.folder is not None:
        outcome.lines = write_checkpoint(job, job.folder, outcome.result)
        if outcome.calibrated is not None:
            outcome.reloaded = quality_of_checkpoint(job, job.folder)
            if outcome.reloaded is None:
                outcome.lines.append("not loaded again: some ranks cannot read that folder")
    row = report(job, outcome)
    if dist.is_initialized():  # gloo's threads may abort a process that ends in a group (pytorch #190489)
        dist.destroy_process_group()
    return row


@dataclass
class Outcome:
    """Quality on held-out data and what goes with it; None: not measured.

    Attributes:
        full: in full precision.
        calibrated: after calibration, before fine-tuning.
        quantized: of what was exported.
        reloaded: of the checkpoint, loaded again.
        seconds_trained: how long fine-tuning took.
        lines: further lines of the closing report.
        counts: how often each input value was seen, by module name.
        planned: fields of :class:`~lightning_obs.report.page.Report` that ``task=plan`` fills.
    """

    result: CalibrationResult
    full: Quality | None = None
    calibrated: Quality | None = None
    quantized: Quality | None = None
    reloaded: Quality | None = None
    seconds_trained: float | None = None
    errors: list[LayerError] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    counts: dict[str, Support] = field(default_factory=dict)
    planned: dict[str, Any] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, tuple[float, float]]:
        """Before and after, by name."""
        if self.full is None or self.quantized is None:
            return {}
        return {self.full.name: (self.full.value, self.quantized.value)}

    @property
    def row(self) -> dict[str, Any]:
        """What a comparison of runs shows of it."""
        if self.full is None or self.quantized is None:
            return {"metric": None}
        name = self.full.name
        others = {"calibrated": self.calibrated, "reloaded": self.reloaded}
        return {
            **quality_row(name, self.full.value, self.quantized.value),
            **{f"{name}_{when}": None if one is None else one.value for when, one in others.items()},
        }

    @property
    def recovered(self) -> float | None:
        """How much fine-tuning brought back of what calibration lost, from 0 (nothing, or less) to 1 (all, or more).

        None where calibration lost next to nothing, since a share of that is noise, or where nobody says which
        direction is better.
        """
        if self.full is None or self.calibrated is None or self.quantized is None:
            return None
        if self.full.higher_is_better is None:
            return None
        sign = -1 if self.full.higher_is_better else 1
        lost = sign * (self.calibrated.value - self.full.value)
        back = sign * (self.calibrated.value - self.quantized.value)
        return None if lost < _LOST * abs(self.full.value) or not lost else min(1.0, max(0.0, back / lost))

    def add_fine_tuning_lines(self) -> None:
        """Say what fine-tuning brought, where there was any."""
        if self.calibrated is not None:
            values = {"full precision": self.full, "calibrated": self.calibrated, "fine-tuned": self.quantized}
            measured = {**values, "reloaded": self.reloaded}.items()
            text = ", ".join(f"{when} {one.value:.3f}" for when, one in measured if one is not None)
            self.lines.append(f"{self.calibrated.name} on held-out data: {text}")
        if self.seconds_trained is not None:
            share = self.recovered
            brought = "" if share is None else f", and brought back {share:.0%} of what calibration lost"
            self.lines.append(f"fine-tuning took {self.seconds_trained / 60:.1f} minutes{brought}")


def report(job: Job, outcome: Outcome) -> dict[str, Any]:
    """Write ``report.html``, ``report.json`` and ``layers.csv``, and print the closing report, on rank 0.

    Returns:
        What a comparison of runs shows.
    """
    config, errors, result = job.config, outcome.errors, outcome.result
    sizes = None
    if job.folder is not None and job.trainer.is_global_zero:
        tensors = {t.data_ptr(): t.nbytes for t in [*job.model.parameters(), *job.model.buffers()]}
        sizes = (sum(tensors.values()), folder_size(job.folder))
    row = {
        "run": job.callback.label,
        **outcome.row,
        "recovered": outcome.recovered,
        "seconds_trained": outcome.seconds_trained,
        "size": sizes[1] if sizes else None,
        "seconds": result.seconds,
        "worst_sqnr": errors[0].sqnr if errors else None,
        "ignore": [*job.callback.ignore, *poor_layers(errors, fused=result.fused)],
    }
    if job.trainer.is_global_zero:
        model = Path(str(config.model.get("path") or DEFAULT_MODEL)).name
        write_report(
            config.output_dir,
            Report(
                title=f"{job.callback.label} \N{MIDDLE DOT} {model}",
                result=result,
                errors=errors,
                metrics=outcome.metrics,
                sizes=sizes,
                counts=outcome.counts,
                drift=job.callback.drift,
                **outcome.planned,
                lines=outcome.lines,
                extra={**row, "config": plain(config)},
            ),
        )
        path = Path(config.output_dir) / "report.html"
        hint = "" if not poor_layers(errors) else f"  (leave out: ignore_from={path.with_suffix('.json')})"
        outcome.add_fine_tuning_lines()
        advice = better_inputs(job.callback.options.config, errors)
        outcome.lines += [advice] if advice else []
        lines, worst = [*outcome.lines, f"report {path}{hint}"], config.report.worst_layers
        print()
        print_report(summary(result, errors, metrics=outcome.metrics, sizes=sizes, lines=lines, worst=worst))
    return row
