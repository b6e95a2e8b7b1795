"""The application on a tiny model, composed as the command line does it."""

import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir

from lightning_obs.__main__ import config_dir
from tests.tiny_model import save_tiny_llama


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny_overrides(tiny_folder, tmp_path):
    return [
        f"model.path={tiny_folder}",
        "trainer=cpu",
        "trainer.enable_progress_bar=false",
        "data.batches=2",
        "data.tokens=32",
        "data.eval_batches=2",
    ]


@pytest.fixture
def composed(tiny_overrides, tmp_path):
    """Compose the config for the tiny model: ``composed("scheme=int8_static")``."""

    def make(*overrides, tiny=True):
        with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
            return compose(
                "config", overrides=[*(tiny_overrides if tiny else ()), f"output_dir={tmp_path / 'run'}", *overrides]
            )

    return make


@pytest.fixture
def command_line(tiny_overrides, tmp_path):
    """Run ``python -m lightning_obs`` in an empty folder: ``command_line("scheme=fp8")``."""

    def run(*arguments, tiny=True):
        flags = [argument for argument in arguments if argument.startswith("--")]
        own = [argument for argument in arguments if argument not in flags]
        overrides = [*(tiny_overrides if tiny else ()), *own]
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "lightning_obs", *flags, *overrides],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run
