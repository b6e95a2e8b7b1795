from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize, preset_name_to_scheme
from hypothesis import given, settings
from torch.distributed import ReduceOp

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.candidates import shrink_factors
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.qparams import flatten_for_calibration, observed_range
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.ranges import search_range
from lightning_obs.observers import MovingAverageMSEObserver, Observer
from lightning_obs.observers.observer import observe_shared
from tests.observers.contract import range_of, two_tensors

INT8 = QuantizationArgs(num_bits=8)
INT4 = QuantizationArgs(num_bits=4, strategy="channel")
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
NAMES = ["memoryless_mse", "mse", "nvfp4_expanded_mse"]

every_observer = pytest.mark.parametrize("name", NAMES)


def make(name: str, base_name: str = "weight", args: QuantizationArgs = INT8, **kwargs) -> Observer:
    return Observer.load_from_registry(name, base_name=base_name, args=args, **kwargs)


def loss(weight, args, name):
    """Mean squared error of a weight quantized with an observer's qparams."""
    qparams = make(name, args=args)(weight).get_qparams()
    back = fake_quantize(weight, qparams["scale"], qparams["zero_point"], args, global_scale=qparams["global_scale"])
    return (weight - back).square().mean().item()


# ---------------------------------------------------------------------- what llm-compressor's own tests pin


@pytest.mark.parametrize(
    ("strategy", "symmetric", "expected"),
    [
        ("tensor", True, 4.8103e-06),
        ("tensor", False, 1.1258e-06),
        ("channel", True, 2.5675e-06),
        ("channel", False, 2.3696e-07),
        ("group", True, 3.1282e-06),
        ("group", False, 1.3794e-07),
        ("block", True, 2.8968e-06),
        ("block", False, 5.6068e-07),
    ],
)
def test_mse_loses_what_the_peer_pins(strategy, symmetric, expected):
    cut = {"group": {"group_size": 2}, "block": {"block_structure": [3, 2]}}.get(strategy, {})
    args = QuantizationArgs(num_bits=8, strategy=strategy, symmetric=symmetric, **cut)
    assert loss(torch.arange(24).reshape(6, 4) / 24, args, "mse") == pytest.approx(expected, abs=1e-10)


def test_mse_is_the_moving_average():
    assert type(make("mse")) is MovingAverageMSEObserver


@every_observer
def test_fp4_loses_little(name):
    weight = torch.arange(24 * 16, dtype=torch.float32).reshape(24, 16) / (24 * 16)
    assert loss(weight, NVFP4, name) <= 0.0015


@pytest.mark.parametrize("name", ["memoryless_mse", "mse"])
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_a_symmetric_weight_loses_no_more_than_with_its_full_range(strategy, num_bits, name):
    args = QuantizationArgs(num_bits=num_bits, strategy=strategy)
    weight = torch.randn(16, 64)
    kept = make(name, args=args, norm=2.0)(weight).get_qparams()
    back = fake_quantize(weight, kept["scale"], kept["zero_point"], args)
    assert (weight - back).square().mean().item() <= loss(weight, args, "memoryless_minmax")


@pytest.mark.parametrize("std", [0.05, 0.2, 1.0])
@pytest.mark.parametrize(
    ("strategy", "symmetric", "num_bits", "allowed"),
    [
        ("tensor", True, 8, 1.0),
        ("tensor", False, 8, 1.1),
        ("channel", True, 8, 1.1),
        ("channel", False, 8, 1.1),
        ("tensor_group", True, 4, 1.1),
        ("tensor_group", False, 4, 1.1),
        ("channel", True, 4, 1.1),
        ("channel", False, 4, 1.1),
    ],
)
def test_by_default_a_weight_loses_no_more_than_the_peer_allows(strategy, symmetric, num_bits, allowed, std):
    """The default norm of 2.4 is not that of the mean squared error; for one symmetric scale it loses no more still."""
    group_size = 32 if strategy == "tensor_group" else None
    args = QuantizationArgs(num_bits=num_bits, strategy=strategy, symmetric=symmetric, group_size=group_size)
    weight = torch.randn(128, 256) * std
    assert loss(weight, args, "memoryless_mse") <= loss(weight, args, "memoryless_minmax") * allowed


def test_expanding_loses_less_in_nvfp4():
    weight = torch.randn(64, 64)
    assert loss(weight, NVFP4, "nvfp4_expanded_mse") < loss(weight, NVFP4, "memoryless_mse")
    assert loss(weight, NVFP4, "memoryless_mse") < loss(weight, NVFP4, "memoryless_minmax")


# ---------------------------------------------------------------------- the search behind the names


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("memoryless_mse", {"maxshrink": 0.2, "patience": 5, "grid": 100, "norm": 2.4, "expand": 1}),
        ("mse", {"maxshrink": 0.2, "patience": 5, "grid": 100, "norm": 2.4, "expand": 1, "averaging_constant": 0.01}),
        (
            "nvfp4_expanded_mse",
            {"maxshrink": 1 - 0.8 / 1.8, "patience": 1000, "grid": 200, "norm": 2.4, "expand": 1.8},
        ),
    ],
)
def test_defaults_are_the_peer_s(name, defaults):
    observer = make(name)
    assert {key: getattr(observer, key) for key in defaults} == defaults


@every_observer
def test_hyperparameters_reach_the_search(name):
    weight = torch.randn(8, 32)
    given = {"maxshrink": 0.5, "patience": 2, "grid": 20, "norm": 2.0, "expand": 1.25}
    found = make(name, args=INT4, **given)(weight).get_min_max()
    observed = flatten_for_calibration(weight, "weight", INT4)
    search = GridSearch(NumberGrid.of(INT4), shrink_factors(0.5, 20), patience=2, norm=2.0, expand=1.25)
    expected = search_range(observed, search)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert not torch.equal(found[0], make(name, args=INT4)(weight).min_vals)


