"""Statistics of several ranks. Each `on_*` function runs on every rank, in a process of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import distributed as dist

from lightning_obs.distributed.sync import MAX_COLLECTIVES, Collectives, share_weights, sync_statistics
from lightning_obs.errors import CalibrationError
from lightning_obs.observers import Observer
from tests.ranks import run_ranks

INT8 = QuantizationArgs(num_bits=8, symmetric=False)
EXACT = ["static_minmax", "histogram", "percentile"]


def make(name, args=INT8, base_name="input", **kwargs):
    return Observer.load_from_registry(name, base_name=base_name, args=args, **kwargs)


def batches(count, dtype=torch.float32, seed=0):
    """Batches that differ in scale, so that each matters to some end of the range."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(3, 32, generator=generator) * (1 + i % 5) + i % 3 - 1).to(dtype) for i in range(count)]


def statistics(observer):
    return {n: v for n, v in vars(observer).items() if isinstance(v, torch.Tensor)}


def counting(collectives):
    """The same collectives, and how often each is called with how many elements."""
    calls, elements = Counter(), Counter()

    def reduce(tensor, op):
        calls[op, tensor.dtype] += 1
        elements[op, tensor.dtype] += tensor.numel()
        assert tensor.is_contiguous()
        assert tensor.dim() == 1
        return collectives.reduce(tensor, op)

    def gather_object(thing):
        calls["gather"] += 1
        return collectives.gather_object(thing)

    return replace(collectives, reduce=reduce, gather_object=gather_object), calls, elements


def same(one, other):
    """Equal shapes, dtypes and bits."""
    assert one.keys() == other.keys()
    for name in one:
        assert (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape), name
        assert torch.equal(one[name].reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)), name
    return True


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except CalibrationError as error:
        return str(error)
    return None


# ---------------------------------------------------------------------- exact in any partition


def on_parts(rank, cuts, dtypes, names):
    """Observe the batches that ``cuts`` gives this rank, with every observer and dtype; sync."""
    observers = {(f"{name}.{dtype}", "input"): make(name) for name in names for dtype in dtypes}
    for (key, _), observer in observers.items():
        dtype = next(d for d in dtypes if key.endswith(str(d)))
        for batch, owner in zip(batches(len(cuts), dtype), cuts, strict=True):
            if owner == rank:
                observer(batch)
    synced = sync_statistics(observers, Collectives.of_group())
    assert synced.unreached == []
    return {key: (statistics(o), dict(o.get_qparams())) for key, o in observers.items()}


