"""Negative scales, which give the lowest code of a symmetric integer format to the larger end."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize
from torch import nn

from lightning_obs import CalibrationError, CalibrationSession
from lightning_obs.numerics.fake_quantize import fake_quantize as with_gradients
from lightning_obs.numerics.fake_quantize import learned_scale
from lightning_obs.observers import Observer

NAMES = ["memoryless_minmax", "static_minmax", "minmax", "memoryless_mse", "mse", "imatrix_mse"]
GROUP = {"num_bits": 4, "group_size": 16}
STRATEGIES = [
    {"strategy": "tensor"},
    {"strategy": "channel"},
    {"strategy": "group", "group_size": 16},
    {"strategy": "block", "block_structure": [4, 16]},
]
every_observer = pytest.mark.parametrize("name", NAMES)


def observe(name, weight, args, **kwargs):
    observer = Observer.load_from_registry(
        name, base_name="weight", args=QuantizationArgs(num_bits=4, **args), **kwargs
    )
    if observer.needs_inputs:
        observer.observe_inputs(torch.ones(1, weight.shape[1]))
    return observer(weight)


def error(observer, weight):
    qparams = observer.get_qparams()
    back = fake_quantize(weight, qparams["scale"], qparams["zero_point"], observer.args)
    return (back - weight).double().square().sum()


@every_observer
@pytest.mark.parametrize("args", STRATEGIES, ids=lambda a: a["strategy"])
def test_the_larger_end_gets_the_lowest_code(name, args):
    weight = torch.randn(8, 64)
    observer = observe(name, weight, args, signed=True)
    low, high = observer.get_min_max()
    scale = observer.get_qparams()["scale"]
    assert torch.equal(scale < 0, high > -low)
    assert torch.equal(scale.abs(), torch.maximum(-low, high) / 8)
    assert torch.equal(observer.get_qparams()["zero_point"], torch.zeros_like(scale))


@every_observer
def test_scales_are_rounded_to_the_dtype_that_the_format_has(name):
    weight = torch.randn(8, 64)
    weight[0] = 0
    scale = observe(name, weight, {"group_size": 16, "scale_dtype": torch.float16}, signed=True).get_qparams()["scale"]
    plain = observe(name, weight, {"group_size": 16}, signed=True).get_qparams()["scale"]
    assert scale.dtype == torch.float32
    assert torch.equal(scale, scale.half().float())
    assert not torch.equal(plain, plain.half().float())
    assert 0 < (scale < 0).sum() < scale.numel()
    assert scale[0].unique().tolist() == [torch.finfo(torch.float16).eps]


@pytest.mark.parametrize("name", ["memoryless_minmax", "memoryless_mse", "imatrix_mse"])
def test_less_is_lost_than_with_positive_scales(name):
    weight = torch.distributions.StudentT(4.0).sample((64, 256))
    lost = [error(observe(name, weight, {"group_size": 32}, signed=signed), weight) for signed in (True, False)]
    assert lost[0] < 0.97 * lost[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_search_has_the_least_error_of_all_candidates(dtype):
    weight = torch.randn(16, 64).to(dtype)
    found = observe("memoryless_mse", weight, {"strategy": "channel"}, signed=True, patience=100, norm=2.0)
    plain = observe("memoryless_minmax", weight, {"strategy": "channel"}, signed=True)

    def lost(low, high):
        plain.min_vals, plain.max_vals = low, high
        scale = plain.get_qparams()["scale"].double()
        return (((weight / scale).round().clamp(-8, 7) * scale - weight) ** 2).sum(-1, keepdim=True)

    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    low, high = low * (16 / 15), high * (16 / 15)  # where candidates of positive scales begin
    every = [lost((low * (1 - i / 100)).to(dtype), (high * (1 - i / 100)).to(dtype)) for i in range(20)]
    torch.testing.assert_close(lost(*found.get_min_max()), torch.stack(every).amin(0), rtol=1e-5, atol=0)


def test_equal_ends_have_a_positive_scale_and_zeros_one_that_divides():
    weight = torch.tensor([[-1.0, 1.0], [0.0, 0.0]])
    scale = observe("memoryless_minmax", weight, {"strategy": "channel"}, signed=True).get_qparams()["scale"]
    assert scale.flatten().tolist() == [0.125, torch.finfo(torch.float32).eps]


@pytest.mark.parametrize(
    ("base_name", "args"),
    [
        ("input", {"num_bits": 8}),
        ("weight", {"num_bits": 8, "type": "float"}),
        ("weight", {"num_bits": 4, "symmetric": False}),
        ("weight", {"num_bits": 4, "scale_dtype": torch.float8_e4m3fn, "group_size": 16}),
    ],
)
@pytest.mark.parametrize("name", ["memoryless_minmax", "mse"])
def test_they_are_refused_where_they_mean_nothing(base_name, args, name):
    args = QuantizationArgs(observer_kwargs={"signed": True}, **args)
    with pytest.raises(CalibrationError, match="signed scales are for weights in symmetric integer formats"):
        Observer.load_from_registry(name, base_name=base_name, args=args)


def test_a_negative_scale_that_nobody_asked_for_is_refused():
    class Negative(Observer):
        def update_statistics_from_observed(self, observed):
            self.min_vals, self.max_vals = observed.amin((0, -1)), observed.amax((0, -1))

        def get_qparams(self):
            return {**super().get_qparams(), "scale": -super().get_qparams()["scale"]}

    Observer.register_value(Negative, "negative_scales")
    scheme = {"weights": {**GROUP, "observer": "negative_scales"}}
    with (
        pytest.raises(CalibrationError, match="scales are not finite and positive"),
        CalibrationSession(nn.Sequential(nn.Linear(16, 4)), scheme),
    ):
        pass


def test_a_saved_calibration_is_taken_up():
    torch.manual_seed(1)
    scheme = {"weights": {**GROUP, "observer": "memoryless_mse", "observer_kwargs": {"signed": True}}}
    first, second = (CalibrationSession(nn.Sequential(nn.Linear(64, 8)), scheme) for _ in range(2))
    first.finalize()
    second.load_state_dict(first.state_dict())
    scale = second.model[0].weight_scale
    assert torch.equal(scale, first.model[0].weight_scale)
    assert 0 < (scale < 0).sum() < scale.numel()


def test_a_gradient_passes_where_nothing_is_clipped_and_moves_the_scale():
    args = QuantizationArgs(num_bits=4)
    for sign in (1.0, -1.0):
        weight = torch.tensor([0.2, 1.0, 9.0, -9.0], requires_grad=True)
        scale = torch.tensor([0.5 * sign], requires_grad=True)
        quantized = with_gradients(weight, scale, None, args)
        quantized.sum().backward()
        assert quantized.tolist() == [0.0, 1.0, 3.5 if sign > 0 else 4.0, -4.0 if sign > 0 else -3.5]
        assert weight.grad.tolist() == [1.0, 1.0, 0.0, 0.0]
        # (0 - 0.4) + (2 - 2) of the values inside, the codes 7 and -8 of the others
        assert scale.grad.item() == pytest.approx((-0.4 * sign - 1) * (4 * 7) ** -0.5)


def test_a_learned_scale_keeps_its_sign():
    calibrated, factor = torch.tensor([-0.25, 0.25]), torch.tensor([-500.0, -500.0])
    assert learned_scale(calibrated, torch.zeros(2)).tolist() == [-0.25, 0.25]
    assert learned_scale(calibrated, factor).sign().tolist() == [-1.0, 1.0]
