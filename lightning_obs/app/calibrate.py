"""Calibrate, and measure what it cost: perplexity on held-out text, and each layer's own error."""

from __future__ import annotations

from contextlib import nullcontext

from lightning_obs.app.console import say, step
from lightning_obs.app.job import Job
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.model.quantized_forward import quantized
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


def evaluate(job: Job, what: str, as_quantized: bool = True) -> float | None:
    """Perplexity on held-out text; None if ``config.evaluate`` is off or the module measures none.

    Args:
        job: the model and its text.
        what: is measured, for the user to read.
        as_quantized: quantize in the forward.
    """
    if not job.config.evaluate:
        return None
    say(f"· {what}")
    with quantized(job.model) if as_quantized else nullcontext():
        metrics = job.evaluator.test(job.module, datamodule=job.data, verbose=False)[0]
    value = metrics.get("perplexity")
    return None if value is None else float(value)


def layer_errors(job: Job, counts: dict[str, Support] | None = None) -> list[LayerError]:
    """Each layer's error on ``config.report.layer_error_batches`` held-out batches, the worst first.

    Args:
        job: the model and its text.
        counts: filled with how often each input value was seen there, by module name; inputs that an observer counted
            while it calibrated are in it as they were then.
    """
    batches = job.config.report.layer_error_batches
    if batches < 1:
        return []
    device = next(job.model.parameters()).device
    extra = {"use_cache": False} if is_transformers_model(job.model) else {}
    chosen = [batch for batch, _ in zip(job.data.test_dataloader(), range(batches), strict=False)]
    moved = [{**{key: value.to(device) for key, value in batch.items()}, **extra} for batch in chosen]
    with step("measuring each layer's error"):
        errors = measure_layer_errors(job.model, moved, counts=counts)
    if counts is not None and job.callback.session is not None:
        counts.update(job.callback.session.input_counts)
    return errors
