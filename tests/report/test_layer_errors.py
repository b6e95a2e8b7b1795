"""Each layer's own error."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_obs import CalibrationSession
from lightning_obs.calibration.result import CalibrationResult, PlanSummary
from lightning_obs.report.facts import Report
from lightning_obs.report.layer_errors import LayerError, measure_layer_errors
from lightning_obs.report.metrics import TensorError
from lightning_obs.report.numbers import human_size
from lightning_obs.report.summary import comparison_table


def calibrated(model, *batches, scheme="INT8_STATIC", **kwargs):
    with CalibrationSession(model, scheme, **kwargs):
        for batch in batches:
            model(batch)
    return model


def test_the_error_is_the_mean_over_tokens_in_db():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    nn.init.eye_(model[0].weight)
    model = calibrated(model, torch.tensor([[127.5, 1.0, 1.0, 1.0]]))  # a scale of 1
    with torch.no_grad():
        model[0].weight_scale.fill_(1.0)
    tokens = torch.tensor([[10.0, 0.25, 0.0, 0.0], [0.0, 2.25, 0.0, 0.0]])  # rounding takes 0.25 off each
    (error,) = measure_layer_errors(model, [tokens])
    expected = torch.tensor([(10**2 + 0.25**2) / 0.25**2, 2.25**2 / 0.25**2]).log10().mul(10).mean()
    assert error.sqnr == pytest.approx(expected.item(), rel=1e-4)
    assert (error.input.low, error.input.high) == (0.0, 10.0)


def test_one_outlier_token_does_not_hide_that_the_others_are_lost():
    torch.manual_seed(0)
    model, tokens = nn.Sequential(nn.Linear(16, 16)), torch.randn(64, 16)
    tokens[0] = 3000.0
    (error,) = measure_layer_errors(calibrated(model, tokens), [tokens])
    assert error.sqnr < 3  # of all energy together it would be above 40 dB


@pytest.mark.parametrize("scheme", ["INT8_STATIC", "FP8"])
def test_clipped_counts_what_lies_outside_the_range(scheme):
    model, tokens = nn.Sequential(nn.Linear(8, 8)), torch.linspace(-1, 1, 64).view(8, 8)
    calibrated(model, tokens, scheme=scheme)
    assert measure_layer_errors(model, [tokens])[0].clipped == 0.0
    (error,) = measure_layer_errors(model, [torch.cat([tokens, torch.full((8, 8), 5.0)])])
    assert error.clipped == pytest.approx(50.0)


RELUS = {
    "F.relu": F.relu,
    "torch.relu": torch.relu,
    "in place": lambda x: F.relu(x, inplace=True),
    "a method": lambda x: x.relu(),
}


class Convolutions(nn.Module):
    """Two convolutions, and a function between them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        self.between = between

    def forward(self, x):
        return self.second(self.between(self.first(x)))


@pytest.mark.parametrize("scheme", ["INT8_ONNX", "INT8_TENSORRT"])
@pytest.mark.parametrize("relu", RELUS.values(), ids=RELUS)
def test_what_a_relu_cuts_off_is_no_error(relu, scheme):
    torch.manual_seed(0)
    model, images = Convolutions(relu), torch.randn(4, 3, 8, 8)
    calibrated(model, images, scheme=scheme)
    assert (model.first.output_scale * 127).item() < model.first(images).abs().max()  # its lowest values have no level
    errors = {error.name: error for error in measure_layer_errors(model, [images])}
    assert errors["first"].sqnr > 35
    assert errors["first"].output.low == 0


def test_a_cut_that_another_function_reads_is_an_error():
    torch.manual_seed(0)
    model, images = Convolutions(F.relu), torch.randn(4, 3, 8, 8)
    calibrated(model, images, scheme="INT8_ONNX")
    model.between = lambda x: F.relu(x) + 0.1 * x
    errors = {error.name: error for error in measure_layer_errors(model, [images])}
    assert errors["first"].sqnr < 10
    assert errors["first"].output.low < 0


def test_dynamic_inputs_have_no_clipping(mlp):
    with CalibrationSession(mlp, "W8A8"):
        pass
    assert {error.clipped for error in measure_layer_errors(mlp, [torch.randn(4, 16)])} == {None}


def test_a_layer_names_the_layers_that_first_read_what_it_has_computed(tiny_llama):
    model, ids = tiny_llama(), torch.arange(8).view(2, 4)
    with CalibrationSession(model, "INT8_STATIC", ignore=["lm_head"]):
        model(input_ids=ids)
    errors = measure_layer_errors(model, [{"input_ids": ids}] * 2)
    feeds = {error.name.removeprefix("model.layers."): error.feeds for error in errors}
    of = {name: {one.removeprefix("model.layers.") for one in found} for name, found in feeds.items()}
    assert of["0.self_attn.q_proj"] == of["0.self_attn.v_proj"] == {"0.self_attn.o_proj"}
    assert of["0.self_attn.o_proj"] == {"0.mlp.gate_proj", "0.mlp.up_proj"}
    assert of["0.mlp.gate_proj"] == of["0.mlp.up_proj"] == {"0.mlp.down_proj"}
    assert of["0.mlp.down_proj"] == {f"1.self_attn.{one}_proj" for one in "qkv"}
    assert of["1.mlp.down_proj"] == set()


def test_measuring_leaves_the_model_as_it_was(mlp):
    calibrated(mlp, torch.randn(4, 16))
    x = torch.randn(4, 16)
    before = mlp(x)
    measure_layer_errors(mlp, [x])
    assert torch.equal(mlp(x), before)
    assert not any(m._forward_hooks for m in mlp.modules())
    assert not any("forward" in vars(m) for m in mlp.modules())


def test_layers_that_are_fused_are_named_together():
    sqnr = {"l.0.down_proj": 5, "l.1.up_proj": 9, "l.1.gate_proj": 30, "l.2.up_proj": 30}
    errors = [LayerError(name, output=TensorError(ratio)) for name, ratio in sqnr.items()]
    result = CalibrationResult("INT8", list(sqnr), plan=PlanSummary(fused=[["l.1.gate_proj", "l.1.up_proj"]]))
    assert Report("a run", result, errors).poor_layers == ["l.0.down_proj", "l.1.up_proj", "l.1.gate_proj"]


def test_a_failed_run_is_a_row_too():
    table = comparison_table(
        [{"run": "a [x]", "metric": "perplexity", "perplexity": (10.0, 11.0), "size": 2**20}, {"run": "b (failed)"}]
    )
    assert table.row_count == 2
    assert human_size(3 * 2**30) == "3.00 GiB"


def test_data_with_nan_give_a_layer_without_a_ratio(mlp):
    calibrated(mlp, torch.randn(4, 16))
    x = torch.randn(4, 16)
    x[1, 2] = torch.nan
    first, *_ = sorted(measure_layer_errors(mlp, [x]), key=lambda error: error.name)
    assert (first.input.sqnr, first.output.sqnr) == (None, None)
    assert first.weight.sqnr > 0
