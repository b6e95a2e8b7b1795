"""The compiled loops against the definition, bit for bit, and where they run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_obs
from lightning_obs.numerics.candidates import shrink_factors
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.kernels import launch
from lightning_obs.numerics.search import cpu, cpu_format, cpu_kernel, definition
from lightning_obs.numerics.search.cpu_power import fit_power
from lightning_obs.numerics.search.definition import GridSearch
from lightning_obs.numerics.search.ranges import search_range
from lightning_obs.numerics.search.rows import Rows, rows_of_observed
from tests.numerics.search.test_ranges import FORMATS as SOME_FORMATS
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


def both(rows, name, factors=FACTORS, norm=2.4, expand=1.0):
    """The loops' outcome and the definition's."""
    grid = NumberGrid.of(FORMATS[name], name in SIGNED)
    search = GridSearch(grid, factors, None, norm, expand)
    assert cpu.can_search(rows, search)
    return cpu.visit(rows, search), definition.visit(rows, search)


def assert_equal(loops, exact):
    for name in ("low", "high"):
        torch.testing.assert_close(getattr(loops, name), getattr(exact, name), rtol=0, atol=0, equal_nan=True)


values = st.one_of(
    st.floats(-10, 10, width=32),
    st.floats(-1.0, 1.0, width=32).map(lambda x: x * 1e-20),
    st.floats(-1.0, 1.0, width=32).map(lambda x: x * 1e15),
    st.floats(-1.0, 1.0, width=32).map(lambda x: x * 1e-39),
    st.integers(-8, 8).map(float),
    st.sampled_from([0.0, -0.0, 65504.0, 3e38, float("nan"), float("inf"), float("-inf")]),
)
weights = st.one_of(
    st.just(0.0), st.just(1.0), st.floats(0, 100, width=32), st.floats(0, 1, width=32).map(lambda x: x * 1e-30)
)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 12)),
    name=st.sampled_from(sorted(FORMATS)),
    dtype=st.sampled_from(DTYPES),
    norm=st.sampled_from([1.0, 1.5, 2.0, 2.4, 3.0, 4.0]),
    expand=st.sampled_from([1.0, 1.0, 1.8]),
    weighed=st.booleans(),
)
def test_any_values_give_what_the_definition_gives(data, shape, name, dtype, norm, expand, weighed):
    count = int(np.prod(shape))
    # Most rows are ordinary: of these the loops decide.
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 1000))))
    odd = data.draw(st.lists(st.tuples(st.integers(0, count - 1), values), max_size=4))
    for at, value in odd:
        drawn[at] = value
    importance = None
    if weighed:
        drawn_weights = data.draw(st.lists(weights, min_size=shape[3], max_size=shape[3]))
        importance = torch.tensor(drawn_weights, dtype=torch.float32).unsqueeze(0)
    rows = Rows(drawn.reshape(shape).to(dtype), importance)
    assert_equal(*both(rows, name, norm=norm, expand=expand))


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 100, 128, 576, 1024, 2049, 5000])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_every_length_fill_a_tile(name, size):
    count = max(3, 20_000 // size)
    rows = Rows((torch.randn(count, size) * torch.rand(count, 1))[None, :, None])
    assert_equal(*both(rows, name))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_scales_are_rounded_as_compressed_tensors_rounds_them(name, dtype):
    grid = NumberGrid.of(FORMATS[name], name in SIGNED)
    form, _ = cpu_format.loop_format(GridSearch(grid, FACTORS), dtype)
    ends = torch.randn(2000, 2).mul_(torch.rand(2000, 1) * 9 + 0.01).sort(1).values.to(dtype)
    scale, zero_point = grid.qparams(ends[:, 0], ends[:, 1])
    zero_point = torch.zeros_like(scale) if zero_point is None else zero_point
    found = np.empty((2, 2000), np.float32)
    cpu_format.qparams(*ends.float().T.contiguous().numpy(), form, *found)
    assert found.tolist() == [scale.tolist(), zero_point.tolist()]


@pytest.mark.parametrize("name", ["int4", "int4 signed", "int8", "int8 asymmetric", "fp8", "mxfp4"])
@pytest.mark.parametrize("view", ["one piece", "heads", "weighed"])
def test_long_rows_are_added_up_in_pieces(name, view, monkeypatch):
    observed = torch.distributions.StudentT(4.0).sample((700, 3, 64))
    if view == "one piece":
        observed = observed.reshape(-1, 1, 192)
    importance = torch.rand(1, observed.shape[2]) if view == "weighed" else None
    rows = rows_of_observed(observed, importance)
    monkeypatch.setattr(cpu, "_ROW", 1 << 13)
    monkeypatch.setattr(cpu, "_PIECE", 5000)
    assert_equal(*both(rows, name))


def test_a_long_row_near_the_ends_of_float32_is_left_to_the_definition(monkeypatch):
    monkeypatch.setattr(cpu, "_ROW", 1 << 10)
    for scale in (1e-40, 1e-30, 1e30, 1e37, 0.0):
        assert_equal(*both(rows_of_observed(torch.randn(1, 1, 5000) * scale), "int8"))


def test_candidates_that_tie_are_decided_by_the_definition():
    """Values on a grid of a power of two: the same error at several factors, to the last bit."""
    rows = Rows((torch.randint(-8, 8, (50, 32)) / 8.0)[None, :, None])
    for name in ("int8", "fp8", "int4", "int4 signed", "fp4"):
        assert_equal(*both(rows, name))


def test_nearly_all_rows_are_decided_by_the_loops(monkeypatch):
    left = []
    settle = cpu._Loops._settle

    def counting(self, start, ends, best, rival):
        left.append((rival != -1).float().mean().item())
        return settle(self, start, ends, best, rival)

    monkeypatch.setattr(cpu._Loops, "_settle", counting)
    for name in FORMATS:
        for dtype in DTYPES:
            search_range(torch.randn(1, 512, 64).to(dtype), GridSearch(NumberGrid.of(FORMATS[name]), FACTORS))
    assert len(left) >= len(FORMATS) * len(DTYPES)
    assert max(left) < 0.08


def test_the_definition_decides_only_the_rows_that_leave_the_end_of_a_search_open(monkeypatch):
    """Of few rows, a candidate may improve none for certain, and one perhaps."""
    decided, visit = [], definition.visit

    def counting(rows, *options):
        decided.append(rows.count)
        return visit(rows, *options)

    monkeypatch.setattr(definition, "visit", counting)
    torch.manual_seed(0)
    weight = (torch.distributions.StudentT(5.0).sample((256, 4096)) * 0.02).bfloat16()
    args = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    search = GridSearch(NumberGrid.of(args), FACTORS)
    found = search_range(weight, search)
    assert 0 < sum(decided) < 8  # of 64
    monkeypatch.setattr(cpu, "can_search", lambda *_: False)
    assert all(map(torch.equal, found[:2], search_range(weight, search)[:2]))


@pytest.mark.parametrize("norm", [1.0, 1.5, 2.4, 2.7, 4.0])
def test_a_fitted_power_is_as_near_as_it_says(norm):
    power = fit_power(norm, 16.0, 0.5)
    errors = np.random.default_rng(0).random(200_000, dtype=np.float32) * np.float32([0.01, 0.5, 2, 16]).repeat(50_000)
    exact = errors.astype(np.float64) ** norm
    assert (np.abs(power(errors) - exact) <= power.error * (exact + power.usual)).all()


def test_a_root_by_bits_is_not_below_the_root():
    for exponent in (1.0, 1 / 2.4, 1 / 3, 0.1):
        x = np.exp(np.random.default_rng(0).uniform(-40, 40, 5000)).astype(np.float32)
        roots = np.array([cpu_kernel.root_above(one, np.float32(exponent)) for one in x])
        assert (roots >= x**exponent).all()
        assert (roots <= x**exponent * 1.3).all()


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
    assert all(torch.equal(found[i].low, expected[i].low) for i in range(8))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader_may_search(method, tmp_path):
    code = f"""
