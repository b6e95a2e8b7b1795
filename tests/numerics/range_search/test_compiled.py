"""The compiled inner loop chooses what the eager one chooses, and is left alone where it cannot run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

from lightning_obs.numerics.range_search.power_fit import evaluate_power, fit_power, halves_of
from lightning_obs.numerics.range_search.search import search_block_range, search_range, shrink_factors

FACTORS = shrink_factors(maxshrink=0.2, grid=100.0)
FORMATS = {
    "int4": QuantizationArgs(num_bits=4),
    "int8": QuantizationArgs(num_bits=8),
    "int4 asymmetric": QuantizationArgs(num_bits=4, symmetric=False),
    "fp8": QuantizationArgs(num_bits=8, type="float"),
    "fp4": preset_name_to_scheme("NVFP4", ["Linear"]).weights,
}
needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")


def assert_equal(found, expected):
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


#: what is compiled apart: integers, zero points and floats, two kinds of power, two dtypes
CASES = {
    **{name: (name, torch.float32, [{}, {"patience": 3}, {"patience": None, "expand": 1.3}]) for name in FORMATS},
    "squares": ("int4 asymmetric", torch.float32, [{"norm": 2.0}]),
    "bfloat16": ("fp8", torch.bfloat16, [{}, {"patience": 3}]),
    "bfloat16 with zero points": ("int4 asymmetric", torch.bfloat16, [{}, {"patience": None, "expand": 1.3}]),
}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("case", CASES)
def test_compiled_and_eager_choose_the_same_ranges(case):
    """In one process, because formats share their compiled code."""
    name, dtype, searches = CASES[case]
    for shape in ((1, 200, 3, 64), (1, 7, 1, 500), (1, 1, 1, 300), (1, 40, 1, 1)):
        observed = (torch.randn(shape) * torch.rand(shape[1], 1, 1)).to(dtype)
        for options in searches:
            expected = search_range(observed, FORMATS[name], FACTORS, compile=False, **options)
            assert_equal(search_range(observed, FORMATS[name], FACTORS, compile=True, **options), expected)


@pytest.mark.slow
@needs_compiler
def test_importance_is_compiled_too():
    observed, importance = torch.randn(1, 64, 4, 32), torch.rand(4, 32) ** 4
    expected = search_range(observed, FORMATS["int4"], FACTORS, importance=importance, compile=False)
    assert_equal(search_range(observed, FORMATS["int4"], FACTORS, importance=importance, compile=True), expected)


@pytest.mark.slow
@needs_compiler
def test_nothing_is_compiled_where_torch_is_told_not_to():
    observed = torch.randn(1, 64, 4, 32)
    expected = search_range(observed, FORMATS["fp8"], FACTORS, compile=False)
    with torch.compiler.set_stance("force_eager"):
        assert_equal(search_range(observed, FORMATS["fp8"], FACTORS, compile=True), expected)


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::lightning_obs.errors.CalibrationWarning", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )
    return done.stdout + done.stderr


SEARCH = """
import torch
from compressed_tensors.quantization import QuantizationArgs
from lightning_obs.numerics.range_search import compiled
from lightning_obs.numerics.range_search.search import search_range
compiled._PAYS_BACK = 0
torch.manual_seed(0)
x = torch.randn(1, 64, 2, 32)
args = QuantizationArgs(num_bits=4)
"""


@pytest.fixture(scope="module")
def said_without_a_compiler():
    """What one process says that imports the package, searches little, then much, and then has to compile."""
    return python(
        f"""
import os, sys, torch, torch._dynamo.config as dynamo, torch._inductor.config as inductor
def settings():
    return (dynamo.save_config_portable(), inductor.save_config_portable(), torch.get_num_threads(),
            torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_float32_matmul_precision())
before = settings()
import lightning_obs.calibration.session
from lightning_obs.observers import Observer
print("unchanged", settings() == before)
from compressed_tensors.quantization import QuantizationArgs
Observer.load_from_registry("memoryless_mse", base_name="weight", args=QuantizationArgs(num_bits=8))(torch.randn(8, 8))
print("loaded", "torch._inductor.compile_fx" in sys.modules)
{SEARCH}
os.environ["CXX"] = "/nowhere/c++"
one = search_range(x, args, [1.0, 0.9], compile="auto")
two = search_range(x, args, [1.0, 0.9], compile=False)
print("same", torch.equal(one[0], two[0]))
search_range(x, args, [1.0, 0.9], compile=True)
"""
    )


def test_importing_changes_no_setting_of_torch(said_without_a_compiler):
    assert "unchanged True" in said_without_a_compiler


def test_a_small_search_does_not_load_the_compiler(said_without_a_compiler):
    assert "loaded False" in said_without_a_compiler


def test_without_a_compiler_auto_runs_eagerly_and_true_says_what_is_missing(said_without_a_compiler):
    assert "same True" in said_without_a_compiler
    expected = "CalibrationError: the range search cannot be compiled. Got no C++ compiler '/nowhere/c++'"
    assert expected in said_without_a_compiler


@pytest.mark.slow
def test_a_compiler_that_fails_is_told_once_and_auto_goes_on(tmp_path):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    code = f"""{SEARCH}
import warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    found = [search_range(x, args, [1.0, 0.9], compile="auto")[0] for _ in range(2)]
print("told", [str(w.message)[:34] for w in told if w.category.__name__ == "CalibrationWarning"])
print("same", torch.equal(found[1], search_range(x, args, [1.0, 0.9], compile=False)[0]))
search_range(x, args, [1.0, 0.9], compile=True)
"""
    said = python(code, CXX=str(broken), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert "told ['the range search runs uncompiled: ']" in said
    assert "same True" in said
    assert "CalibrationError: the range search could not be compiled" in said


@pytest.mark.parametrize("norm", [0.5, 0.7, 1.5, 2.4, 2.7, 4.0])
def test_a_fitted_power_is_as_near_as_it_says(norm):
    fit = fit_power(norm, 16.0, 0.5)
    errors = torch.rand(200_000) * torch.tensor([0.01, 0.5, 2.0, 16.0]).repeat(50_000)
    exact = errors.double() ** norm
    off = (evaluate_power(errors, halves_of(norm), fit.coefficients).double() - exact).abs()
    assert (off <= fit.error * (exact + fit.usual)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [None, 100, 1000])
def test_blocks_are_searched_where_they_are_as_they_would_be_when_copied(dtype, tile):
    args = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[8, 16])
    weight = (torch.randn(32, 80) * torch.rand(32, 1)).to(dtype)
    blocks = weight.reshape(4, 8, 5, 16).transpose(1, 2).flatten(-2).unsqueeze(0)
    assert_equal(search_block_range(weight, args, FACTORS, tile=tile), search_range(blocks, args, FACTORS))


@pytest.mark.parametrize("name", ["int4", "int8", "int4 asymmetric", "fp8"])
def test_counted_values_give_the_least_error_in_float64(name):
    """2**18 bfloat16 values of one scale are counted; the oracle measures each of them."""
    from tests.numerics.range_search.test_search import error_at

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
