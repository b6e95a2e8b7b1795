"""docs/your_run.md: its commands and its Python run."""

import re
import shlex
from pathlib import Path

import lightning as L
import pytest
import yaml

from lightning_obs import CalibrationCallback
from tests.callbacks.calibration_modules import Plain, loader
from tests.in_process import run_command_line, run_script
from tests.tiny_model import save_tiny_llama

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "your_run.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]


@pytest.mark.parametrize("command", [line for line in COMMANDS if "-m lightning_obs" in line])
def test_its_command_lines_run(command, tmp_path):
    model = [] if "--version" in command else [f"model.path={save_tiny_llama(tmp_path / 'tiny')}", "trainer=cpu"]
    small = ["group_size=32" if word == "group_size=64" else word for word in shlex.split(command)[3:]]
    done = run_command_line(*small, *model, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 batches" in done.stdout or "no data" in done.stdout or "lightning_obs 0" in done.stdout


@pytest.mark.parametrize("command", [line for line in COMMANDS if "-m lightning_obs" not in line])
def test_its_commands_run(command, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    python, script, *arguments = shlex.split(command)
    assert python == "python"
    done = run_script(ROOT / script, *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "stripes_int8" / "model.safetensors").is_file()


def test_its_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    known = {"L": L, "CalibrationCallback": CalibrationCallback, "module": Plain()}
    exec(code, {**known, "train_loader": loader(), "val_loader": loader(2)})
    assert (tmp_path / "my-model-int8" / "model.safetensors").is_file()


def test_its_yaml_is_the_example_s():
    (shown,) = blocks("yaml")
    example = yaml.safe_load((ROOT / "examples" / "14_lightning_cli.yaml").read_text())
    (callback,) = yaml.safe_load(shown)["trainer"]["callbacks"]
    assert callback["init_args"].items() <= example["trainer"]["callbacks"][0]["init_args"].items()
