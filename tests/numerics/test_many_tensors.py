"""Questions about many tensors at once."""

import pytest
import torch

from lightning_obs.numerics.many_tensors import all_finite

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
