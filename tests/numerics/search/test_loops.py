"""The compiled loops of a CPU: they find a least error, whatever the values, and where they run."""

from __future__ import annotations

import threading

import numba
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_obs.numerics.candidates import Candidates, improvements, shrink_factors
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.kernels import launch
from lightning_obs.numerics.search import arithmetic, lane_scales, numba_loop, torch_loop
from lightning_obs.numerics.search import rows as rows_module
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.ranges import range_of_rows, search_range
from lightning_obs.numerics.search.rows import Rows, rows_of_observed
from tests.numerics.apart import count_without_a_cache, ranges_of_a_worker, short_search, short_search_without_numba
from tests.numerics.search.test_ranges import FORMATS as SOME_FORMATS
from tests.numerics.search.test_ranges import TIE
from tests.support.rank_processes import run_apart
from tests.support.versions import HAS_FLOATS_OF_6_BITS

FACTORS = shrink_factors(maxshrink=0.2, grid=100.0)
FORMATS = SOME_FORMATS | {
    "int2": QuantizationArgs(num_bits=2),
    "int3 asymmetric": QuantizationArgs(num_bits=3, symmetric=False),
    "int6": QuantizationArgs(num_bits=6),
    "int4 signed": QuantizationArgs(num_bits=4),
    "int8 signed": QuantizationArgs(num_bits=8),
    "fp4 with fp8 scales": QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=16, scale_dtype=torch.float8_e4m3fn
    ),
}
if HAS_FLOATS_OF_6_BITS:
    FORMATS["fp6"] = QuantizationArgs(num_bits=6, type="float")
INT4 = GridSearch(NumberGrid.of(FORMATS["int4"]), FACTORS)
SIGNED = {name for name in FORMATS if name.endswith("signed")}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def search_for(name, norm=2.4, expand=1.0):
    """A search of a format that visits all candidates."""
    return GridSearch(NumberGrid.of(FORMATS[name], name in SIGNED), FACTORS, None, norm, expand)


def candidates_of(rows, search):
    """The candidates of all rows."""
    low, high = (end * search.expand for end in rows.observed_range())
    return Candidates(low, high, torch.tensor(search.factors, dtype=torch.float64))


def exact_errors(rows, search):
    """Errors in float64, ``(C, R)``; infinite where a scale or a value is not finite."""
    scale, zero_point = candidates_of(rows, search).qparams(search.grid)
    zero_point = torch.zeros_like(scale) if zero_point is None else zero_point
    scale, zero_point = scale.double().unsqueeze(-1), zero_point.double().unsqueeze(-1)
    values = rows.view.flatten(2).flatten(0, 1).double()
    level = search.grid.round((values / scale + zero_point).float()).double() - zero_point
    lost = (level * scale - values).abs() ** search.norm
    if rows.importance is not None:
        lines, pieces = rows.view.shape[:2].numel(), rows.view.shape[2]
        lost *= rows.importance.repeat(lines // len(rows.importance), pieces)
    return lost.sum(-1).nan_to_num(torch.inf, torch.inf)


def assert_least_error(rows, search):
    """The error of the chosen candidate is the least, but for a tie; without a finite error, the range is kept."""
    assert numba_loop.can_run(rows, search)
    low, high = range_of_rows(rows, search, numba_loop.measure)
    candidates = candidates_of(rows, search)
    lows, highs = candidates.ranges()
    errors = exact_errors(rows, search)
    is_chosen = (lows == low) & (highs == high)
    chosen = torch.where(is_chosen, errors, torch.inf).amin(0)
    keeps = (low == candidates.low) & (high == candidates.high) | candidates.low.isnan() & low.isnan()
    has_error = errors.amin(0) < torch.inf
    assert torch.where(has_error, chosen <= errors.amin(0) * TIE, keeps).all()


values = st.one_of(
    st.floats(-10, 10, width=32),
    st.floats(-1.0, 1.0, width=32).map(lambda x: x * 1e-20),
    st.floats(-1.0, 1.0, width=32).map(lambda x: x * 1e15),
    st.floats(-1.0, 1.0, width=32).map(lambda x: x * 1e-39),
    st.integers(-8, 8).map(float),
    st.sampled_from([0.0, -0.0, 65504.0, 3e38, float("nan"), float("inf"), float("-inf")]),
)
weights = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.0009765625, 100, width=32))


