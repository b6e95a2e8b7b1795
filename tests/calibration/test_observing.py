"""What of the data reaches an observer, and how often it is measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationSession, quantized
from lightning_obs.errors import CalibrationError
from lightning_obs.model.qparams import read_qparams
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


class Layout(nn.Module):
    """Linear modules that read a batch ``(B, T, C)`` in another layout."""

    def __init__(self, change):
        super().__init__()
        self.fc, self.change = nn.Linear(8, 8), change

    def forward(self, x):
        return self.fc(self.change(x))


UNCERTAIN = {
    "time first": lambda x: x.transpose(0, 1),
    "time first, flattened": lambda x: x.transpose(0, 1).flatten(0, 1),
    "flattened": lambda x: x.flatten(0, 1),
    "routed rows, twice the batch": lambda x: x.flatten(0, 1)[torch.tensor([9, 1, 2, 3, 4, 5, 6, 7])],
}


@pytest.mark.parametrize("layout", UNCERTAIN)
@pytest.mark.parametrize(
    "mask",
    [torch.tensor([True, True, True, False]), torch.tensor([[1, 1, 1, 1]] * 3 + [[1, 1, 1, 0]])],
    ids=["B", "BT"],
)
def test_rows_of_which_the_shape_does_not_say_whose_they_are_are_an_error(layout, mask):
    model = Layout(UNCERTAIN[layout])
    session = CalibrationSession(model, "INT8_STATIC", observers={"input": "percentile"})
    session.attach()
    session.mask_tokens(mask)
    with pytest.raises(CalibrationError, match=r"cannot be told from the shape: fc\. Got an activation"):
        model(torch.randn(4, 4, 8))
    session.detach()


@pytest.mark.parametrize("layout", UNCERTAIN)
def test_any_layout_is_observed_whole_where_all_samples_count(layout):
    x, model = torch.randn(4, 4, 8), Layout(UNCERTAIN[layout])
    session = CalibrationSession(model, "INT8_STATIC")
    with session:
        session.mask_tokens(torch.ones(4))
        model(x)
    assert torch.equal(model.fc.input_scale, input_scale(model.change(x)))


def test_as_many_samples_as_tokens_are_told_apart_by_an_earlier_batch():
    x, mask = torch.randn(4, 4, 8), torch.ones(4, 4)
    mask[1, 2:] = 0
    x[mask == 0] = 1e6
    model = Layout(lambda x: x)
    session = CalibrationSession(model, "INT8_STATIC")
    with session:
        session.mask_tokens(torch.ones(2, 4))
        model(x[2:])
        session.mask_tokens(mask)
        model(x)
    assert torch.equal(model.fc.input_scale, input_scale(x[mask.bool()]))


def test_rows_that_were_not_one_for_each_sample_before_are_not_taken_for_samples():
    model = Layout(lambda x: x.flatten(0, 1)[: 4 if len(x) == 4 else 3])
    session = CalibrationSession(model, "INT8_STATIC")
    session.attach()
    session.mask_tokens(torch.ones(2))
    model(torch.randn(2, 4, 8))
    session.mask_tokens(torch.tensor([1, 1, 1, 0]))
    with pytest.raises(CalibrationError, match="repeated cannot be told"):
        model(torch.randn(4, 4, 8))
    session.detach()
