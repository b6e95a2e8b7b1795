"""The guides "In your own run" and "Without a Trainer": their commands and their Python run."""

import shlex

import lightning as L
import pytest
import torch
import yaml

from lightning_obs import CalibrationCallback
from tests.callbacks.calibration_modules import Plain, loader
from tests.support.in_process import run_script
from tests.support.markdown import ROOT, blocks, commands, page

PAGE = page("docs/guide/your_run.md") + page("docs/guide/without_trainer.md")


@pytest.mark.parametrize("command", commands(PAGE))
def test_its_commands_run(command, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    python, script, *arguments = shlex.split(command)
    assert python == "python"
    done = run_script(ROOT / script, *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "stripes_int8" / "model.safetensors").is_file()


def test_its_python_runs(tmp_path, monkeypatch, tiny_llama):
    monkeypatch.chdir(tmp_path)
    known = {"torch": torch, "L": L, "CalibrationCallback": CalibrationCallback, "module": Plain()}
    known |= {"train_loader": loader(), "val_loader": loader(2)}
    known |= {"model": tiny_llama(), "batch": {"input_ids": torch.randint(3, 128, (2, 16))}}
    for code in blocks(PAGE, "python"):
        exec(compile(code, "docs/guide/your_run.md", "exec"), known)
    assert (tmp_path / "my-model-int8" / "model.safetensors").is_file()
    assert (tmp_path / "my-model.onnx").is_file()
    assert (tmp_path / "my-model.pt2").is_file()
    assert (tmp_path / "model-fp8-dynamic" / "model.safetensors").is_file()


def test_its_yaml_is_the_example_s():
    (shown,) = blocks(PAGE, "yaml")
    example = yaml.safe_load((ROOT / "examples" / "14_lightning_cli.yaml").read_text())
    (callback,) = yaml.safe_load(shown)["trainer"]["callbacks"]
    assert callback["init_args"].items() <= example["trainer"]["callbacks"][0]["init_args"].items()
