from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from lightning_obs.errors import CalibrationError
from lightning_obs.observers import Observer
from tests.observers.contract import range_of, two_tensors

INT8 = QuantizationArgs(num_bits=8)
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights


def make(base_name: str = "input", args: QuantizationArgs = INT8, **kwargs) -> Observer:
    return Observer.load_from_registry("normal_observer", base_name=base_name, args=args, **kwargs)


@pytest.mark.parametrize("k", [None, 3.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_range_is_mean_and_k_deviations_of_everything(k, dtype):
    x = (torch.randn(9, 5, 32) * 3 + 1).to(dtype)
    observer = make(**({} if k is None else {"k": k}))
    for part in x.split(2):
        observer(part)
    mean, std = x.double().mean(), x.double().std()
    low, high = observer.get_min_max()
    torch.testing.assert_close(low, (mean - (k or 2) * std).float().reshape(1))
    torch.testing.assert_close(high, (mean + (k or 2) * std).float().reshape(1))


@settings(max_examples=40)
@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=5), min_size=1, max_size=5), st.data())
def test_order_and_partition_do_not_matter_beyond_rounding(batches, data):
    one = make()(torch.tensor([[x for batch in batches for x in batch]]))
    other = make()
    for batch in data.draw(st.permutations(batches)):
        other(torch.tensor([batch]))
    for a, b in zip(one.get_min_max(), other.get_min_max(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-4)


def test_what_ranks_add_up_is_what_one_rank_finds():
    x = torch.randn(8, 4, 16)
    whole, (first, second) = make()(x), [make()(part) for part in x.split([5, 3])]
    assert whole._act_sync_dict == dict.fromkeys(("number", "sums", "squares"), ReduceOp.SUM)
    for statistic in whole._act_sync_dict:
        setattr(first, statistic, getattr(first, statistic) + getattr(second, statistic))
    for a, b in zip(first.get_min_max(), whole.get_min_max(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("base_name", "args", "shape", "ranges"),
    [
        ("weight", QuantizationArgs(strategy="tensor"), (6, 8), (1,)),
        ("weight", QuantizationArgs(strategy="channel"), (6, 8), (6, 1)),
        ("weight", QuantizationArgs(num_bits=4, group_size=4), (6, 8), (6, 2)),
        ("weight", QuantizationArgs(strategy="block", block_structure=[4, 8]), (6, 8), (2, 1)),
        ("k", QuantizationArgs(strategy="attn_head"), (2, 3, 5, 4), (3, 1, 1)),
        ("input", INT8, (2, 5, 8), (1,)),
    ],
)
def test_ranges_have_the_shape_of_the_scales(base_name, args, shape, ranges):
    observer = make(base_name, args)(torch.randn(shape))(torch.randn(shape))
    assert all(end.shape == ranges for end in observer.get_min_max())
    assert observer.get_qparams()["scale"].shape == ranges


def test_a_fused_set_has_one_global_scale():
    weights = [torch.randn(4, 32) * scale for scale in (1, 5, 3)]
    group = [make("weight", NVFP4)(w) for w in weights]
    alone = [observer.get_qparams()["global_scale"] for observer in group]
    Observer.fuse(group)
    assert [o.get_qparams()["global_scale"] for o in group] == [min(alone)] * 3
    groups = weights[1].reshape(4, 2, 16)
    absmax = (groups.mean(-1).abs() + 2 * groups.std(-1)).max()
    assert min(alone).item() == pytest.approx(448 * 6 / absmax.item(), rel=1e-5)


@pytest.mark.parametrize("values", [[0.0], [5.0], [-3.0, -3.0], [1e-45], [1e37, -1e37]], ids=str)
def test_the_scale_is_finite_and_positive(values):
    scale = make()(torch.tensor([values])).get_qparams()["scale"]
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_found_and_counted(bad):
    weight = torch.zeros(3, 4)
    weight[1, 2] = bad
    observer = make("weight", QuantizationArgs(strategy="channel"))(weight)
    with pytest.raises(CalibrationError, match="Got 1 of 3 sums not finite, 1 of 3 squares not finite"):
        observer.get_qparams()


def test_nothing_observed_is_said_and_reset_forgets():
    observer = make()(torch.empty(0, 4))
    with pytest.raises(CalibrationError, match="No statistics available in NormalObserver"):
        observer.get_qparams()
    observer(torch.ones(1, 2)).reset()
    assert not observer.has_statistics


@pytest.mark.parametrize("k", [0, -1, float("nan")])
def test_k_must_be_above_0(k):
    with pytest.raises(CalibrationError, match=r"k. Got .*, expected a value above 0"):
        make(k=k)


@settings(max_examples=25)
@given(two_tensors())
def test_three_quarters_of_any_values_lie_within_two_deviations(pair):
    """Chebyshev: beyond k deviations lies at most 1 / k**2."""
    assert range_of(make(), *pair).share_inside(torch.cat([value.flatten() for value in pair])) >= 0.75
