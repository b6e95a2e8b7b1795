"""The observers that count: histogram, and what percentile has in common with it."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from lightning_obs import CalibrationSession
from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.qparams import compute_qparams
from lightning_obs.observers import Observer

INT8 = QuantizationArgs(num_bits=8)
INT4 = QuantizationArgs(num_bits=4)
ASYMMETRIC = QuantizationArgs(num_bits=8, symmetric=False)
FP8 = QuantizationArgs(num_bits=8, type="float")
HEADS = QuantizationArgs(num_bits=8, strategy="attn_head")
WAYS = [
    ("histogram", {"criterion": "mse"}),
    ("histogram", {"criterion": "percentile", "percentile": 99}),
    ("histogram", {"criterion": "entropy"}),
    ("percentile", {"percentile": 99}),
]
every_way = pytest.mark.parametrize(("name", "kwargs"), WAYS, ids=["mse", "percentile", "entropy", "percentile_alone"])
every_format = pytest.mark.parametrize("args", [INT8, ASYMMETRIC, FP8], ids=["int8", "int8 asymmetric", "fp8"])


def make(name: str, base_name: str = "input", args: QuantizationArgs = INT8, **kwargs) -> Observer:
    return Observer.load_from_registry(name, base_name=base_name, args=args, **kwargs)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------------- exact in any partition


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


def test_observers_that_share_a_measurement_do_not_share_their_counts():
    x, measured = torch.randn(3, 8), {}
    first, second = make("histogram"), make("percentile")
    first.observe_shared(x, measured)
    second.observe_shared(x, measured)
    assert len(measured) == 1
    first.counts.add_(second.counts)  # as a sum over two ranks does, in place
    assert int(second.counts.sum()) == int(next(iter(measured.values())).counts.sum()) == 24


# ---------------------------------------------------------------------- the range of the least error


def errors_of_the_data(x, args, factors, norm):
    """Float64, on the data themselves."""
    lows = torch.stack([x.min() * p for p in factors])
    highs = torch.stack([x.max() * p for p in factors])
    qparams = compute_qparams(lows, highs, args)
    errors = []
    for scale, zero in zip(qparams["scale"].double(), qparams["zero_point"].double(), strict=True):
        steps = x.double() / scale + zero
        if args.type == "int":
            half = 2 ** (args.num_bits - 1)
            levels = steps.clamp(-half, half - 1).round()
        else:
            levels = steps.clamp(-448, 448).to(torch.float8_e4m3fn).double()
        errors.append((((levels - zero) * scale) - x.double()).abs().pow(norm).sum().item())
    return lows, highs, errors


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("power", [1, 3])
def test_mse_takes_the_candidate_with_the_least_error_on_all_the_data(args, dtype, power):
    x = (torch.randn(64, 128) ** power).to(dtype)
    observer = make("histogram", args=args, maxshrink=0.9, norm=2.4)
    for part in x.chunk(4):
        observer(part)
    low, high = observer.get_min_max()
    lows, highs, errors = errors_of_the_data(x, args, [1 - i / 100 for i in range(90)], 2.4)
    chosen = [i for i in range(90) if lows[i] == low and highs[i] == high]
    tolerance = 1e-5 if dtype == torch.bfloat16 else 1e-2  # fp32 is counted in bfloat16
    assert errors[chosen[0]] <= min(errors) * (1 + tolerance)
    assert low.dtype == dtype


def test_mse_stops_where_the_search_through_the_data_stops():
    x = torch.cat([torch.randn(4000), torch.tensor([12.0])]).bfloat16()
    _, highs, errors = errors_of_the_data(x, INT8, [1 - i / 100 for i in range(90)], 2.4)
    best = waited = 0
    for i, error in enumerate(errors[1:], start=1):
        best, waited = (i, 0) if error < errors[best] else (best, waited + 1)
        if waited == 2:
            break
    assert make("histogram", maxshrink=0.9, patience=2, norm=2.4)(x[None]).get_min_max()[1] == highs[best]


def test_mse_by_default_finds_the_least_squared_error_far_below_an_outlier():
    x = torch.cat([torch.randn(20_000), torch.tensor([25.0])]).bfloat16()
    lows, highs, errors = errors_of_the_data(x, INT4, [1 - i / 100 for i in range(95)], 2.0)
    best = errors.index(min(errors))
    assert best > 50
    assert make("histogram", args=INT4)(x[None]).get_min_max() == (lows[best], highs[best])


def test_mse_by_default_gives_up_no_more_than_95_percent():
    x = torch.cat([torch.randn(100_000), torch.tensor([100.0])]).bfloat16()
    low, high = make("histogram", args=INT4, norm=0.5)(x[None]).get_min_max()
    assert high == torch.tensor(100.0).bfloat16() * (1 - 94 / 100)
    assert low == x.min() * (1 - 94 / 100)


def test_a_search_without_steps_is_the_exact_range():
    x = torch.randn(5, 40)
    assert make("histogram", maxshrink=0)(x).get_min_max() == (x.min(), x.max())


# ---------------------------------------------------------------------- one search for the same statistics

SEARCHED = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) ** 3


def searched(monkeypatch, **kwargs):
    """An observer that has been asked for its range, and a list that grows with every further search."""
    observer = make("histogram", **kwargs)(SEARCHED)
    observer.get_min_max()
    searches, search = [], type(observer)._search
    monkeypatch.setattr(type(observer), "_search", lambda self: searches.append(self) or search(self))
    return observer, searches


def test_the_same_statistics_are_searched_once(monkeypatch):
    observer, searches = searched(monkeypatch)
    expected = make("histogram")(SEARCHED).get_qparams()["scale"]
    searches.clear()
    observer.get_min_max()
    assert torch.equal(observer.get_qparams()["scale"], expected)
    assert searches == []


def after_new_data(observer):
    observer(SEARCHED * 7)


def after_reset(observer):
    observer.reset()
    observer(SEARCHED * 7)


def after_a_reduction_that_replaces(observer):
    other = make("histogram")(SEARCHED * 7)
    observer.counts = observer.counts + other.counts
    observer.min_vals, observer.max_vals = other.min_vals, other.max_vals


def after_a_reduction_in_place(observer):
    # .data writes without raising a tensor's version, as torch.distributed does.
    other = make("histogram")(SEARCHED * 7)
    observer.counts.data.add_(other.counts)
    observer.min_vals.data.copy_(other.min_vals)
    observer.max_vals.data.copy_(other.max_vals)


def after_a_reduction_of_the_ends_in_place(observer):
    observer.max_vals.data.mul_(3)


def after_counts_were_moved_in_place(observer):
    observer.counts.copy_(observer.counts.flip(-1))


def after_another_norm(observer):
    observer.norm = 4.0


def after_another_format(observer):
    observer.args.num_bits = 4


@pytest.mark.parametrize(
    "change",
    [
        after_new_data,
        after_reset,
        after_a_reduction_that_replaces,
        after_a_reduction_in_place,
        after_a_reduction_of_the_ends_in_place,
        after_counts_were_moved_in_place,
        after_another_norm,
        after_another_format,
    ],
    ids=lambda change: change.__name__,
)
def test_a_range_is_found_anew(change):
    # What was never asked before has nothing to remember.
    asked, fresh = make("histogram")(SEARCHED), make("histogram")(SEARCHED)
    before = asked.get_min_max()
    change(asked)
    change(fresh)
    assert same(asked.get_min_max(), fresh.get_min_max())
    assert not same(asked.get_min_max(), before)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_finds_its_own_range(duplicate):
    observer = make("histogram")(SEARCHED)
    observer.counts.add_(0)  # raises the version, which a copy starts anew
    observer.get_min_max()
    copied, fresh = duplicate(observer), make("histogram")(SEARCHED)
    for each in (copied, fresh):
        each.counts = each.counts.clone()
        after_counts_were_moved_in_place(each)
    assert same(copied.get_min_max(), fresh.get_min_max())


def test_changing_what_was_returned_does_not_change_the_answer():
    observer = make("histogram")(SEARCHED)
    low, high = observer.get_min_max()
    expected = low.clone(), high.clone()
    low.zero_(), high.zero_()
    assert same(observer.get_min_max(), expected)


def test_statistics_of_inference_mode_are_searched_each_time(monkeypatch):
    observer, searches = searched(monkeypatch)
    with torch.inference_mode():
        observer.counts = observer.counts * 1
    observer.get_min_max()
    observer.get_min_max()
    assert len(searches) == 2


def test_new_data_lets_go_of_the_old_counts():
    observer = make("histogram")(SEARCHED)
    observer.get_min_max()
    old = weakref.ref(observer.counts)
    observer(SEARCHED)
    assert old() is None


# ---------------------------------------------------------------------- entropy


def test_entropy_clips_an_outlier_and_keeps_a_uniform_range():
    uniform = torch.rand(20_000) * 2 - 1
    assert make("histogram", criterion="entropy")(uniform[None]).get_min_max()[1] > 0.95
    normal = torch.cat([torch.randn(20_000), torch.tensor([40.0])])
    assert make("histogram", criterion="entropy")(normal[None]).get_min_max()[1] < 10


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
        ({"patience": 0}, r"patience. Got 0, expected a value above 0"),
        ({"grid": -1}, r"grid. Got -1, expected a value above 0"),
        ({"norm": 0}, r"norm. Got 0, expected a value above 0"),
        ({"bins": 2048}, r"HistogramObserver has no hyperparameter 'bins'. Expected criterion, percentile, maxshrink"),
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
