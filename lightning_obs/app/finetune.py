"""Fine-tune a calibrated model through fake quantization, and measure what it brought.

Four perplexities on held-out text: full precision, calibrated only, fine-tuned, and of the checkpoint loaded again. The
last two are the same number, or something is wrong.
"""

from __future__ import annotations

import time
from pathlib import Path

from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig

from lightning_obs.callbacks.quantization_aware_training import QuantizationAwareTraining
from lightning_obs.errors import CalibrationError


def fine_tune(
    config: DictConfig, callback: QuantizationAwareTraining, module: LightningModule, data: LightningDataModule
) -> float:
    """Train from the ranges that calibration found; the last thing it does is a validation of the result.

    Returns:
        How long that took, in seconds.

    Raises:
        CalibrationError: no text to train on.
    """
    if not config.data.get("train_batches"):
        raise CalibrationError("data.train_batches", got=config.data.get("train_batches"), expected="one or more")
    started = time.perf_counter()
    if config.task.seed is not None:
        seed_everything(config.task.seed, verbose=False)
    trainer: Trainer = instantiate(config.trainer, callbacks=[callback])
    module.train()
    trainer.fit(module, datamodule=data)
    module.eval()
    trainer.validate(module, datamodule=data, verbose=False)
    return time.perf_counter() - started


def share_recovered(full: float, calibrated: float, tuned: float) -> float | None:
    """How much of the perplexity that calibration alone lost came back; None if it lost nothing.

    >>> share_recovered(20.0, 30.0, 22.5)
    0.75
    """
    return None if calibrated <= full else (calibrated - tuned) / (calibrated - full)


def perplexity_of_checkpoint(config: DictConfig, folder: Path, data: LightningDataModule) -> float:
    """Perplexity of what transformers loads from ``folder``, on the held-out text."""
    loaded: LightningModule = instantiate(config.model, path=str(folder), dtype="auto")
    trainer: Trainer = instantiate(config.trainer)
    return float(trainer.test(loaded, datamodule=data, verbose=False)[0]["perplexity"])