# A loop is compiled for each dtype, which it reads in one place, and for each kind of norm.
@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("dtypes", "norms"), [(DTYPES, [2.4]), ([torch.float32], [1.0, 1.5, 2.0, 3.0, 4.0])], ids=["dtypes", "norms"]
)
@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 12)),
    name=st.sampled_from(sorted(FORMATS)),
    expand=st.sampled_from([1.0, 1.0, 1.8]),
    weighed=st.booleans(),
)
def test_any_values_get_a_range_of_least_error(dtypes, norms, data, shape, name, expand, weighed):
    dtype, norm = data.draw(st.sampled_from(dtypes)), data.draw(st.sampled_from(norms))
    count = int(np.prod(shape))
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 1000))))
    odd = data.draw(st.lists(st.tuples(st.integers(0, count - 1), values), max_size=4))
    for place, value in odd:
        drawn[place] = value
    importance = None
    if weighed:
        drawn_weights = data.draw(st.lists(weights, min_size=shape[3], max_size=shape[3]))
        importance = torch.tensor(drawn_weights, dtype=torch.float32).unsqueeze(0)
    rows = Rows(drawn.reshape(shape).to(dtype), importance)
    assert_least_error(rows, search_for(name, norm, expand))


@pytest.mark.parametrize(
    ("name", "size"),
    [("int4", size) for size in (1, 2, 15, 16, 17, 100, 128, 576, 1024, 2049, 5000)]
    + [(name, size) for name in FORMATS if name != "int4" for size in (17, 2049)],
)
def test_rows_of_every_length_fill_a_block(name, size):
    count = max(3, 20_000 // size)
    assert_least_error(Rows((torch.randn(count, size) * torch.rand(count, 1))[None, :, None]), search_for(name))


@pytest.mark.parametrize("name", FORMATS)
def test_errors_are_those_of_torchs_loop(name):
    rows = Rows((torch.randn(300, 200) * torch.rand(300, 1))[None, :, None])
    search = search_for(name)
    candidates = candidates_of(rows, search)
    expected = torch_loop.errors_of(rows, slice(0, rows.count), candidates, search)
    errors = errors_of_loop(rows, candidates, search)
    units = torch.ones(rows.count)
    lane_scales.take_units(torch.maximum(-candidates.low, candidates.high).numpy(), units.numpy())
    torch.testing.assert_close(errors / units.double() ** search.norm, expected.double(), rtol=1e-5, atol=0)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [16, 100, 5000])
def test_candidates_measured_together_improve_what_they_improve_one_by_one(name, size):
    rows = Rows((torch.randn(300, size) * torch.rand(300, 1))[None, :, None])
    search = search_for(name)
    candidates = candidates_of(rows, search)
    improved, least = numba_loop.measure(rows, slice(0, rows.count), candidates, search)
    one_by_one = improvements(errors_of_loop(rows, candidates, search))
    assert torch.equal(improved, one_by_one.improved)
    assert torch.equal(least, one_by_one.least)


def errors_of_loop(rows, candidates, search):
    """Errors by the compiled loop, ``(C, R)``: the least error of one candidate is its error."""
    errors = []
    for k in range(len(candidates.factors)):
        alone = candidates._replace(factors=candidates.factors[k : k + 1])
        errors.append(numba_loop.measure(rows, slice(0, rows.count), alone, search).least)
    return torch.stack(errors)


