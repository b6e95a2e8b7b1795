"""Questions about many tensors at once."""

import pytest
import torch

from lightning_obs.numerics.many_tensors import all_finite, all_positive, to_host

LARGE = 2**17


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", range(4))
def test_a_value_that_is_not_finite_is_found_among_small_and_large_tensors(place, bad):
    values = [torch.ones(3), torch.ones(LARGE), torch.ones(3, dtype=torch.float64), torch.ones(LARGE)]
    assert all_finite([*values, torch.ones(2, dtype=torch.int64), "no tensor", None])
    values[place][1] = bad
    assert not all_finite(values)


def test_large_tensors_are_not_put_together(monkeypatch):
    joined = []
    monkeypatch.setattr(torch, "cat", lambda parts, cat=torch.cat: joined.extend(map(len, parts)) or cat(parts))
    assert all_finite([torch.ones(LARGE), torch.ones(3), torch.ones(LARGE), torch.ones(4)])
    assert joined == [3, 4]


@pytest.mark.parametrize("size", [3, 2**16 + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [0.0, -1.0, torch.inf, -torch.inf, torch.nan])
def test_one_value_that_is_not_positive_is_found_among_small_and_large_tensors(value, dtype, size):
    scales = torch.ones(size, dtype=dtype)
    assert all_positive([torch.ones(2), scales, torch.empty(0)])
    scales[1] = value
    assert not all_positive([torch.ones(2), scales, torch.empty(0)])
    assert all_positive([torch.ones(2), scales], absolute=True) == (value == -1)


def test_large_and_small_tensors_come_to_the_host_as_they_are():
    tensors = [torch.randn(2**16 + 1), torch.tensor([1, 2]), torch.randn(3, 4).T]
    for copied, tensor in zip(to_host(tensors), tensors, strict=True):
        assert torch.equal(copied, tensor)
        assert copied.data_ptr() != tensor.data_ptr()
