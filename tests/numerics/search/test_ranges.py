"""The range search against a brute-force search in the arithmetic of compressed-tensors, and in float64."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle import fake_quantize
from compressed_tensors.quantization.quant_args import round_to_quantized_type_args
from compressed_tensors.quantization.utils import calculate_qparams, calculate_range
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_obs.numerics.candidates import shrink_factors
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.qparams import flatten_for_calibration, observed_range
from lightning_obs.numerics.search import numba_loop, ranges, torch_loop
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.rows import rows_of_observed

FACTORS = shrink_factors(maxshrink=0.2, grid=100.0)
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
MXFP4, MXFP8 = (preset_name_to_scheme(name, ["Linear"]).weights for name in ("MXFP4", "MXFP8"))
FORMATS = {
    "int4": QuantizationArgs(num_bits=4),
    "int4 asymmetric": QuantizationArgs(num_bits=4, symmetric=False),
    "int8": QuantizationArgs(num_bits=8),
    "int8 asymmetric": QuantizationArgs(num_bits=8, symmetric=False),
    "fp8": QuantizationArgs(num_bits=8, type="float"),
    "fp4": NVFP4,
    "mxfp4": MXFP4,
}
STRATEGIES = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    "group": {"strategy": "group", "group_size": 16},
    "block": {"strategy": "block", "block_structure": [8, 24]},
}
#: candidates whose errors differ by less are equally good
TIE = 1 + 1e-5
every_format = pytest.mark.parametrize("args", FORMATS.values(), ids=FORMATS)


@pytest.fixture(params=["numba", "torch"], autouse=True)
def loop(request, monkeypatch):
    """Every test holds for both loops of a CPU."""
    if request.param == "torch":
        monkeypatch.setattr(numba_loop, "can_run", lambda *_: False)
    return request.param


@pytest.fixture
def assert_agrees(loop):
    """Whether a range is the brute-force one: torch's loop has its bits, numba's may decide a tie otherwise."""
    return assert_same_bits if loop == "torch" else assert_as_good


def search_range(observed, args, factors, importance=None, **options):
    """The chosen range."""
    search = GridSearch(NumberGrid.of(args), factors, **options)
    return ranges.search_range(observed, search, importance=importance)


def brute_force(observed, args, factors, patience=5, norm=2.4, expand=1.0, importance=None):
    """One candidate after the other on the whole tensor, by compressed-tensors' own functions."""
    if args.strategy == "tensor_group":
        args = args.model_copy(update={"scale_dtype": None})
    low, high = observed.amin((0, -1)) * expand, observed.amax((0, -1)) * expand
    best = torch.full_like(low, torch.finfo(torch.float32).max, dtype=torch.float32)
    best_low, best_high, idle, errors = low.clone(), high.clone(), 0, []
    for p in factors:
        scale, zero_point = calculate_qparams(low * p, high * p, args)
        token = args.model_copy(update={"strategy": "token"})
        back = fake_quantize(observed.float(), scale.float().unsqueeze(-1), zero_point.unsqueeze(-1), token)
        lost = (back - observed.float()).abs().pow(norm)
        errors.append((lost if importance is None else lost * importance).sum((0, -1)))
        better = errors[-1] < best
        best = torch.where(better, errors[-1], best)
        best_low, best_high = torch.where(better, low * p, best_low), torch.where(better, high * p, best_high)
        idle = 0 if better.any() else idle + 1
        if patience is not None and idle >= patience:
            break
    return (best_low, best_high), torch.stack(errors)


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def assert_same_bits(found, expected, observed, args, **options):
    assert_same(found, expected)


def assert_as_good(found, expected, observed, args, **options):
    """Where a range is another than expected, it loses no more than a tie allows."""
    assert found[0].dtype == found[1].dtype == expected[0].dtype
    is_same = (found[0] == expected[0]) & (found[1] == expected[1])
    has_nan = expected[0].isnan() & found[0].isnan()
    is_as_good = error_at(observed, args, found, **options) <= error_at(observed, args, expected, **options) * TIE
    assert (is_same | has_nan | is_as_good).all()