def test_memoryless_mse_keeps_the_last_tensor_only():
    first, last = torch.randn(2, 8, 32)
    observer = make("memoryless_mse", args=INT4)(first)(last)
    assert torch.equal(observer.min_vals, make("memoryless_mse", args=INT4)(last).min_vals)


def test_mse_is_the_recurrence_over_each_tensor_s_range():
    observer = make("mse", "input", averaging_constant=0.3)
    low = high = None
    for x in torch.randn(4, 6, 32):
        observer(x)
        a, b = make("memoryless_mse", "input")(x).get_min_max()
        low, high = (a, b) if low is None else (low * (1 - 0.3) + a * 0.3, high * (1 - 0.3) + b * 0.3)
    assert torch.equal(observer.min_vals, low)
    assert torch.equal(observer.max_vals, high)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_observer
def test_ranges_have_the_dtype_and_shape_of_the_weight_s_scales(name, dtype):
    observer = make(name, args=NVFP4)(torch.randn(6, 32).to(dtype))
    assert observer.min_vals.dtype == observer.max_vals.dtype == dtype
    assert observer.min_vals.shape == observer.get_qparams()["scale"].shape == (6, 2)


@every_observer
def test_an_all_zero_weight_has_a_scale(name):
    scale = make(name, args=INT4)(torch.zeros(3, 8)).get_qparams()["scale"]
    assert (scale > 0).all()


def test_a_weight_of_infinity_is_said():
    weight = torch.randn(3, 8)
    weight[1, 2] = float("inf")
    with pytest.raises(CalibrationError, match=r"not finite. Got 1 of 3 max_vals not finite"):
        make("memoryless_mse", args=INT4)(weight).get_qparams()


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"maxshrink": 1.1}, r"maxshrink. Got 1.1, expected a value in \[0, 1\]"),
        ({"maxshrink": -0.1}, "maxshrink. Got -0.1"),
        ({"patience": -1}, "patience. Got -1, expected a whole number, at least 0"),
        ({"grid": 0}, "grid. Got 0, expected a positive number"),
        ({"grid": float("inf")}, "grid. Got inf"),
        ({"norm": 0}, "norm. Got 0, expected a positive number"),
        ({"norm": float("nan")}, "norm. Got nan"),
        ({"expand": 0.9}, "expand. Got 0.9, expected at least 1"),
        ({"expand": "wide"}, "expand. Got 'wide', expected a number"),
    ],
)
@every_observer
def test_a_hyperparameter_outside_its_values_is_refused(name, given, said):
    with pytest.raises(CalibrationError, match=said):
        make(name, **given)


@every_observer
def test_an_unknown_hyperparameter_is_refused_and_the_known_are_named(name):
    with pytest.raises(
        CalibrationError,
        match=r"has no hyperparameter 'max_shrink' .did you mean `maxshrink`.*Expected .*maxshrink, patience",
    ):
        make(name, max_shrink=0.5)


@pytest.mark.parametrize("constant", [0, 1.1])
def test_mse_refuses_an_averaging_constant_outside_0_to_1(constant):
    with pytest.raises(CalibrationError, match=rf"averaging_constant. Got {constant}"):
        make("mse", averaging_constant=constant)


# ---------------------------------------------------------------------- sharing and ranks


def test_q_k_and_v_share_one_search():
    measured = {}
    x = torch.randn(2, 4, 32)
    group = [make("mse", "input") for _ in range(3)]
    for observer in group:
        observe_shared(observer, x, measured)
    assert len(measured) == 1
    assert all(torch.equal(observer.min_vals, make("mse", "input")(x).min_vals) for observer in group)


@pytest.mark.parametrize(
    "other",
    [
        lambda: make("mse", "input", norm=2.0),
        lambda: make("mse", "input", patience=3),
        lambda: make("mse", "input", QuantizationArgs(num_bits=4)),
        lambda: make("mse", "input", QuantizationArgs(num_bits=8, type="float")),
        lambda: make("mse", "input", QuantizationArgs(num_bits=8, symmetric=False)),
    ],
    ids=["norm", "patience", "bits", "type", "symmetry"],
)
def test_a_search_is_not_shared_where_it_would_find_another_range(other):
    measured = {}
    x = torch.randn(2, 4, 32)
    observe_shared(make("mse", "input"), x, measured)
    observe_shared(other(), x, measured)
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("memoryless_mse", {}),
        ("mse", {"min_vals": ReduceOp.AVG, "max_vals": ReduceOp.AVG}),
        ("nvfp4_expanded_mse", {}),
    ],
)
def test_statistics_declare_their_reduction(name, expected):
    assert make(name)._act_sync_dict == expected


def test_without_a_search_the_range_is_the_observed_one():
    weight = torch.randn(8, 32)
    observer = make("memoryless_mse", args=INT4, maxshrink=0)(weight)
    assert torch.equal(observer.min_vals, observed_range(flatten_for_calibration(weight, "weight", INT4))[0])


# ---------------------------------------------------------------------- any values


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("name", "most"), [("memoryless_mse", 1), ("nvfp4_expanded_mse", 1.8)])
@settings(max_examples=25)
@given(pair=two_tensors())
def test_the_range_is_that_of_any_last_tensor_times_one_factor(name, most, pair):
    assert range_of(make(name, "input"), *pair).is_scaled(pair[1], 0.8, most)


@settings(max_examples=25)
@given(two_tensors())
def test_mse_lies_between_the_shrunk_ranges_of_any_two_tensors(pair):
    assert range_of(make("mse", "input"), *pair).is_between(*pair, least=0.8)
