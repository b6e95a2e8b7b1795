"""What holds for every built-in observer, whatever the values: one, equal, denormal, huge, negative, none at all."""

from __future__ import annotations

import math

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    initialize_module_for_quantization,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.quant_args import round_to_quantized_type_args
from compressed_tensors.quantization.utils import calculate_qparams, calculate_range
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_obs.observers import Observer
from tests.support.markdown import ROOT

NAMES = sorted(
    name.replace("-", "_")
    for name in Observer.registered_names()
    if Observer.get_value_from_registry(name).__module__.startswith("lightning_obs.")
)
ONE_SCALE_ONLY = {"histogram", "percentile"}
#: observers of weights that want inputs; here they do without
IMPORTANCE = {"imatrix_mse", "nvfp4_expanded_imatrix", "local_hessian", "hessian"}
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
FORMATS = {
    "int8": QuantizationArgs(num_bits=8),
    "int8 asymmetric": QuantizationArgs(num_bits=8, symmetric=False),
    "int4": QuantizationArgs(num_bits=4),
    "fp8": QuantizationArgs(num_bits=8, type="float"),
}
#: where a range's width is still a number, with room for the mean and two deviations
LARGEST = {torch.float32: 1e37, torch.bfloat16: 1e37, torch.float16: 3e4}

every_observer = pytest.mark.parametrize("name", NAMES)


def make(name: str, base_name: str = "input", args: QuantizationArgs = FORMATS["int8"], **kwargs) -> Observer:
    if name in IMPORTANCE:
        base_name, kwargs = "weight", {"strict": False, **kwargs}
    return Observer.load_from_registry(name, base_name=base_name, args=args, **kwargs)


@every_observer
def test_it_has_a_config_and_a_line_of_the_reference(name):
    configs = [ROOT / "configs" / kind / f"{name}.yaml" for kind in ("observer", "weight_observer")]
    assert any(config.is_file() for config in configs)
    observer_class = Observer.get_value_from_registry(name)
    reference = (ROOT / "docs" / "reference" / "observers.md").read_text()
    assert f"::: lightning_obs.observers.{observer_class.__name__}\n" in reference


@st.composite
def tensors(draw, dtypes=(torch.float32, torch.bfloat16, torch.float16)):
    """An activation of any shape, with at least one value."""
    dtype = draw(st.sampled_from(dtypes))
    shape = (*draw(st.lists(st.integers(1, 3), max_size=3)), draw(st.integers(1, 6)))
    info, count = torch.finfo(dtype), math.prod(shape)
    kind = draw(st.sampled_from(["any", "equal", "zeros", "denormal", "huge", "negative", "positive", "one outlier"]))
    low, high = {
        "denormal": (-info.tiny, info.tiny),
        "negative": (-100.0, -0.5),
        "positive": (0.5, 100.0),
        "one outlier": (-0.5, 0.5),
        "huge": (-1.0, 1.0),
    }.get(kind, (-100.0, 100.0))
    unit = st.floats(low, high)
    if kind in ("equal", "zeros"):
        values = [0.0 if kind == "zeros" else draw(unit)] * count
    else:
        values = draw(st.lists(unit, min_size=count, max_size=count))
    if kind == "huge":
        values = [value * LARGEST[dtype] for value in values]
    if kind == "one outlier":
        values[0] = 1000.0
    return torch.tensor(values, dtype=torch.float64).to(dtype).reshape(shape)


# ---------------------------------------------------------------------- scale


@pytest.mark.slow_but_first
@every_observer
@settings(max_examples=25)
@given(data=st.data(), form=st.sampled_from(sorted(FORMATS)))
def test_the_scale_is_finite_and_positive_and_zero_is_on_the_grid(name, data, form):
    first = data.draw(tensors())
    second = data.draw(tensors([first.dtype]))
    args = FORMATS[form]
    observer = make(name, args=args)(torch.empty(0, 4))(first)(torch.empty(2, 0))(second)
    qparams = observer.get_qparams()
    assert torch.isfinite(qparams["scale"]).all()
    assert (qparams["scale"] > 0).all()
    low, high = (float(end) for end in calculate_range(args, "cpu"))
    assert low <= qparams["zero_point"].item() <= high
    assert qparams["zero_point"].dtype == args.zp_dtype
    assert observer.nonfinite_statistics() is None