@pytest.mark.parametrize("loop", [numba_loop.measure, torch_loop.measure])
def test_a_measurement_goes_on_from_the_least_errors_before_it(loop):
    rows = Rows(torch.randn(1, 300, 1, 64))
    everything = slice(0, rows.count)
    candidates = candidates_of(rows, INT4)
    together = loop(rows, everything, candidates, INT4, None)
    first = loop(rows, everything, candidates._replace(factors=candidates.factors[:7]), INT4, None)
    second = loop(rows, everything, candidates._replace(factors=candidates.factors[7:]), INT4, first.least)
    assert torch.equal(torch.cat([first.improved, second.improved]), together.improved)
    assert torch.equal(second.least, together.least)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_scales_are_those_of_compressed_tensors(name, dtype):
    grid = NumberGrid.of(FORMATS[name], name in SIGNED)
    ends = torch.randn(2000, 2).mul_(torch.rand(2000, 1) * 9 + 0.01)
    ends[:3] = torch.tensor([[0.0, 0.0], [1e-45, 1e-45], [-1e-39, 1e-38]])
    low, high = ends.sort(1).values.to(dtype).unbind(1)
    candidates = Candidates(low, high, torch.tensor(FACTORS, dtype=torch.float64))
    assert_scales_are_compressed_tensors(candidates, grid)


def assert_scales_are_compressed_tensors(candidates, grid):
    scales = lane_scales.scales_of(candidates, grid)
    expected, zero_point = candidates.qparams(grid)
    if scales.stored.size:
        assert torch.equal(torch.from_numpy(scales.stored), expected)
        assert zero_point is None or torch.equal(torch.from_numpy(scales.zeros), zero_point)
        return
    assert scales.rule.has_zeros == (zero_point is not None)
    computed = torch.empty_like(expected)
    computed_zeros = torch.zeros_like(expected)
    exponents = np.empty(expected.shape[1], np.int32)
    numbers = arithmetic.numbers_of(grid)
    for factor, computed_scales, zeros in zip(scales.factors, computed.numpy(), computed_zeros.numpy(), strict=True):
        if scales.rule.has_zeros:
            lane_scales.divide_widths(scales.lows, scales.highs, factor, scales.rule, numbers, computed_scales, zeros)
        elif scales.rule.mx_round:
            lane_scales.take_exponents(scales.largest, factor, scales.rule, exponents)
            lane_scales.take_powers(exponents, scales.rule, computed_scales)
        else:
            lane_scales.divide(scales.largest, factor, scales.rule, computed_scales)
    assert torch.equal(computed, expected)
    assert zero_point is None or torch.equal(computed_zeros, zero_point)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", ["MXFP4", "MXFP8", *(["MXFP6A16"] if HAS_FLOATS_OF_6_BITS else [])])
def test_powers_of_two_are_those_of_compressed_tensors_up_to_the_ends_of_float32(preset, dtype):
    grid = NumberGrid.of(preset_name_to_scheme(preset, ["Linear"]).weights)
    exponents = torch.arange(-149, 128, dtype=torch.float64)
    largest = torch.cat([torch.rand(4, 277, dtype=torch.float64).add(1) * 2**exponents, torch.zeros(1, 277)]).flatten()
    largest = torch.cat(
        [largest.to(dtype), torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).tiny], dtype=dtype)]
    )
    candidates = Candidates(-largest, largest / 2, torch.tensor(FACTORS, dtype=torch.float64))
    scale, _ = candidates.qparams(grid)
    assert scale.isinf().any()
    assert_scales_are_compressed_tensors(candidates, grid)


@pytest.fixture
def short_pieces(monkeypatch):
    """Rows of some thousand values are long."""
    monkeypatch.setattr(rows_module, "LONG", 1 << 13)
    monkeypatch.setattr(numba_loop, "_PIECE", 5000)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["int4", "int4 signed", "int8", "int8 asymmetric", "fp8", "mxfp4"])
@pytest.mark.parametrize("view", ["one piece", "heads", "weighed"])
def test_long_rows_are_added_up_in_pieces(name, view, short_pieces):
    observed = torch.distributions.StudentT(4.0).sample((700, 3, 64))
    if view == "one piece":
        observed = observed.reshape(-1, 1, 192)
    importance = torch.rand(1, observed.shape[2]) if view == "weighed" else None
    rows = rows_of_observed(observed, importance)
    assert rows.are_long
    assert_least_error(rows, search_for(name))