@pytest.mark.parametrize(
    "cuts", [[0] * 6, [0, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 1, 2, 1, 1, 2], [3, 0, 3, 1, 1, 3]]
)
def test_statistics_have_the_bits_of_one_process_that_saw_everything(cuts):
    """Also with unequal numbers of batches, and with ranks that had none."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    alone = {(f"{name}.{dtype}", "input"): make(name) for name in EXACT for dtype in dtypes}
    for (key, _), observer in alone.items():
        for batch in batches(len(cuts), next(d for d in dtypes if key.endswith(str(d)))):
            observer(batch)
    for found in run_ranks(on_parts, max(cuts) + 1 if max(cuts) else 2, cuts, dtypes, EXACT):
        for key, observer in alone.items():
            assert same(found[key][0], statistics(observer))
            qparams = observer.get_qparams()
            assert same(*({k: v for k, v in q.items() if v is not None} for q in (found[key][1], qparams)))


def test_moments_are_added_and_equal_on_all_ranks():
    cuts, names = [0, 1, 2, 0, 0, 2, 1], ["normal_observer"]
    alone = make("normal_observer")
    for batch in batches(len(cuts)):
        alone(batch)
    results = [
        found["normal_observer.torch.float32", "input"]
        for found in run_ranks(on_parts, 3, cuts, (torch.float32,), names)
    ]
    assert all(same(found[0], results[0][0]) for found in results)
    assert torch.equal(results[0][0]["number"], alone.number)
    torch.testing.assert_close(results[0][0]["squares"], alone.squares, rtol=1e-14, atol=0)
    torch.testing.assert_close(results[0][0]["sums"], alone.sums, rtol=1e-13, atol=0)


def on_means(rank):
    observers = {("all", "input"): make("minmax"), ("two", "input"): make("mse"), ("one", "input"): make("minmax")}
    mine = [key for key in observers if key[0] == "all" or (key[0] == "two" and rank > 0) or rank == 1]
    for key in mine:
        for batch in batches(4, seed=rank):
            observers[key](batch)
    own = {key: statistics(observers[key]) for key in mine}
    sync_statistics(observers, Collectives.of_group())
    return own, {key: statistics(observer) for key, observer in observers.items()}


def test_a_mean_is_over_the_ranks_that_saw_data():
    results = run_ranks(on_means, 3)
    for key, ranks in {("all", "input"): (0, 1, 2), ("two", "input"): (1, 2), ("one", "input"): (1,)}.items():
        for name in ("min_vals", "max_vals"):
            mean = torch.stack([results[rank][0][key][name].double() for rank in ranks]).mean(0).float()
            assert all(torch.equal(found[1][key][name], mean) for found in results)


# ---------------------------------------------------------------------- what a rank did not see or does not hold


def on_experts(rank):
    """Three experts: rank 0 reaches the first, rank 1 the second, none the third."""
    observers = {(f"experts.{i}", "input"): make("static_minmax") for i in range(3)}
    if rank < 2:
        observers[f"experts.{rank}", "input"](torch.tensor([[-1.0, 1.0]]) * (1, 500)[rank])
    synced = sync_statistics(observers, Collectives.of_group())
    ranges = [o.get_min_max() if o.has_statistics else None for o in observers.values()]
    for observer in observers.values():
        observer.reset()
    return synced.unreached, ranges, [o.has_statistics for o in observers.values()]


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_expert_that_one_rank_reached_has_its_own_range_on_all_and_one_that_none_reached_has_none(ranks):
    for unreached, ranges, after_reset in run_ranks(on_experts, ranks):
        assert unreached == [("experts.2", "input")]
        assert ranges == [(-1, 1), (-500, 500), None]
        assert after_reset == [False] * 3


def on_expert_parallel(rank):
    """Every rank holds two experts, of which the second is also its neighbour's; the last rank holds none."""
    names = {0: ["e0", "e1"], 1: ["e1", "e2"], 2: []}[rank]
    observers = {(name, "input"): make("static_minmax") for name in names}
    for i, observer in enumerate(observers.values()):
        if (rank, i) != (1, 1):
            observer(torch.tensor([[-1.0 - 10 * rank - i, 1.0 + 10 * rank + i]]))
    collectives, calls, elements = counting(Collectives.of_group())
    synced = sync_statistics(observers, collectives)
    ranges = {name: o.get_min_max() for (name, _), o in observers.items() if o.has_statistics}
    return synced, ranges, calls, elements


def test_ranks_that_hold_different_modules_merge_those_that_they_share():
    results = run_ranks(on_expert_parallel, 3)
    assert [found[1] for found in results] == [{"e0": (-1, 1), "e1": (-11, 11)}, {"e1": (-11, 11)}, {}]
    for synced, _, calls, elements in results:
        assert synced.unreached == [("e2", "input")]
        assert synced.collectives == sum(calls.values()) == 2
        assert sum(elements.values()) == 2  # min and max of e1; e0 and e2 are nobody else's


def on_nothing_held(rank):
    return sync_statistics({}, Collectives.of_group()).unreached


def test_ranks_that_hold_nothing_agree_on_nothing():
    assert run_ranks(on_nothing_held, 2) == [[], []]


# ---------------------------------------------------------------------- errors, on every rank alike


def on_bad_data(rank, name, bad):
    observers = {(f"fc{i}", "input"): make(name) for i in range(3)}
    for key, observer in observers.items():
        observer(torch.tensor([[1.0, bad if (rank, key[0]) == (1, "fc1") else 2.0]]))
    return error_of(sync_statistics, observers, Collectives.of_group())


