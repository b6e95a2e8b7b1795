"""What goes wrong on one rank is raised on all. Each `on_*` function runs on every rank, in a process of its own."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import distributed as dist
from torch import nn

from lightning_obs import CalibrationSession
from lightning_obs.errors import CalibrationError
from lightning_obs.observers import Observer
from lightning_obs.observers.min_max import StaticMinMaxObserver
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.ranks.sync import sync_statistics
from tests.ranks.common import INT8, error_of, make
from tests.support.rank_processes import run_ranks


def on_bad_data(rank, name, bad):
    observers = {(f"fc{i}", "input"): make(name) for i in range(3)}
    for key, observer in observers.items():
        observer(torch.tensor([[1.0, bad if (rank, key[0]) == (1, "fc1") else 2.0]]))
    return error_of(sync_statistics, observers, Collectives.of_group())


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["static_minmax", "histogram", "minmax", "normal_observer", "memoryless_minmax"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_or_infinity_on_one_rank_is_raised_on_all_naming_module_and_rank(name, bad):
    errors = run_ranks(on_bad_data, 3, name, bad)
    assert len(set(errors)) == 1
    assert errors[0].startswith("observed values are not finite: fc1 (input, rank 1: ")
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


class KeepsAnObject(Product):
    _act_sync_dict: ClassVar[dict[str, Any]] = {}

    def update_statistics_from_observed(self, observed):
        super().update_statistics_from_observed(observed)
        self.seen = object()


class CountsInBytes(Product):
    _act_sync_dict: ClassVar[dict[str, Any]] = {"number": dist.ReduceOp.SUM}

    def update_statistics_from_observed(self, observed):
        super().update_statistics_from_observed(observed)
        self.number = torch.tensor([100], dtype=torch.int8)


def on_unusable(rank, cls):
    observer = cls("input", INT8)
    observer(torch.ones(1, 2))
    return error_of(sync_statistics, {("fc", "input"): observer}, Collectives.of_group())


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (Product, "max_vals of Product cannot be reduced over ranks: fc .input.. Got reduction"),
        (Numbers, "total of Numbers cannot be reduced over ranks: fc .input.. Got float"),
        (MeanOfCounts, "number of MeanOfCounts cannot be reduced over ranks: fc .input.. Got mean of torch.int64"),
        (KeepsAnObject, "cannot be sent to the other ranks.*: fc .input: seen.. Expected tensors, numbers"),
        (CountsInBytes, "sum of number over ranks does not fit into torch.int8: fc"),
    ],
)
def test_a_statistic_that_cannot_be_reduced_is_refused_on_all_ranks(cls, text):
    errors = run_ranks(on_unusable, 2, cls)
    for error in errors:
        with pytest.raises(CalibrationError, match=text):
            raise CalibrationError(error)


class FailsOnOneRank(StaticMinMaxObserver):
    def get_min_max(self):
        if dist.get_rank() == 1:
            raise RuntimeError("no such range")
        return super().get_min_max()


def on_a_range_that_fails(rank):
    Observer.register_value(FailsOnOneRank, "fails_on_one_rank")
    model = nn.Sequential(nn.Linear(4, 4))
    observers = {"input": "fails_on_one_rank"}
    session = CalibrationSession(model, "INT8_STATIC", observers=observers, collectives=Collectives.of_group())
    session.attach()
    model(torch.randn(2, 4))
    return error_of(session.finalize), sorted(vars(model[0]))


def test_a_range_that_fails_on_one_rank_after_the_merge_fails_on_all_and_nothing_is_written():
    (first, left), (second, right) = run_ranks(on_a_range_that_fails, 2, timeout=60)
    assert first == second
    assert re.search(r"rank 1: RuntimeError: no such range: 0 .input.", first)
    assert left == right
    assert not any("scale" in name for name in left)
