"""The application on a tiny model, composed as the command line does it."""

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from lightning_obs.app.config_files import config_dir
from tests.support.in_process import run_command_line, run_script
from tests.support.tiny_model import save_tiny_llama


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

    def run(*arguments, tiny=True, new_process=False):
        flags = [argument for argument in arguments if argument.startswith("--")]
        own = [argument for argument in arguments if argument not in flags]
        words = [*flags, *(tiny_overrides if tiny else ()), *own]
        if not new_process:
            return run_command_line(*words, folder=tmp_path)
        command = [sys.executable, "-W", "ignore", "-m", "lightning_obs", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)

    return run


@pytest.fixture
def verified_here(monkeypatch):
    """Load the checkpoint back in the test's process, where what is tested is not that it is a new one."""

    in_a_new_process = subprocess.run

    def run(command, **kwargs):
        if command[0] == "git":  # for the commit on the page
            return in_a_new_process(command, **kwargs)
        assert command[0] == sys.executable
        return run_script(Path(command[1]), *command[2:], folder=Path.cwd())

    monkeypatch.setattr("lightning_obs.app.checkpoint.subprocess.run", run)
