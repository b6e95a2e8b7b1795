"""A task of the command line. A further one is a class of these three methods, named by ``task._target_``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig

from lightning_obs.errors import CalibrationError


class Task(ABC):
    """One thing to do with a composed config; its own keys are under ``task``. All ranks run it; rank 0 writes."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config

    @abstractmethod
    def check(self) -> None:
        """Refuse configs that are known to fail, before the model runs."""

    @abstractmethod
    def run(self) -> None:
        """Do the work, print it, write the report."""

    @abstractmethod
    def row(self) -> dict[str, Any]:
        """This run's row of a comparison of runs; it has a key ``run``."""


def task_node(config: DictConfig) -> DictConfig:
    """The node with the task's class and the keys that it reads: ``task``, or its part for ``model.layerwise``."""
    in_blocks = config.get("model", {}).get("layerwise") and config.task.get("layerwise")
    return in_blocks or config.task


def make_task(config: DictConfig) -> Task:
    """The task that ``_target_`` of its node names."""
    target = task_node(config).get("_target_")
    try:
        kind: Any = get_class(str(target))
    except (ImportError, ValueError) as error:
        raise CalibrationError(f"task._target_={target} is not a class", got=str(error).splitlines()[0]) from error
    if not issubclass(kind, Task):
        expected = f"a subclass of {Task.__module__}.Task"
        raise CalibrationError(f"task._target_={target} is not a task", expected=expected)
    return kind(config)
