"""What a run prints while it goes on; rank 0 only."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_obs.errors import printable


def say(text: str) -> None:
    """Print a line."""
    if rank_zero_only.rank == 0:
        print(printable(text), flush=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Show what is going on, with a bar that moves and the time it takes."""
    if rank_zero_only.rank != 0:
        yield
        return
    with Progress(TextColumn("· {task.description}"), BarColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task(text, total=None)
        yield
        progress.update(task, total=1, completed=1)


def quiet_lightning() -> None:
    """Leave out what Lightning says of devices and workers."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*deprecated")  # Lightning 2.6 on torch 2.13
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