@every_observer
@settings(max_examples=10)
@given(value=tensors(), empty=st.sampled_from([(0,), (0, 3), (2, 0, 3), (3, 0)]))
def test_an_empty_tensor_changes_nothing_and_a_reset_observer_is_a_new_one(name, value, empty):
    plain, other = make(name)(value), make(name)(torch.empty(empty))
    assert not other.has_statistics
    other(value + 1).reset()
    assert not other.has_statistics
    other(value)(torch.empty(empty, dtype=value.dtype))
    assert all(torch.equal(a, b) for a, b in zip(plain.get_min_max(), other.get_min_max(), strict=True))


WEIGHTS = {
    "tensor": (QuantizationArgs(strategy="tensor"), torch.float32),
    "channel": (QuantizationArgs(strategy="channel"), torch.bfloat16),
    "group": (QuantizationArgs(num_bits=4, strategy="group", group_size=4), torch.float16),
    "block": (QuantizationArgs(strategy="block", block_structure=[4, 8]), torch.float32),
    "block that does not divide": (QuantizationArgs(strategy="block", block_structure=[7, 3]), torch.bfloat16),
    "tensor_group": (NVFP4, torch.bfloat16),
}


@pytest.mark.parametrize(
    ("name", "strategy"), [(n, s) for n in NAMES for s in WEIGHTS if s == "tensor" or n not in ONE_SCALE_ONLY]
)
def test_a_weight_s_qparams_fit_the_module_that_compressed_tensors_initializes(name, strategy):
    args, dtype = WEIGHTS[strategy]
    module = nn.Linear(32, 12, dtype=dtype)
    initialize_module_for_quantization(module, QuantizationScheme(targets=["Linear"], weights=args))
    qparams = make(name, "weight", args)(module.weight).get_qparams()
    assert qparams["scale"].shape == module.weight_scale.shape
    assert qparams["zero_point"].shape == module.weight_zero_point.shape
    assert qparams["zero_point"].dtype == module.weight_zero_point.dtype
    if args.strategy == "tensor_group":
        assert qparams["global_scale"].shape == module.weight_global_scale.shape
    else:
        assert qparams["global_scale"] is None


@every_observer
def test_a_vector_is_observed_as_its_one_row(name):
    x = torch.randn(16)
    vector, row = make(name)(x), make(name)(x[None])
    assert all(torch.equal(a, b) for a, b in zip(vector.get_min_max(), row.get_min_max(), strict=True))
    assert vector.get_qparams()["scale"].shape == (1,)


# ---------------------------------------------------------------------- range


def share_inside(x, low, high):
    return ((x >= low) & (x <= high)).double().mean().item()


