from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_obs.errors import CalibrationError
from lightning_obs.observers import Observer, StaticMinMaxObserver
from lightning_obs.observers.segments import observe_segments, takes_segments
from tests.observers.contract import range_of, two_tensors

INT8 = QuantizationArgs(num_bits=8)


def make(name: str, base_name: str = "input", args: QuantizationArgs = INT8, **kwargs) -> Observer:
    return Observer.load_from_registry(name, base_name=base_name, args=args, **kwargs)


def test_memoryless_minmax_keeps_the_last_tensor_only():
    observer = make("memoryless_minmax")(torch.tensor([[-9.0, 9.0]]))(torch.tensor([[-1.0, 2.0]]))
    assert observer.get_min_max() == (-1, 2)


def test_static_minmax_keeps_the_range_of_everything():
    observer = make("static_minmax")
    for low, high in ((-1.0, 2.0), (-3.0, 1.0), (0.0, 0.5)):
        observer(torch.tensor([[low, high]]))
    assert observer.get_min_max() == (-3, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("args", [INT8, QuantizationArgs(num_bits=4, group_size=8)], ids=["tensor", "group"])
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_static_minmax_ignores_how_the_data_is_cut(parts, args, dtype):
    x = torch.randn(8, 16, 32, dtype=dtype)
    observer = make("static_minmax", args=args)
    for part in x.chunk(parts)[::-1]:
        observer(part)
    grouped = x.reshape(-1, *observer.min_vals.shape, x.shape[-1] // observer.min_vals.numel())
    low, high = observer.get_min_max()
    assert torch.equal(low, grouped.amin((0, -1)))
    assert torch.equal(high, grouped.amax((0, -1)))
    assert low.dtype == dtype


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=5), min_size=1, max_size=5))
def test_static_minmax_is_the_smallest_and_the_largest_value(batches):
    observer = make("static_minmax")
    for batch in batches:
        observer(torch.tensor([batch]))
    values = [x for batch in batches for x in batch]
    assert observer.get_min_max() == (min(values), max(values))


# The next two hold the numbers that llm-compressor's own tests of minmax pin.
@pytest.mark.parametrize(
    "values", [torch.linspace(0, 1, 10), torch.ones(5, dtype=torch.long)], ids=["floats", "integers"]
)
@pytest.mark.parametrize(
    ("symmetric", "scale", "zero_point"),
    [(True, 1 / 127.5, 0), (False, 1 / 255, -128)],
    ids=["symmetric", "asymmetric"],
)
@pytest.mark.parametrize("name", ["memoryless_minmax", "static_minmax", "minmax"])
def test_values_up_to_1_give_the_scale_that_the_peer_pins(name, symmetric, scale, zero_point, values):
    qparams = make(name, "weight", QuantizationArgs(num_bits=8, symmetric=symmetric))(values).get_qparams()
    assert qparams["scale"].item() == pytest.approx(scale, rel=1e-6)
    assert round(qparams["scale"].item(), 4) == (0.0078 if symmetric else 0.0039)
    assert qparams["zero_point"].item() == zero_point


def test_minmax_takes_one_percent_of_an_outlier_as_the_peer_pins():
    observer = make("minmax")(torch.tensor([[1.0]]))(torch.tensor([[127.0, 1.0]]))
    assert observer.max_vals.item() == pytest.approx(2.26, abs=1e-6)
    observer = make("minmax")(torch.tensor([[1.0]]))(torch.tensor([[-128.0, 1.0]]))
    assert observer.min_vals.item() == pytest.approx(-0.29, abs=1e-6)


@pytest.mark.parametrize("constant", [None, 0.3])
def test_minmax_is_the_recurrence(constant):
    observer = make("minmax", **({} if constant is None else {"averaging_constant": constant}))
    c = 0.01 if constant is None else constant
    low = high = None
    for x in torch.randn(5, 6, 4):
        observer(x)
        low = x.min() if low is None else low * (1 - c) + x.min() * c
        high = x.max() if high is None else high * (1 - c) + x.max() * c
    assert observer.get_min_max() == (low, high)


