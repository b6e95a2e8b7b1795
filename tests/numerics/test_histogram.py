from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_obs.numerics import histogram as module
from lightning_obs.numerics.candidates import candidate_ranges
from lightning_obs.numerics.histogram import (
    BINS,
    Support,
    candidate_divergences,
    count_nan,
    count_values,
    percentile_range,
    support,
)

FLOAT_MAX = torch.finfo(torch.float32).max
TINY = 2.0**-149
SPECIAL = [0.0, -0.0, 1.0, TINY, -TINY, 1e-40, 1.17549435e-38, 3.3895e38, FLOAT_MAX, -FLOAT_MAX, 65504.0]
FORMATS = {
    "int8": QuantizationArgs(num_bits=8),
    "int8 asymmetric": QuantizationArgs(num_bits=8, symmetric=False),
    "int4": QuantizationArgs(num_bits=4),
    "fp8": QuantizationArgs(num_bits=8, type="float"),
}
every_format = pytest.mark.parametrize("args", FORMATS.values(), ids=list(FORMATS))


def finite(min_value=-FLOAT_MAX, max_value=FLOAT_MAX):
    return st.one_of(
        st.floats(min_value, max_value, width=32),
        st.sampled_from([x for x in SPECIAL if min_value <= x <= max_value]),
    )


def flat(values, dtype=torch.float32):
    x = torch.tensor(values, dtype=torch.float32)
    if dtype == torch.float16:
        x = x.clamp(-65504, 65504)
    x = x.to(dtype)
    return x[x.isfinite()] if dtype == torch.bfloat16 else x  # the largest float32 has no bfloat16


@st.composite
def tensors(draw, dtypes=(torch.float32, torch.float16, torch.bfloat16)):
    """One-dimensional: any values, one, all equal, or negative only."""
    kind = draw(st.sampled_from(["any", "one", "equal", "negative"]))
    if kind == "equal":
        values = [draw(finite())] * draw(st.integers(2, 20))
    else:
        high = -TINY if kind == "negative" else FLOAT_MAX
        values = draw(st.lists(finite(max_value=high), min_size=1, max_size=1 if kind == "one" else 40))
    x = flat(values, draw(st.sampled_from(dtypes)))
    return x if len(x) else torch.zeros(1, dtype=x.dtype)


def one_scale(x):
    """Counts and exact range of a flat tensor."""
    counts, low, high = count_values(x.reshape(1, 1, -1))
    return counts[0], low[0], high[0]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------------- counting and merging


@settings(max_examples=40)
@given(tensors())
def test_every_value_is_counted_in_the_bin_of_its_bfloat16(x):
    counts, low, high = one_scale(x)
    codes = x.to(torch.bfloat16).view(torch.int16).tolist()
    expected = torch.zeros(BINS, dtype=torch.int64)
    for code in codes:
        expected[code % BINS] += 1
    assert torch.equal(counts, expected)
    assert (low, high) == (x.min(), x.max())
    assert low.dtype == high.dtype == x.dtype


@settings(max_examples=40)
@given(tensors([torch.bfloat16]))
def test_for_bfloat16_nothing_is_lost(x):
    found = support(*one_scale(x))
    assert torch.equal(found.values.repeat_interleave(found.counts), x.float().sort().values)


@settings(max_examples=40)
@given(tensors())
def test_no_value_read_from_the_counts_lies_outside_the_data(x):
    found = support(*one_scale(x))
    assert torch.equal(found.values, found.values.sort().values)
    assert found.values[0] >= x.min()
    assert found.values[-1] <= x.max()
    relative = (found.values.repeat_interleave(found.counts) - x.float().sort().values).abs()
    tiny = 2.0**-134  # half of the distance between the smallest values
    assert bool((relative <= x.float().sort().values.abs() * 2**-8 + tiny).all())


def combined(one, other):
    return type(one)(one.counts + other.counts, torch.minimum(one.low, other.low), torch.maximum(one.high, other.high))