import torch
from torch.utils.data import DataLoader, Dataset
from lightning_obs.observers import Observer
from compressed_tensors.quantization import QuantizationArgs

args = QuantizationArgs(num_bits=8, strategy="channel")
torch.set_num_threads(2)

class Searching(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        weight = torch.arange(64.0).reshape(8, 8).sin() + i
        return Observer.load_from_registry("memoryless_mse", base_name="weight", args=args)(weight).min_vals

if __name__ == "__main__":
    data = Searching()
    expected = torch.stack([data[i] for i in range(4)])
    loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="{method}")
    print("same", torch.equal(next(iter(loader)), expected))
"""
    script = tmp_path / "searching.py"
    script.write_text(code)
    assert "same True" in python(str(script))


# ---------------------------------------------------------------------- without numba, without a cache

SEARCH = """
import warnings, torch
from compressed_tensors.quantization import QuantizationArgs
from lightning_obs.numerics.candidates import shrink_factors
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.search.cpu_power import fit_power
from lightning_obs.numerics.search.definition import GridSearch
from lightning_obs.numerics.search.ranges import search_range
torch.manual_seed(0)
search = GridSearch(NumberGrid.of(QuantizationArgs(num_bits=4)), shrink_factors(0.2, 100))
x = torch.randn(1, 20, 64)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    found = [search_range(x, search)[:2] for _ in range(2)]
print("warnings", [str(w.message) for w in said if w.category.__name__ == "CalibrationWarning"])
print("range", found[0][0].sum().item())
"""


@pytest.mark.slow
def test_importing_the_package_does_not_import_numba():
    assert "numba False" in python(
        "import sys, lightning_obs, lightning_obs.observers; print('numba', 'numba' in sys.modules)"
    )


@pytest.mark.slow
def test_without_numba_the_definition_finds_the_same_range_and_a_short_search_says_nothing():
    without = python("import sys; sys.modules['numba'] = None\n" + SEARCH)
    assert "warnings []" in without
    assert without.splitlines()[-1] == python(SEARCH).splitlines()[-1]


@pytest.mark.slow
def test_without_a_folder_to_write_to_the_loops_are_compiled_anew():
    """The package's own folder cannot hold a cache, nor can the user's. The loop is one that compiles in a second."""
    code = """
from numba.core import caching
class Nowhere(caching.UserProvidedCacheLocator):
    @classmethod
    def from_function(cls, py_func, py_file):
        return None
caching.CacheImpl._locator_classes = [Nowhere]
import torch
from lightning_obs.numerics.kernels import launch, loops
counts = launch.count_values(torch.ones(35, dtype=torch.bfloat16))
print("counted", counts.sum().item(), "cached", loops.count._cache.__class__.__name__)
"""
    assert "counted 35 cached NullCache" in python(code)


def python(code):
    """What a new process prints that runs some code, or a script."""
    arguments = [code] if code.endswith(".py") else ["-c", code]
    env = {**os.environ, "PYTHONPATH": str(Path(lightning_obs.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=240, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