def error_at(observed, args, found, norm=2.4, importance=None, **_):
    """Error of a range in float64, with the scale as it is stored."""
    if args.strategy == "tensor_group":
        args = args.model_copy(update={"scale_dtype": None})
    scale, zero_point = (value.double().unsqueeze(-1) for value in calculate_qparams(*found, args))
    x = observed.double()
    q = (x / scale + zero_point).float()
    q = round_to_quantized_type_args(q, args, *calculate_range(args, "cpu")).double()
    lost = ((q - zero_point) * scale - x).abs().pow(norm)
    return (lost if importance is None else lost * importance).sum((0, -1))


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@every_format
def test_the_range_is_the_brute_force_one(args, strategy, assert_agrees):
    if args.strategy == "tensor":
        args = args.model_copy(update=strategy)
    weight = torch.randn(32, 96) * torch.rand(32, 1)
    observed = flatten_for_calibration(weight, "weight", args)
    expected, _ = brute_force(observed, args, FACTORS)
    assert_agrees(search_range(observed, args, FACTORS), expected, observed, args)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("patience 1", {"patience": 1}),
        ("patience 3", {"patience": 3}),
        ("no end", {"patience": None}),
        ("norm 2", {"norm": 2.0}),
        pytest.param("norm 3", {"norm": 3.0}, marks=pytest.mark.slow),  # loops are compiled for it
        pytest.param("norm 0.7", {"norm": 0.7}, marks=pytest.mark.slow),
        ("expanded", {"expand": 1.8}),
    ],
)
@every_format
def test_options_mean_what_they_mean_in_the_brute_force_search(args, name, options, assert_agrees):
    observed = torch.randn(1, 40, 3, 32)
    expected, _ = brute_force(observed, args, FACTORS, **options)
    assert_agrees(search_range(observed, args, FACTORS, **options), expected, observed, args, **options)


@every_format
def test_activations_are_searched_over_all_observations(args):
    for shape in ((50, 1, 24), (50, 6, 16), (20, 3, 1, 1, 8)):
        observed = torch.randn(shape)
        expected, _ = brute_force(observed, args, FACTORS)
        found = search_range(observed, args, FACTORS)
        assert found[0].shape == expected[0].shape == shape[1:-1]
        assert_as_good(found, expected, observed, args)  # the sum over two dimensions is added up in another order


@pytest.mark.slow_but_first
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_format
def test_no_visited_candidate_has_less_error_in_float64(args, dtype):
    observed = torch.randn(1, 30, 2, 64).to(dtype)
    found = search_range(observed, args, FACTORS, patience=None)
    low, high = observed_range(observed)
    every = torch.stack([error_at(observed, args, (low * p, high * p)) for p in FACTORS])
    assert found[0].dtype == dtype
    assert (error_at(observed, args, found) <= every.amin(0) * TIE).all()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("loop", ["torch"], indirect=True)
@pytest.mark.parametrize("tile", [1, 7, 64, 100, 1000])
@pytest.mark.parametrize("shape", [(1, 12, 1, 64), (9, 4, 16), (9, 1, 33)])
def test_the_tile_changes_nothing_but_rounding(shape, tile, monkeypatch):
    observed = torch.randn(shape)
    search = GridSearch(NumberGrid.of(FORMATS["int4"]), FACTORS, None)
    rows = rows_of_observed(observed)
    results = [ranges.range_of_rows(rows, search, torch_loop.measure)]
    monkeypatch.setattr(torch_loop, "_TILE", tile)
    results.append(ranges.range_of_rows(rows, search, torch_loop.measure))
    errors = []
    for low, high in results:
        found = low.reshape(shape[1:-1]), high.reshape(shape[1:-1])
        errors.append(error_at(observed, FORMATS["int4"], found))
    torch.testing.assert_close(errors[1], errors[0], rtol=1e-5, atol=0)


def test_a_search_of_rows_ends_where_the_last_row_ends(assert_agrees):
    """Rows that improve late keep the search going for all rows."""
    observed = torch.randn(1, 64, 1, 32)
    observed[:, 32:] *= 3
    expected, _ = brute_force(observed, FORMATS["int8"], FACTORS, patience=2)
    assert_agrees(search_range(observed, FORMATS["int8"], FACTORS, patience=2), expected, observed, FORMATS["int8"])


