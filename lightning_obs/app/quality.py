"""The one number by which a run is judged: what the module's ``test_step`` logs on held-out data."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_obs.app.console import say
from lightning_obs.app.job import Job
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.quantized_forward import quantized


@dataclass(frozen=True)
class Quality:
    """A value that was measured.

    Attributes:
        name: under which ``test_step`` logged it.
        value: over all held-out batches and ranks.
        higher_is_better: as the torchmetrics metric of that name says; None where the module has none.
    """

    name: str
    value: float
    higher_is_better: bool | None


def measure_quality(module: LightningModule, trainer: Trainer, data: LightningDataModule) -> Quality | None:
    """Run ``trainer.test``; None if ``test_step`` logs nothing.

    Of several values ``module.metric`` names the one that counts.

    Raises:
        CalibrationError: several values, and ``module.metric`` names none of them.
    """
    logged = trainer.test(module, datamodule=data, verbose=False)[0]
    if not logged:
        return None
    wanted = getattr(module, "metric", None)
    name = str(wanted or next(iter(logged)))
    if name not in logged or (wanted is None and len(logged) > 1):
        raise CalibrationError(
            f"which value judges the model: {type(module).__name__}.test_step logs {', '.join(logged)}",
            got=f"metric = {wanted!r}",
            remedy=f"name one of them in the class: metric = {next(iter(logged))!r}.",
        )
    return Quality(name, float(logged[name]), getattr(getattr(module, name, None), "higher_is_better", None))


def evaluate(job: Job, what: str, as_quantized: bool = True) -> Quality | None:
    """Quality of the job's model on held-out data; None if ``evaluate`` is off or the module measures none.

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
