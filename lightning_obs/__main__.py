"""``python -m lightning_obs``: compose ``configs/`` with Hydra and run."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lightning_obs.app.words import typed_remedy
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
    failures: list[Exception] = []

    def task(config: DictConfig) -> Any:
        from lightning_obs.app.main import run  # after Hydra's own help and shell completion had their turn

        try:
            return run(config)
        except Exception as error:
            if HydraConfig.get().mode is not RunMode.MULTIRUN:
                raise
            failures.append(error)  # raised when the other runs have been compared
            return error

    try:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")(task)()
        for failure in failures:
            raise failure
    except (HydraException, OmegaConfBaseException, CalibrationError) as error:
        if trace:
            raise
        cause = error.__cause__  # Hydra wraps exceptions of the classes that it instantiates
        told = next((one for one in (cause, error) if isinstance(one, CalibrationError)), None)
        lines = [error, cause, _valid_options(error)] if told is None else [f"CalibrationError: {told}"]
        lines.append(typed_remedy(str(error if told is None else told)))
        sys.exit("\n".join([*map(str, filter(None, lines)), "(HYDRA_FULL_ERROR=1 shows where it was raised)"]))


def versions() -> str:
    """Versions of the package and of the packages its results depend on, for bug reports."""
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


def _valid_options(error: Exception) -> str:
    """The option of a group that was probably meant, or the keys that stand where an unknown one was given."""
    option = re.search(r"Could not find '([^'/]+)/([^']+)'", str(error))  # Hydra lists the others itself
    if option is not None:
        hint = likely(option[2], [file.stem for file in (config_dir() / option[1]).glob("*.yaml")])
        return hint and f"{option[0]}{hint}"
    cause = error.__cause__
    if not isinstance(cause, (ConfigAttributeError, ConfigKeyError)) or not cause.parent_node:
        return ""
    parent, _, last = str(cause.full_key).rpartition(".")
    known = [str(key) for key in cause.parent_node]
    return f"{cause.full_key}{likely(last, known)}\nValid options in '{parent or 'the top level'}': {', '.join(known)}"


if __name__ == "__main__":
    main()
