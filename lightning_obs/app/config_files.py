"""The files in ``configs/``: the options of each group, and the keys that each option sets.

They alone declare the keys of the command line. Hints about mistyped words (``overrides.py``), the check of values
(``values.py``) and ``--help`` read them here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

#: the first line of a config whose keys are at the top level, not below the name of its group
_TOP_LEVEL = "# @package _global_"


@dataclass(frozen=True)
class Option:
    """A config file as a user chooses it: ``observer/minmax.yaml`` is ``observer=minmax``. :func:`options` makes it.

    Attributes:
        group: the folder of the file; empty for the top-level ``config.yaml``.
        name: the name of the file, without its suffix.
        values: the values that the file sets, by full key (``observer.averaging_constant``), with those of the configs
            in its ``defaults``.
    """

    group: str
    name: str
    values: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.group}={self.name}"


def config_dir() -> Path:
    """Return the folder of configs: inside the installed package, or at the top of a checkout.

    ``__main__`` passes it to Hydra; this file reads the configs in it.
    """
    package = Path(__file__).resolve().parents[1]
    return next(folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir())


def group_names() -> list[str]:
    """Return the names of the config groups that a user chooses options of: ``scheme``, ``observer``...

    Called by ``overrides.py`` to explain an unknown key.
    """
    return sorted(folder.name for folder in config_dir().iterdir() if folder.is_dir() and folder.name != "hydra")


def option_names(group: str) -> list[str]:
    """Return the names of a group's options (``fp8``, ``int8``... of ``scheme``); none if there is no such group.

    ``overrides.py`` calls it to check each typed option, and :func:`options` to read all config files.
    """
    if group not in group_names():
        return []
    return sorted(file.stem for file in (config_dir() / group).glob("*.yaml"))


@cache
def options() -> list[Option]:
    """Return every config file with its keys and values, the top-level one first; ``values.py`` checks values by it."""
    everything = [Option("", "config", dict(_values(config_dir() / "config.yaml", "")))]
    for group in group_names():
        for name in option_names(group):
            file = config_dir() / group / f"{name}.yaml"
            everything.append(Option(group, name, dict(_values(file, group))))
    return everything


def options_with(key: str) -> list[Option]:
    """Return the options of groups that set a full key (``observer.averaging_constant``).

    ``overrides.py`` names them in the error for a key that the chosen options do not have.
    """
    return [option for option in options() if option.group and key in option.values]


def all_keys() -> list[str]:
    """Return every key of every config file, for the hints that ``overrides.py`` gives about an unknown key."""
    keys = set[str]()
    for option in options():
        keys.update(option.values)
    return sorted(keys)


def _values(file: Path, group: str) -> Iterator[tuple[str, Any]]:
    """Yield a file's full keys and their values, after those of the configs that it builds on (``defaults``).

    Of a top-level file, only its own keys are yielded: its ``defaults`` choose options of other groups
    (``override /scheme: fp8``), and :func:`options` lists these options by themselves.

    Args:
        file: a config.
        group: its folder in ``configs/``; empty for ``config.yaml``.
    """
    node: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    is_top_level = not group or file.read_text().startswith(_TOP_LEVEL)
    bases = node.pop("defaults", ())
    if not is_top_level:
        for base in bases:
            for base_file in _files_of_base(base, file):
                yield from _values(base_file, group)
    yield from _flat(node, "" if is_top_level else f"{group}.")


def _files_of_base(base: Any, file: Path) -> Iterator[Path]:
    """The configs that one entry of ``defaults`` names.

    Args:
        base: ``checkpoint``, a config beside the file, or ``{"/observer@_here_": "mse"}``, a config of another group.
        file: the config that has the entry.
    """
    if isinstance(base, str):
        yield file.with_name(f"{base}.yaml")
        return
    for place, name in base.items():
        group = place.strip("/").partition("@")[0]
        yield config_dir() / group / f"{name}.yaml"


def _flat(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The values below a node by their full keys, which begin with the prefix."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# ---------------------------------------------------------------------- what --help says of them


@cache
def described(*groups: str) -> str:
    """Return the text of ``--help`` about groups of configs; ``${described:...}`` in Hydra's help template calls it.

    Args:
        groups: names of groups; an option that several of them have is listed once.

    Returns:
        A line with the first sentence of each option, and for each task a line with the keys that it reads.
    """
    files = {}
    for group in groups:
        for file in sorted((config_dir() / group).glob("*.yaml")):
            files[file.name] = file  # an observer of inputs and of weights is listed once
    lines = []
    for file in files.values():
        lines.append(f"  {file.stem:<24}{_first_sentence(file)}")
        if groups == ("task",):
            lines.append(f"{'':<26}reads {_keys_read(file)}")
    return "\n".join(lines)


def _first_sentence(file: Path) -> str:
    """The first sentence of the comment that a config opens with, without its full stop; for ``--help``.

    The comment consists of sentences, and then of lines with commands, which are indented (``#   python -m ...``). A
    file must have such a line: it is where the sentences end.
    """
    comment, _, _ = file.read_text().removeprefix("# @package _global_\n").partition("\n#   ")
    text = comment.replace("\n#", "").removeprefix("# ")
    return text.partition(". ")[0].rstrip(".")


def _keys_read(file: Path) -> str:
    """The keys that a task reads, by its config, for ``--help``.

    A task's list ``ignores`` has patterns of keys that the task does not read: ``['*']`` stands for all keys. Its list
    ``reads`` has the exceptions. ``refuse_unread`` (``typed_words.py``) checks typed keys by the same two lists.
    """
    config: Any = OmegaConf.load(file)
    task = config.get("task", config)
    ignores = ", ".join(task.get("ignores", ()))
    if ignores == "*":  # then the exceptions are all that the task reads
        return ", ".join(task.get("reads", ()))
    return f"all keys but {ignores}" if ignores else "all keys"
