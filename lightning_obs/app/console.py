"""What a run prints while it goes on; rank 0 only."""

from __future__ import annotations

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
    columns = TextColumn("· {task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, disable=rank_zero_only.rank != 0) as progress:
        task = progress.add_task(text, total=None)
        yield
        progress.update(task, total=1, completed=1)
