"""The numbers of the README, on the real default model and text."""

import json

import pytest

from tests.in_process import run_command_line

pytestmark = pytest.mark.slow


def run(folder, *overrides):
    quiet = ("trainer.enable_progress_bar=false", f"hydra.run.dir={folder}")
    done = run_command_line(*quiet, *overrides, folder=folder.parent)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "report.json").read_text()), done.stdout


def test_fp8_is_within_5_percent_and_reloads_with_the_same_logits(tmp_path):
    report, output = run(tmp_path / "run", "scheme=fp8")
    before, after = report["perplexity"]
    assert 14.5 < before < 15.1
    assert after / before < 1.05
    assert "largest difference of logits 0.0" in output


def test_static_int8_names_the_layers_that_cost_it_and_is_within_15_percent_without_them(tmp_path):
    report, output = run(tmp_path / "first", "scheme=int8_static", "export=none")
    before, after = report["perplexity"]
    assert after / before > 1.15
    assert "model.layers.11.mlp.down_proj" in output
    worst = [layer["name"] for layer in report["layers"][:6]]
    assert all(name.endswith("down_proj") for name in worst)
    named, _ = run(
        tmp_path / "second", "scheme=int8_static", "export=none", f"ignore_from={tmp_path / 'first' / 'report.json'}"
    )
    assert len(named["layers"]) > 180
    assert named["perplexity"][1] / before < 1.15
