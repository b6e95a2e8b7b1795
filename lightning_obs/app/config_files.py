"""The files in ``configs/``: the options of each group, and the keys that each option sets.

They are the one declaration of the keys of the command line, which hints about wrong keys and checks of values read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

#: the first line of a config whose keys stand at the top level, not under the name of its group
_AT_THE_TOP = "# @package _global_"


@dataclass(frozen=True)
class Option:
    """A config file: ``observer/minmax.yaml`` is ``observer=minmax``; the top-level ``config.yaml`` has no group."""

    group: str
    name: str
    #: values by full key, ``{"observer.averaging_constant": 0.01, ...}``, with those of the configs that it builds on
    values: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.group}={self.name}"


def config_dir() -> Path:
    """The folder of configs: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next(folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir())


def group_names() -> list[str]:
    """The groups that a user chooses options of: ``scheme``, ``observer``..."""
    return sorted(folder.name for folder in config_dir().iterdir() if folder.is_dir() and folder.name != "hydra")


def option_names(group: str) -> list[str]:
    """The options of a group: ``fp8``, ``int8``... of ``scheme``; none, if there is no such group."""
    if group not in group_names():
        return []
    return sorted(file.stem for file in (config_dir() / group).glob("*.yaml"))


@cache
def options() -> list[Option]:
    """Every config file, the top-level one first."""
    found = [Option("", "config", dict(_values(config_dir() / "config.yaml", "")))]
    for group in group_names():
        for name in option_names(group):
            found.append(Option(group, name, dict(_values(config_dir() / group / f"{name}.yaml", group))))
    return found


def options_with(key: str) -> list[Option]:
    """The options of groups that set a key."""
    return [option for option in options() if option.group and key in option.values]


def all_keys() -> list[str]:
    """Every key of every config file."""
    keys = set[str]()
    for option in options():
        keys.update(option.values)
    return sorted(keys)


def _values(file: Path, group: str) -> Iterator[tuple[str, Any]]:
    """The keys and values of a file, after those of the configs that it builds on."""
    node: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    at_the_top = not group or file.read_text().startswith(_AT_THE_TOP)
    for base in node.pop("defaults", ()):
        if at_the_top:
            continue  # what it overrides are options that a user can choose as well
        if isinstance(base, str):
            yield from _values(file.with_name(f"{base}.yaml"), group)
        else:  # /observer@_here_: mse
            for place, name in base.items():
                other = place.strip("/").partition("@")[0]
                yield from _values(config_dir() / other / f"{name}.yaml", group)
    yield from _flat(node, "" if at_the_top else f"{group}.")


def _flat(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
