"""The base of the command line's tasks: a task is a class with three methods, named by ``task._target_``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig

from lightning_obs.errors import CalibrationError


class Task(ABC):
    """Does one thing with a composed config; its own keys are under ``task``. All ranks run it, rank 0 writes.

    :func:`lightning_obs.app.main.run` makes the task by :func:`make_task`, and calls ``check``, ``run`` and ``row`` in
    this order.

    Args:
        config: the config that Hydra has composed of files and typed words; kept as the attribute ``config``.
    """

    def __init__(self, config: DictConfig) -> None:
        self.config = config

    @abstractmethod
    def check(self) -> None:
        """Load what the task needs, and refuse configs that are known to fail, before the model runs.

        ``main.run`` calls it first, on every rank.
        """

    @abstractmethod
    def run(self) -> None:
        """Do the work, print the result, write the report; ``main.run`` calls it on every rank, after :meth:`check`."""

    @abstractmethod
    def row(self) -> dict[str, Any]:
        """Return the run's row of a comparison of runs; it has a key ``run`` with the name of the result.

        Called after :meth:`run`; a ``--multirun`` shows the rows of its runs in one table.
        """


def task_node(config: DictConfig) -> DictConfig:
    """Return the config node with the class and the keys of the task.

    It is ``task``, or ``task.layerwise`` if ``model.layerwise`` is set and the task has this variant. ``main.run``
    calls this to check the typed words, and :func:`make_task` to make the task.
    """
    is_layerwise = config.get("model", {}).get("layerwise")
    if is_layerwise and config.task.get("layerwise"):
        return config.task.layerwise
    return config.task


def make_task(config: DictConfig) -> Task:
    """An instance of the class that ``_target_`` of the task's node names; ``main.run`` calls this.

    Raises:
        CalibrationError: it names no class, or a class that is no task.
    """
    target = task_node(config).get("_target_")
    try:
        task_class: Any = get_class(str(target))
    except (ImportError, ValueError) as error:
        raise CalibrationError(f"task._target_={target} is not a class", got=str(error).splitlines()[0]) from error
    if not issubclass(task_class, Task):
        expected = f"a subclass of {Task.__module__}.Task"
        raise CalibrationError(f"task._target_={target} is not a task", expected=expected)
    return task_class(config)
