"""What data and weights must be: reached, finite, materialized, asked for."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationSession, quantized
from lightning_obs.errors import CalibrationError, CalibrationWarning
from lightning_obs.model.module_qparams import get_scheme
from lightning_obs.observers import Observer
from tests.calibration.common import STATIC, Experts, attributes, calibrate


def test_a_static_scheme_without_data_is_refused_and_nothing_is_written(mlp):
    before = attributes(mlp)
    with (
        pytest.raises(
            CalibrationError,
            match=r"INT8_STATIC has static activations and saw no data: fc1 \(input\), fc2.*0 batches.*FP8_DYN",
        ),
        CalibrationSession(mlp, STATIC),
    ):
        pass
    assert attributes(mlp) == before


@pytest.mark.parametrize("name", ["imatrix_mse", "hessian"])
def test_inputs_that_are_all_zero_weigh_no_column_and_are_named(name, mlp):
    scheme = {"weights": {"num_bits": 4, "strategy": "channel"}}
    session = CalibrationSession(mlp, scheme, observers={"weight": name})
    with pytest.warns(CalibrationWarning, match=r"all inputs of these modules were zero.*count alike: fc1$"), session:
        mlp(torch.zeros(4, 16))


def test_a_module_that_no_data_reached_is_an_error_and_nothing_is_written():
    model = Experts()
    before = attributes(model)
    with (
        pytest.raises(
            CalibrationError,
            match=r"no data reached 2 of 3 observers: experts.1 \(input\), .*`ignore`, or set on_missing='warn'",
        ),
        CalibrationSession(model, STATIC),
    ):
        model(torch.randn(4, 16))
    assert attributes(model) == before


def test_a_module_that_no_data_reached_can_be_left_in_full_precision():
    model = Experts()
    message = r"left in full precision, because no data reached them: experts.1 \(input\), experts.2 \(input\)$"
    with (
        pytest.warns(CalibrationWarning, match=message),
        CalibrationSession(model, STATIC, on_missing="warn") as session,
    ):
        model(torch.randn(4, 16))
    assert session.result.modules == ["experts.0"]
    assert session.result.skipped == ["experts.1", "experts.2"]
    assert get_scheme(model.experts[1]) is None


def test_an_error_of_a_spawned_rank_arrives_whole():
    model = Experts()
    with pytest.raises(CalibrationError) as raised, CalibrationSession(model, STATIC):
        model(torch.randn(4, 16))
    arrived = pickle.loads(pickle.dumps(raised.value))
    assert str(arrived) == str(raised.value)
    assert arrived.where == ["experts.1 (input)", "experts.2 (input)"]


def test_no_data_at_all_is_an_error_even_where_missing_data_is_not(mlp):
    with pytest.raises(CalibrationError, match="saw no data"), CalibrationSession(mlp, STATIC, on_missing="warn"):
        pass


@pytest.mark.parametrize("scheme", [STATIC, "NVFP4"])
def test_a_fused_set_is_left_in_full_precision_as_a_whole(scheme):
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("gate_proj", "up_proj", "down_proj")}).bfloat16()
    session = CalibrationSession(model, scheme, on_missing="warn")
    message = r"no data reached them: up_proj \(input\); and, fused with them: gate_proj"
    with pytest.warns(CalibrationWarning, match=message), session:
        model["gate_proj"](model["down_proj"](torch.randn(4, 32, dtype=torch.bfloat16)))
    assert session.result.modules == ["down_proj"]
    assert session.result.skipped == ["gate_proj", "up_proj"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_data_that_is_not_finite_is_named_and_nothing_is_written(mlp, bad):
    before, x = attributes(mlp), torch.randn(4, 16)
    x[1, 2] = bad
    message = r"not finite: fc1 \(input: 1 of 1 .*not finite.*fc2 \(input: .*nothing was written"
    with pytest.raises(CalibrationError, match=message):
        calibrate(mlp, STATIC, torch.randn(4, 16), x)
    assert attributes(mlp) == before


def test_a_weight_that_is_not_finite_is_named_and_nothing_is_written(mlp):
    before = attributes(mlp)
    with torch.no_grad():
        mlp.fc2.weight[3, 2] = float("nan")
    with (
        pytest.raises(CalibrationError, match=r"not finite: fc2 \(weight: 1 of 8 min_vals") as raised,
        CalibrationSession(mlp, "W8A8"),
    ):
        pass
    assert raised.value.where == ["fc2 (weight: 1 of 8 min_vals not finite, 1 of 8 max_vals not finite)"]
    assert attributes(mlp) == before


@pytest.mark.usefixtures("own_registry")
def test_scales_that_are_not_positive_are_refused_and_nothing_is_written(mlp):
    @Observer.register("broken")
    class Broken(Observer):
        def update_statistics_from_observed(self, observed):
            self.min_vals = self.max_vals = torch.ones(1)

        def get_qparams(self):
            return {"scale": torch.zeros(1), "zero_point": torch.zeros(1), "global_scale": None}

    before = attributes(mlp)
    with (
        pytest.raises(CalibrationError, match=r"scales are not finite and positive: fc1.input_scale"),
        CalibrationSession(mlp, STATIC, observers={"input": "broken"}),
    ):
        mlp(torch.randn(4, 16))
    assert attributes(mlp) == before


def test_a_weight_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    with (
        pytest.raises(CalibrationError, match=r"the weight is not materialized .*: 0"),
        CalibrationSession(model, "W8A8"),
    ):
        pass


def test_data_for_w8a8_is_answered_with_the_static_preset(mlp):
    message = r"W8A8 needs no data.*: 2 batches were run.*static activations \(INT8_STATIC"
    session = CalibrationSession(mlp, "W8A8")
    session.attach()
    for x in torch.randn(2, 4, 16):
        mlp(x)
    with pytest.warns(CalibrationWarning, match=message) as said:
        session.finalize()
    assert said[0].filename == __file__


def test_data_for_a_weight_only_scheme_is_said_not_to_be_needed(mlp):
    with pytest.warns(CalibrationWarning, match=r"FP8_DYNAMIC needs no data.*not used\. Data are used by"):
        calibrate(mlp, "FP8_DYNAMIC", torch.randn(4, 16))


def test_a_scale_that_is_zero_in_the_dtype_it_is_stored_in_is_refused(mlp):
    mlp.half()
    before = attributes(mlp)
    with (
        pytest.raises(CalibrationError, match=r"not finite and positive: fc1.input_scale \(float16\)\. .*bfloat16"),
        CalibrationSession(mlp, STATIC, ignore=["fc2"]),
        torch.autocast("cpu", torch.bfloat16),  # inputs of another dtype than the weights
    ):
        mlp(1e-6 * torch.randn(4, 16))
    assert attributes(mlp) == before


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_inputs_that_are_not_floating_point_are_refused_and_named(dtype):
    class Takes(nn.Linear):
        def forward(self, x):
            return super().forward(x.real.float())

    model = nn.Sequential(Takes(4, 4))
    with (
        pytest.raises(CalibrationError, match=rf"only floating point .*: 0\. Got {str(dtype).removeprefix('torch.')},"),
        CalibrationSession(model, "FP8"),
    ):
        model(torch.ones(2, 4).to(dtype))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_inputs_are_refused_and_a_scheme_of_weights_alone_takes_them(layout):
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=layout)
    model = nn.Sequential(nn.Linear(4, 4))
    with (
        pytest.raises(CalibrationError, match=r"nested tensors cannot be observed: 0\. .*`ignore`.*only its weight"),
        CalibrationSession(model, "FP8"),
    ):
        model(nested)
    with CalibrationSession(model, {"weights": {"num_bits": 8, "strategy": "channel"}}):
        pass
    with quantized(model), torch.no_grad():
        assert model(nested).is_nested