@settings(max_examples=40)
@given(tensors([torch.float32]), tensors([torch.float32]), tensors([torch.float32]))
def test_combining_is_associative_and_equals_the_histogram_of_the_concatenation(a, b, c):
    a, b, c = (x.reshape(1, 1, -1) for x in (a, b, c))
    ha, hb, hc = (count_values(x) for x in (a, b, c))
    together = count_values(torch.cat([a, b, c], dim=-1))
    assert same(combined(combined(ha, hb), hc), together)
    assert same(combined(ha, combined(hb, hc)), together)
    assert same(combined(hc, combined(hb, ha)), together)


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))
def test_each_scale_has_a_histogram_of_its_own(n, scales, width):
    x = torch.randn(n, scales, width)
    counts, low, high = count_values(x)
    for q in range(scales):
        assert same((counts[q], low[q], high[q]), one_scale(x[:, q].reshape(-1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_without_compiled_loops_and_in_any_tile_the_counts_are_the_same(dtype, monkeypatch):
    x = torch.cat([torch.randn(999), torch.tensor([1e-40, -1e-6, 0.0, -0.0, 3e4])]).to(dtype).reshape(1, 1, -1)
    whole = count_values(x)
    monkeypatch.setattr(module.launch, "can_read", lambda _: False)
    monkeypatch.setattr(module, "_TILE", 7)
    assert same(count_values(x), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), float("-inf")])
def test_a_nan_or_infinity_shows_in_the_range(bad, dtype):
    counts, low, high = one_scale(torch.tensor([1.0, bad, -2.0], dtype=dtype))
    assert not bool(torch.isfinite(low) & torch.isfinite(high))
    assert count_nan(counts) == int(math.isnan(bad))
    assert int(counts.sum()) == 3


def test_the_largest_float32_is_finite_although_its_bfloat16_is_not():
    found = support(*one_scale(torch.tensor([-FLOAT_MAX, FLOAT_MAX])))
    assert found.values.tolist() == [-FLOAT_MAX, FLOAT_MAX]


# ---------------------------------------------------------------------- percentiles

percentiles = st.one_of(st.sampled_from([50.1, 75.0, 90, 99.0, 99.9, 99.99, 99.999, 100]), st.floats(50.001, 100))


@settings(max_examples=40)
@given(tensors([torch.bfloat16]), percentiles)
def test_a_percentile_is_that_of_the_sorted_data(x, percentile):
    low, high = percentile_range(*one_scale(x), percentile)
    ordered = x.double().sort().values.tolist()
    # At least the share lies at or below, and no smaller value has that.
    share = [sum(v <= y for v in ordered) / len(ordered) * 100 for y in ordered]
    expected = next(y for y, s in zip(ordered, share, strict=True) if s >= percentile - 1e-9)
    assert high == expected
    mirrored, _ = percentile_range(*one_scale(-x), percentile)
    assert mirrored == -high
    assert low <= high


@pytest.mark.parametrize("percentile", [60, 99.0, 99.9, 99.99, 99.999, 100])
@pytest.mark.parametrize("size", [1, 2, 999, 1000, 1001, 100_000])
def test_a_percentile_is_numpy_s_inverted_cdf(size, percentile):
    x = torch.randn(size).bfloat16()
    low, high = percentile_range(*one_scale(x), percentile)
    ordered = x.double().numpy()
    # numpy rounds q * n; an exact percentile of these sizes is a matter of one part in 1e12.
    above = np.quantile(ordered, percentile / 100 - 1e-12, method="inverted_cdf")
    below = -np.quantile(-ordered, percentile / 100 - 1e-12, method="inverted_cdf")
    assert (low.item(), high.item()) == (below, above)


@settings(max_examples=40)
@given(tensors())
def test_the_100th_percentile_is_the_exact_range(x):
    assert percentile_range(*one_scale(x), 100) == (x.min(), x.max())


def test_candidates_in_pieces_give_the_same_divergences(monkeypatch):
    counts, low, high = one_scale(torch.randn(3000))
    lows, highs = candidate_ranges(low, high, [1 - i / 100 for i in range(20)])
    found = support(counts, low, high)
    int8 = FORMATS["int8"]
    divergences = candidate_divergences(found, lows, highs, int8)
    monkeypatch.setattr(module, "_CELLS", 3 * len(found.values))
    torch.testing.assert_close(candidate_divergences(found, lows, highs, int8), divergences)


# ---------------------------------------------------------------------- entropy


def oracle_divergence(values, counts, scale, highest):
    """Migacz's recipe in plain Python for a symmetric format of levels -highest to highest, bin by bin."""
    limit = scale * (highest + 0.5)
    pairs = [(v, c) for v, c in zip(values, counts, strict=True) if v]
    inside = [(v, c) for v, c in pairs if abs(v) <= limit]
    if not inside:
        return math.inf
    p = [c for _, c in inside]
    p[0] += sum(c for v, c in pairs if v < -limit)
    p[-1] += sum(c for v, c in pairs if v > limit)
    widths = [2.0 ** math.frexp(v)[1] for v, _ in inside]
    levels = [max(-highest - 1, min(highest, round(v / scale))) for v, _ in inside]
    q = []
    for w, level in zip(widths, levels, strict=True):
        mates = [i for i, other in enumerate(levels) if other == level]
        q.append(sum(inside[i][1] for i in mates) * w / sum(widths[i] for i in mates))
    return sum(a * math.log(a / b) - a + b for a, b in zip(p, q, strict=True)) / sum(p)


@pytest.mark.parametrize("seed", range(5))
def test_entropy_is_the_published_recipe(seed):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(200, generator=generator) * 3).bfloat16()
    counts, low, high = one_scale(x)
    found = support(counts, low, high)
    limits = torch.tensor([1.01, 0.77, 0.51, 0.31, 0.13]) * x.float().abs().max()  # no value lies on an edge
    got = candidate_divergences(found, -limits, limits, FORMATS["int4"])
    expected = [
        oracle_divergence(found.values.tolist(), found.counts.tolist(), limit / 7.5, 7) for limit in limits.tolist()
    ]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-9)


