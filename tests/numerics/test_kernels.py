"""Loops that read a tensor once, against torch's own operations."""

from __future__ import annotations

import threading

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_obs.model.module_qparams import checksum
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.kernels import launch
from lightning_obs.numerics.moments import channel_squares
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.ranges import search_range
from tests.numerics.apart import schemes_that_import_numba
from tests.support.rank_processes import run_apart

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def views(dtype):
    """``(A, B, N, G)`` in every layout that is read."""
    x = torch.randn(24, 10, 64).to(dtype)
    yield x.reshape(-1, 1, 1, 64)  # a weight by groups
    yield x.reshape(1, 1, 1, -1)  # a tensor
    yield x.transpose(0, 1).unsqueeze(0)  # an activation by groups
    yield x.reshape(6, 4, 5, 128).transpose(1, 2)  # blocks
    yield x.permute(1, 2, 0).unsqueeze(2)  # the last dimension not contiguous
    yield x[:, :1].expand(-1, 3, -1).unsqueeze(2)  # one value read as several
    yield torch.randn(3 * (1 << 9) + 5).to(dtype).view(1, 1, 1, -1)  # in pieces


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Work is shared out over threads."""
    monkeypatch.setattr(launch, "_PART", 1 << 9)


@every_dtype
def test_extremes_are_those_of_torch_in_every_layout(dtype):
    for view in views(dtype):
        low, high = launch.extremes(view)
        same(low, view.float().amin((2, 3)).to(dtype))
        same(high, view.float().amax((2, 3)).to(dtype))


numbers = st.floats(width=16) | st.sampled_from([0.0, -0.0, float("nan"), -float("nan"), float("inf"), float("-inf")])


@settings(deadline=None)
@given(values=st.lists(numbers, min_size=1, max_size=40), dtype=st.sampled_from(DTYPES))
def test_extremes_of_any_values_are_those_of_torch(values, dtype):
    view = torch.tensor(values).to(dtype).view(1, 1, 1, -1)
    low, high = launch.extremes(view)
    same(low, view.float().amin((2, 3)).to(dtype))
    same(high, view.float().amax((2, 3)).to(dtype))


def test_the_storage_of_what_was_read_can_be_freed():
    """FSDP1 frees gathered weights; ``Tensor.numpy()`` would forbid it for good."""
    value = torch.randn(4, 64)
    launch.extremes(value[:, None, None])
    launch.count_values(value.flatten())
    channel_squares(value)
    checksum(value)
    search_range(value[None, :, None], GridSearch(NumberGrid.of(QuantizationArgs(num_bits=4)), [1.0, 0.9]))
    value.untyped_storage().resize_(0)


@every_dtype
@pytest.mark.parametrize("shape", [(7, 5), (2, 300, 33), (4, 5000, 64)])
def test_squares_are_added_up_in_float64(shape, dtype):
    x = torch.randn(shape).to(dtype)
    squares, count = channel_squares(x)
    torch.testing.assert_close(squares, x.double().square().flatten(0, -2).sum(0), rtol=1e-12, atol=0)
    assert squares.dtype == torch.float64
    assert count.item() == x[..., 0].numel()
    sliced = torch.cat([x, x], -1)[..., : shape[-1]]
    same(channel_squares(sliced)[0], squares)


def test_squares_of_a_row_that_is_expanded_count_once_for_each_row():
    row = torch.randn(1, 8)
    squares, _ = channel_squares(row.expand(5, 8))
    torch.testing.assert_close(squares, 5 * row[0].double().square(), rtol=1e-12, atol=0)


@every_dtype
def test_every_pattern_of_a_half_is_counted_once(dtype):
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    if dtype == torch.bfloat16:
        assert launch.count_values(patterns).eq(1).all()
        return
    finite = patterns[patterns.isfinite() & (patterns.float() == patterns.to(dtype).float())]
    counts = launch.count_values(finite.to(dtype))
    assert counts.sum() == len(finite)
    assert (counts[finite.view(torch.uint16).int()] == 1).all()


def test_counts_of_a_large_tensor_are_the_sum_over_its_parts():
    x = torch.randn((1 << 20) + 3)
    same(launch.count_values(x), sum(launch.count_values(part) for part in x.split(70_001)))


def test_float32_weights_in_training_are_observed_without_the_memory_of_numba():
    found = run_apart(schemes_that_import_numba, ["W4A16", "W8A8", "FP8_BLOCK", "NVFP4A16"])
    assert found == {"W4A16": False, "W8A8": False, "FP8_BLOCK": False, "NVFP4A16": True}


def test_a_loop_is_compiled_by_one_thread_for_each_format(monkeypatch):
    monkeypatch.setattr(launch, "_ready", set())
    monkeypatch.setattr(launch, "_compiling", threading.Lock())
    were_locked = []

    def loop(source, number_format):
        were_locked.append(launch._compiling.locked())

    source = launch.memory(torch.randn(8))
    for number_format in ((1.0, None), (1.0, None), (1.0, (2, 3))):
        launch.run(loop, source, number_format)
    assert were_locked == [True, False, True]


def test_a_loop_that_is_compiled_in_a_notebook_asks_for_no_widgets(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(launch, "_ready", set())
    launch.extremes(torch.randn(1, 1, 1, 8))  # a warning of rich would be an error
