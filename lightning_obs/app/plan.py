"""Choose a scheme for each layer, or observers for each tensor, by what they cost the model's predictions.

The choice becomes the job's scheme, and is written as a config of the group ``scheme``, so that a later run takes it as
it takes any other: ``--config-dir <output folder>/configs scheme=plan``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationConfig
from omegaconf import OmegaConf

from lightning_obs.app.console import say, step
from lightning_obs.app.job import Job, make_trainer, plain
from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.calibration import CalibrationCallback
from lightning_obs.choice.mixed_precision import (
    MixedPlan,
    choose_schemes,
    frontier,
    plan_of,
)
from lightning_obs.choice.observer_choice import choose_for
from lightning_obs.choice.sensitivity import Sensitivity, sensitivity
from lightning_obs.errors import CalibrationError
from lightning_obs.files.write import write_text
from lightning_obs.report.frontier import frontier_rows, frontier_table
from lightning_obs.report.page import as_json
from lightning_obs.report.summary import print_report


def choose_plan(job: Job) -> tuple[Job, dict[str, Any]]:
    """Measure, choose, write and print; return the job with the scheme that was chosen, and fields of its report.

    Raises:
        CalibrationError: nothing fits the budget.
    """
    config = job.config
    asked = job.callback.options
    measured = _measure(job, asked)
    plan = choose_schemes(measured, config.budget, at_most=plain(config.task.at_most))
    if plan.config is None:
        raise CalibrationError("every module is best left in full precision", got=f"budget {config.budget}")
    plans = frontier(measured, config.task.frontier, at_most=plain(config.task.at_most))
    rows = frontier_rows(plans, {name: plan_of(measured, name) for name in measured.schemes})
    print_report(frontier_table(plans, title=f"estimated {measured.method} against size"))
    counts = ", ".join(f"{name} {count}" for name, count in plan.counts.items())
    say(f"chosen: {plan.bits:.3f} bits per weight ({counts} modules), estimated {measured.method} {plan.loss:.4g}")
    say(f"wrote {_write(Path(config.output_dir), measured, plan, rows)}  (scheme=plan)")
    worst = {name: max(losses.get(name, 0.0) for losses in measured.layers.values()) for name in plan.schemes}
    unit = f"{measured.method}, worst candidate" + (", nats" if measured.method == "divergence" else "")
    shown = {"sensitivity": worst, "sensitivity_unit": unit, "choices": plan.schemes, "frontier": rows}
    return _with_options(job, asked.with_config(plan.config)), shown


def choose_tensor_observers(job: Job) -> Job:
    """Score observers on every second calibration batch, write and print; return the job with those chosen.

    Raises:
        CalibrationError: nothing to choose; whatever is wrong with a candidate on these data.
    """
    asked, folder = job.callback.options, Path(job.config.output_dir)
    with step("scoring observers"):
        choice, options = choose_for(job.model, _batches(job), asked, plain(job.config.task.candidates))
    print_report(choice.table())
    say(f"wrote {_write_scheme(folder, choice.config, 'Observers chosen by task=observers.')}  (scheme=plan)")
    return _with_options(job, options)


def check_candidates(job: Job) -> None:
    """Refuse candidates that cannot be, before anything is run.

    Raises:
        CalibrationError: several devices; whatever is wrong with a candidate without data.
    """
    _require_one_device(job)
    asked, candidates = job.callback.options, plain(job.config.task.candidates) or {}
    if job.config.task.name == "plan":
        for scheme in candidates.values():
            if scheme is not None:
                CalibrationSession(job.model, CalibrationOptions.of(scheme, **_of_candidates(asked)))
        return
    for base_name, observers in candidates.items():
        for observer in [observers] if isinstance(observers, (str, dict)) else observers:
            replace(asked, observers={base_name: observer})


def _require_one_device(job: Job) -> None:
    if job.trainer.world_size > 1:
        raise CalibrationError(
            f"task={job.config.task.name} runs on one device",
            got=f"{job.trainer.world_size} devices",
            remedy="choose with trainer.devices=1, then calibrate with what it wrote (scheme=plan).",
        )


def _batches(job: Job) -> list[dict[str, Any]]:
    device = job.trainer.strategy.root_device
    job.module.to(device)
    return [dict(job.inputs(batch, device)) for batch in job.data.val_dataloader()]


def _of_candidates(options: CalibrationOptions) -> dict[str, Any]:
    given = {"targets": options.targets, "ignore": options.ignore, "observers": options.observers}
    return {**given, **options.beside_scheme}


def _with_options(job: Job, options: CalibrationOptions) -> Job:
    callback = CalibrationCallback(options, module=job.config.module, token_mask=job.config.token_mask, show=False)
    return replace(job, callback=callback, trainer=make_trainer(job.config, callback))


def _measure(job: Job, options: CalibrationOptions) -> Sensitivity:
    batches, config = _batches(job), job.config
    with step("measuring each layer's sensitivity"):
        return sensitivity(
            job.model,
            batches[: config.task.batches],
            plain(config.task.candidates),
            calibration=batches,
            **_of_candidates(options),
        )


def _write(folder: Path, measured: Sensitivity, plan: MixedPlan, rows: list[dict[str, Any]]) -> Path:
    """``plan.json`` for programs, and the config for a later run; the latter's path."""
    assert plan.config is not None
    path = _write_scheme(folder, plan.config, f"{plan.bits:.3f} bits per weight, chosen by task=plan.")
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
    write_text(folder / "plan.json", as_json(whole))
    return path


def _write_scheme(folder: Path, config: QuantizationConfig, headline: str) -> Path:
    path = folder / "configs" / "scheme" / "plan.yaml"
    scheme = config.model_dump(mode="json", include={"config_groups", "ignore"}, exclude_none=True)
    head = f"# {headline}\n#   python -m lightning_obs --config-dir {folder / 'configs'} scheme=plan\n"
    write_text(path, head + OmegaConf.to_yaml(OmegaConf.create(scheme)))
    return path
