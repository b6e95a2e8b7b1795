"""Run ``python -m lightning_obs`` with a composed config: the task checks, runs, and returns a row to compare."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig
from torch import distributed as dist

from lightning_obs.app.tasks.task import make_task, task_node
from lightning_obs.app.typed_words import refuse_deleted, refuse_unread, typed_overrides
from lightning_obs.app.values import check_values
from lightning_obs.callbacks.lightning_package import class_of
from lightning_obs.packages import import_package
from lightning_obs.schemes.config import as_names


def run(config: DictConfig) -> dict[str, Any]:
    """Run the task of a composed config and return its row for a table that compares runs.

    ``lightning_obs.__main__`` calls this for each run, once Hydra has composed its config.

    Raises:
        CalibrationError: typed words or values that are wrong, or what the task refuses.
    """
    with _lightning_quiet():
        return _run(config)


def _run(config: DictConfig) -> dict[str, Any]:
    """Check the typed words and values, run the task, and return its row; :func:`run` calls it with Lightning quiet."""
    overrides = typed_overrides()
    refuse_deleted(overrides)
    refuse_unread(task_node(config), overrides)
    check_values(config)
    for name in as_names(config.imports):
        import_package(name, "imports", "run from the folder that holds it, or set PYTHONPATH.")
    task = make_task(config)
    task.check()
    try:
        task.run()
    except SystemExit as error:
        if class_of(error, "SIGTERMException") is None:
            raise
        # With Lightning's own exit code the run would count as a success.
        raise SystemExit(128 + signal.SIGTERM) from None
    if dist.is_initialized():  # gloo's threads may abort a process that ends in a group (pytorch #190489)
        dist.destroy_process_group()
    return task.row()


@contextmanager
def _lightning_quiet() -> Iterator[None]:
    """Suppress Lightning's messages about devices and workers inside the ``with`` block; :func:`run` enters it.

    After the block its loggers have their earlier levels, and later messages are shown again. The tokenizers' warning
    about forked processes stays off.
    """
    loggers = []
    for package in ("lightning.pytorch", "pytorch_lightning"):
        for name in ("utilities.rank_zero", "accelerators.cuda"):
            loggers.append(logging.getLogger(f"{package}.{name}"))
    levels = [logger.level for logger in loggers]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*deprecated")  # Lightning 2.6 on torch 2.13
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
