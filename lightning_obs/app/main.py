"""``python -m lightning_obs``, once its config is composed: the task checks, runs, leaves a row to compare."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

from omegaconf import DictConfig
from torch import distributed as dist

from lightning_obs.app.imports import import_for
from lightning_obs.app.sigterm import ended_by_sigterm
from lightning_obs.app.tasks.task import make_task
from lightning_obs.schemes.config import as_names


def run(config: DictConfig) -> dict[str, Any]:
    """Run the task of a composed config and return what a comparison shows of it."""
    _quiet_lightning()
    for name in as_names(config.imports):
        import_for("imports", name, "run from the folder that holds it, or set PYTHONPATH.")
    with ended_by_sigterm():
        task = make_task(config)
        task.check()
        task.run()
    if dist.is_initialized():  # gloo's threads may abort a process that ends in a group (pytorch #190489)
        dist.destroy_process_group()
    return task.row()


def _quiet_lightning() -> None:
    """Leave out what Lightning says of devices and workers."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*deprecated")  # Lightning 2.6 on torch 2.13
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
