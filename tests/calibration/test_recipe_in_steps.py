"""The accurate recipe rounds on quantized inputs where the model can be run block by block; elsewhere as before.

What stands in the way may be known before any data, or only at their end: in both cases a warning says so, and weights
are rounded as by rounding='gptq'.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_obs import (
    CalibrationCallback,
    CalibrationError,
    CalibrationSession,
    CalibrationWarning,
    QuantizationAwareTraining,
    export_checkpoint,
    linearize_experts,
)
from lightning_obs.calibration import quantized_inputs
from tests.callbacks.calibration_modules import trainer
from tests.support.moe_models import tiny_moe

INT4 = {"weights": {"num_bits": 4, "group_size": 16}}
TOKENS = torch.randint(32, (3, 2, 12), generator=torch.Generator().manual_seed(1))
ON_QUANTIZED_INPUTS = {"name": "gptq", "inputs": "quantized", "random_tokens": 0.2}
IN_FULL_PRECISION = "the recipe rounds weights by inputs in full precision here"


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval()


def call(model):
    for tokens in TOKENS:
        model(input_ids=tokens)


def calibrated(run=call, **options) -> tuple[CalibrationSession, torch.Tensor]:
    """A session with the accurate recipe, and the numbers of the last weight."""
    model = tiny_llama()
    session = CalibrationSession(model, INT4, ignore=["lm_head"], recipe="accurate", **options)
    with session, torch.no_grad():
        run(model)
    return session, model.model.layers[1].mlp.down_proj.weight_rounded


def test_the_recipe_rounds_on_quantized_inputs():
    session, rounded = calibrated()
    assert session.label.endswith("gptq on quantized inputs")
    assert session.result.batches == 3
    assert torch.equal(rounded, calibrated(rounding=ON_QUANTIZED_INPUTS)[1])
    assert not torch.equal(rounded, calibrated(rounding="gptq")[1])


def test_parts_that_the_steps_call_are_observed_as_they_run():
    def call_part(model):
        for tokens in TOKENS:
            model.model(input_ids=tokens)

    with (
        pytest.warns(CalibrationWarning, match="all tokens count alike"),
        pytest.warns(CalibrationWarning, match=rf"{IN_FULL_PRECISION}: parts of LlamaForCausalLM .*module=\.\.\."),
    ):
        session, rounded = calibrated(call_part)
    assert session.result.scheme == session.label == "int4 group 16 weights + gptq"
    with pytest.warns(CalibrationWarning, match="all tokens count alike"):
        assert torch.equal(rounded, calibrated(call_part, rounding="gptq")[1])


def test_a_checkpoint_records_the_rounding_that_was_done(tmp_path):
    """In the config of the checkpoint, also after the calibration was loaded by another session."""

    def call_part(model):
        for tokens in TOKENS:
            model.model(input_ids=tokens)

    with (
        pytest.warns(CalibrationWarning, match="all tokens count alike"),
        pytest.warns(CalibrationWarning, match=IN_FULL_PRECISION),
    ):
        session, rounded = calibrated(call_part)
    later = CalibrationSession(tiny_llama(), INT4, ignore=["lm_head"], recipe="accurate")
    later.load_state_dict(session.state_dict())
    assert later.label == session.label == "int4 group 16 weights + gptq"
    assert torch.equal(later.model.model.layers[1].mlp.down_proj.weight_rounded, rounded)
    for name, calibrated_session in {"calibrated": session, "loaded": later}.items():
        export_checkpoint(calibrated_session.model, tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        [group] = config["quantization_config"]["config_groups"].values()
        assert group["weights"]["observer_kwargs"]["rounding"] == {"name": "gptq"}
        assert "weigh_tokens" not in group["weights"]["observer_kwargs"]  # all tokens counted alike, as a warning says


def test_a_checkpoint_records_a_rounding_on_quantized_inputs(tmp_path):
    session, _ = calibrated()
    later = CalibrationSession(tiny_llama(), INT4, ignore=["lm_head"], recipe="accurate")
    later.load_state_dict(session.state_dict())
    assert later.label == session.label == "int4 group 16 weights + gptq on quantized inputs"
    export_checkpoint(later.model, tmp_path / "loaded")
    config = json.loads((tmp_path / "loaded" / "config.json").read_text())
    [group] = config["quantization_config"]["config_groups"].values()
    assert group["weights"]["observer_kwargs"]["rounding"] == ON_QUANTIZED_INPUTS
    assert group["weights"]["observer_kwargs"]["weigh_tokens"] is True


class Uncopyable:
    """An argument that the model ignores and nobody can copy."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")


