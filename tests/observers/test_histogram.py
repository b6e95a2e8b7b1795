"""Observers that count: exact in any partition, for any data, strategy and shape."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from lightning_obs import CalibrationSession
from lightning_obs.errors import CalibrationError
from lightning_obs.observers import Observer
from lightning_obs.observers.counting import HistogramObserver
from lightning_obs.observers.observer import observe_shared
from tests.observers.contract import range_of, two_tensors
from tests.observers.histograms import HEADS, WAYS, every_format, every_way, make, same

# ---------------------------------------------------------------------- exact in any partition


@pytest.mark.slow_but_first
@every_way
@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_range_ignores_how_the_data_is_cut_and_ordered(name, kwargs, args, dtype):
    x = (torch.randn(16, 8, 32) ** 3).to(dtype)
    whole = make(name, args=args, **kwargs)(x).get_qparams()
    for parts in (2, 5, 16):
        observer = make(name, args=args, **kwargs)
        for i in torch.randperm(len(chunks := x.chunk(parts))).tolist():
            observer(chunks[i])
        found = observer.get_qparams()
        assert torch.equal(found["scale"], whole["scale"])
        assert torch.equal(found["zero_point"], whole["zero_point"])
    assert whole["scale"].dtype == dtype


@settings(max_examples=30)
@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=6), min_size=1, max_size=5), st.data())
def test_any_partition_in_any_order_gives_the_same_bits(batches, data):
    name, kwargs = data.draw(st.sampled_from(WAYS))
    order = data.draw(st.permutations(batches))
    one, other = make(name, **kwargs), make(name, **kwargs)
    one(torch.tensor([[x for batch in batches for x in batch]]))
    for batch in order:
        other(torch.tensor([batch]))
    assert same(one.get_min_max(), other.get_min_max())


@every_way
def test_what_ranks_add_up_is_what_one_rank_counts(name, kwargs):
    x = torch.randn(8, 4, 16)
    whole = make(name, **kwargs)(x)
    ranks = [make(name, **kwargs)(part) for part in x.chunk(3)]
    reduce = {ReduceOp.SUM: torch.sum, ReduceOp.MIN: torch.amin, ReduceOp.MAX: torch.amax}
    assert set(whole._act_sync_dict) == {"counts", "min_vals", "max_vals"}
    for statistic, op in whole._act_sync_dict.items():
        together = reduce[op](torch.stack([getattr(rank, statistic) for rank in ranks]), dim=0)
        assert torch.equal(together, getattr(whole, statistic))
        setattr(ranks[0], statistic, together)
    assert same(ranks[0].get_min_max(), whole.get_min_max())


def test_observers_that_see_the_same_tensors_keep_one_histogram_until_one_sees_another():
    first, second = make("histogram"), make("histogram")
    for _ in range(2):
        x, measured = torch.randn(3, 8), {}
        observe_shared(first, x, measured)
        observe_shared(second, x, measured)
        assert len(measured) == 1
    assert first.counts is second.counts
    assert int(first.counts.sum()) == 48
    observe_shared(first, torch.randn(3, 8), {})
    assert int(first.counts.sum()) == 72
    assert int(second.counts.sum()) == 48


def test_observers_that_have_seen_other_tensors_before_keep_their_own_histograms():
    first, second, measured = make("histogram"), make("histogram"), {}
    first(torch.randn(3, 8))
    x = torch.randn(3, 8)
    observe_shared(first, x, measured)
    observe_shared(second, x, measured)
    assert int(first.counts.sum()) == 48
    assert int(second.counts.sum()) == 24


# ---------------------------------------------------------------------- any data


@every_way
@every_format
@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [0.0, 0.0],
        [5.0],
        [-3.0, -3.0],
        [-1.0, -2.0, -3.0],
        [1e-45, -1e-45],
        [1e37, -1e37],
        [1e-30, 1e30],
        [3.4e38],
    ],
    ids=str,
)
def test_the_scale_is_finite_and_positive(name, kwargs, args, values):
    qparams = make(name, args=args, **kwargs)(torch.tensor([values])).get_qparams()
    assert torch.isfinite(qparams["scale"]).all()
    assert (qparams["scale"] > 0).all()


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_found(name, kwargs, bad, dtype):
    observer = make(name, **kwargs)(torch.tensor([[1.0, bad, bad]], dtype=dtype))(torch.ones(1, 2, dtype=dtype))
    observer.get_min_max()
    with pytest.raises(CalibrationError, match=r"not finite. Got 1 of 1 (min|max)_vals not finite"):
        observer.get_qparams()


def test_a_nan_that_a_minimum_over_ranks_lost_is_still_counted():
    observer = make("histogram")(torch.tensor([[1.0, float("nan"), 2.0]]))
    observer.min_vals, observer.max_vals = torch.ones(1), torch.full((1,), 2.0)
    with pytest.raises(CalibrationError, match="Got 1 of 3 values NaN"):
        observer.get_qparams()


@every_way
def test_an_empty_tensor_changes_nothing(name, kwargs):
    observer = make(name, **kwargs)(torch.empty(0, 4))
    assert not observer.has_statistics
    with pytest.raises(CalibrationError, match="No statistics available"):
        observer.get_qparams()


@every_way
def test_computing_changes_nothing_and_reset_forgets(name, kwargs):
    observer = make(name, **kwargs)(torch.randn(4, 8))
    before = {key: value.clone() for key, value in vars(observer).items() if isinstance(value, torch.Tensor)}
    first, second = observer.get_qparams(), observer.get_qparams()
    assert torch.equal(first["scale"], second["scale"])
    assert all(torch.equal(getattr(observer, key), value) for key, value in before.items())
    observer.reset()
    assert not observer.has_statistics
    assert not hasattr(observer, "counts")


# ---------------------------------------------------------------------- strategies and shapes


@every_way
def test_each_attention_head_has_its_own_range(name, kwargs):
    x = torch.randn(2, 3, 50, 8) * torch.tensor([1.0, 10, 100])[None, :, None, None]
    low, high = make(name, "k", HEADS, **kwargs)(x).get_min_max()
    assert low.shape == high.shape == (3, 1, 1)
    alone = [make(name, "k", QuantizationArgs(), **kwargs)(x[:, [h]]).get_min_max() for h in range(3)]
    # One that improves keeps the search going for all, so mse may look further than alone.
    tolerance = {"rtol": 0.05, "atol": 0} if kwargs.get("criterion") == "mse" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(low.flatten(), torch.cat([r[0] for r in alone]), **tolerance)
    torch.testing.assert_close(high.flatten(), torch.cat([r[1] for r in alone]), **tolerance)


@every_way
def test_a_whole_weight_has_one_range(name, kwargs):
    observer = make(name, "weight", QuantizationArgs(strategy="tensor"), **kwargs)(torch.randn(6, 8))
    assert observer.get_qparams()["scale"].shape == (1,)
    assert observer.counts.shape == (1, 65536)
    assert observer.counts.element_size() * observer.counts.numel() == 512 * 1024


@every_way
@pytest.mark.parametrize(
    ("base_name", "args"),
    [
        ("weight", QuantizationArgs(strategy="channel")),
        ("weight", QuantizationArgs(num_bits=4, group_size=4)),
        ("weight", QuantizationArgs(strategy="block", block_structure=[4, 8])),
        ("input", QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)),
        ("input", QuantizationArgs(strategy="token", dynamic=True)),
    ],
    ids=["channel", "group", "block", "tensor_group", "token"],
)
def test_a_strategy_of_many_scales_is_refused_with_a_remedy(name, kwargs, base_name, args):
    strategy = args.strategy.value if hasattr(args.strategy, "value") else args.strategy
    expected = rf"one histogram of 512 KiB per scale. Got strategy {strategy}, expected strategy tensor or attn_head"
    with pytest.raises(CalibrationError, match=expected + ".*Remedy: observe this with mse"):
        make(name, base_name, args, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"criterion": "mae"}, r"criterion. Got 'mae', expected one of mse, percentile, entropy"),
        ({"percentile": 50}, r"percentile. Got 50, expected a value in percent, in \(50, 100\]"),
        ({"maxshrink": 1.5}, r"maxshrink. Got 1.5, expected a value in \[0, 1\]"),
        ({"patience": 0}, r"patience. Got 0, expected a whole number above 0"),
        ({"grid": -1}, r"grid. Got -1, expected a value above 0"),
        ({"norm": 0}, r"norm. Got 0, expected a value above 0"),
        ({"bins": 2048}, r"HistogramObserver has no hyperparameter 'bins'. Expected percentile, criterion, maxshrink"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_hyperparameter_that_cannot_be_is_refused(kwargs, message):
    with pytest.raises(CalibrationError, match=message):
        make("histogram", **kwargs)


# ---------------------------------------------------------------------- in a session


@every_way
def test_a_session_calibrates_inputs_with_it(mlp, name, kwargs):
    x = torch.randn(64, 16)
    with CalibrationSession(mlp, "INT8_STATIC", observers={"input": {"name": name, **kwargs}}) as session:
        for part in x.split(16):
            mlp(part)
    assert torch.equal(mlp.fc1.input_scale, make(name, **kwargs)(x).get_qparams()["scale"])
    assert session.result.modules == ["fc1", "fc2"]


def test_a_subclass_that_only_measures_otherwise_has_the_ranges_of_what_it_measured(own_registry):
    @Observer.register("halved histogram")
    class Halved(HistogramObserver):
        def measure(self, observed):
            return super().measure(observed / 2)

    x = torch.randn(64, 8)
    halved = make("halved histogram")
    for _ in range(2):  # the second asks for statistics that are there
        assert halved(x).get_qparams()["scale"].equal(make("histogram")(x / 2).get_qparams()["scale"])
    assert halved.get_statistics().keys() == {"counts", "min_vals", "max_vals"}
    halved.reset()
    assert not halved.has_statistics


@settings(max_examples=25)
@given(two_tensors())
def test_the_range_is_that_of_any_two_tensors_times_one_factor(pair):
    observed = range_of(make("histogram"), *pair)
    assert observed.is_scaled(torch.cat([value.flatten() for value in pair]), 0.05, 1)
