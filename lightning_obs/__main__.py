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
    """Run the command line.

    - The typed words are checked before Hydra reads them (``checked_words``), which also spells names of options as
      their files are.
    - ``described`` writes the part of ``--help`` that lists options.
    - An error of configuration or calibration is one message (``explained``) and exit code 1. It is raised with its
      traceback if ``HYDRA_FULL_ERROR=1``. So is the failure to make the folder of the run's output.
    - ``HYDRA_FULL_ERROR`` is 1 in the environment of the process from then on.
    """
    if "--version" in sys.argv[1:]:  # Hydra would print its own version
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

    from lightning_obs.app.config_files import config_dir, described
    from lightning_obs.app.overrides import checked_words, explained

    trace = os.environ.get("HYDRA_FULL_ERROR") == "1"
    OmegaConf.register_new_resolver("described", described, replace=True)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, which are explained below
    #: errors of the failed runs of a --multirun, in the order of the runs
    failures: list[Exception] = []
    #: the config of each run that has begun
    begun: list[DictConfig] = []

    def task(config: DictConfig) -> Any:
        from lightning_obs.app.main import run  # after Hydra's own help and shell completion had their turn

        begun.append(config)
        try:
            return run(config)
        except Exception as error:
            if HydraConfig.get().mode is not RunMode.MULTIRUN:
                raise
            failures.append(error)
            return error  # Hydra gives it to ComparisonTable, which prints it below the table of all runs

    try:
        sys.argv[1:] = checked_words(sys.argv[1:])
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")(task)()
        if failures:  # ComparisonTable has printed them all; the first decides how the program exits
            raise failures[0]
    except (HydraException, OmegaConfBaseException, CalibrationError) as error:
        if trace:
            raise
        sys.exit(f"{explained(error)}\n(HYDRA_FULL_ERROR=1 shows where it was raised)")
    except OSError as error:
        if trace or begun:
            raise
        key = "hydra.sweep.dir" if {"-m", "--multirun"}.intersection(sys.argv) else "hydra.run.dir"
        remedy = f"run in a folder that you may write to, or set {key}=<folder>."
        message = CalibrationError("the output folder cannot be made", got=str(error), remedy=remedy)
        sys.exit(f"CalibrationError: {message}")


def versions() -> str:
    """Versions of the package and of the packages its results depend on, for bug reports."""
    packages = ("torch", "lightning", "transformers", "compressed-tensors")
    dependencies = ", ".join(f"{package} {version(package)}" for package in packages)
    return f"lightning_obs {version('lightning-obs')} ({dependencies})"


if __name__ == "__main__":
    main()
