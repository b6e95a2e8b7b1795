"""``python -m lightning_obs``, once its config is composed: the task checks, runs, leaves a row to compare."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from torch import distributed as dist

from lightning_obs.app.console import quiet_lightning
from lightning_obs.app.job import import_modules
from lightning_obs.app.sigterm import ended_by_sigterm
from lightning_obs.app.tasks.task import make_task


def run(config: DictConfig) -> dict[str, Any]:
    """Run the task of a composed config and return what a comparison shows of it.

    Raises:
        CalibrationError: whatever is wrong with config, model, scheme or data; the exported checkpoint does not give
            the calibrated model's logits.
    """
    quiet_lightning()
    import_modules(config)
    with ended_by_sigterm():
        task = make_task(config)
        task.check()
        task.run()
    if dist.is_initialized():  # gloo's threads may abort a process that ends in a group (pytorch #190489)
        dist.destroy_process_group()
    return task.row()
