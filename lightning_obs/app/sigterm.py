"""SIGTERM ends a run of the command line: exit code 143, no report, and the ranks that it launched end with it.

Lightning's own handler notes the signal and goes on: the last batch of a validation, and all that follows the Trainer,
still run. On several ranks it first waits for a collective that the others may never join. So it is replaced as soon as
Lightning has installed it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class EndOnSigterm(Callback):
    """Part of every Trainer of a run, inside :func:`ended_by_sigterm`."""

    #: Trainers of this process that launched ranks
    launchers: list[Any] = []  # noqa: RUF012

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None and launcher not in self.launchers:
            self.launchers.append(launcher)

    def _replace_handler(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _handle()

    on_validation_start = on_test_start = on_train_start = _replace_handler


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Inside this block SIGTERM raises ``SystemExit(143)``. The other ranks end last: Lightning watches them, and would
    kill this process before it has cleaned up."""
    before = signal.getsignal(signal.SIGTERM)
    _handle()
    try:
        yield
    except SystemExit:
        for launcher in EndOnSigterm.launchers:
            launcher.kill(signal.SIGKILL)
        raise
    finally:
        EndOnSigterm.launchers.clear()
        _handle(before)


def _end(number: int, frame: Any) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is on its way
    raise SystemExit(128 + signal.SIGTERM)


def _handle(handler: Any = _end) -> None:
    if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
        signal.signal(signal.SIGTERM, handler)