@pytest.mark.parametrize("name", ["static_minmax", "histogram", "minmax", "normal_observer", "memoryless_minmax"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_or_infinity_on_one_rank_is_raised_on_all_naming_module_and_rank(name, bad):
    errors = run_ranks(on_bad_data, 3, name, bad)
    assert len(set(errors)) == 1
    assert errors[0].startswith("what was observed is not finite: fc1 (input, rank 1: ")
    assert "fc0" not in errors[0]


def on_disagreement(rank, what):
    observer = make("static_minmax")
    value = torch.tensor([[-1.0, 1.0]])
    if rank == 1:
        if what == "shape":
            observer = make("static_minmax", QuantizationArgs(num_bits=8, group_size=1))
        elif what == "dtype":
            value = value.double()
        else:
            observer._act_sync_dict = {"min_vals": dist.ReduceOp.AVG, "max_vals": dist.ReduceOp.MAX}
    return error_of(sync_statistics, {("fc", "input"): observer(value)}, Collectives.of_group())


@pytest.mark.parametrize(
    ("what", "shown"),
    [("shape", ("min_vals 1 ", "min_vals 2 ")), ("dtype", ("float32", "float64")), ("op", ("min of", "mean of"))],
)
def test_ranks_that_differ_raise_on_all_naming_module_and_ranks(what, shown):
    errors = run_ranks(on_disagreement, 3, what)
    assert len(set(errors)) == 1
    assert errors[0].startswith("ranks differ in the statistics of one module: fc (input, rank 0: ")
    assert "fc (input, rank 1: " in errors[0]
    assert all(part in errors[0] for part in shown)


def on_failure(rank, error):
    observers = {("fc", "input"): make("static_minmax")(torch.ones(1, 2))}
    failure = error if rank == 1 else None
    return error_of(sync_statistics, observers, Collectives.of_group(), failure=failure)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no tokens"), "rank 1: ValueError: no tokens."),
        (CalibrationError("bad mask", where=["fc9"], got=3), "rank 1: bad mask: fc9. Got 3."),
    ],
)
def test_what_failed_on_one_rank_is_raised_on_all(error, text):
    assert run_ranks(on_failure, 2, error) == [text] * 2


class Product(Observer):
    _act_sync_dict: ClassVar[dict[str, Any]] = {"min_vals": dist.ReduceOp.MIN, "max_vals": dist.ReduceOp.PRODUCT}

    def update_statistics_from_observed(self, observed):
        self.min_vals, self.max_vals = observed.amin((0, -1)), observed.amax((0, -1))


class Numbers(Product):
    _act_sync_dict: ClassVar[dict[str, Any]] = {"total": dist.ReduceOp.SUM}

    def update_statistics_from_observed(self, observed):
        super().update_statistics_from_observed(observed)
        self.total = float(observed.sum())


class MeanOfCounts(Product):
    _act_sync_dict: ClassVar[dict[str, Any]] = {"number": dist.ReduceOp.AVG}

    def update_statistics_from_observed(self, observed):
        super().update_statistics_from_observed(observed)
        self.number = torch.tensor([observed.numel()])


class KeepsAList(Product):
    _act_sync_dict: ClassVar[dict[str, Any]] = {}

    def update_statistics_from_observed(self, observed):
        super().update_statistics_from_observed(observed)
        self.seen = [observed.shape]


class CountsInBytes(Product):
    _act_sync_dict: ClassVar[dict[str, Any]] = {"number": dist.ReduceOp.SUM}

    def update_statistics_from_observed(self, observed):
        super().update_statistics_from_observed(observed)
        self.number = torch.tensor([100], dtype=torch.int8)


def on_unusable(rank, cls):
    observer = cls("input", INT8)
    if rank == 0 or cls is not KeepsAList:
        observer(torch.ones(1, 2))
    return error_of(sync_statistics, {("fc", "input"): observer}, Collectives.of_group())


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (Product, "max_vals of Product cannot be reduced over ranks: fc .input.. Got reduction"),
        (Numbers, "total of Numbers cannot be reduced over ranks: fc .input.. Got float"),
        (MeanOfCounts, "number of MeanOfCounts cannot be reduced over ranks: fc .input.. Got mean of torch.int64"),
        (KeepsAList, "cannot be sent to them: fc .input: seen.. Got neither a tensor nor a number"),
        (CountsInBytes, "sum of number over ranks does not fit into torch.int8: fc"),
    ],
)
def test_a_statistic_that_cannot_be_reduced_is_refused_on_all_ranks(cls, text):
    errors = run_ranks(on_unusable, 2, cls)
    for error in errors:
        with pytest.raises(CalibrationError, match=text):
            raise CalibrationError(error)


