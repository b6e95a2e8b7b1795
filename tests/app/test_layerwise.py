"""``model.layerwise=true`` on a tiny model."""

import re
from pathlib import Path

import pytest
import torch

from tests.streaming.test_checkpoint_weights import sums
from tests.support.in_process import run_command_line
from tests.support.lightning_ranks import run_command_line_on_ranks
from tests.support.tiny_model import save_tiny_llama

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "larger_than_memory.md").read_text()
QUICK = ["data.batches=2", "data.tokens=32", "data.eval_batches=2", "trainer=cpu"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), torch.bfloat16)


@pytest.mark.slow
def test_the_command_of_the_page_writes_the_checkpoint_of_a_model_in_memory(tiny, tmp_path):
    command = re.search(r"^python -m lightning_obs (model.layerwise=true .*)$", PAGE, flags=re.MULTILINE).group(1)
    texts = tmp_path / "texts.txt"
    texts.write_text("The quick brown fox jumps over the lazy dog, and so on, and so forth. " * 40)
    for old, new in (("<folder>", tiny), ("<out>", tmp_path / "out"), ("<texts>", texts)):
        command = command.replace(old, str(new))
    done = run_command_line(*command.split(), *QUICK, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"FP8 · 14 modules · [\d.]+ s · [\d.]+ MB -> [\d.]+ MB · left in float: Emb", done.stdout)
    assert "Linear" not in done.stdout  # the head is tied to the embedding, and counts once
    whole = [word for word in command.split() if "layerwise" not in word and "export" not in word]
    off = ["evaluate=false", "report.layer_error_batches=0", f"export.folder={tmp_path / 'memory'}"]
    assert run_command_line(*whole, *QUICK, *off, folder=tmp_path).returncode == 0
    assert sums(tmp_path / "out") == sums(tmp_path / "memory")
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.dtype=float32"], "task=calibrate with model.layerwise does not read what was given: model.dtype"),
        (["evaluate=true"], "task=calibrate with model.layerwise does not read what was given: evaluate"),
        (["export.folder=null"], "model.layerwise writes a checkpoint: export.folder. Got none. Remedy: name one."),
        (["task=finetune"], "layer by layer a model is calibrated and exported, nothing else is done with it"),
        (["model.path=somebody/bert"], "model.path=somebody/bert does not exist. Expected a folder with config.json"),
        (["data.tokens=513"], "data.tokens is longer than the texts that the model was made for. Got 513, expected at"),
        (["trainer.precision=bf16-true"], "layer by layer a model runs in the dtype in which it was saved"),
    ],
)
def test_what_it_cannot_do_is_said(tiny, tmp_path, words, message):
    done = run_command_line("model.layerwise=true", f"model.path={tiny}", *QUICK, *words, folder=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr


def test_a_recipe_is_that_of_calibrate_layerwise(tiny, tmp_path):
    """It does without weigh_tokens here; what is left of it are these options."""
    words = ["model.layerwise=true", f"model.path={tiny}", "scheme=w4a16", "group_size=32", *QUICK]
    weight_observer = ["weight_observer=imatrix_mse", "weight_observer.norm=2.0", "weight_observer.signed=true"]
    rounding = "rounding={name: gptq, inputs: quantized, random_tokens: 0.2}"
    for name, options in {"recipe": ["recipe=accurate"], "options": [*weight_observer, rounding]}.items():
        done = run_command_line(*words, *options, f"export.folder={tmp_path / name}", folder=tmp_path)
        assert done.returncode == 0, done.stderr
    assert sums(tmp_path / "recipe") == sums(tmp_path / "options")


@pytest.mark.slow
def test_two_ranks_of_the_command_line_write_the_checkpoint_of_one(tiny, tmp_path):
    words = ["model.layerwise=true", f"model.path={tiny}", "observer=static_minmax", *QUICK]
    one, two = f"export.folder={tmp_path / 'one'}", f"export.folder={tmp_path / 'two'}"
    assert run_command_line(*words, one, folder=tmp_path).returncode == 0
    ddp = ["trainer.devices=2", "trainer.strategy=ddp"]  # with Lightning's launcher: test_cli.py
    ranks = run_command_line_on_ranks(2, *words, two, *ddp, folder=tmp_path)
    assert [done.returncode for done in ranks] == [0, 0], ranks
    assert "".join(done.stdout for done in ranks).count("wrote ") == 1
    assert sums(tmp_path / "two") == sums(tmp_path / "one")
