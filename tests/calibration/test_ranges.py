"""The result gives the inputs' observed range and the chosen one, whoever observes, on ranks and after a resume."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from torch import distributed as dist
from torch import nn

from lightning_obs import CalibrationSession
from lightning_obs.calibration.saved_state import dump_observation, load_observation
from lightning_obs.observers import Observer
from lightning_obs.ranks.collectives import Collectives
from tests.support.rank_processes import run_ranks

SCHEME = {"input_activations": {"num_bits": 8, "symmetric": False, "strategy": "tensor"}}
NAMES = ["static_minmax", "minmax", "mse", "histogram", "percentile", "normal_observer", "clipped"]


class Clipped(Observer):
    """Of a user's: nothing beyond -1 and 1, and no statistic that holds what was observed."""

    _act_sync_dict: ClassVar = {"min_vals": dist.ReduceOp.MIN, "max_vals": dist.ReduceOp.MAX}

    def update_statistics_from_observed(self, observed):
        self.min_vals, self.max_vals = torch.tensor([-1.0]), torch.tensor([1.0])


@pytest.fixture(autouse=True)
def clipped(own_registry):
    Observer.register("clipped")(Clipped)


def data():
    x = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(0))
    x[2, 1, 3], x[5, 0, 0] = 100, -3.15
    return x


def session(name, collectives=None):
    torch.manual_seed(0)
    return CalibrationSession(nn.Linear(16, 4), SCHEME, observers={"input": name}, collectives=collectives)


def ranges(calibration, batches):
    with calibration, torch.inference_mode():
        for x in batches:
            calibration.model(x)
    return calibration.result.input_ranges, calibration.result.chosen_input_ranges


@pytest.mark.parametrize("name", NAMES)
def test_the_observed_range_is_of_all_data_and_the_chosen_range_is_what_the_scale_covers(name):
    calibration, x = session(name), data()
    observed, chosen = ranges(calibration, x)
    assert observed[""] == (x.min().item(), x.max().item())
    low, high = calibration.observers["", "input"].get_min_max()
    assert chosen[""] == (low.item(), high.item())
    assert (chosen != observed) == (name in ("minmax", "mse", "normal_observer", "clipped"))


def test_finishing_again_and_attaching_anew():
    calibration, x = session("minmax"), data()
    observed, _ = ranges(calibration, x)
    calibration.finalize(activations=False)
    assert calibration.result.input_ranges == observed
    assert ranges(calibration, x[:2])[0][""] == (x[:2].min().item(), x[:2].max().item())


def on_parts(rank, ranks):
    if "clipped" not in Observer.registered_names():
        Observer.register("clipped")(Clipped)
    found = {}
    for name in NAMES:
        parts = data()[rank::ranks] if rank < 3 else ()  # a fourth rank sees nothing
        calibration = session(name, Collectives.of_group())
        found[name] = *ranges(calibration, parts), calibration.result.collectives
    return found


@pytest.mark.slow_but_first
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_observed_range_is_of_the_data_of_all_ranks(ranks):
    seen = torch.cat([data()[rank::ranks] for rank in range(min(ranks, 3))])
    results = run_ranks(on_parts, ranks, ranks)
    for found in results:
        for name, (observed, chosen, collectives) in found.items():
            assert observed[""] == (seen.min().item(), seen.max().item()), name
            assert chosen == results[0][name][1], name
            assert collectives <= 5


@pytest.mark.parametrize("name", NAMES)
def test_an_observation_that_was_resumed_knows_what_it_saw_before(name):
    x, calibration, resumed = data(), session(name), session(name)
    calibration.attach()
    for batch in x[:4]:
        calibration.model(batch)
    state = copy.deepcopy(dump_observation(calibration.data_observers, calibration.collectives))
    calibration.detach()
    resumed.attach()
    assert load_observation(resumed.data_observers, state, resumed.collectives)
    for batch in x[4:]:
        resumed.model(batch)
    result = resumed.finalize()
    assert result.input_ranges[""] == (x.min().item(), x.max().item())
