from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_obs.numerics import moments as module
from lightning_obs.numerics.moments import Moments, mean_and_std, measure_moments

floats = st.floats(-1e4, 1e4, width=32)


@given(st.lists(st.lists(floats, min_size=1, max_size=8), min_size=1, max_size=6))
def test_added_parts_have_the_moments_of_the_concatenation(parts):
    found = [measure_moments(torch.tensor(part).reshape(1, 1, -1)) for part in parts]
    merged = Moments(*(torch.stack(each).sum(0) for each in zip(*found, strict=True)))
    x = torch.tensor([v for part in parts for v in part], dtype=torch.float64)
    mean, std = mean_and_std(merged)
    expected = x.std() if len(x) > 1 else torch.zeros(())
    # Squares up to 1e8 leave 1e-8 of a variance; of a deviation near zero that is its root.
    torch.testing.assert_close(mean[0], x.mean(), rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(std[0], expected.double(), rtol=1e-9, atol=1e-3)


@pytest.mark.parametrize("shape", [(7, 1, 9), (1, 6, 1, 8), (1, 6, 2, 4), (5, 3, 1, 1, 4), (1, 1, 40), (4, 3, 5)])
@pytest.mark.parametrize("tile", [1, 3, 7, 16, 1 << 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moments_are_torch_s_whatever_the_shape_and_the_tile(shape, tile, dtype, monkeypatch):
    monkeypatch.setattr(module, "_TILE", tile)
    x = torch.randn(shape).to(dtype)
    mean, std = mean_and_std(measure_moments(x))
    assert mean.shape == std.shape == shape[1:-1]
    torch.testing.assert_close(mean, x.double().mean((0, -1)))
    torch.testing.assert_close(std, x.double().std((0, -1)))


def test_a_mean_far_above_the_deviation_costs_a_few_digits_only():
    x = torch.randn(1, 1, 10_000) + 1000
    _, std = mean_and_std(measure_moments(x))
    torch.testing.assert_close(std[0], x.double().std(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("value", [1e-40, 3e38, -7.0])
def test_equal_values_have_no_deviation_beyond_rounding(value):
    mean, std = mean_and_std(measure_moments(torch.full((1, 1, 50), value)))
    assert mean.item() == pytest.approx(torch.tensor(value).item(), rel=1e-12)
    assert std.item() <= abs(value) * 1e-6
