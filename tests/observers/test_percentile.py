from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_obs.errors import CalibrationError
from lightning_obs.observers import Observer
from tests.observers.contract import range_of, two_tensors


def make(**kwargs) -> Observer:
    return Observer.load_from_registry("percentile", base_name="input", args=QuantizationArgs(), **kwargs)


@pytest.mark.parametrize("percentile", [51, 90, 99.9, 100])
def test_the_range_over_all_batches_is_exact_for_bfloat16(percentile):
    x = torch.randn(20, 500).bfloat16()
    observer = make(percentile=percentile)
    for part in x.split(3):
        observer(part)
    low, high = observer.get_min_max()
    ordered = x.double().flatten().numpy()
    assert high.item() == np.quantile(ordered, percentile / 100 - 1e-12, method="inverted_cdf")
    assert low.item() == -np.quantile(-ordered, percentile / 100 - 1e-12, method="inverted_cdf")


def test_float32_is_found_to_the_precision_of_bfloat16():
    x = torch.randn(10_000)
    low, high = make(percentile=99)(x[None]).get_min_max()
    assert high.item() == pytest.approx(np.quantile(x.numpy(), 0.99, method="inverted_cdf"), rel=2**-8)
    assert low.item() == pytest.approx(-np.quantile(-x.numpy(), 0.99, method="inverted_cdf"), rel=2**-8)


def test_by_default_few_values_lose_nothing():
    x = torch.randn(1, 9_999)
    assert make()(x).get_min_max() == (x.min(), x.max())


def test_each_end_loses_its_share():
    x = torch.arange(-100.0, 100.0)[None]  # 200 values: one percent is two of them
    assert make(percentile=99)(x).get_min_max() == (-98, 97)


@pytest.mark.parametrize(("percentile", "total", "kept"), [(50.34, 5_000, 2_517), (90.04, 5_000, 4_502)])
def test_the_percentile_is_the_decimal_that_was_written(percentile, total, kept):
    # In binary floats it comes out a little more, and one value more would be kept.
    assert math.ceil(total * percentile / 100) == kept + 1
    x = torch.ones(1, total)
    x[0, kept:] = 2
    assert make(percentile=percentile)(x).get_min_max() == (1, 1)
    assert make(percentile=percentile)(-x).get_min_max() == (-1, -1)


@pytest.mark.parametrize("percentile", [50, 0.999, -1, 100.1, float("nan")])
def test_a_percentile_outside_50_to_100_is_refused(percentile):
    with pytest.raises(CalibrationError, match=r"percentile. Got .*, expected a value in percent, in \(50, 100\]"):
        make(percentile=percentile)


def test_an_unknown_hyperparameter_is_refused():
    with pytest.raises(CalibrationError, match=r"PercentileObserver has no hyperparameter 'norm'. Expected percentile"):
        make(norm=2)


@settings(max_examples=40)
@given(st.lists(st.integers(-200, 200), min_size=1, max_size=60), st.integers(51, 99))
def test_percentile_cuts_no_more_than_its_share_off_each_end(values, percentile):
    x = torch.tensor([values], dtype=torch.bfloat16)
    low, high = make(percentile=percentile)(x).get_min_max()
    may_go = len(values) - math.ceil(len(values) * percentile / 100)
    assert (x < low).sum() <= may_go
    assert (x > high).sum() <= may_go


@settings(max_examples=25)
@given(two_tensors())
def test_of_any_few_values_the_default_keeps_all(pair):
    observed = range_of(make(), *pair)
    assert observed.low == min(value.min() for value in pair)
    assert observed.high == max(value.max() for value in pair)
