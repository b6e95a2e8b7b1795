"""The next steps of a report as commands: the command of the run with a few words changed.

A command is proposed only if it composes, its task reads all of its words, and the model takes its options.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import compose
from hydra.errors import HydraException
from lightning.pytorch import LightningModule
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from lightning_obs.app.job import make_options, read_data
from lightning_obs.app.main import refuse_unread
from lightning_obs.app.tasks.task import task_node
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.errors import CalibrationError
from lightning_obs.report.next_steps import path_from_here
from lightning_obs.report.step import Step

_PROGRAM = ("python", "-m", "lightning_obs")
#: keys of folders that a run writes to; a proposed run writes to folders of its own
_FOLDERS = ("output_dir", "export.folder")


@dataclass(frozen=True)
class _Change:
    """How a command differs from that of the run.

    Attributes:
        words: to add. They replace words of the same keys.
        groups: of the config, whose words are left out with all of their keys.
        keys: whose words are left out.
    """

    words: Sequence[str]
    groups: Sequence[str] = ()
    keys: Sequence[str] = ()


def step_command(step: Step, words: Sequence[str], folder: Path) -> str | None:
    """What to type for a step; None where no command does it.

    Args:
        step: of the report.
        words: the arguments of ``python -m lightning_obs`` in the run's command.
        folder: of the run's report.
    """
    if step.name == "serve":
        return shlex.join(["vllm", "serve", str(step.changes["checkpoint"])])
    change = _change(step, words, folder)
    if change is None:
        return None
    return shlex.join([*_PROGRAM, *changed_words(words, change, step.name)])


def is_possible(step: Step, words: Sequence[str], folder: Path, module: LightningModule, model: nn.Module) -> bool:
    """Whether the command of a step can run; True for a step without one.

    Args:
        step: of the report.
        words: as for :func:`step_command`.
        folder: as for :func:`step_command`.
        module: of the run; training needs more data than it has read.
        model: the one inside ``module`` that was calibrated.
    """
    change = _change(step, words, folder)
    if change is None:
        return True
    overrides = [word for word in changed_words(words, change, step.name) if not word.startswith("--")]
    try:
        config = compose("config", overrides=overrides)
        refuse_unread(task_node(config), overrides)
        if step.name not in ("leave_out", "budget"):  # a report that is not written yet, candidates of the plan
            CalibrationSession(model, make_options(config))
        if step.name == "fine_tune":
            read_data(config, module)
    except (HydraException, OmegaConfBaseException, CalibrationError):
        return False
    return True


def _change(step: Step, words: Sequence[str], folder: Path) -> _Change | None:
    """How the run's command changes for a step; None for a step that is not a run of this program."""
    if step.name == "export":
        return _Change(["export=checkpoint"], keys=["export.folder"])
    if step.name == "measure":
        return _Change(["evaluate=true"])
    if step.name == "leave_out":
        return _Change([f"ignore_from={_quoted(path_from_here(folder / 'report.json'))}"])
    if step.name == "token_scales":
        groups = ["scheme", "observer"]
        if "task=observers" in words:  # it chose the observers that the other scheme does not need
            groups.append("task")
        return _Change([f"scheme={step.changes['scheme'].lower()}"], groups)
    if step.name == "observers":
        return _Change(["task=observers"], groups=["task", "observer"], keys=["data.train_batches", "budget"])
    if step.name == "rounding":
        return _Change(["weight_observer=hessian", "rounding=gptq"], groups=["weight_observer", "rounding"])
    if step.name == "budget":
        return _Change([f"budget={step.changes['budget']:.2f}"])
    if step.name == "fine_tune":
        return _Change(["task=finetune"], groups=["task"], keys=["budget"])
    if step.name == "untrained":
        return _Change(["task=calibrate"], groups=["task"], keys=["data.train_batches"])
    return None


def changed_words(words: Sequence[str], change: _Change, name: str) -> list[str]:
    """The words of a command with a change; its results go to folders of their own.

    >>> changed_words(["scheme=fp8", "output_dir=out"], _Change(["scheme=w4a16"]), "small")
    ['scheme=w4a16', 'output_dir=out-small']
    """
    kept, folders = [], []
    for word in words:
        if _is_left_out(_key(word), change):
            continue
        if _key(word) in _FOLDERS and "=" in word:
            folders.append(f"{word.rstrip('/')}-{name}")
        else:
            kept.append(word)
    options = [word for word in kept if word.startswith("--")]
    others = [word for word in kept if not word.startswith("--")]
    return [*options, *others, *change.words, *folders]


def _is_left_out(key: str, change: _Change) -> bool:
    if key in change.keys or key in [_key(word) for word in change.words]:
        return True
    return any(key == group or key.startswith((f"{group}.", f"{group}@")) for group in change.groups)


def _key(word: str) -> str:
    """The key of an override: ``+scheme.weights=...`` is of ``scheme.weights``."""
    return word.lstrip("+~").partition("=")[0]


def _quoted(text: str) -> str:
    """A value of an override as Hydra's grammar takes it."""
    if re.fullmatch(r"[\w./\\+@%-]+", text):
        return text
    quoted = text.replace("'", "\\'")
    return f"'{quoted}'"
