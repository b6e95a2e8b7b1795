"""Which range a histogram observer finds, and how often it looks for it."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize

from lightning_obs.numerics.qparams import compute_qparams
from lightning_obs.observers import Observer
from lightning_obs.observers.counting import HistogramObserver
from tests.observers.histograms import ASYMMETRIC, FP8, HEADS, INT4, INT8, every_format, make, same

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


@pytest.mark.parametrize(
    ("args", "norm"), [(INT8, 1.0), (ASYMMETRIC, 2.0), (FP8, 2.4)], ids=["int8 1.0", "int8 asymmetric 2.0", "fp8 2.4"]
)
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(5000),
        torch.randn(5000) * 1e-3 + 0.01,
        torch.randn(5000).exp() * torch.randn(5000).sign(),
        -torch.rand(5000) * 1e4,
        torch.cat([torch.randn(5000), torch.tensor([30.0])]),
        torch.full((10,), -0.3),
        torch.randn(5000) * 2.0**-80,
        torch.randn(5000) * 2.0**80,
    ],
    ids=["normal", "shifted", "heavy tails", "negative", "outlier", "equal", "tiny", "huge"],
)
def test_mse_loses_no_more_than_the_best_candidate_of_the_data(x, norm, args):
    x = x.bfloat16()
    factors = [1 - i / 50 for i in range(40)]
    low, high = make("histogram", args=args, maxshrink=0.8, grid=50, norm=norm)(x[None]).get_min_max()
    lows, highs, errors = errors_of_the_data(x, args, factors, norm)
    chosen = [error for *ends, error in zip(lows, highs, errors, strict=True) if ends == [low, high]]
    # fp32 arithmetic puts a value that lies between two levels on the other one: as far away, within rounding.
    assert chosen[0] <= min(errors) * (1 + 2e-3)


def test_the_heads_of_one_tensor_are_one_search():
    """Two candidates in a row that improve no head end it: a head that improves keeps it going for the other."""
    x = torch.randn(1, 2, 64, 128).bfloat16()
    x[:, 1, 0, 0] = 30
    one, other, both = (make("histogram", "k", HEADS, patience=2)(y) for y in (x[:, :1], x[:, 1:], x))
    ends = both.get_min_max()[1].flatten()
    assert ends[1] == other.get_min_max()[1].flatten()
    assert ends[0] <= one.get_min_max()[1].flatten()


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


def test_fused_observers_of_one_tensor_are_searched_once(monkeypatch):
    observer, searches = searched(monkeypatch)
    same_data, other_data, alone = (make("histogram")(SEARCHED * factor) for factor in (1, 2, 1))
    Observer.fuse([observer, same_data, other_data])
    assert same(same_data.get_min_max(), observer.get_min_max())
    assert searches == []
    for one in (other_data, alone):
        one.get_min_max()
    assert searches == [other_data, alone]


def test_fused_observers_with_other_hyperparameters_of_a_class_of_one_s_own_have_ranges_of_their_own():
    class Halved(HistogramObserver):
        hyperparameters = {"share": 1.0}  # noqa: RUF012
        share: float

        def _search(self):
            return tuple(end * self.share for end in super()._search())

    whole, half = (Halved("input", QuantizationArgs(), share=share)(SEARCHED) for share in (1.0, 0.5))
    Observer.fuse([whole, half])
    assert same([end / 2 for end in whole.get_min_max()], half.get_min_max())


def after_new_data(observer):
    observer(SEARCHED * 7)


def after_reset(observer):
    observer.reset()
    observer(SEARCHED * 7)


def after_a_reduction_that_replaces(observer):
    other = make("histogram")(SEARCHED * 7)
    observer.counts = observer.counts + other.counts
    observer.min_vals, observer.max_vals = other.min_vals, other.max_vals


def after_a_reduction_that_replaces_an_end(observer):
    observer.max_vals = observer.max_vals * 3


def after_counts_were_moved(observer):
    observer.counts = observer.counts.flip(-1)


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
        after_a_reduction_that_replaces_an_end,
        after_counts_were_moved,
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
    observer.get_min_max()
    copied, fresh = duplicate(observer), make("histogram")(SEARCHED)
    for each in (copied, fresh):
        after_counts_were_moved(each)
    assert same(copied.get_min_max(), fresh.get_min_max())


def test_changing_what_was_returned_does_not_change_the_answer():
    observer = make("histogram")(SEARCHED)
    low, high = observer.get_min_max()
    expected = low.clone(), high.clone()
    low.zero_(), high.zero_()
    assert same(observer.get_min_max(), expected)


def test_statistics_of_inference_mode_are_searched_when_they_are_others(monkeypatch):
    observer, searches = searched(monkeypatch)
    for factor in (2, 1, 3):
        with torch.inference_mode():
            observer.counts = observer.counts * factor
        observer.get_min_max()
    assert len(searches) == 2


@pytest.mark.parametrize("change", [after_new_data, lambda observer: observer.reset()], ids=["new data", "reset"])
def test_the_old_counts_are_let_go_of(change):
    observer = make("histogram")(SEARCHED)
    observer.get_min_max()
    old = weakref.ref(observer.counts)
    change(observer)
    assert old() is None


# ---------------------------------------------------------------------- entropy


def test_entropy_clips_an_outlier_and_keeps_a_uniform_range():
    uniform = torch.rand(20_000) * 2 - 1
    assert make("histogram", criterion="entropy")(uniform[None]).get_min_max()[1] > 0.95
    normal = torch.cat([torch.randn(20_000), torch.tensor([40.0])])
    assert make("histogram", criterion="entropy")(normal[None]).get_min_max()[1] < 10


SHAPES = {
    "normal": lambda n: torch.randn(n),
    "uniform": lambda n: torch.rand(n) * 2 - 1,
    "away from zero": lambda n: 2 + 0.2 * torch.randn(n),
    "one-sided": lambda n: torch.randn(n).relu(),
    "bimodal": lambda n: torch.cat([-1 + 0.1 * torch.randn(n // 2), 3 + 0.1 * torch.randn(n // 2)]),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "args", [QuantizationArgs(), QuantizationArgs(symmetric=False), QuantizationArgs(type="float")]
)
def test_entropy_has_hardly_more_error_than_the_least_where_there_is_no_outlier(shape, args):
    torch.manual_seed(0)
    x = SHAPES[shape](50_000)[None]
    error = {}
    for criterion in ("entropy", "mse"):
        observer = HistogramObserver("input", args, criterion=criterion)
        qparams = observer(x).get_qparams()
        zero_point = None if args.symmetric else qparams["zero_point"]
        quantized = fake_quantize(x, qparams["scale"], zero_point, observer.args)
        error[criterion] = (quantized - x).square().sum()
    assert error["entropy"] < 2 * error["mse"]  # 3 dB; a range with hardly a bin inside costs 40
