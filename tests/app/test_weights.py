"""``task=weights`` on a tiny model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationSession, export_checkpoint
from tests.support.in_process import run_command_line
from tests.support.markdown import commands
from tests.support.moe_models import W4A16_32
from tests.support.tiny_model import save_tiny_llama

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "larger_than_memory.md").read_text()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), torch.bfloat16)


def test_the_command_of_the_page_writes_the_tensors_of_an_export_from_memory(tiny, tmp_path):
    command = re.search(r"^python -m lightning_obs (task=weights .*)$", PAGE, flags=re.MULTILINE).group(1)
    words = command.replace("<folder>", str(tiny)).replace("<out>", str(tmp_path / "out")).split()
    done = run_command_line(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"int4 group 32 weights · 14 modules · [\d.]+ s · [\d.]+ MB -> [\d.]+ MB · left in float: Emb", done.stdout
    )
    assert f"wrote {tmp_path / 'out'}" in done.stdout
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype="auto")
    with CalibrationSession(model, W4A16_32, ignore=["lm_head"], recipe="fast"):
        pass
    expected = load_file(export_checkpoint(model, tmp_path / "memory") / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(value) for name, value in expected.items())
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["python -m lightning_obs", pytest.param("torchrun", marks=pytest.mark.nightly)])
def test_the_commands_that_share_the_work_write_the_files_of_one_process(tiny, tmp_path, launcher):
    [command] = [line for line in commands(PAGE) if line.startswith(launcher) and "nvfp4a16" in line]
    words = command.replace("<folder>", str(tiny)).replace("<out>", str(tmp_path / "out")).split()
    alone = [word for word in words if "=" in word and not word.startswith(("--", "task.workers"))]
    alone[-1] = f"export.folder={tmp_path / 'one'}"
    assert run_command_line(*alone, folder=tmp_path).returncode == 0
    if words[0] == "python":  # the workers that it starts are new processes
        done = run_command_line(*words[3:], folder=tmp_path)
    else:
        command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote ") == 1
    one, out = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "out"))
    assert one == out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scheme=fp8"], "FP8 needs data"),
        (["scheme=w4a16", "export.folder=null"], "writes a checkpoint: export.folder. Got none. Remedy: name one."),
        (["scheme=w4a16", "data.batches=3"], "task=weights does not read what was given: data.batches"),
    ],
)
def test_what_it_cannot_do_is_said(tiny, tmp_path, words, message):
    done = run_command_line("task=weights", f"model.path={tiny}", *words, folder=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
