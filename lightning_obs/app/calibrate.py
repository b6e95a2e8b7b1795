"""Calibrate, and measure what it cost: the model's quality on held-out data, and each layer's own error."""

from __future__ import annotations

from contextlib import nullcontext

from lightning_obs.app.console import say, step
from lightning_obs.app.job import Job
from lightning_obs.app.quality import Quality, measure_quality
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.forward.quantized_forward import quantized
from lightning_obs.numerics.histogram import Support
from lightning_obs.report.layer_errors import LayerError, measure_layer_errors


def calibrate(job: Job) -> CalibrationResult:
    """Calibrate in Lightning's validation loop, or without a single batch where the scheme needs none."""
    callback = job.callback
    say(f"· calibrating {callback.label}")
    session = callback.prepare(job.trainer, job.module)
    if session.needs_data:
        job.trainer.validate(job.module, datamodule=job.data, verbose=False)
    else:
        say(f"{callback.label} needs no data: no batch is run, data.batches is not used")
        with session:
            pass
    assert callback.result is not None  # it raised otherwise
    return callback.result


def evaluate(job: Job, what: str, as_quantized: bool = True) -> Quality | None:
    """Quality on held-out data; None if ``config.evaluate`` is off or the module measures none.

    Args:
        job: the model and its data.
        what: is measured, for the user to read.
        as_quantized: quantize in the forward.
    """
    if not job.config.evaluate:
        return None
    say(f"· measuring {what}")
    with quantized(job.model) if as_quantized else nullcontext():
        return measure_quality(job.module, job.evaluator, job.data)


def layer_errors(job: Job, counts: dict[str, Support] | None = None) -> list[LayerError]:
    """Each layer's error on ``config.report.layer_error_batches`` held-out batches, the worst first.

    Args:
        job: the model and its data.
        counts: filled with how often each input value was seen there, by module name; inputs that an observer counted
            while it calibrated are in it as they were then.
    """
    batches = job.config.report.layer_error_batches
    if batches < 1:
        return []
    moved = [job.inputs(batch) for batch, _ in zip(job.data.test_dataloader(), range(batches), strict=False)]
    with step("measuring each layer's error"):
        errors = measure_layer_errors(job.model, moved, counts=counts)
    if counts is not None and job.callback.session is not None:
        counts.update(job.callback.session.input_counts)
    return errors