def call_with_uncopyable(model):
    """The weighing of tokens copies arguments, too, and does without them there."""
    for tokens in TOKENS:
        model(input_ids=tokens, note=Uncopyable())


def test_calls_that_cannot_be_kept_are_observed_as_they_run():
    with (
        pytest.warns(CalibrationWarning, match=rf"{IN_FULL_PRECISION}: a batch is kept .*cannot be copied"),
        pytest.warns(CalibrationWarning, match="all tokens count alike"),
    ):
        session, rounded = calibrated(call_with_uncopyable)
    assert session.result.batches == 3
    with pytest.warns(CalibrationWarning, match="all tokens count alike"):
        assert torch.equal(rounded, calibrated(call_with_uncopyable, rounding="gptq")[1])


def test_what_fails_in_steps_is_done_again_in_full_precision(monkeypatch):
    def fail(*_: Any) -> Any:
        raise CalibrationError("the model cannot be run block by block", where=["LlamaForCausalLM"])

    expected = calibrated(rounding="gptq")[1]
    monkeypatch.setattr(quantized_inputs.StepwiseCalibration, "calibrate_rest", fail)
    with pytest.warns(CalibrationWarning, match=rf"{IN_FULL_PRECISION}: the model cannot be run block by block"):
        session, rounded = calibrated()
    assert (session.result.batches, session.kept_runs.are_in_use) == (3, False)
    assert torch.equal(rounded, expected)


def test_data_are_missing_in_steps_as_elsewhere():
    with pytest.raises(CalibrationError, match="saw no data"):
        calibrated(lambda _: None)


def test_batches_whose_outputs_do_not_fit_are_not_observed(monkeypatch):
    size_of_outputs = 2 * 2 * (2 * 12 * 32 * 4)  # of two runs of a batch, each in full precision and quantized
    monkeypatch.setattr(quantized_inputs, "memory_of", lambda _: 4 * 2.5 * size_of_outputs)
    with pytest.warns(CalibrationWarning, match="those of 2 of 3 calls fit"):
        _, rounded = calibrated()
    monkeypatch.undo()

    def call_first(model):
        for tokens in TOKENS[:2]:
            model(input_ids=tokens)

    assert torch.equal(rounded, calibrated(call_first)[1])


class Parts(L.LightningModule):
    """Its step calls the layers, not the module itself, which has no ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def validation_step(self, batch, _):
        self.log("loss", self.layers(self.first(batch)).square().mean())


class Whole(Parts):
    """It has a ``forward`` that its step does not call."""

    def forward(self, x):
        return self.layers(self.first(x))


@pytest.mark.parametrize(
    ("module_class", "reason"),
    [(Parts, r"Parts has no forward\(\)"), (Whole, r"parts of Whole were called by themselves.*module=\.\.\.")],
)
def test_the_report_of_a_callback_names_the_rounding_that_was_done(module_class, reason):
    callback = CalibrationCallback(INT4, recipe="accurate")
    assert callback.label.endswith("gptq on quantized inputs")
    batches = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).split(4)
    with (
        pytest.warns(CalibrationWarning, match="all tokens count alike"),
        pytest.warns(CalibrationWarning, match=f"{IN_FULL_PRECISION}: {reason}"),
    ):
        trainer(callback).validate(module_class(), DataLoader(batches, batch_size=None), verbose=False)
    assert callback.result.scheme == "int4 group 16 weights + gptq"
    assert callback.results.facts().title.startswith("int4 group 16 weights + gptq")
    assert "quantized inputs" not in callback.results.facts().title


class Layers(nn.Module):
    """Two layers that are no list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.second(self.first(x))


def experts() -> nn.Module:
    model = tiny_moe("mixtral")
    linearize_experts(model)
    return model


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (Layers, {}, "the blocks of Layers were not found"),
        (experts, {}, "MixtralForCausalLM has experts"),
        (tiny_llama, {"kv_cache": "FP8"}, "attention states and outputs are quantized"),
    ],
    ids=["blocks", "experts", "kv cache"],
)
def test_what_cannot_run_in_steps_is_said_before_data(make, options, reason):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session = CalibrationSession(make(), INT4, ignore=["re:.*lm_head"], recipe="accurate", **options)
    texts = [str(each.message) for each in caught]
    assert any(f"weights are rounded by inputs in full precision: {reason}" in text for text in texts)
    assert session.kept_runs is None
    assert "quantized inputs" not in session.label


def test_scales_are_trained_from_a_rounding_in_full_precision():
    options = QuantizationAwareTraining(INT4, recipe="accurate", train="scales").options
    weights = options.config.config_groups["group_0"].weights
    assert weights.observer_kwargs["rounding"] == {"name": "gptq"}
