"""A failure of one rank, anywhere in ``finalize``, is the same CalibrationError on all ranks, and nothing is written.

Each failure is made by what users can bring: an observer of their own, or a module that refuses an attribute.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import distributed as dist
from torch import nn

from lightning_obs import CalibrationError, CalibrationSession
from lightning_obs.observers import Observer
from lightning_obs.observers.min_max import MemorylessMinMaxObserver, StaticMinMaxObserver
from lightning_obs.ranks.collectives import Collectives
from tests.support.rank_processes import run_ranks


def fail_on_rank_1():
    if dist.is_initialized() and dist.get_rank() == 1:
        raise RuntimeError("no such thing")


class FailsInReset(MemorylessMinMaxObserver):
    """Called before the ranks talk for the first time."""

    def reset(self, keep=None):
        if keep is None:  # the session's constructor and attach
            super().reset()
            return
        fail_on_rank_1()
        super().reset(keep)


class FailsInReduction(StaticMinMaxObserver):
    """Called when the ranks' statistics are reduced."""

    def load_statistics(self, statistics):
        fail_on_rank_1()
        super().load_statistics(statistics)


class FailsInRange(StaticMinMaxObserver):
    def get_qparams(self):
        fail_on_rank_1()
        return super().get_qparams()


class FailsInSearch(MemorylessMinMaxObserver):
    def update_statistics_from_observed(self, observed):
        fail_on_rank_1()
        super().update_statistics_from_observed(observed)


class FailsToTakeOver(MemorylessMinMaxObserver):
    """Called when the ranges of weights that other ranks have searched arrive."""

    def load_statistics(self, statistics):
        fail_on_rank_1()
        super().load_statistics(statistics)


class FailsInWeightScale(MemorylessMinMaxObserver):
    """Called after the last collective that passes statistics on."""

    def get_qparams(self):
        fail_on_rank_1()
        return super().get_qparams()


class FailsInResult(StaticMinMaxObserver):
    """Its scale is known by then; the result asks for its range once more."""

    scale_is_made = False

    def get_qparams(self):
        qparams = super().get_qparams()
        self.scale_is_made = True
        return qparams

    def get_min_max(self):
        if self.scale_is_made:
            fail_on_rank_1()
        return super().get_min_max()


class RefusesScales(nn.Linear):
    def __setattr__(self, name, value):
        if name == "weight_scale":
            fail_on_rank_1()
        super().__setattr__(name, value)


OBSERVERS = {
    "weights, before the first collective": ("weight", FailsInReset),
    "inputs, reduced": ("input", FailsInReduction),
    "inputs, their scale": ("input", FailsInRange),
    "weights, searched": ("weight", FailsInSearch),
    "weights, ranges of other ranks": ("weight", FailsToTakeOver),
    "weights, their scale": ("weight", FailsInWeightScale),
    "the result": ("input", FailsInResult),
}


def model_of(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), kind(8, 8))


def on_finalize(rank, where, options, kind=nn.Linear):
    observers = {}
    if where is not None:
        base, observer = OBSERVERS[where]
        Observer.register_value(observer, "fails_on_rank_1")
        observers = {base: "fails_on_rank_1"}
    session = CalibrationSession(
        model_of(kind), "INT8_STATIC", observers=observers, collectives=Collectives.of_group(), **options
    )
    session.attach()
    session.model(torch.randn(3, 8))
    try:
        session.finalize()
        error = None
    except CalibrationError as raised:
        error = str(raised)
    left = [name for module in session.model for name in vars(module) if "scale" in name or "scheme" in name]
    return error, left, session.result


def require_the_same_error(results):
    (first, *_), *_ = results
    assert first is not None
    assert re.match(r"rank 1: RuntimeError: no such thing", first)
    assert results == [(first, [], None)] * 2


@pytest.mark.parametrize("where", list(OBSERVERS))
def test_an_observer_that_fails_on_one_rank_is_the_same_error_on_all(where):
    require_the_same_error(run_ranks(on_finalize, 2, where, {}, timeout=60))


@pytest.mark.parametrize("where", ["weights, searched", "weights, their scale"])
def test_so_is_one_that_fails_before_weights_are_rounded(where):
    require_the_same_error(run_ranks(on_finalize, 2, where, {"rounding": "gptq"}, timeout=60))


def test_a_module_that_refuses_its_scale_on_one_rank_is_the_same_error_on_all():
    require_the_same_error(run_ranks(on_finalize, 2, None, {}, RefusesScales, timeout=60))
