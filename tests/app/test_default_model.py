"""What the README says of the real default model: FP8 on an eighth of its batches, and every night all of it."""

import json

import pytest

from lightning_obs.app.models.pretrained import default_model_folder
from tests.support.in_process import run_command_line

pytestmark = pytest.mark.slow
#: batches to calibrate on and to measure on, and the perplexity of the unquantized model on the latter
SIZES = [pytest.param(2, 14.69, id="2 batches"), pytest.param(16, 14.80, id="16 batches", marks=pytest.mark.nightly)]


def run(folder, batches, *overrides):
    size = [f"data.batches={batches}", f"data.eval_batches={batches}"]
    size += ["report.layer_error_batches=0"] if batches == 2 else []
    quiet = ("trainer.enable_progress_bar=false", f"hydra.run.dir={folder}")
    done = run_command_line(*quiet, *size, *overrides, folder=folder.parent)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "report.json").read_text()), done.stdout


@pytest.mark.parametrize(("batches", "expected"), SIZES)
def test_fp8_is_within_5_percent_and_reloads_with_the_same_logits(batches, expected, tmp_path, verified_here):
    report, output = run(tmp_path / "run", batches, "scheme=fp8")
    before, after = report["perplexity"]
    assert before == pytest.approx(expected, rel=0.02)  # the text differs a little by version of Python
    assert after / before < 1.05
    assert "largest difference of logits 0.0" in output


@pytest.mark.parametrize(("batches", "expected"), SIZES[1:])
def test_static_int8_names_the_layers_that_cost_it_and_is_within_15_percent_without_them(batches, expected, tmp_path):
    report, output = run(tmp_path / "first", batches, "scheme=int8_static", "export=none")
    before, after = report["perplexity"]
    assert before == pytest.approx(expected, rel=0.02)
    assert after / before > 1.15
    assert "model.layers.11.mlp.down_proj" in output
    worst = [layer["name"] for layer in report["layers"][:6]]
    assert all(name.endswith("down_proj") for name in worst)
    named, _ = run(
        tmp_path / "second",
        batches,
        "scheme=int8_static",
        "export=none",
        "report.layer_error_batches=0",
        f"ignore_from={tmp_path / 'first' / 'report.json'}",
    )
    assert len(named["ignore"]) < 30  # of 210 modules
    assert named["perplexity"][1] / before < 1.15


@pytest.mark.nightly
def test_the_default_model_is_dequantized_once_and_that_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LIGHTNING_OBS_CACHE", str(tmp_path))
    assert default_model_folder() == default_model_folder()
    assert capsys.readouterr().out.count("dequantizing the GGUF file of ") == 1