EDGES = {
    "one element": torch.tensor([3.0]),
    "zeros": torch.zeros(16),
    "all equal": torch.full((16,), 0.7),
    "negative only": -torch.rand(16) - 1,
    "positive only": torch.rand(16) + 1,
    "whole numbers": torch.arange(-8.0, 8.0),
    "denormal": torch.rand(16) * 1e-40,
    "tiny": torch.randn(16) * 1e-18,
    "small": torch.randn(16) * 1e-13,
    "large": torch.randn(16) * 1e14,
    "huge": torch.randn(16) * 1e30,
    "one outlier": torch.cat([torch.randn(15) * 1e-3, torch.tensor([100.0])]),
    "nearly all zero": torch.cat([torch.zeros(15), torch.tensor([1e-3])]),
}


@pytest.mark.parametrize("values", EDGES.values(), ids=EDGES)
@every_format
def test_the_edges_of_float32_are_the_brute_force_ones(args, values, assert_agrees):
    """Numba's loop measures in a unit of the row, so its errors are finite where those of the brute force are not."""
    observed = values.reshape(1, 1, -1)
    expected, _ = brute_force(observed, args, FACTORS)
    found = search_range(observed, args, FACTORS)
    assert_agrees(found, expected, observed, args)
    scale, _ = calculate_qparams(*found, args)
    assert ((scale > 0) & scale.isfinite()).all()


@pytest.mark.parametrize(
    ("largest", "expand"), [(65504.0, 1.0), (65504.0, 1.8), (60000.0, 1.0), (57344.0, 1.8), (40000.0, 1.8)]
)
@pytest.mark.parametrize("args", [*FORMATS.values(), MXFP8], ids=[*FORMATS, "mxfp8"])
def test_scales_that_leave_float16_are_infinite_as_compressed_tensors_computes_them(
    args, expand, largest, assert_agrees
):
    observed = torch.randn(1, 6, 64).clamp(-3, 3).mul(300)
    observed[0, 1:4, 7] = largest
    observed[0, 2:5, 9] = -largest
    observed = observed.half()
    expected, _ = brute_force(observed, args, FACTORS, expand=expand)
    assert_agrees(search_range(observed, args, FACTORS, expand=expand), expected, observed, args)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_stays_in_the_range_of_its_scale_only(bad):
    observed = torch.randn(1, 4, 1, 16)
    good = search_range(observed, FORMATS["int4"], FACTORS)
    observed[0, 2, 0, 5] = bad
    low, high = search_range(observed, FORMATS["int4"], FACTORS)
    assert (low.isfinite() & high.isfinite()).flatten().tolist() == [True, True, False, True]
    assert torch.equal(low[[0, 1, 3]], good[0][[0, 1, 3]])


def test_equal_candidates_tie_wherever_they_stand_in_the_working_memory():
    """pow of the last elements of a tensor is a scalar one, and rounds otherwise."""
    observed = torch.zeros(1, 3, 4)
    observed[0, 2, 3] = 46875000000000.0  # every candidate has the same power of two as its scale
    expected, errors = brute_force(observed, MXFP4, FACTORS)
    assert (errors == errors[0]).all()
    assert_same(search_range(observed, MXFP4, FACTORS), expected)


numbers = st.one_of(
    st.floats(-10, 10, width=32),
    st.floats(-1.0, 1.0, width=32).map(lambda x: x * 1e-20),
    st.floats(-1.0, 1.0, width=32).map(lambda x: x * 1e15),
    st.integers(-8, 8).map(float),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), rows=st.integers(1, 4), group=st.integers(1, 9), name=st.sampled_from(sorted(FORMATS)))
def test_any_values_give_the_brute_force_range(data, rows, group, name, assert_agrees):
    values = data.draw(st.lists(numbers, min_size=rows * group, max_size=rows * group))
    observed = torch.tensor(values, dtype=torch.float32).reshape(1, rows, group)
    expected, _ = brute_force(observed, FORMATS[name], FACTORS)
    found = search_range(observed, FORMATS[name], FACTORS)
    assert_agrees(found, expected, observed, FORMATS[name])
    assert (found[0] <= found[1]).all()


# ---------------------------------------------------------------------- importance


def test_uniform_importance_changes_nothing():
    observed = torch.randn(1, 8, 4, 16)
    expected = search_range(observed, FORMATS["int4"], FACTORS)
    assert_same(search_range(observed, FORMATS["int4"], FACTORS, importance=torch.ones(4, 16)), expected)