def test_entropy_by_hand():
    # Symmetric int4 with limit 7.5 has scale 1: 1 and 1.25 share a level and a width, 2 is alone, 20 is clipped.
    found = Support(torch.tensor([1.0, 1.25, 2.0, 20.0]), torch.tensor([1, 3, 2, 2]))
    got = candidate_divergences(found, torch.tensor([-7.5]), torch.tensor([7.5]), FORMATS["int4"])
    p, q = [1 / 8, 3 / 8, 4 / 8], [2 / 8, 2 / 8, 2 / 8]
    assert got.item() == pytest.approx(sum(a * math.log(a / b) - a + b for a, b in zip(p, q, strict=True)))


def test_entropy_differs_from_the_normalised_one_by_half_the_square_of_what_is_clipped():
    values, counts = torch.tensor([1.0, 1.25, 2.0, 20.0]), torch.tensor([300, 900, 900, 21])
    got = candidate_divergences(Support(values, counts), torch.tensor([-7.5]), torch.tensor([7.5]), FORMATS["int4"])
    p, q = [300 / 2121, 900 / 2121, 921 / 2121], [600 / 2100, 600 / 2100, 900 / 2100]
    normalised = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert got.item() - normalised == pytest.approx((21 / 2121) ** 2 / 2, rel=0.01)


@every_format
def test_entropy_of_an_all_zero_tensor_prefers_nothing(args):
    counts, low, high = one_scale(torch.zeros(5))
    found = candidate_divergences(support(counts, low, high), *candidate_ranges(low, high, [1.0, 0.5]), args)
    assert found.tolist() == [0, 0]


def test_a_candidate_with_nothing_inside_is_never_the_best():
    counts, low, high = one_scale(torch.full((9,), 5.0))
    found = candidate_divergences(support(counts, low, high), *candidate_ranges(low, high, [1.0, 0.5]), FORMATS["int8"])
    assert found.tolist() == [0, math.inf]


def test_a_spike_of_exact_zeros_does_not_change_the_entropy():
    x = torch.randn(5000)
    limits = torch.tensor([4.0, 2.0, 1.0])
    one, other = (
        candidate_divergences(support(*one_scale(y)), -limits, limits, FORMATS["int8"])
        for y in (x, torch.cat([x, torch.zeros(5000)]))
    )
    assert torch.equal(one, other)