# ---------------------------------------------------------------------- observers of users, and other details


class Everything(Observer):
    """Every reduction, several dtypes, declared as people declare them, and some undeclared statistics."""

    _act_sync_dict: ClassVar[dict[str, Any]] = {
        "lows": dist.ReduceOp(dist.ReduceOp.MIN),
        "highs": "max",
        "number": dist.ReduceOp.SUM,
        "small": dist.ReduceOp.SUM,
        "mean": dist.ReduceOp.AVG,
        "levels": dist.ReduceOp.MAX,
        "deep": dist.ReduceOp.MIN,
        "never": dist.ReduceOp.SUM,
        "empty": dist.ReduceOp.MIN,
        "no_counts": dist.ReduceOp.SUM,
    }

    def __init__(self, base_name, args, **kwargs):
        super().__init__(base_name, args, **kwargs)
        self.steps = 0
        self.never = None
        self.constant = torch.arange(3)

    def update_statistics_from_observed(self, observed):
        flat = observed.flatten()
        self.lows, self.highs = flat[:4].reshape(2, 2).T.bfloat16(), flat[:2].half()  # not contiguous
        self.number, self.small = torch.tensor(flat.numel()), torch.tensor([flat.numel()], dtype=torch.int32)
        self.mean, self.deep = flat.mean(), flat[:1].double()
        self.levels = flat[:3].to(torch.float8_e4m3fn)
        self.empty, self.no_counts = flat.new_zeros(2, 0), torch.zeros(0, 3, dtype=torch.int64)
        self.last, self.steps, self.label = flat[:5] * -0.0, self.steps + 1, f"{flat[0]:.3f}"

    @property
    def has_statistics(self):
        return self.steps > 0


def on_everything(rank):
    observers = {(f"fc{i}", "input"): Everything("input", INT8) for i in range(3)}
    for i, observer in enumerate(observers.values()):
        if rank:
            observer(torch.randn(1, 8, generator=torch.Generator().manual_seed(10 * i + rank)))
    collectives, calls, _ = counting(Collectives.of_group())
    owns = [{**vars(observer)} for observer in observers.values()]
    sync_statistics(observers, collectives)
    return [(*before_and_after(own, observer), calls) for own, observer in zip(owns, observers.values(), strict=True)]


def before_and_after(own, observer):
    assert observer.levels.dtype == torch.float8_e4m3fn  # which torch cannot unpickle
    own["levels"], observer.levels = own.get("levels", observer.levels).float(), observer.levels.float()
    names = [*Everything._act_sync_dict, "last", "steps", "label", "constant"]
    return {n: own.get(n) for n in names}, {n: getattr(observer, n) for n in names}


@pytest.fixture(scope="module")
def everything():
    return run_ranks(on_everything, 3)


@pytest.mark.parametrize("place", range(3))
def test_an_observer_of_a_user_may_declare_any_reduction_of_any_statistic(everything, place):
    results = [of_rank[place] for of_rank in everything]
    owns = [results[rank][0] for rank in (1, 2)]
    for _, found, calls in results:
        assert sum(calls.values()) <= 4
        for name, fold in {"lows": torch.minimum, "highs": torch.maximum, "deep": torch.minimum}.items():
            assert torch.equal(found[name], fold(owns[0][name], owns[1][name]))
            assert found[name].dtype == owns[0][name].dtype
        assert torch.equal(found["levels"], torch.maximum(*(own["levels"] for own in owns)))
        assert (found["number"], found["small"]) == (16, 16)
        assert (found["number"].shape, found["small"].dtype) == ((), torch.int32)
        assert (found["empty"].shape, found["no_counts"].shape) == ((2, 0), (0, 3))
        assert torch.equal(found["mean"], torch.stack([own["mean"].double() for own in owns]).mean().float())
        assert torch.equal(found["last"].view(torch.int32), owns[0]["last"].view(torch.int32))
        assert (found["steps"], found["label"], found["never"]) == (1, owns[0]["label"], None)
        assert torch.equal(found["constant"], torch.arange(3))


