"""The search for weight ranges, shared out over ranks."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given
from hypothesis import strategies as st

from lightning_obs.errors import CalibrationError
from lightning_obs.observers import Observer
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.ranks.sync import partition, share_weights, sync_statistics
from tests.support.rank_processes import run_ranks

#: elements of a block of Llama-3.2-1B's Linear layers (q, k, v, o, gate, up, down), 16 of them, and lm_head
LLAMA = [2048 * n for n in (2048, 512, 512, 2048, 8192, 8192, 8192)] * 16 + [2048 * 128256]
INT4 = QuantizationArgs(num_bits=4, group_size=8)


@pytest.mark.parametrize(("ranks", "share"), [(2, 0.55), (3, 0.37), (4, 0.275), (1, 1.0)])
@pytest.mark.parametrize("sizes", [LLAMA, LLAMA[:-1]], ids=["with lm_head", "without"])
def test_no_rank_searches_more_than_its_share(sizes, ranks, share):
    if len(sizes) == len(LLAMA) and ranks > 2:
        share = max(share, sizes[-1] / sum(sizes))  # lm_head is a quarter of all
    owners = partition(sizes, ranks)
    for rank in range(ranks):
        assert sum(s for s, owner in zip(sizes, owners, strict=True) if owner == rank) <= share * sum(sizes)


@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 3))
def test_the_largest_share_is_within_a_third_of_the_least_possible(sizes, ranks):
    def largest(owners):
        return max(sum(s for s, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks))

    best = min(largest(owners) for owners in product(range(ranks), repeat=len(sizes)))
    assert largest(partition(sizes, ranks)) <= best * (4 / 3 - 1 / (3 * ranks))  # Graham, 1969


@given(st.lists(st.tuples(st.integers(0, 9), st.sets(st.integers(0, 3), min_size=1)), max_size=12))
def test_an_item_goes_to_a_rank_that_holds_it(items):
    holders = [sorted(able) for _, able in items]
    owners = partition([size for size, _ in items], 4, holders)
    assert all(owner in able for owner, able in zip(owners, holders, strict=True))


def weight(index: int) -> torch.Tensor:
    value = torch.randn(4 + 4 * (index % 3), 16, generator=torch.Generator().manual_seed(index))
    value[0, :8] = -0.0
    return value.to((torch.float32, torch.bfloat16, torch.float16)[index % 3])


def make(name: str, index: int) -> Observer:
    observer = Observer.load_from_registry(name, base_name="weight", args=INT4)
    return observer(weight(index)) if index >= 0 else observer


def bits(observer: Observer) -> list[list[int]]:
    return [end.reshape(-1).view(torch.uint8).tolist() for end in observer.get_min_max()]


def on_weights(rank, names, held):
    observers = {(f"m{i}", "weight"): make(names[i % len(names)], -1) for i in held[rank]}
    collectives = Collectives.of_group()
    sizes = {(f"m{i}", "weight"): weight(i).numel() for i in held[rank]}
    owners = sync_statistics({}, collectives, weights=sizes).owners
    searched = []

    def search(key):
        searched.append(key[0])
        observers[key](weight(int(key[0][1:])))

    share_weights(observers, owners, search, collectives)
    return searched, {key[0]: bits(observer) for key, observer in observers.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_weight_is_searched_once_and_all_ranks_have_its_bits(ranks):
    names = ["memoryless_mse", "memoryless_minmax", "static_minmax"]
    results = run_ranks(on_weights, ranks, names, [list(range(9))] * ranks)
    assert sorted(name for searched, _ in results for name in searched) == [f"m{i}" for i in range(9)]
    elements = [sum(weight(int(name[1:])).numel() for name in searched) for searched, _ in results]
    assert max(elements) - min(elements) <= max(weight(i).numel() for i in range(9))
    for _, found in results:
        assert found == {f"m{i}": bits(make(names[i % 3], i)) for i in range(9)}


def test_a_weight_that_one_rank_holds_is_searched_there():
    held = [[0, 1, 2], [2, 3], []]
    results = run_ranks(on_weights, 3, ["memoryless_mse"], held)
    assert sorted(name for searched, _ in results for name in searched) == ["m0", "m1", "m2", "m3"]
    for (searched, found), mine in zip(results, held, strict=True):
        assert {int(name[1:]) for name in searched} <= set(mine)
        assert found == {f"m{i}": bits(make("memoryless_mse", i)) for i in mine}


def on_failing_search(rank, how):
    observers = {(f"m{i}", "weight"): make("memoryless_mse", -1) for i in range(4)}
    owners = {key: i % 2 for i, key in enumerate(observers)}

    def search(key):
        value = weight(0)
        if key[0] == "m3":
            if how == "raise":
                raise RuntimeError("out of memory")
            value[1, 3] = float("nan")
        observers[key](value)

    try:
        share_weights(observers, owners, search, Collectives.of_group())
    except CalibrationError as error:
        return str(error)


@pytest.mark.parametrize(
    ("how", "text"),
    [("raise", "rank 1: RuntimeError: out of memory: m3 (weight)."), ("nan", "not finite: m3 (weight, rank 1: ")],
)
def test_a_search_that_fails_on_its_owner_is_raised_on_all(how, text):
    errors = run_ranks(on_failing_search, 3, how)
    assert len(set(errors)) == 1
    assert text in errors[0]
