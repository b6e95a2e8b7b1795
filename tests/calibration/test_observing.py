"""What of the data reaches an observer, and how often it is measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationSession, quantized
from lightning_obs.errors import CalibrationError
from lightning_obs.model.module_qparams import read_qparams
from lightning_obs.observers import Observer
from tests.calibration.common import STATIC, Experts, Shared, calibrate, input_scale


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
def test_a_buffer_that_is_filled_again_between_batches_is_measured_again(mode):
    with mode():
        model, buffer = nn.Sequential(nn.Linear(16, 8)), torch.ones(4, 16)
        with CalibrationSession(model, STATIC) as session:
            for _ in range(3):
                model(buffer)
                buffer.mul_(2)
    assert session.result.input_ranges == {"0": (1.0, 4.0)}


@pytest.mark.parametrize(
    ("mode", "observer"),
    [(mode, observer) for mode in (torch.no_grad, torch.inference_mode) for observer in ("static_minmax", "mse")],
)
def test_modules_that_read_one_tensor_measure_it_once(mode, observer):
    model, x = Shared(), torch.randn(4, 16)
    options = {"averaging_constant": 1.0, "maxshrink": 0.0} if observer == "mse" else {}
    observers = {"input": {"name": observer, **options}}
    with mode(), CalibrationSession(model, STATIC, observers=observers) as session:
        model(x)
        model(x * 2)
    assert session.result.measurements == (4 if observer == "mse" else 2)  # of a search, the extremes too
    assert session.result.input_ranges.keys() == {"q_proj", "k_proj", "v_proj"}
    assert len({tuple(r) for r in session.result.input_ranges.values()}) == 1
    assert torch.equal(model.v_proj.input_scale, input_scale(x * 2))


@pytest.mark.parametrize("observer", ["static_minmax", "percentile", "mse"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("columns", [slice(16, None), slice(None, None, 2), slice(17, 18)])
def test_no_change_in_place_between_two_readers_is_missed(mode, observer, columns):
    class TwoReaders(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(32, 4), nn.Linear(32, 4)

        def forward(self, x):
            y = self.first(x)
            x[..., columns] *= 100
            return y + self.second(x)

    model, other = TwoReaders(), TwoReaders()
    x = torch.randn(4, 64, 32)
    for each, mode_of_each in ((model, mode), (other, torch.no_grad)):
        session = CalibrationSession(each, STATIC, observers={"input": observer})
        with mode_of_each(), session:
            each(x.clone())
    assert torch.equal(model.first.input_scale, other.first.input_scale)
    assert torch.equal(model.second.input_scale, other.second.input_scale)
    assert model.second.input_scale > 20 * model.first.input_scale


def test_a_tensor_that_was_changed_in_place_is_measured_again():
    model = Shared(change=True)
    with torch.no_grad(), CalibrationSession(model, STATIC) as session:
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


def test_a_weight_that_lacks_inputs_for_its_range_and_for_its_rounding_is_named_once():
    with pytest.raises(CalibrationError, match="no data reached 4 of 6 observers") as error:
        calibrate(Experts(), WEIGHTED, torch.randn(3, 16), rounding="gptq")
    assert str(error.value).count("experts.1 (inputs for its weight)") == 1


def test_importance_can_be_done_without_on_request():
    model = Experts()
    scheme = {"weights": {**WEIGHTED["weights"], "observer_kwargs": {"strict": False}}}
    calibrate(model, scheme, torch.randn(3, 16))
    assert all(hasattr(expert, "weight_scale") for expert in model.experts)


def test_an_observer_that_needs_inputs_is_refused_for_a_convolution(cnn):
    with pytest.raises(CalibrationError, match=r"\(Conv2d\).*memoryless_mse"):
        CalibrationSession(cnn, {"weights": WEIGHTED["weights"], "targets": ["Conv2d"]})