@pytest.mark.parametrize("patience", [1, 2, 5, 19])
def test_a_long_row_ends_its_search_where_a_short_one_does(patience, monkeypatch):
    for scale in (0.3, 1.0, 3.0):
        observed = torch.randn(1, 2, 20_000) * scale
        observed[0, :, 0] = 5.0
        search = INT4._replace(patience=patience)
        expected = search_range(observed, search)
        monkeypatch.setattr(rows_module, "LONG", 1 << 13)
        found = search_range(observed, search)
        monkeypatch.undo()
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e30, 1e37, 0.0])
def test_a_long_row_may_be_near_the_ends_of_float32(scale, short_pieces):
    assert_least_error(rows_of_observed(torch.randn(1, 1, 9000) * scale), search_for("int8"))


@pytest.mark.parametrize("name", ["int8", "fp8", "int4", "int4 signed", "fp4", "mxfp4"])
def test_the_first_of_equal_candidates_is_chosen(name):
    """Values on a grid of a power of two: the same scale, or the same error, at several factors."""
    rows = Rows((torch.randint(-8, 8, (50, 32)) / 8.0)[None, :, None])
    search = search_for(name)
    assert_least_error(rows, search)
    twice = search._replace(factors=[factor for factor in FACTORS for _ in range(2)])
    errors = errors_of_loop(rows, candidates_of(rows, twice), twice)
    assert torch.equal(errors[::2], errors[1::2])


def test_where_errors_leave_float32_the_loop_finds_the_least_and_torchs_keeps_the_range():
    rows = Rows(torch.randn(1, 20, 1, 64) * 1e30)
    search = search_for("int4")
    low, _ = rows.observed_range()
    assert torch.equal(range_of_rows(rows, search, torch_loop.measure)[0], low)
    assert not torch.equal(range_of_rows(rows, search, numba_loop.measure)[0], low)
    assert_least_error(rows, search)


@numba.njit(fastmath={"contract"})  # kept on disk, it would not follow a change of the formulas
def powers_of(errors, exponent, powers):
    for i in range(errors.size):
        powers[i] = arithmetic.power_of(errors[i], exponent)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("norm", [0.7, 1.0, 1.5, 2.0, 2.4, 2.7, 3.0, 4.0])
def test_a_power_is_exact_to_six_digits_and_hides_nothing(norm):
    drawn = np.exp(np.random.default_rng(0).uniform(-12, 1, 200_000)).astype(np.float32)
    errors = np.concatenate([drawn, -drawn, np.float32([0.0, np.nan, np.inf, -np.inf])])
    powers = np.empty_like(errors)
    powers_of(errors, arithmetic.exponent_of(norm), powers)
    exact = np.abs(errors[:-4].astype(np.float64)) ** norm
    np.testing.assert_allclose(powers[:-4], exact, rtol=4e-6)
    assert 0 <= powers[-4] < 1e-26  # of zero
    assert not np.isfinite(powers[-3:]).any()


# ---------------------------------------------------------------------- threads and processes


@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_any_number_of_threads_finds_the_same_bits(name, monkeypatch):
    monkeypatch.setattr(launch, "_WORTH", 0)
    threads, found = torch.get_num_threads(), []
    observed = torch.randn(1, 3000, 128)
    long = torch.randn(1, 1, 300_000)
    search = GridSearch(NumberGrid.of(FORMATS[name]), FACTORS)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append([*search_range(observed, search), *search_range(long, search)])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(found[0], other, strict=True))


def test_two_threads_of_python_may_search_at_once():
    observed = [torch.randn(1, 200, 64) for _ in range(8)]
    expected, found = [search_range(x, INT4) for x in observed], {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: search_range(observed[i], INT4)})) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(torch.equal(found[i][0], expected[i][0]) for i in range(8))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_workers_of_a_data_loader_may_search(method):
    here, of_worker = run_apart(ranges_of_a_worker, method)
    assert torch.equal(of_worker, here)


# ---------------------------------------------------------------------- without numba, without a cache


@pytest.mark.slow
def test_without_numba_torch_finds_the_same_range_and_a_short_search_says_nothing():
    low, high, warned = run_apart(short_search_without_numba)
    expected_low, expected_high, _ = short_search()
    assert warned == []
    assert torch.equal(low, expected_low)
    assert torch.equal(high, expected_high)


@pytest.mark.slow
def test_without_a_folder_to_write_to_the_loops_are_compiled_anew():
    """The package's own folder cannot hold a cache, nor can the user's."""
    assert run_apart(count_without_a_cache) == (35, "NullCache")
