"""The next steps of a report as commands: the command of the run with a few words changed.

A step (:class:`~lightning_obs.report.step.Step`) is a proposal at the end of a report: export, fine-tune, leave out the
worst layers. A command is proposed only if Hydra composes it, its task reads all of its words, and the model takes its
options.
"""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import compose
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from lightning_obs.app.data.module import TextData
from lightning_obs.app.from_config import facts_for_data, make_options, read_data
from lightning_obs.app.job import Job
from lightning_obs.app.models.language import CausalLM
from lightning_obs.app.overrides import PATHS_WRITTEN, with_suffix
from lightning_obs.app.tasks.task import task_node
from lightning_obs.app.typed_words import refuse_unread, typed_words
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.lightning_package import class_of
from lightning_obs.callbacks.possible_steps import can_choose_observers
from lightning_obs.callbacks.trainable import can_train
from lightning_obs.errors import CalibrationError
from lightning_obs.report.next_steps import path_from_here
from lightning_obs.report.step import Step

_PROGRAM = ("python", "-m", "lightning_obs")


@dataclass(frozen=True)
class _Change:
    """How the command of a next step differs from the command of the run.

    Attributes:
        words: words to add; they replace words with the same keys.
        groups: config groups; words that choose their options or set keys in them are left out.
        keys: keys whose words are left out.
    """

    words: Sequence[str]
    groups: Sequence[str] = ()
    keys: Sequence[str] = ()


class StepCommands:
    """Says which next steps are possible after a run, and by which command. ``Calibrate.report`` makes one.

    Args:
        job: the job of the run, whose model is calibrated.
        has_logits: whether the run has compared the predictions, so that the model's output has logits.
        may_train: whether the run may be followed by training: it has neither trained the model nor chosen its schemes
            or observers.
    """

    def __init__(self, job: Job, has_logits: bool, may_train: bool) -> None:
        self.job = job
        self.has_logits = has_logits
        self.may_train = may_train
        self._words = typed_words()
        self._folder = Path(job.config.output_dir)

    def can_run(self, step: Step) -> bool:
        """Whether a step can run on the run's model, in Python and, if the run was a command, as a command.

        The report calls it for each step that it might propose (``Results.facts``).
        """
        if not self._fits_model(step):
            return False
        if self._words is None:
            return True
        return is_possible(step, self._words, self._folder, self.job.module, self.job.model)

    def command(self, step: Step) -> str | None:
        """Return the command of a step; None if no command does it, or if the run was composed in Python.

        ``publish_report`` calls it for each proposed step.
        """
        if self._words is None:
            return None
        return step_command(step, self._words, self._folder)

    def _fits_model(self, step: Step) -> bool:
        """Whether the step is of use for the run's model and data."""
        job = self.job
        session = job.callback.session
        assert session is not None
        if step.name == "measure":
            lightning_module = class_of(job.module, "LightningModule")
            return not job.config.evaluate and is_overridden("test_step", job.module, lightning_module)
        if step.name == "observers":
            return self.has_logits and can_choose_observers(session)
        if step.name == "fine_tune":
            is_trainable = isinstance(job.module, CausalLM) and isinstance(job.data, TextData)
            return is_trainable and self.may_train and can_train(session, job.module)
        return job.callback.results.can_run(step)


def step_command(step: Step, words: Sequence[str], folder: Path) -> str | None:
    """Return the command to type for a step; None if no command does it. :meth:`StepCommands.command` calls it.

    Args:
        step: a step that the report proposes.
        words: the arguments of ``python -m lightning_obs`` in the run's command.
        folder: the folder of the run's report.
    """
    if step.name == "serve":
        return shlex.join(["vllm", "serve", str(step.changes["checkpoint"])])
    change = _change(step, words, folder)
    if change is None:
        return None
    return shlex.join([*_PROGRAM, *changed_words(words, change, step.name)])


def command_of_run() -> str | None:
    """Return the command that started this run; None if the run was composed in Python.

    ``run_provenance`` calls it for the page of the run.
    """
    words = typed_words()
    return None if words is None else shlex.join([*_PROGRAM, *words])