@pytest.mark.parametrize("weights", [1, 4, 32])
def test_importance_weighs_every_value_and_is_repeated_over_the_scales(weights, assert_agrees):
    observed, importance = torch.randn(1, 8, 4, 16), torch.rand(weights, 16) ** 4
    each = importance.repeat(32 // weights, 1).view(8, 4, 16)
    expected, _ = brute_force(observed, FORMATS["int4"], FACTORS, patience=None, importance=each)
    found = search_range(observed, FORMATS["int4"], FACTORS, patience=None, importance=importance)
    assert_agrees(found, expected, observed, FORMATS["int4"], importance=each)
    assert not torch.equal(found[0], search_range(observed, FORMATS["int4"], FACTORS, patience=None)[0])


# ---------------------------------------------------------------------- formats


@pytest.mark.parametrize("name", ["fp8", "fp4", "int4", "int8"])
def test_rounding_is_compressed_tensors_own_bit_for_bit(name):
    grid = NumberGrid.of(FORMATS[name])
    ends = torch.linspace(-500, 500, 200_001)
    near_zero = torch.linspace(-8, 8, 256 * 16 * 16 + 1)  # every tie of fp4, most of fp8
    values = torch.cat([ends, near_zero, near_zero * 2**-6, torch.tensor([0.0, -0.0, 1e-30, 447.9, 464, 1e38])])
    expected = round_to_quantized_type_args(values.clone(), FORMATS[name], *calculate_range(FORMATS[name], "cpu"))
    assert torch.equal(grid.round(values), expected)


def test_factors_count_down_to_but_not_including_the_end():
    assert shrink_factors(0.05, 100.0) == [1, 0.99, 0.98, 0.97, 0.96]
    assert len(shrink_factors(1 - 0.8 / 1.8, 200.0)) == 111
    assert shrink_factors(0, 100.0) == []


def test_without_factors_the_range_is_the_observed_one():
    observed = torch.randn(1, 4, 8)
    assert_same(search_range(observed, FORMATS["int4"], []), observed_range(observed))


# ---------------------------------------------------------------------- layouts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fp8", "int4", "int8 asymmetric"])
def test_blocks_are_searched_where_they_are_as_they_would_be_when_copied(dtype, name):
    kwargs = FORMATS[name].model_dump(include={"num_bits", "type", "symmetric"})
    args = QuantizationArgs(**kwargs, strategy="block", block_structure=[8, 16])
    weight = (torch.randn(32, 80) * torch.rand(32, 1)).to(dtype)
    blocks = weight.reshape(4, 8, 5, 16).transpose(1, 2).flatten(-2).unsqueeze(0)
    assert_same(search_range(weight, args, FACTORS), search_range(blocks, args, FACTORS))


@pytest.mark.parametrize("name", FORMATS)
def test_a_tensor_need_not_be_contiguous(name):
    observed = torch.randn(16, 6, 20)
    for view in (observed.transpose(1, 2), observed[:, ::2], observed[..., ::3], observed[:, :1].expand(-1, 4, -1)):
        assert_same(search_range(view, FORMATS[name], FACTORS), search_range(view.clone(), FORMATS[name], FACTORS))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["int4", "int8", "int4 asymmetric", "fp8"])
def test_counted_values_give_the_least_error_in_float64(name):
    """2**18 bfloat16 values of one scale are counted; the oracle measures each of them."""
    args = FORMATS[name]
    observed = torch.distributions.StudentT(5.0).sample((1, 1, 1 << 18)).bfloat16()
    low, high = search_range(observed, args, FACTORS, patience=None)
    ends = observed.amin((0, -1)), observed.amax((0, -1))
    every = torch.stack([error_at(observed, args, (ends[0] * p, ends[1] * p)) for p in FACTORS])
    assert low.dtype == torch.bfloat16
    assert error_at(observed, args, (low, high)) <= every.amin(0) * (1 + 1e-6)


def test_values_that_are_not_finite_are_not_counted():
    observed = torch.randn(1, 1, 1 << 18).bfloat16()
    observed[0, 0, 3] = float("nan")
    assert search_range(observed, FORMATS["int8"], FACTORS)[0].isnan().all()