@pytest.mark.slow_but_first
@every_observer
@settings(max_examples=25)
@given(data=st.data())
def test_the_range_covers_what_the_observer_promises(name, data):
    first = data.draw(tensors())
    second = data.draw(tensors([first.dtype]))
    low, high = (end.item() for end in make(name)(first)(second).get_min_max())
    last, x = second.double(), torch.cat([first.flatten(), second.flatten()]).double()
    lows, highs = sorted([first.min().item(), last.min().item()]), sorted([first.max().item(), last.max().item()])
    assert low <= high
    rounding = 4 * torch.finfo(first.dtype).eps * x.abs().max().item() + torch.finfo(first.dtype).smallest_normal
    if name == "memoryless_minmax":
        assert (low, high) == (last.min(), last.max())
    elif name == "static_minmax":
        assert (low, high) == (x.min(), x.max())
    elif name == "minmax":  # between the two tensors' ranges
        assert lows[0] - rounding <= low <= lows[1] + rounding
        assert highs[0] - rounding <= high <= highs[1] + rounding
    elif name in ("memoryless_mse", "nvfp4_expanded_mse", *IMPORTANCE):  # the last tensor's, times one factor
        least, most = {"memoryless_mse": (0.8, 1), "imatrix_mse": (0.05, 1)}.get(
            name, (0.8 if "nvfp4" in name else 0.36, 1.8)
        )
        for end, full in ((low, last.min().item()), (high, last.max().item())):
            assert least * abs(full) - rounding <= abs(end) <= most * abs(full) + rounding
            assert end * full >= 0
    elif name == "mse":
        assert min(lows[0], lows[0] * 0.8) - rounding <= low <= max(lows[1], lows[1] * 0.8) + rounding
        assert min(highs[0], highs[0] * 0.8) - rounding <= high <= max(highs[1], highs[1] * 0.8) + rounding
    elif name == "histogram":  # everything's, times one factor
        for end, full in ((low, x.min().item()), (high, x.max().item())):
            assert 0.05 * abs(full) - rounding <= abs(end) <= abs(full) + rounding
            assert end * full >= 0
    elif name == "percentile":  # of so few values, 99.99 percent are all
        assert (low, high) == (x.min(), x.max())
    elif name == "normal_observer":  # Chebyshev: beyond k deviations lies at most 1 / k**2
        assert share_inside(x, low - rounding, high + rounding) >= 0.75
    else:
        pytest.fail(f"say here what {name} promises")


@settings(max_examples=40)
@given(st.lists(st.integers(-200, 200), min_size=1, max_size=60), st.integers(51, 99))
def test_percentile_cuts_no_more_than_its_share_off_each_end(values, percentile):
    x = torch.tensor([values], dtype=torch.bfloat16)
    low, high = make("percentile", percentile=percentile)(x).get_min_max()
    may_go = len(values) - math.ceil(len(values) * percentile / 100)
    assert (x < low).sum() <= may_go
    assert (x > high).sum() <= may_go


# ---------------------------------------------------------------------- least error


FP4 = NVFP4.model_copy(update={"scale_dtype": None})
#: No search counts what float32 cannot: below 1e-15, the error's power of 2.4 is zero for every candidate.
hundredths = st.integers(-(10**4), 10**4).map(lambda n: n / 100)


def error(x, low, high, args, norm):
    """``sum |quantized(x) - x| ** norm`` in float64, with the scale as it is stored."""
    scale, zero_point = (value.double() for value in calculate_qparams(low, high, args))
    levels = round_to_quantized_type_args((x / scale + zero_point).float(), args, *calculate_range(args, "cpu"))
    return ((levels.double() - zero_point) * scale - x).abs().pow(norm).sum().item()


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("name", "factors", "norm"),
    [
        ("memoryless_mse", [1 - i / 100 for i in range(20)], 2.4),
        ("mse", [1 - i / 100 for i in range(20)], 2.4),
        ("nvfp4_expanded_mse", [1.8 * (1 - i / 200) for i in range(111)], 2.4),
        ("histogram", [1 - i / 100 for i in range(95)], 2.0),
    ],
)
@settings(max_examples=40)
@given(values=st.lists(hundredths, min_size=1, max_size=32), form=st.sampled_from([*sorted(FORMATS), "fp4"]))
def test_no_candidate_in_float64_has_less_error_than_the_chosen(name, factors, norm, values, form):
    args = FORMATS.get(form, FP4)
    x = torch.tensor(values, dtype=torch.bfloat16).float()  # the histogram counts bfloat16
    args = args.model_copy(update={"strategy": "tensor", "group_size": None})
    low, high = make(name, args=args, patience=1000)(x[None]).get_min_max()
    every = [error(x.double(), x.min().reshape(1) * p, x.max().reshape(1) * p, args, norm) for p in factors]
    assert error(x.double(), low, high, args, norm) <= min(every) * (1 + 1e-4) + 1e-9 * x.abs().max().item() ** norm
