from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from compressed_tensors.quantization import QuantizationStatus
from torch import nn

from lightning_obs import CalibrationSession, quantized
from lightning_obs.errors import CalibrationError, CalibrationWarning
from lightning_obs.model.qparams import calibrated_modules, get_scheme, read_qparams
from lightning_obs.observers import Observer

STATIC = "INT8_STATIC"


def attributes(model: nn.Module) -> dict[str, set[str]]:
    """What stands on every module, to see that nothing was written."""
    return {name: set(vars(module)) for name, module in model.named_modules()}


def hooks(model: nn.Module) -> int:
    tables = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, table)) for module in model.modules() for table in tables)


def input_scale(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack([v.detach().abs().max() for v in values]).max().reshape(1) / 127.5


def calibrate(model: nn.Module, scheme=STATIC, *inputs: torch.Tensor, **options) -> CalibrationSession:
    with CalibrationSession(model, scheme, **options) as session:
        for x in inputs:
            model(x)
    return session


class Shared(nn.Module):
    """q, k and v read one tensor; optionally it is changed in place before v."""

    def __init__(self, change: bool = False):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))
        self.change = change

    def forward(self, x):
        q, k = self.q_proj(x), self.k_proj(x)
        if self.change:
            x.mul_(3)
        return q + k + self.v_proj(x)


