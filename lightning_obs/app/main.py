"""One run: load, measure, calibrate, fine-tune if asked to, measure again, export, load back in a new process, report.

On several ranks all of them run this; only rank 0 prints and writes.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from torch import distributed as dist

from lightning_obs.app.calibrate import calibrate, evaluate, layer_errors
from lightning_obs.app.console import quiet_lightning
from lightning_obs.app.finetune import fine_tune, perplexity_of_checkpoint
from lightning_obs.app.job import make_job
from lightning_obs.app.outcome import Outcome, report
from lightning_obs.app.write import write_checkpoint
from lightning_obs.callbacks.quantization_aware_training import QuantizationAwareTraining


def run(config: DictConfig) -> dict[str, Any]:
    """Run the composed config and return what a comparison shows.

    Raises:
        CalibrationError: whatever is wrong with scheme, model or data; the exported checkpoint does not give the
            calibrated model's logits.
    """
    quiet_lightning()
    job = make_job(config)
    full = evaluate(job, "perplexity in full precision", as_quantized=False)
    outcome = Outcome(calibrate(job), full)
    if isinstance(job.callback, QuantizationAwareTraining):
        outcome.calibrated = evaluate(job, "perplexity calibrated")
        outcome.seconds_trained = fine_tune(job)
        outcome.result = job.callback.result or outcome.result
    outcome.errors = layer_errors(job)
    outcome.quantized = evaluate(job, "perplexity quantized")
    if job.folder is not None:
        outcome.lines = write_checkpoint(job, job.folder)
        if outcome.calibrated is not None:
            outcome.reloaded = perplexity_of_checkpoint(job, job.folder)
            if outcome.reloaded is None:
                outcome.lines.append("not loaded again: some ranks cannot read that folder")
    row = report(job, outcome)
    if dist.is_initialized():  # gloo's threads may abort a process that ends in a group (pytorch #190489)
        dist.destroy_process_group()
    return row
