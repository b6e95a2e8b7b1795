"""The application on a mixture of experts."""

import json

import pytest
import torch

from lightning_obs.app.main import run
from lightning_obs.errors import CalibrationError
from tests.support.moe_models import tiny_moe
from tests.support.tiny_model import save_tiny_llama
from tests.support.versions import converted_weights

pytestmark = converted_weights


@pytest.fixture
def moe_folder(tmp_path):
    folder = save_tiny_llama(tmp_path / "moe")  # for its tokenizer
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    options = {"vocab_size": vocabulary, "hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 64}
    tiny_moe("qwen3_moe", torch.bfloat16, **options).save_pretrained(folder)
    return folder


@pytest.fixture
def moe_run(moe_folder, composed, tmp_path):
    (tmp_path / "run").mkdir()  # Hydra makes it on the command line

    def make(*overrides):
        return run(composed(f"model.path={moe_folder}", "data.tokens=32", "export.overwrite=true", *overrides))

    return make


@pytest.mark.slow
def test_experts_are_quantized_and_the_checkpoint_gives_the_same_logits(moe_run, tmp_path, capsys, verified_here):
    moe_run("scheme=w4a16", f"export.folder={tmp_path / 'out'}")
    assert "largest difference of logits 0.0" in capsys.readouterr().out


@pytest.mark.slow
def test_experts_that_stay_stacked_give_the_same_logits(moe_run, moe_folder, tmp_path, capsys, verified_here):
    vocabulary = json.loads((moe_folder / "config.json").read_text())["vocab_size"]
    tiny_moe("gpt_oss", vocab_size=vocabulary, hidden_size=64, intermediate_size=64).save_pretrained(moe_folder)
    ignore = "ignore=[lm_head,'re:.*experts']"
    moe_run("scheme=fp8", ignore, "model.linearize_experts=false", f"export.folder={tmp_path / 'out'}")
    assert "largest difference of logits 0.0" in capsys.readouterr().out


def test_all_experts_can_be_calibrated(moe_run, tmp_path, capsys):
    moe_run(
        "scheme=fp8",
        f"export.folder={tmp_path / 'out'}",
        "export.engines=dequantize",
        "export.verify=false",
        "calibrate_all_experts=true",
    )
    out = capsys.readouterr().out
    assert "tokens per expert: " in out


def test_experts_that_are_left_stacked_have_to_be_ignored(moe_run):
    with pytest.raises(CalibrationError, match=r"stacked in 3-D parameters.*experts"):
        moe_run("scheme=fp8", "model.linearize_experts=false", "export=none")


def test_fused_sets_reach_the_callback(moe_run):
    with pytest.raises(CalibrationError, match="not a fused set"):
        moe_run("scheme=fp8", "fused_sets=[[alone]]", "export=none")
