"""``python -m lightning_obs``: compose ``configs/`` with Hydra and run."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from lightning_obs.errors import CalibrationError
from lightning_obs.packages import import_package

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main() -> None:
    """Run. Errors of configuration and calibration are one message and exit code 1; ``HYDRA_FULL_ERROR=1`` traces."""
    if "--version" in sys.argv[1:]:  # Hydra's own would say Hydra's
        print(versions())
        return
    try:
        import_package("hydra", "the command line")
    except CalibrationError as error:
        sys.exit(f"CalibrationError: {error}")
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from lightning_obs.app.config_files import config_dir
    from lightning_obs.app.overrides import checked_words, explained

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
        sys.argv[1:] = checked_words(sys.argv[1:])
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")(task)()
        for failure in failures:
            raise failure
    except (HydraException, OmegaConfBaseException, CalibrationError) as error:
        if trace:
            raise
        sys.exit(f"{explained(error)}\n(HYDRA_FULL_ERROR=1 shows where it was raised)")


def versions() -> str:
    """Versions of the package and of the packages its results depend on, for bug reports."""
    names = ("torch", "lightning", "transformers", "compressed-tensors")
    others = ", ".join(f"{name} {version(name)}" for name in names)
    return f"lightning_obs {version('lightning-obs')} ({others})"


def described(*groups: str) -> str:
    """The options of groups of configs for ``--help``: the first sentence of each, and the keys that a task reads."""
    from omegaconf import OmegaConf

    from lightning_obs.app.config_files import config_dir

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


if __name__ == "__main__":
    main()