class Parameters(Observer):
    """Its statistic is no plain tensor, and as long as what it saw."""

    _act_sync_dict: ClassVar[dict[str, Any]] = {"sums": dist.ReduceOp.SUM}
    has_statistics = True

    def update_statistics_from_observed(self, observed):
        self.sums = torch.nn.Parameter(observed.flatten(), requires_grad=False)


def on_parameters(rank):
    observers = {("fc", str(n)): Parameters("input", INT8)(torch.ones(1, n)) for n in (2, 3)}
    sync_statistics(observers, Collectives.of_group())
    return [observer.sums.tolist() for observer in observers.values()]


def test_statistics_of_several_shapes_may_be_parameters():
    assert run_ranks(on_parameters, 2) == [[[2.0] * 2, [2.0] * 3]] * 2


def on_last_tensor(rank):
    observer = make("memoryless_minmax")
    if rank:
        observer(torch.tensor([[-float(rank), 2.0 * rank]]))
    sync_statistics({("fc", "input"): observer}, Collectives.of_group())
    return observer.get_min_max()


def test_what_is_not_declared_is_that_of_the_lowest_rank_that_has_it():
    assert run_ranks(on_last_tensor, 3) == [(-1, 2)] * 3


def on_shared_reads(rank):
    observers = {(name, "input"): make("static_minmax") for name in "qkv"}
    measured = {}
    for observer in observers.values():
        observer.observe_shared(batches(2)[rank], measured)
    low, high = next(iter(measured.values()))
    before = low.clone(), high.clone()
    sync_statistics(observers, Collectives.of_group())
    q, k, v = (observer.min_vals for observer in observers.values())
    return (
        torch.equal(low, before[0])
        and torch.equal(high, before[1])
        and len({q.data_ptr(), k.data_ptr(), v.data_ptr()}) == 3
    )


def test_a_measurement_that_observers_share_is_not_changed():
    assert run_ranks(on_shared_reads, 2) == [True, True]


def on_inference(rank):
    with torch.inference_mode():
        observers = {(n, "input"): make(n) for n in ("static_minmax", "histogram", "minmax", "memoryless_minmax")}
        if rank:
            for observer in observers.values():
                observer(batches(1)[0])
        sync_statistics(observers, Collectives.of_group())
    for observer in observers.values():
        for value in statistics(observer).values():
            value.add_(0)
            assert not value.requires_grad
        observer(batches(1)[0])
    return [observer.has_statistics for observer in observers.values()]


def test_statistics_synced_in_inference_mode_can_be_updated_afterwards():
    assert run_ranks(on_inference, 2) == [[True] * 4] * 2


def on_fused(rank):
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, dynamic="local")
    observers = {(name, "input"): make("static_minmax", args) for name in "qkv"}
    Observer.fuse(list(observers.values()))
    reached = "q" if rank == 0 else "kv"
    for name in reached:
        observers[name, "input"](batches(3, seed=3)["qkv".index(name)])
    sync_statistics(observers, Collectives.of_group())
    return [observer.get_global_scale() for observer in observers.values()]


def test_fused_members_have_one_global_scale_on_all_ranks():
    scales = [scale for found in run_ranks(on_fused, 2) for scale in found]
    largest = torch.stack(batches(3, seed=3)).abs().max()
    assert len({float(scale) for scale in scales}) == 1
    torch.testing.assert_close(scales[0], (448 * 6 / largest).reshape(1))


def on_lightning(rank):
    """Lightning's own reduce, which works in place and corrupts tensors that are not contiguous."""
    from lightning.pytorch.strategies import DDPStrategy

    strategy = DDPStrategy()
    lightning = replace(Collectives.of_group(), reduce=lambda t, op: strategy.reduce(t, reduce_op=op))
    observers = [make("histogram")(batches(4)[rank]) for _ in range(2)]
    for observer, collectives in zip(observers, (lightning, Collectives.of_group()), strict=True):
        sync_statistics({("fc", "input"): observer}, collectives)
    return same(*map(statistics, observers))


