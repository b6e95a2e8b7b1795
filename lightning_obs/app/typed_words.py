"""Check the words that a user typed behind ``python -m lightning_obs`` against the config that Hydra composed.

Hydra calls the words overrides. :mod:`lightning_obs.app.overrides` checks them before Hydra reads them; ``main.run``
checks them here. ``step_commands.py`` checks the words of the commands that it proposes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lightning_obs.app.from_config import plain
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.schemes.config import as_names
from lightning_obs.schemes.patterns import unmatched

#: the number of a run of a ``--multirun`` in a word, as it is typed, and as Hydra's sweeper hands it to the run
_NUMBER_OF_RUN = ("${hydra:job.num}", r"$\{hydra\:job.num\}")


def typed_words() -> list[str] | None:
    """Return the arguments of ``python -m lightning_obs`` in this run's command; None for a config composed in Python.

    ``step_commands.py`` makes the commands of the run and of its next steps from them. In a run of a ``--multirun`` the
    run's number stands in place of ``${hydra:job.num}``.
    """
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    words = folders_of_configs(hydra.runtime.config_sources)
    overrides: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)  # ${...} is kept as it was typed
    is_of_multirun = hydra.mode is RunMode.MULTIRUN
    for override in overrides:
        word = str(override)
        if is_of_multirun:  # commands made of the words are single runs, which have no number
            for number in _NUMBER_OF_RUN:
                word = word.replace(number, str(hydra.job.num))
        words.append(word)
    return words


def folders_of_configs(sources: Iterable[Any]) -> list[str]:
    """Return the word ``--config-dir=<folder>`` of a command if the user typed it; else no words.

    :func:`typed_words` calls it for a run, and the comparison of a ``--multirun`` for the command of all its runs.

    Args:
        sources: Hydra's record of where it looked for configs, ``hydra.runtime.config_sources``.
    """
    return [f"--config-dir={source.path}" for source in sources if source.provider == "command-line"]


def typed_overrides() -> list[str]:
    """Return the typed words of the form ``key=value``, ``+key=value`` or ``~key``; none for a config made in Python.

    ``main.run`` calls it to check them before the task is made, and :func:`refuse_idle_ignore` to find ``ignore``.
    """
    return [word for word in typed_words() or () if not word.startswith("--")]


def refuse_deleted(words: Sequence[str]) -> None:
    """Raise for ``~key`` of a key that every run reads; ``main.run`` calls this first.

    Keys of the task and the Trainer have defaults in their classes. ``~model`` and ``~data`` are allowed if another
    class is added in their place: ``~model +model._target_=...``.

    Args:
        words: the typed words of :func:`typed_overrides`.
    """
    overrides = _parsed(words)
    added_keys = {_key(override) for override in overrides if override.is_add()}
    for override in overrides:
        key = _key(override)
        is_optional = key.startswith(("task.", "trainer.")) or f"{key}._target_" in added_keys
        if override.is_delete() and not is_optional:
            raise CalibrationError(f"{key} cannot be deleted", remedy="leave `~` out, or set it to another value.")


def refuse_unread(task: DictConfig, words: Sequence[str]) -> None:
    """Raise for typed keys that the task does not read.

    ``main.run`` calls this before the task is made; ``step_commands.py`` calls it for a command that it proposes.

    Args:
        task: the node of the task. ``ignores`` has patterns of the keys that the task does not read, ``reads`` has
            patterns of exceptions.
        words: the words of the run, or of the proposed command, that are no flags.
    """
    overrides = _parsed(words)
    keys = [_key(override) for override in overrides]
    if "task._target_" in keys:  # a class of the user's, whose keys this config does not know
        return
    groups = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    added_keys = []
    for override in overrides:
        key = _key(override)
        is_top_level = not any(separator in key for separator in "./@")
        if override.is_add() and is_top_level and key not in groups:
            added_keys.append(key)
    refuse(added_keys, "no task reads an added key", remedy="--help lists all keys.")
    ignores = task.get("ignores", ())
    reads = ["task", *task.get("reads", ())]
    unread = [key for key in keys if _matches(key, ignores) and not _matches(key, reads)]
    refuse(
        unread,
        f"task={task.name} does not read what was given",
        remedy="leave it out; --help lists what each task reads.",
    )


def refuse_idle_ignore(config: DictConfig, model: nn.Module) -> None:
    """Raise for a typed ``ignore`` that matches no module; the default of a config may match none.

    The check of a task calls this: with the loaded model in ``Job.load``, and in ``Weights.check`` with a model on the
    meta device, since that task loads no whole model.
    """
    typed_keys = [_key(override) for override in _parsed(typed_overrides())]
    if "ignore" in typed_keys:
        refuse(
            unmatched(model, as_names(plain(config.ignore))),
            f"ignore matches no module of {type(model).__name__}",
            expected="names or classes of modules, or `re:` patterns (anchored at the front)",
        )


def _parsed(words: Sequence[str]) -> list[Override]:
    """Overrides as Hydra's grammar reads them."""
    return OverridesParser.create().parse_overrides(list(words))


def _key(override: Override) -> str:
    """The full key of an override, or the name of a group."""
    return str(override.key_or_group)


def _matches(key: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the key, or names a node above it."""
    is_below = [key.startswith(f"{pattern}.") for pattern in patterns]
    return any(is_below) or any(fnmatch(key, pattern) for pattern in patterns)
