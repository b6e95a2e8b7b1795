"""A task of the command line. A further one is a class of these three methods, named by ``task._target_``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig

from lightning_obs.errors import CalibrationError


class Task(ABC):
    """Does one thing with a composed config. On several ranks all of them run it; only rank 0 prints and writes.

    Args:
        config: of the run; ``config.task`` holds the task's own keys.
    """

    def __init__(self, config: DictConfig) -> None:
        self.config = config

    @abstractmethod
    def check(self) -> None:
        """Refuse, before the model is run, what can be known to be wrong.

        Raises:
            CalibrationError: what that is.
        """

    @abstractmethod
    def run(self) -> None:
        """Do the work, print it, write the report."""

    @abstractmethod
    def row(self) -> dict[str, Any]:
        """What a comparison of runs shows of this one; it has a key ``run``."""


def make_task(config: DictConfig) -> Task:
    """The task that ``task._target_`` names.

    Raises:
        CalibrationError: it names no class of tasks.
    """
    target = config.task.get("_target_")
    try:
        kind: Any = get_class(str(target))
    except (ImportError, ValueError) as error:
        raise CalibrationError(f"task._target_={target} is not a class", got=str(error).splitlines()[0]) from error
    if not issubclass(kind, Task):
        raise CalibrationError(
            f"task._target_={target} is not a task", expected=f"a subclass of {Task.__module__}.Task"
        )
    task: Task = kind(config)
    return task