class Experts(nn.Module):
    """The first expert always runs, the others when asked."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, chosen=(0,)):
        return sum(self.experts[i](x) for i in chosen)


# ---------------------------------------------------------------------- what is written


@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC", {"weights": {"num_bits": 4, "group_size": 8}}])
def test_a_scheme_without_static_activations_needs_no_forward(mlp, scheme):
    with CalibrationSession(mlp, scheme) as session:
        pass
    assert session.result.modules == ["fc1", "fc2"]
    assert session.result.batches == session.result.measurements == 0
    assert set(read_qparams(mlp.fc1)) == {"weight_scale"}


def test_a_static_scheme_writes_the_range_of_all_batches(mlp):
    batches = torch.randn(3, 4, 16)
    with CalibrationSession(mlp, STATIC) as session:
        for x in batches:
            mlp(x)
    assert torch.equal(mlp.fc1.input_scale, input_scale(batches))
    assert torch.equal(mlp.fc2.input_scale, input_scale(mlp.act(mlp.fc1(batches.flatten(0, 1)))))
    assert torch.equal(mlp.fc1.weight_scale, mlp.fc1.weight.detach().abs().amax(1, keepdim=True) / 127.5)
    assert session.result.batches == 3


def test_the_result_says_what_was_done(mlp):
    x = torch.randn(4, 16)
    with CalibrationSession(mlp, STATIC) as session:
        mlp(x)
    result = session.result
    assert (result.scheme, result.modules, result.observers, result.skipped) == (STATIC, ["fc1", "fc2"], 4, [])
    assert result.input_ranges["fc1"] == (x.min().item(), x.max().item())
    assert set(result.qparams) == {f"fc{i}.{base}_scale" for i in (1, 2) for base in ("weight", "input")}
    assert torch.equal(result.qparams["fc1.input_scale"], mlp.fc1.input_scale)
    assert result.seconds > 0


def test_asymmetric_schemes_have_zero_points_and_symmetric_ones_have_none(mlp):
    scheme = {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8, "symmetric": False}}
    with CalibrationSession(mlp, scheme):
        mlp(torch.rand(4, 16) + 1)
    assert set(read_qparams(mlp.fc1)) == {"weight_scale", "input_scale", "input_zero_point"}
    assert mlp.fc1.input_zero_point.tolist() == [-128]


def test_outputs_are_observed(mlp):
    x = torch.randn(4, 16)
    with CalibrationSession(mlp, {"output_activations": {"num_bits": 8, "observer": "static_minmax"}}, targets="fc2"):
        output = mlp(x)
    assert torch.equal(mlp.fc2.output_scale, input_scale(output))


def test_a_convolution_is_calibrated(cnn):
    x = torch.randn(2, 3, 8, 8)
    with CalibrationSession(cnn, STATIC, targets=["Conv2d", "Linear"]):
        cnn(x)
    assert torch.equal(cnn.conv.input_scale, input_scale(x))
    assert cnn.conv.weight_scale.shape == (8, 1)


def test_observers_and_their_hyperparameters_are_used(mlp):
    batches = torch.randn(2, 4, 16)
    with CalibrationSession(mlp, STATIC, observers={"input": {"name": "minmax", "averaging_constant": 0.5}}) as session:
        for x in batches:
            mlp(x)
    low, high = (torch.stack([f(x) for x in batches]).mean() for f in (torch.min, torch.max))
    assert session.result.chosen_input_ranges["fc1"] == pytest.approx((low.item(), high.item()))
    assert session.result.input_ranges["fc1"] == (batches.min().item(), batches.max().item())


@pytest.mark.parametrize("name", ["on_missing", "reload"])
def test_an_unknown_option_value_is_refused(mlp, name):
    with pytest.raises(CalibrationError, match=rf"{name}. Got 'ignore', expected '(error|default)'"):
        CalibrationSession(mlp, STATIC, **{name: "ignore"})


# ---------------------------------------------------------------------- how data reaches an observer


def test_a_module_that_is_called_with_keywords_is_observed():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 8)

        def forward(self, *, features):
            return self.fc(input=features)

    model, x = Wrapper(), torch.randn(4, 16)
    with CalibrationSession(model, STATIC):
        model(features=x)
    assert torch.equal(model.fc.input_scale, input_scale(x))
    with quantized(model):
        model(features=x)


def test_a_module_that_is_called_twice_sees_both():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x):
            return self.fc(x * 10) + self.fc(x)

    model, x = Twice(), torch.randn(4, 16)
    with CalibrationSession(model, STATIC):
        model(x)
    assert torch.equal(model.fc.input_scale, input_scale(x * 10))


def test_a_module_under_two_names_is_calibrated_once():
    layer = nn.Linear(16, 16)
    model, x = nn.Sequential(layer, nn.ReLU(), layer), torch.randn(4, 16)
    with CalibrationSession(model, STATIC) as session:
        model(x)
    assert session.result.modules == ["0"]
    assert torch.equal(layer.input_scale, input_scale(x, layer(x).relu()))


def test_a_model_that_is_one_layer_is_calibrated():
    layer, x = nn.Linear(16, 16), torch.randn(4, 16)
    with CalibrationSession(layer, STATIC) as session:
        layer(x)
    assert torch.equal(layer.input_scale, input_scale(x))
    CalibrationSession(layer, STATIC).load_state_dict(session.state_dict())


def test_an_expert_without_tokens_does_not_disturb():
    model, x = Experts(), torch.randn(4, 16)
    with CalibrationSession(model, STATIC):
        model(x, chosen=(0, 1, 2))
        model(x[:0], chosen=(1,))
    assert torch.equal(model.experts[1].input_scale, input_scale(x))


def test_a_model_of_which_only_parts_are_called_is_observed(mlp):
    x = torch.randn(4, 16)
    with CalibrationSession(mlp, STATIC) as session:
        mlp.fc2(mlp.fc1(x).relu())
    assert session.result.batches == 0
    assert torch.equal(mlp.fc1.input_scale, input_scale(x))


@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_compiled_model_is_observed(mlp, when):
    x = torch.randn(4, 16)
    model = torch.compile(mlp, backend="eager")
    if when == "before":
        model(x * 0)  # a graph without hooks is cached
    with CalibrationSession(mlp, STATIC):
        model(x)
    assert torch.equal(mlp.fc1.input_scale, input_scale(x))


def test_the_compiled_module_itself_can_be_calibrated(mlp):
    x = torch.randn(4, 16)
    model = torch.compile(mlp, backend="eager")
    with CalibrationSession(model, STATIC) as session:
        model(x)
    assert session.result.batches == 1
    assert torch.equal(mlp.fc1.input_scale, input_scale(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_calibrated_under_any_gradient_mode_a_model_trains_on(mlp, mode):
    x = torch.randn(4, 16)
    with mode(), CalibrationSession(mlp, STATIC) as session:
        mlp(x)
    assert not any(value.is_inference() or value.requires_grad for value in read_qparams(mlp.fc1).values())
    assert torch.equal(session.result.qparams["fc1.input_scale"], input_scale(x))
    mlp(x).sum().backward()
    assert mlp.fc1.weight.grad is not None


def test_a_llama_is_calibrated_by_its_own_keyword_forward(tiny_llama, batches):
    model = tiny_llama()
    with CalibrationSession(model, "FP8", ignore=["lm_head"]) as session, torch.no_grad():
        for batch in batches:
            model(**batch)
    assert session.result.batches == 3
    assert len(session.result.modules) == 14
    # per layer and batch: q=k=v, o, gate=up, down
    assert session.result.measurements == 3 * 2 * 4


# ---------------------------------------------------------------------- one measurement of one tensor


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modules_that_read_one_tensor_measure_it_once(mode):
    model, x = Shared(), torch.randn(4, 16)
    with mode(), CalibrationSession(model, STATIC) as session:
        model(x)
        model(x * 2)
    assert session.result.measurements == 2
    assert session.result.input_ranges.keys() == {"q_proj", "k_proj", "v_proj"}
    assert len({tuple(r) for r in session.result.input_ranges.values()}) == 1
    assert torch.equal(model.v_proj.input_scale, input_scale(x * 2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_tensor_that_was_changed_in_place_is_measured_again(mode):
    model = Shared(change=True)
    with mode(), CalibrationSession(model, STATIC) as session:
        x = torch.randn(4, 16)
        model(x)
    assert session.result.measurements == 2
    assert torch.equal(model.v_proj.input_scale, input_scale(x))
    assert torch.equal(model.q_proj.input_scale * 3, input_scale(x))


@pytest.mark.usefixtures("own_registry")
def test_an_observer_of_one_s_own_is_not_given_another_s_measurement():
    @Observer.register("clipped")
    class Clipped(Observer.get_value_from_registry("static_minmax")):
        def update_statistics_from_observed(self, observed):
            super().update_statistics_from_observed(observed.clamp(-1, 1))

    model = Shared()
    with CalibrationSession(model, STATIC, observers={"input": "clipped"}) as session:
        model(torch.randn(4, 16) * 10)
    assert set(session.result.chosen_input_ranges.values()) == {(-1, 1)}


# ---------------------------------------------------------------------- nothing is left behind


def test_no_hook_is_left(mlp):
    with CalibrationSession(mlp, STATIC):
        assert hooks(mlp) == 3
        mlp(torch.randn(4, 16))
    assert hooks(mlp) == 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_no_hook_and_writes_nothing(mlp, error):
    before, session = attributes(mlp), CalibrationSession(mlp, STATIC)

    def stopped():
        with session:
            mlp(torch.randn(4, 16))
            raise error("stop")

    with pytest.raises(error, match="stop"):
        stopped()
    assert hooks(mlp) == 0
    assert attributes(mlp) == before
    assert session.result is None


def test_an_exception_in_the_forward_leaves_no_hook(mlp):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), CalibrationSession(mlp, STATIC):
        mlp(torch.randn(4, 17))
    assert hooks(mlp) == 0


def test_hooks_of_the_user_s_stay(mlp):
    calls = []
    mlp.fc1.register_forward_pre_hook(lambda module, args: calls.append("pre"))
    mlp.fc1.register_forward_hook(lambda module, args, output: calls.append("post"))
    for _ in range(2):
        with CalibrationSession(mlp, STATIC):
            mlp(torch.randn(4, 16))
    assert hooks(mlp) == 2
    assert calls == ["pre", "post"] * 2


def test_calibrating_changes_no_output(mlp):
    x = torch.randn(4, 16)
    before = mlp(x)
    with CalibrationSession(mlp, STATIC):
        assert torch.equal(mlp(x), before)
    assert torch.equal(mlp(x), before)


def test_detaching_twice_is_fine_and_finishing_needs_no_block(mlp):
    session = CalibrationSession(mlp, STATIC)
    session.attach()
    mlp(torch.randn(4, 16))
    session.detach()
    session.detach()
    assert session.finalize().modules == ["fc1", "fc2"]


def test_the_caller_can_count_the_batches(mlp):
    session = CalibrationSession(mlp, STATIC)
    session.attach(count_calls=False)
    mlp(torch.randn(4, 16))
    assert session.batches == 0
    session.batches += 7
    assert session.finalize().batches == 7


# ---------------------------------------------------------------------- again


def test_a_second_calibration_forgets_the_first(mlp):
    session, x = CalibrationSession(mlp, STATIC), torch.randn(4, 16)
    with session:
        mlp(x * 10)
    with torch.no_grad():
        mlp.fc1.weight.mul_(0.5)
    with session:
        mlp(x)
    assert torch.equal(mlp.fc1.input_scale, input_scale(x))
    assert torch.equal(mlp.fc1.weight_scale, mlp.fc1.weight.detach().abs().amax(1, keepdim=True) / 127.5)
    assert session.result.batches == 1


def test_weights_are_observed_as_they_are_at_the_end(mlp):
    with CalibrationSession(mlp, "W8A8"), torch.no_grad():
        mlp.fc1.weight.fill_(255)
    assert (mlp.fc1.weight_scale == 2).all()


def test_finishing_twice_observes_the_weights_anew(mlp):
    session = calibrate(mlp, "W8A8", observers={"weight": "static_minmax"})
    with torch.no_grad():
        mlp.fc1.weight.mul_(0.5)
    session.finalize()
    assert torch.equal(mlp.fc1.weight_scale, mlp.fc1.weight.detach().abs().amax(1, keepdim=True) / 127.5)


def test_a_module_that_a_second_calibration_does_not_reach_loses_its_qparams():
    model, x = Experts(), torch.randn(4, 16)
    with CalibrationSession(model, STATIC):
        model(x, chosen=(0, 1, 2))
    with (
        pytest.warns(CalibrationWarning, match="left in full precision"),
        CalibrationSession(model, STATIC, on_missing="warn"),
    ):
        model(x, chosen=(0, 1))
    assert [name for name, _ in calibrated_modules(model)] == ["experts.0", "experts.1"]


# ---------------------------------------------------------------------- what data must be


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
def test_a_fused_group_is_left_in_full_precision_as_a_whole(scheme):
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
    message = r"W8A8 needs no data.*: 2 batches were run.*use scheme='INT8_STATIC'"
    with pytest.warns(CalibrationWarning, match=message) as said:
        calibrate(mlp, "W8A8", *torch.randn(2, 4, 16))
    assert said[0].filename == __file__


def test_data_for_a_weight_only_scheme_is_said_not_to_be_needed(mlp):
    with pytest.warns(CalibrationWarning, match=r"FP8_DYNAMIC needs no data.*not used\.$"):
        calibrate(mlp, "FP8_DYNAMIC", torch.randn(4, 16))


# ---------------------------------------------------------------------- fused groups


def test_nvfp4_global_scales_are_equal_across_q_k_v_and_gate_up(tiny_llama, batches):
    model = tiny_llama(torch.bfloat16)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    with torch.no_grad():
        attention.k_proj.weight.mul_(4)
        mlp.up_proj.weight.mul_(4)
    with CalibrationSession(model, "NVFP4", ignore=["lm_head"]), torch.no_grad():
        for batch in batches:
            model(**batch)
    for group in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
        absmax = torch.stack([m.weight.detach().abs().max() for m in group]).max()
        assert [m.weight_global_scale.item() for m in group] == [(448 * 6 / absmax).item()] * len(group)
        assert len({m.input_global_scale.item() for m in group}) == 1
        assert group[0].weight_global_scale.dtype == torch.float32
    assert attention.o_proj.weight_global_scale != attention.q_proj.weight_global_scale


def test_a_member_that_a_layer_does_not_have_is_skipped():
    """As the sliding attention of Gemma 4, whose v_proj is None."""
    attention = nn.Module()
    attention.q_proj, attention.k_proj, attention.v_proj = nn.Linear(32, 8), nn.Linear(32, 4), None
    calibrate(nn.ModuleDict({"self_attn": attention}), "NVFP4A16", reload="unchecked")
    absmax = max(m.weight.detach().abs().max() for m in (attention.q_proj, attention.k_proj))
    for module in (attention.q_proj, attention.k_proj):
        assert module.weight_global_scale.item() == (448 * 6 / absmax).item()


# ---------------------------------------------------------------------- what llm-compressor's own tests pin


NVFP4_OF_3 = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 3, "scale_dtype": torch.float8_e4m3fn,
}  # fmt: skip
FULL = ([0, 6, 12, 18], [5, 11, 17, 23])
THREES = ([[0, 3], [6, 9], [12, 15], [18, 21]], [[2, 5], [8, 11], [14, 17], [20, 23]])


@pytest.mark.parametrize(
    ("args", "ranges", "quantized_rows"),
    [
        (
            {"num_bits": 4, "strategy": "tensor"},
            ([0], [23]),
            [
                [0, 0, 3.0625, 3.0625, 3.0625, 6.125],
                [6.125, 6.125, 9.1875, 9.1875, 9.1875, 12.25],
                [12.25, 12.25, 15.3125, 15.3125, 15.3125, 18.375],
                [18.375, 18.375, 21.5, 21.5, 21.5, 21.5],
            ],
        ),
        (
            {"num_bits": 4, "strategy": "channel"},
            ([[n] for n in FULL[0]], [[n] for n in FULL[1]]),
            [
                [0, 1.3359, 2, 2.6719, 4, 4.6875],
                [5.875, 7.3438, 7.3438, 8.8125, 10.25, 10.25],
                [11.3125, 13.625, 13.625, 15.875, 15.875, 15.875],
                [18.375, 18.375, 21.5, 21.5, 21.5, 21.5],
            ],
        ),
        (
            {"num_bits": 4, "strategy": "group", "group_size": 3},
            THREES,
            [
                [0, 1.0703, 1.875, 2.6719, 4, 4.6875],
                [6.4375, 7.5, 7.5, 8.8125, 10.25, 10.25],
                [11.1875, 13.0625, 13.0625, 15.875, 15.875, 15.875],
                [18.75, 18.75, 18.75, 21.5, 21.5, 21.5],
            ],
        ),
        (
            NVFP4_OF_3,
            THREES,
            [
                [0, 1.0234, 2.0469, 3.2812, 3.2812, 4.9375],
                [5.4688, 8.1875, 8.1875, 10.6875, 10.6875, 10.6875],
                [9.875, 14.75, 14.75, 16.375, 16.375, 16.375],
                [19.75, 19.75, 19.75, 23, 23, 23],
            ],
        ),
        (
            {"num_bits": 4, "strategy": "block", "block_structure": [2, 3]},
            ([[0, 3], [12, 15]], [[8, 11], [20, 23]]),
            [
                [0, 1.0703, 2.1406, 2.9375, 4.4062, 4.4062],
                [6.4375, 7.5, 7.5, 8.8125, 10.25, 10.25],
                [10.6875, 13.375, 13.375, 15.3125, 15.3125, 18.375],
                [18.75, 18.75, 18.75, 21.5, 21.5, 21.5],
            ],
        ),
    ],
    ids=["tensor", "channel", "group", "tensor_group", "block"],
)
def test_a_weight_has_the_ranges_and_the_quantized_values_that_the_peer_pins(args, ranges, quantized_rows):
    model = nn.Sequential(nn.Linear(6, 4, bias=False, dtype=torch.bfloat16))
    model[0].weight.data = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    session = calibrate(model, {"weights": args}, reload="unchecked")
    low, high = session.observers["0", "weight"].get_min_max()
    assert (low.tolist(), high.tolist()) == ranges
    with quantized(model):
        rows = model(torch.eye(6, dtype=torch.bfloat16)).T
    torch.testing.assert_close(rows, torch.tensor(quantized_rows, dtype=torch.bfloat16), rtol=0, atol=0)
    assert model[0].quantization_status == QuantizationStatus.FROZEN
    assert not [value for value in vars(model[0]).values() if isinstance(value, Observer)]


@pytest.mark.parametrize(
    ("args", "quantized_rows"),
    [
        (
            {"num_bits": 4, "strategy": "tensor"},
            [[0, 1.4688, 1.4688, 2.9375, 4.4062, 4.4062], [5.875, 7.3438, 7.3438, 8.8125, 10.25, 10.25]],
        ),
        (
            {**NVFP4_OF_3, "dynamic": "local"},
            [[0, 0.9844, 1.9688, 3.4062, 3.4062, 5.125], [5.25, 7.875, 7.875, 7.3438, 11, 11]],
        ),
    ],
    ids=["tensor", "tensor_group"],
)
def test_an_input_has_the_range_and_the_quantized_values_that_the_peer_pins(args, quantized_rows):
    model = nn.Sequential(nn.Linear(6, 6, bias=False, dtype=torch.bfloat16))
    model[0].weight.data = torch.eye(6, dtype=torch.bfloat16)
    x = torch.arange(12, dtype=torch.bfloat16).reshape(1, 2, 6)
    session = calibrate(model, {"input_activations": args}, x, reload="unchecked")
    assert session.result.input_ranges["0"] == (0, 11)
    with quantized(model):
        found = model(x)[0]
    torch.testing.assert_close(found, torch.tensor(quantized_rows, dtype=torch.bfloat16), rtol=0, atol=0)


def test_two_calibrations_of_one_model_give_identical_qparams(tiny_llama, batches):
    found = []
    for _ in range(2):
        model = tiny_llama(torch.bfloat16)
        with CalibrationSession(model, "NVFP4", ignore=["lm_head"]) as session, torch.no_grad():
            for batch in batches:
                model(**batch)
        found.append(session.result.qparams)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


# ---------------------------------------------------------------------- resume


def test_a_loaded_state_gives_the_same_qparams_and_outputs(mlp, tmp_path):
    fresh = copy.deepcopy(mlp)
    torch.save(calibrate(mlp, STATIC, torch.randn(4, 16)).state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    CalibrationSession(fresh, STATIC).load_state_dict(state)
    for name, module in calibrated_modules(mlp):
        expected = read_qparams(fresh.get_submodule(name))
        assert expected.keys() == read_qparams(module).keys()
        assert all(torch.equal(value, expected[key]) for key, value in read_qparams(module).items())
    x = torch.randn(4, 16)
    with quantized(mlp), quantized(fresh):
        assert torch.equal(mlp(x), fresh(x))


def test_a_loaded_state_can_be_saved_again(mlp):
    state = calibrate(mlp, STATIC, torch.randn(4, 16)).state_dict()
    session = CalibrationSession(copy.deepcopy(mlp), STATIC)
    session.load_state_dict(state)
    again = session.state_dict()
    assert again["qparams"].keys() == state["qparams"].keys()
    assert all(torch.equal(again["qparams"][key], value) for key, value in state["qparams"].items())


def test_a_saved_state_does_not_change_with_the_model(mlp):
    session = calibrate(mlp, STATIC, torch.randn(4, 16))
    state = session.state_dict()
    before = {key: value.clone() for key, value in state["qparams"].items()}
    mlp.fc1.input_scale.zero_()
    session.result.qparams["fc1.input_scale"].zero_()
    assert all(torch.equal(state["qparams"][key], value) for key, value in before.items())


@pytest.mark.parametrize(
    ("scheme", "options"),
    [("W8A8", {}), (STATIC, {"ignore": "fc2"}), (STATIC, {"observers": {"input": "minmax"}})],
    ids=["scheme", "ignore", "observer"],
)
def test_the_state_of_another_configuration_is_refused(mlp, scheme, options):
    state = calibrate(copy.deepcopy(mlp), STATIC, torch.randn(4, 16)).state_dict()
    assert json.loads(state["config"])["config_groups"]
    before = attributes(mlp)
    with pytest.raises(CalibrationError, match="made with another scheme, other observers or another ignore list"):
        CalibrationSession(mlp, scheme, **options).load_state_dict(state)
    assert attributes(mlp) == before


def test_the_state_of_another_model_is_refused(mlp, cnn):
    state = calibrate(mlp, STATIC, torch.randn(4, 16)).state_dict()
    before = attributes(cnn)
    with pytest.raises(CalibrationError, match="has modules that this model has not: fc1, fc2"):
        CalibrationSession(cnn, STATIC).load_state_dict(state)
    assert attributes(cnn) == before


def test_a_state_of_another_shape_or_format_is_refused(mlp):
    with CalibrationSession(mlp, "W8A8") as session:
        pass
    other = CalibrationSession(type(mlp)(width=64), "W8A8")
    with pytest.raises(CalibrationError, match="weights with other shapes: fc1"):
        other.load_state_dict(session.state_dict())
    with pytest.raises(CalibrationError, match="a format that this version does not know"):
        session.load_state_dict({**session.state_dict(), "format": 2})
    assert not hasattr(other.model.fc1, "weight_scale")


# ---------------------------------------------------------------------- inputs of weights

WEIGHTED = {"weights": {"num_bits": 4, "strategy": "channel", "observer": "imatrix_mse"}}


def test_a_weight_observer_that_needs_inputs_gets_them_and_makes_data_needed(mlp):
    x = torch.randn(5, 16)
    session = CalibrationSession(mlp, WEIGHTED)
    assert session.needs_data
    with session:
        mlp(x)
    by_hand = Observer.load_from_registry(
        "imatrix_mse", base_name="weight", args=session.plan.targets[0].args["weight"]
    )
    by_hand.observe_inputs(x)
    assert torch.equal(mlp.fc1.weight_scale, by_hand(mlp.fc1.weight.detach()).get_qparams()["scale"])
    assert not hasattr(mlp.fc1, "input_scale")


def test_inputs_of_q_k_v_are_squared_once(tiny_llama, batches):
    model = tiny_llama()
    session = CalibrationSession(model, WEIGHTED, ignore="lm_head")
    with session:
        model(**batches[0])
    layers = model.config.num_hidden_layers
    assert session.result.measurements == 4 * layers  # q/k/v, o, gate/up, down
    observers = {name.rpartition(".")[2]: obs for (name, _), obs in session.observers.items() if ".0." in name}
    assert torch.equal(observers["q_proj"].input_squares, observers["v_proj"].input_squares)


def test_finishing_twice_keeps_the_importance_and_attaching_anew_forgets_it(mlp):
    session = CalibrationSession(mlp, WEIGHTED)
    with session:
        mlp(torch.randn(5, 16))
    first = mlp.fc1.weight_scale.clone()
    session.finalize()
    assert torch.equal(mlp.fc1.weight_scale, first)
    session.attach()
    with pytest.raises(CalibrationError, match="saw no data"):
        session.finalize()


def test_a_weight_whose_inputs_no_data_reached_is_an_error_that_names_it():
    model = Experts()
    with pytest.raises(CalibrationError, match=r"experts\.1 \(inputs for its weight\)"):
        calibrate(model, WEIGHTED, torch.randn(3, 16))


def test_importance_can_be_done_without_on_request():
    model = Experts()
    scheme = {"weights": {**WEIGHTED["weights"], "observer_kwargs": {"strict": False}}}
    calibrate(model, scheme, torch.randn(3, 16))
    assert all(hasattr(expert, "weight_scale") for expert in model.experts)


def test_an_observer_that_needs_inputs_is_refused_for_a_convolution(cnn):
    with pytest.raises(CalibrationError, match=r"\(Conv2d\).*memoryless_mse"):
        CalibrationSession(cnn, {"weights": WEIGHTED["weights"], "targets": ["Conv2d"]})


# ---------------------------------------------------------------------- padding


def padded(batches):
    """Input ids with junk where the mask is zero, and the mask."""
    ids = batches[0]["input_ids"].clone()
    mask = torch.ones_like(ids)
    for row in range(len(ids)):
        mask[row, ids.shape[1] - row - 1 :] = 0
    return ids, mask


@pytest.mark.parametrize("observer", ["static_minmax", "histogram", "minmax", "normal_observer"])
def test_masked_tokens_reach_no_observer(mlp, observer):
    x, mask = torch.randn(2, 3, 16), torch.tensor([[1, 1, 0], [1, 0, 0]])
    x[mask == 0] = 1e6
    masked = CalibrationSession(mlp, "INT8_STATIC", observers={"input": observer})
    with masked:
        masked.mask_tokens(mask)
        mlp(x)
    first, second = mlp.fc1.input_scale.item(), mlp.fc2.input_scale.item()
    with CalibrationSession(mlp, "INT8_STATIC", observers={"input": observer}):
        mlp(x[mask.bool()])
    assert first == mlp.fc1.input_scale.item()
    assert second == pytest.approx(mlp.fc2.input_scale.item(), rel=1e-6)  # another shape, another order of sums


def test_the_mask_is_read_from_the_model_s_call(tiny_llama, batches):
    ids, mask = padded(batches)
    model = tiny_llama()
    session = CalibrationSession(model, "INT8_STATIC", ignore="lm_head", token_mask="attention_mask")
    seen = []
    with session:
        handle = model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        model(input_ids=ids, attention_mask=mask)
        handle.remove()
    kept = seen[0][mask.bool()]
    assert session.result.input_ranges["model.layers.0.mlp.down_proj"] == (kept.min().item(), kept.max().item())
    assert seen[0].abs().max() >= kept.abs().max()


def test_importance_is_of_the_tokens_that_count(mlp):
    x, mask = torch.randn(2, 3, 16), torch.tensor([[1, 1, 1], [1, 0, 0]])
    session = CalibrationSession(mlp, WEIGHTED)
    with session:
        session.mask_tokens(mask)
        mlp(x)
    observer = session.observers["fc1", "weight"]
    assert observer.input_count.item() == 4
    assert torch.allclose(observer.input_squares, x[mask.bool()].double().square().sum(0), rtol=1e-6)


def test_a_call_without_its_mask_is_an_error(tiny_llama, batches):
    model = tiny_llama()
    session = CalibrationSession(model, "INT8_STATIC", ignore="lm_head", token_mask="attention_mask")
    with pytest.raises(CalibrationError, match="token_mask='attention_mask' was not given"), session:
        model(**batches[0])


def test_rows_that_cannot_be_told_apart_are_an_error(mlp):
    session = CalibrationSession(mlp, "INT8_STATIC")
    session.attach()
    session.mask_tokens(torch.ones(2, 3))
    with pytest.raises(CalibrationError, match=r"which rows are padding.*\(5, .*\(2, 3\)"):
        mlp(torch.randn(5, 16))
    session.detach()


def test_a_mask_of_four_dimensions_is_refused(mlp):
    session = CalibrationSession(mlp, "INT8_STATIC")
    with pytest.raises(CalibrationError, match=r"not a token mask.*\(2, 1, 3, 3\)"), session:
        session.mask_tokens(torch.ones(2, 1, 3, 3))
