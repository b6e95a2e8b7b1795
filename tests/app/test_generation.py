"""generation_check: what the original and the quantized model write."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationError, CalibrationSession, quantized
from lightning_obs.app.generation import loop_at_end, loop_line
from lightning_obs.app.main import run
from lightning_obs.errors import CalibrationWarning
from lightning_obs.forward.quantized_forward import weights_kept
from tests.tiny_model import save_tiny_t5


def wrote(*loops):
    return [{"text": f"text {number} " * 20, "loop": loop} for number, loop in enumerate(loops)]


def test_a_run_reports_what_both_models_wrote(composed, tmp_path, capsys, tiny_folder):
    row = run(composed("generation_check=60", "export=none", "evaluate=false", "scheme=fp8"))
    line = loop_line(**row["generation"])
    assert line in capsys.readouterr().out
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["generation"] == row["generation"]
    assert line in (tmp_path / "run" / "report.html").read_text()
    for texts in row["generation"].values():
        assert len(texts) == 2  # as many as are held out
        assert all(each["text"] for each in texts)


def test_nothing_is_written_unless_asked_for(composed, tmp_path):
    assert "generation" not in run(composed("export=none", "evaluate=false", "scheme=fp8_dynamic"))


def test_a_loop_of_the_quantized_model_alone_is_warned_of():
    with pytest.warns(CalibrationWarning, match=r"loops in 1 of 3 texts where the original does not .*text 2 text 2"):
        loop_line(wrote(None, 4, None), wrote(None, None, 7))


@pytest.mark.parametrize(
    ("tokens", "loop"),
    [
        ([5] * 24, 1),
        ([5] * 23, None),
        ([1, 2] * 12, 2),
        ([*range(30)] + [*range(50)] * 3, 50),
        ([1, 2, 3] * 9 + [4], None),
    ],
)
def test_a_loop_is_three_turns_and_twenty_four_tokens(tokens, loop):
    assert loop_at_end(tokens) == loop


def test_a_model_that_does_not_continue_texts_is_refused(composed, tmp_path):
    with pytest.raises(CalibrationError, match=r"for causal language models.*T5ForCond.*generation_check=0"):
        run(composed(
            "model=seq2seq", f"model.path={save_tiny_t5(tmp_path / 't5')}", "data.batch_size=1", "generation_check=8",
            "export=none",
        ))  # fmt: skip


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W4A16"])
def test_kept_weights_are_the_quantized_ones_and_gone_afterwards(tiny_folder, scheme):
    model, ids = AutoModelForCausalLM.from_pretrained(tiny_folder), torch.arange(3, 19)[None]
    weights = {"weights": {"num_bits": 4, "group_size": 32}} if scheme == "W4A16" else scheme
    with CalibrationSession(model, weights, ignore=["lm_head"]):
        pass
    with torch.no_grad(), quantized(model):
        expected = model(input_ids=ids).logits
        with weights_kept(model):
            assert all(torch.equal(model(input_ids=ids).logits, expected) for _ in range(2))
            model.model.layers[0].mlp.up_proj.weight.zero_()
            assert torch.equal(model(input_ids=ids).logits, expected)
        assert not torch.equal(model(input_ids=ids).logits, expected)