def test_the_reduce_of_lightnings_ddp_gives_the_same_bits():
    assert run_ranks(on_lightning, 2) == [True, True]


# ---------------------------------------------------------------------- the number of collectives


def on_many(rank, count):
    names = ["static_minmax", "minmax", "normal_observer", "histogram", "memoryless_minmax"]
    observers = {(f"layers.{i}", "input"): make(names[i % 5 if i < 20 else i % 3]) for i in range(count)}
    for i, observer in enumerate(observers.values()):
        if (i + rank) % 3:
            observer(torch.tensor([[-1.0 - i, 1.0 + rank]]))
    weights = {(f"layers.{i}", "weight"): make("memoryless_minmax", base_name="weight") for i in range(count)}
    collectives, calls, _ = counting(Collectives.of_group())
    synced = sync_statistics(observers, collectives, weights=dict.fromkeys(weights, 8))
    shared = share_weights(weights, synced.owners, lambda key: weights[key](torch.ones(2, 4)), collectives)
    return dict(calls), synced.collectives + shared.collectives


def test_the_number_of_collectives_is_a_constant():
    ten, thousand = run_ranks(on_many, 2, 10), run_ranks(on_many, 2, 1000)
    assert ten == thousand
    for calls, told in ten:
        assert sum(calls.values()) == told == MAX_COLLECTIVES == 6


def on_histograms(rank):
    observers = {(f"layers.{i}", "input"): make("histogram") for i in range(20)}
    for i, observer in enumerate(observers.values()):
        observer(torch.randn(8, 512, generator=torch.Generator().manual_seed(2 * i + rank)))
    collectives, _, elements = counting(Collectives.of_group())
    sync_statistics(observers, collectives)
    return elements["sum", torch.int64]


def test_bins_that_no_rank_counted_into_are_not_sent():
    sent = run_ranks(on_histograms, 2)
    assert sent[0] == sent[1] <= 20 * 65536 / 10


def test_one_device_reduces_nothing_and_keeps_its_statistics():
    observers = {(name, "input"): make(name)(batches(1)[0]) for name in (*EXACT, "minmax", "normal_observer")}
    before = {key: statistics(observer) for key, observer in observers.items()}
    collectives, calls, _ = counting(Collectives())
    assert sync_statistics(observers, collectives).collectives == 1
    assert calls == {"gather": 1}
    assert all(statistics(observers[key])[n] is v for key, found in before.items() for n, v in found.items())


# ---------------------------------------------------------------------- soak


def on_case(rank, held, seen, names):
    observers = {(f"m{i}", "input"): make(names[i % len(names)]) for i in held[rank]}
    for module, batch in seen[rank]:
        if module in held[rank]:
            observers[f"m{module}", "input"](batches(8, seed=module)[batch])
    synced = sync_statistics(observers, Collectives.of_group())
    return synced.unreached, {key: statistics(observer) for key, observer in observers.items()}


@st.composite
def cases(draw):
    ranks, modules = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    everywhere = draw(st.booleans())
    all_of_them = st.just(list(range(modules)))
    some = st.lists(st.integers(0, modules - 1), unique=True)
    held = [draw(all_of_them if everywhere else some) for _ in range(ranks)]
    pairs = st.tuples(st.integers(0, modules - 1), st.integers(0, 7))
    seen = [draw(st.lists(pairs, max_size=6)) for _ in range(ranks)]
    return ranks, held, seen


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_partition_neither_hangs_nor_diverges(case):
    ranks, held, seen = case
    results = run_ranks(on_case, ranks, held, seen, EXACT, timeout=20)
    expected = {}
    for rank in range(ranks):
        for module, batch in seen[rank]:
            if module in held[rank]:
                observer = expected.setdefault(module, make(EXACT[module % 3]))
                observer(batches(8, seed=module)[batch])
    unreached = sorted((f"m{i}", "input") for i in {i for each in held for i in each} - expected.keys())
    for rank, (missing, found) in enumerate(results):
        assert missing == unreached
        assert found.keys() == {(f"m{i}", "input") for i in held[rank]}
        for module in held[rank]:
            alone = statistics(expected[module]) if module in expected else {}
            assert same(found[f"m{module}", "input"], alone)
