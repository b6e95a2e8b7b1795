"""``python -m lightning_obs``: compose ``configs/`` with Hydra and run."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_obs.errors import CalibrationError, likely


def config_dir() -> Path:
    """The folder of configs: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parent
    return next(folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir())


def main() -> None:
    """Run. Errors of configuration and calibration are one message and exit code 1; ``HYDRA_FULL_ERROR=1`` traces."""
    if "--version" in sys.argv[1:]:  # Hydra's own would say Hydra's
        print(versions())
        return
    trace = os.environ.get("HYDRA_FULL_ERROR") == "1"
    OmegaConf.register_new_resolver("described", described, replace=True)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of exiting, so that we can add the valid options

    def task(config: DictConfig) -> Any:
        from lightning_obs.app.main import run  # after Hydra's own help and shell completion had their turn

        return run(config)

    try:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")(task)()
    except (HydraException, OmegaConfBaseException, CalibrationError) as error:
        if trace:
            raise
        cause = error.__cause__  # Hydra wraps what the class that it instantiates raises
        told = next((one for one in (cause, error) if isinstance(one, CalibrationError)), None)
        if told is not None:
            message = f"CalibrationError: {told}"
        else:
            message = f"{error}{'' if cause is None else f'{chr(10)}{cause}'}{_valid_options(str(error))}"
        sys.exit(f"{message}\n(HYDRA_FULL_ERROR=1 shows where it was raised)")


def versions() -> str:
    """Of the package and of what its results depend on, for a report of a fault."""
    names = ("torch", "lightning", "transformers", "compressed-tensors")
    others = ", ".join(f"{name} {version(name)}" for name in names)
    return f"lightning_obs {version('lightning-obs')} ({others})"


def described(*groups: str) -> str:
    """The options of groups of configs for ``--help``: the first sentence of each, and the keys that a task reads."""
    lines = []
    for file in {
        file.name: file for group in groups for file in sorted((config_dir() / group).glob("*.yaml"))
    }.values():
        about = file.read_text().removeprefix("# @package _global_\n").partition("\n#   ")[0].replace("\n#", "")
        lines.append(f"  {file.stem:<24}{about.removeprefix('# ').partition('. ')[0].rstrip('.')}")
        if groups == ("task",):
            config: Any = OmegaConf.load(file)
            ignores, reads = (", ".join(config.get("task", config).get(key, ())) for key in ("ignores", "reads"))
            keys = reads if ignores == "*" else f"all keys but {ignores}" if ignores else "all keys"
            lines.append(f"{'':<26}reads {keys}")
    return "\n".join(lines)


def _valid_options(message: str) -> str:
    """The keys that stand where an unknown one was given, or the option of a group that was meant."""
    option = re.search(r"Could not find '([^'/]+)/([^']+)'", message)  # Hydra lists the others itself
    if option is not None:
        hint = likely(option[2], [file.stem for file in (config_dir() / option[1]).glob("*.yaml")])
        return hint and f"\n{option[0]}{hint}"
    match = re.search(r"Could not override '([^']+)'", message)
    if match is None:
        return ""
    key = match.group(1)
    parent, _, last = key.rpartition(".")
    overrides = [a for a in sys.argv[1:] if "=" in a and not a.startswith("-") and a.lstrip("+~").split("=")[0] != key]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
            config = compose("config", overrides=[o for o in overrides if "," not in o])
        node = OmegaConf.select(config, parent) if parent else config
    except (HydraException, OmegaConfBaseException):
        return ""
    if not isinstance(node, DictConfig):
        return ""
    hint = likely(last, map(str, node))
    return f"\n{key}{hint}\nValid options in '{parent or 'the top level'}': {', '.join(map(str, node))}"


if __name__ == "__main__":
    main()