def is_possible(step: Step, words: Sequence[str], folder: Path, module: LightningModule, model: nn.Module) -> bool:
    """Whether the command of a step would pass its checks: compose it, and check its words, options and data.

    :meth:`StepCommands.can_run` calls this before a step is proposed. A session is made for the checks of its
    constructor alone: nothing is observed, and the calibration of ``model`` stays. For ``fine_tune`` the data are read
    again, since the run must have enough text to train on, too.

    Args:
        step: a step that the report may propose.
        words: as for :func:`step_command`.
        folder: as for :func:`step_command`.
        module: the LightningModule of the run; its tokenizer reads the data to train on.
        model: the model inside ``module`` that was calibrated.

    Returns:
        True also for a step that no command of this program does.
    """
    change = _change(step, words, folder)
    if change is None:
        return True
    overrides = []
    for word in changed_words(words, change, step.name):
        if not word.startswith("--"):
            overrides.append(word)
    try:
        config = compose("config", overrides=overrides)
        refuse_unread(task_node(config), overrides)
        if step.name not in ("leave_out", "budget"):  # their options are in files that this run has yet to write
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they would be about a run that the user has not asked for
                CalibrationSession(model, make_options(config))
        if step.name == "fine_tune":
            read_data(config, facts_for_data(module))
    except (HydraException, OmegaConfBaseException, CalibrationError):
        return False
    return True


#: changes of the steps whose change depends on nothing
_CHANGES = {
    "export": _Change(["export=checkpoint"], keys=["export.folder"]),
    "measure": _Change(["evaluate=true"]),
    "observers": _Change(["task=observers"], groups=["task", "observer"], keys=["data.train_batches", "budget"]),
    "smooth": _Change(["smooth=true"]),
    "rounding": _Change(["recipe=accurate"], groups=["weight_observer", "rounding", "recipe"]),
    "without_data": _Change(["recipe=fast"], groups=["weight_observer", "rounding", "recipe"]),
    "fine_tune": _Change(["task=finetune"], groups=["task"], keys=["budget"]),
    "untrained": _Change(["task=calibrate"], groups=["task"], keys=["data.train_batches"]),
}


def _change(step: Step, words: Sequence[str], folder: Path) -> _Change | None:
    """How the run's command changes for a step; None for a step that is not a run of this program."""
    if step.name == "leave_out":
        report = path_from_here(folder / "report.json")
        return _Change([f"ignore_from={_quoted(report)}"])
    if step.name == "token_scales":
        groups = ["scheme", "observer"]
        if "task=observers" in words:  # it chose observers, which the other scheme does not need
            groups.append("task")
        return _Change([f"scheme={step.changes['scheme'].lower()}"], groups)
    if step.name == "fine_tune" and "export=gguf" in words:
        # A GGUF file is written into one with the weights from before the training, so a checkpoint is written.
        return _Change(["task=finetune"], groups=["task", "export"], keys=["budget"])
    if step.name == "budget":
        return _Change([f"budget={step.changes['budget']:.2f}"])
    return _CHANGES.get(step.name)


def changed_words(words: Sequence[str], change: _Change, name: str) -> list[str]:
    """The words of a command after a change: flags, then overrides, the words of the change, and paths to write to.

    The new run must not write where the old one wrote: ``-name`` is appended to the paths that were typed.
    Called by :func:`step_command` for the command to show, and by :func:`is_possible` for the command to check.

    Args:
        words: the words of the run's command.
        change: the change to make.
        name: the name of the step.

    >>> changed_words(["scheme=fp8", "output_dir=out"], _Change(["scheme=w4a16"]), "small")
    ['scheme=w4a16', 'output_dir=out-small']
    """
    flags = []
    overrides = []
    paths = []
    for word in words:
        key = _key(word)
        if _is_left_out(key, change):
            continue
        if word.startswith("--"):
            flags.append(word)
        elif key in PATHS_WRITTEN and "=" in word:
            paths.append(with_suffix(word, f"-{name}"))
        else:
            overrides.append(word)
    return [*flags, *overrides, *change.words, *paths]


def _is_left_out(key: str, change: _Change) -> bool:
    """Whether a change replaces or removes the word of a key."""
    replaced_keys = [_key(word) for word in change.words]
    if key in change.keys or key in replaced_keys:
        return True
    return any(_is_in_group(key, group) for group in change.groups)


def _is_in_group(key: str, group: str) -> bool:
    """Whether a key chooses an option of a group, or sets a value in it."""
    return key == group or key.startswith((f"{group}.", f"{group}@"))


def _key(word: str) -> str:
    """The key of an override: ``scheme.weights`` of ``+scheme.weights=...``."""
    return word.lstrip("+~").partition("=")[0]


def _quoted(text: str) -> str:
    """A value of an override in quotes; without quotes, if all its characters may stand unquoted in Hydra's grammar.

    These are ASCII letters and digits and ``_ . / \\ + @ % -``. The grammar has a few more, which are quoted here, too.
    :func:`_change` calls it for a path.

    >>> print(_quoted("out/report.json"), _quoted("it's"))
    out/report.json 'it\\'s'
    """
    if re.fullmatch(r"[\w./\\+@%-]+", text, re.ASCII):
        return text
    return QuotedString(text=text, quote=Quote.single).with_quotes()
