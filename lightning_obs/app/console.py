"""Print lines and progress bars while a run of the command line goes on; only rank 0 prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from lightning_obs.callbacks.lightning_package import rank_zero_only
from lightning_obs.errors import printable


def say(text: str) -> None:
    """Print a line on rank 0; the tasks say by it what they do next."""
    if rank_zero_only.rank == 0:
        print(printable(text), flush=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Show ``text``, a moving bar and the elapsed time while the ``with`` block runs.

    Tasks enter it for work whose length is not known: loading a model, reading data, measuring layers.
    """
    columns = [TextColumn("· {task.description}"), BarColumn(), TimeElapsedColumn()]
    with Progress(*columns, disable=rank_zero_only.rank != 0) as progress:
        task = progress.add_task(text, total=None)
        yield
        progress.update(task, total=1, completed=1)


@contextmanager
def bytes_done(text: str, at_once: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """Show that the ``with`` block is running, with a bar of the bytes done.

    Tasks enter it to export, to search the ranges of weights, and to quantize from file to file.

    Args:
        text: names the work.
        at_once: show the bar at the beginning of the block; False: from the first call of the yielded function.

    Yields:
        A function that the work calls with the name of a tensor, the bytes done so far, and the bytes in all.
    """
    columns = [
        TextColumn("· {task.description}"),
        BarColumn(10),
        DownloadColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(),
        TextColumn("{task.fields[name]}", table_column=Column(ratio=1, no_wrap=True)),  # in the remaining width
    ]
    progress = Progress(*columns, expand=True, disable=rank_zero_only.rank != 0)
    task = progress.add_task(text, total=None, name="")

    def advance(name: str, done: int, total: int) -> None:
        progress.start()
        progress.update(task, completed=done, total=total, name=printable(name))

    try:
        if at_once:
            progress.start()
        yield advance
    finally:
        if progress.live.is_started:
            progress.stop()
