"""Run ``python -m lightning_obs`` with a composed config: the task checks, runs, returns a row to compare."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig
from torch import distributed as dist

from lightning_obs.app.job import typed_words
from lightning_obs.app.overrides import refuse_deleted
from lightning_obs.app.tasks.task import make_task, task_node
from lightning_obs.app.values import check_values
from lightning_obs.errors import refuse
from lightning_obs.packages import import_package
from lightning_obs.schemes.config import as_names


def run(config: DictConfig) -> dict[str, Any]:
    """Run the task of a composed config and return its row of a comparison."""
    _quiet_lightning()
    words = [word for word in typed_words() or () if not word.startswith("--")]
    refuse_deleted(words)
    refuse_unread(task_node(config), words)
    check_values(config)
    for name in as_names(config.imports):
        import_package(name, "imports", "run from the folder that holds it, or set PYTHONPATH.")
    task = make_task(config)
    task.check()
    try:
        task.run()
    except SIGTERMException:  # Lightning's, whose exit code is that of success
        raise SystemExit(128 + signal.SIGTERM) from None
    if dist.is_initialized():  # gloo's threads may abort a process that ends in a group (pytorch #190489)
        dist.destroy_process_group()
    return task.row()


def refuse_unread(task: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse typed keys that the task does not read: keys that its ``ignores`` match, unless its ``reads`` do."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    keys = [str(override.key_or_group) for override in parsed]
    if "task._target_" in keys:  # another task than the one whose config this is
        return

    def among(key: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch(key, pattern) or key.startswith(f"{pattern}.") for pattern in patterns)

    groups = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    added = [k for k, override in zip(keys, parsed, strict=True) if override.is_add() and not {*k} & {*"./@"}]
    refuse([k for k in added if k not in groups], "no task reads an added key", remedy="--help lists all keys.")
    ignores, reads = task.get("ignores", ()), ["task", *task.get("reads", ())]
    refuse(
        [key for key in keys if among(key, ignores) and not among(key, reads)],
        f"task={task.name} does not read what was given",
        remedy="leave it out; --help lists what each task reads.",
    )


def _quiet_lightning() -> None:
    """Suppress Lightning's messages about devices and workers."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*deprecated")  # Lightning 2.6 on torch 2.13
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