def test_minmax_with_constant_1_keeps_the_last_tensor_only():
    observer = make("minmax", averaging_constant=1)(torch.tensor([[-9.0, 9.0]]))(torch.tensor([[-1.0, 2.0]]))
    assert observer.get_min_max() == (-1, 2)


@pytest.mark.parametrize("constant", [0, -0.1, 1.1])
def test_an_averaging_constant_outside_0_to_1_is_refused(constant):
    with pytest.raises(CalibrationError, match=rf"averaging_constant. Got {constant}, expected a value in \(0, 1\]"):
        make("minmax", averaging_constant=constant)


@pytest.mark.parametrize("name", ["memoryless_minmax", "static_minmax", "minmax"])
@pytest.mark.parametrize(
    ("base_name", "args", "shape", "ranges"),
    [
        ("weight", QuantizationArgs(strategy="channel"), (6, 8), (6, 1)),
        ("weight", QuantizationArgs(num_bits=4, group_size=4), (6, 8), (6, 2)),
        ("weight", QuantizationArgs(strategy="block", block_structure=[4, 8]), (6, 8), (2, 1)),
        ("k", QuantizationArgs(strategy="attn_head"), (2, 3, 5, 4), (3, 1, 1)),
        ("input", INT8, (2, 5, 8), (1,)),
    ],
)
def test_ranges_have_the_shape_of_the_scales(name, base_name, args, shape, ranges):
    observer = make(name, base_name, args)(torch.randn(shape))(torch.randn(shape))
    assert observer.min_vals.shape == observer.max_vals.shape == ranges
    assert observer.get_qparams()["scale"].shape == ranges


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("static_minmax", {}),
        ("minmax", {"observer_kwargs": {"averaging_constant": 0.3}}),
        ("memoryless_minmax", {"strategy": "group", "group_size": 2}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_are_observed_as_tensors_one_after_the_other(name, args, dtype):
    def make():
        return [Observer.load_from_registry(name, base_name="input", args=QuantizationArgs(**args)) for _ in range(4)]

    torch.manual_seed(0)
    apart, together, lengths = make(), make(), [3, 0, 5]
    for numbers in ([0, 1, 2, 2], [2, 0, 0, 1]):  # the second and the fourth have statistics in one round only
        parts = torch.randn(8, 4, dtype=dtype).split(lengths)
        for observer, number in zip(apart, numbers, strict=True):
            observer(parts[number])
        observe_segments(together, torch.cat(parts), lengths, numbers)
    for one, other in zip(apart, together, strict=True):
        assert one.get_statistics().keys() == other.get_statistics().keys()
        assert all(torch.equal(*ends) for ends in zip(one.get_min_max(), other.get_min_max(), strict=True))
        assert one.min_vals.dtype == other.min_vals.dtype


def test_an_observer_that_measures_in_another_way_takes_no_segments():
    class Half(StaticMinMaxObserver):
        def measure(self, observed):
            return tuple(end / 2 for end in super().measure(observed))

    class ByGuide(StaticMinMaxObserver):
        def update_statistics_from_observed(self, observed):
            self.min_vals, self.max_vals = observed.amin((0, -1)), observed.amax((0, -1))

    args = QuantizationArgs()
    assert takes_segments(StaticMinMaxObserver("input", args))
    assert not any(takes_segments(cls("input", args)) for cls in (Half, ByGuide))
    assert not takes_segments(Observer.load_from_registry("mse", base_name="input", args=args))


# ---------------------------------------------------------------------- any values


@settings(max_examples=25)
@given(two_tensors())
def test_memoryless_minmax_is_the_range_of_any_last_tensor(pair):
    observed = range_of(make("memoryless_minmax"), *pair)
    assert (observed.low, observed.high) == (pair[1].min(), pair[1].max())


@settings(max_examples=25)
@given(two_tensors())
def test_static_minmax_is_the_range_of_any_two_tensors(pair):
    observed = range_of(make("static_minmax"), *pair)
    assert observed.low == min(value.min() for value in pair)
    assert observed.high == max(value.max() for value in pair)


@settings(max_examples=25)
@given(two_tensors())
def test_minmax_lies_between_the_ranges_of_any_two_tensors(pair):
    assert range_of(make("minmax"), *pair).is_between(*pair)
