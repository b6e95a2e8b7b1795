"""Statistics of all ranks become one. Each `on_*` function runs on every rank, in a process of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_obs.observers import Observer
from lightning_obs.observers.statistic import Statistic
from lightning_obs.ranks import reduction
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.ranks.sync import share_weights, sync_statistics
from tests.ranks.common import EXACT, INT8, batches, counting, make, statistics
from tests.support.lightning_ranks import same
from tests.support.rank_processes import run_ranks

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


@pytest.mark.slow_but_first
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
        assert sum(calls.values()) == told == 5


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


class Products(Observer):
    """The largest statistic there is: of ``(N, 1, C)`` the sums of products of channels, as Hessians are."""

    statistics = (Statistic("products", "sum"),)

    def measure(self, observed):
        rows = observed.reshape(-1, observed.shape[-1])
        return (rows.T @ rows,)


def on_products(rank, widths):
    observers = {(f"layers.{i}", "input"): Products("input", INT8) for i in range(len(widths))}
    data = torch.Generator().manual_seed(rank)
    for width, observer in zip(widths, observers.values(), strict=True):
        observer(torch.randint(-9, 9, (5, width), generator=data).float())
    own = [observer.products for observer in observers.values()]
    collectives, calls, elements = counting(Collectives.of_group())
    # Undone afterwards: this process runs other tests, too.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reduction, "BUCKET_BYTES", 8 * 64 * 64)
        synced = sync_statistics(observers, collectives)
    now = [observer.products for observer in observers.values()]
    return own, now, calls["sum", torch.float64], elements["sum", torch.float64], synced.collectives


def test_large_sums_are_reduced_in_buckets_of_a_size_that_does_not_grow_with_the_model():
    """Four of 32 x 32 take the place of one of 64 x 64; a larger one goes alone."""
    widths = [32, 32, 64, 32, 96, 32, 32]
    results = run_ranks(on_products, 2, widths)
    for _, now, calls, elements, told in results:
        assert (calls, told) == (4, 5)
        assert elements == sum(width**2 for width in widths)
        for mine, a, b in zip(now, results[0][0], results[1][0], strict=True):
            assert torch.equal(mine, a + b)


def test_one_device_talks_to_nobody_and_keeps_its_statistics():
    observers = {(name, "input"): make(name)(batches(1)[0]) for name in (*EXACT, "minmax", "normal_observer")}
    before = {key: statistics(observer) for key, observer in observers.items()}
    collectives, calls, _ = counting(Collectives())
    assert sync_statistics(observers, collectives).collectives == 1
    assert calls == {}
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
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_partition_neither_hangs_nor_diverges(case):
    neither_hangs_nor_diverges(*case)


@pytest.mark.nightly
@settings(max_examples=500, derandomize=False, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_no_other_partition_hangs_or_diverges_either(case):
    neither_hangs_nor_diverges(*case)


def neither_hangs_nor_diverges(ranks, held, seen):
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
