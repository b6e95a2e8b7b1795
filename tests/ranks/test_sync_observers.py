"""Observers of users, and other details of a sync. Each `on_*` function runs on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import distributed as dist

from lightning_obs.observers import Observer
from lightning_obs.observers.observer import observe_shared
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.ranks.sync import sync_statistics
from tests.ranks.common import INT8, batches, counting, make, statistics
from tests.support.lightning_ranks import same
from tests.support.rank_processes import run_ranks

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
        observe_shared(observer, batches(2)[rank], measured)
    (low, high), _ = next(iter(measured.values()))
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


class KeepsContainers(Observer):
    """The range is computed from a list and a dict that nobody declared."""

    def __init__(self, base_name, args, **kwargs):
        super().__init__(base_name, args, **kwargs)
        self.highs, self.lows = [], {}

    def update_statistics_from_observed(self, observed):
        self.highs.append(observed.max())
        self.lows["low"] = (observed.min(), "a label")

    @property
    def has_statistics(self):
        return bool(self.highs)

    def get_min_max(self):
        return self.lows["low"][0].reshape(1), torch.stack(self.highs).mean().reshape(1)


def on_containers(rank, idle):
    observer = KeepsContainers("input", INT8)
    if rank != idle:
        for x in batches(3)[rank:]:
            observer(x)
    sync_statistics({("fc", "input"): observer}, Collectives.of_group())
    return [value.tolist() for value in observer.get_min_max()]


@pytest.mark.parametrize("idle", [None, 0, 1])
def test_undeclared_lists_and_dicts_are_those_of_the_lowest_rank_like_anything_undeclared(idle):
    ranges = run_ranks(on_containers, 2, idle)
    expected = KeepsContainers("input", INT8)
    for x in batches(3)[1 if idle == 0 else 0 :]:
        expected(x)
    assert ranges == [[value.tolist() for value in expected.get_min_max()]] * 2
