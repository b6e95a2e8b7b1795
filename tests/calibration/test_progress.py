"""The search of the weights at the end of a calibration says how far it is."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationSession
from lightning_obs.app.console import bytes_done
from lightning_obs.ranks.collectives import Collectives
from tests.calibration.test_weights import Layers, options, shard
from tests.support.rank_processes import run_ranks


def searched(model, collectives=None, **given):
    session, told = CalibrationSession(model, given.pop("scheme"), collectives=collectives, **given), []
    session.show_progress(lambda *one: told.append(one))
    with session, torch.no_grad():
        if session.needs_data:
            model(torch.randn(4, 32))
    return told


def test_each_weight_is_told_of_with_the_bytes_of_all():
    told = searched(Layers(torch.bfloat16), **options("channel", "memoryless_mse"))
    sizes = {name: layer.weight.nbytes for name, layer in Layers(torch.bfloat16).named_children()}
    assert sorted(name for name, _, _ in told) == sorted(sizes)
    done = 0
    for name, so_far, total in told:
        done += sizes[name]
        assert (so_far, total) == (done, sum(sizes.values()))


def test_rounding_is_told_of_after_the_search():
    scheme = {"weights": {"num_bits": 8, "strategy": "channel"}}
    told = searched(nn.Sequential(nn.Linear(32, 8, bias=False)), scheme=scheme, rounding="gptq")
    assert told == [("0", 1024, 1024)] * 2


def on_each(rank, case):
    return searched(shard(Layers()), Collectives.of_group(), **options(*case))


@pytest.mark.parametrize("case", [("channel", "memoryless_minmax"), ("tensor", "memoryless_mse")], ids=" ".join)
def test_a_rank_tells_of_its_own_share_and_says_so(case):
    ranks = run_ranks(on_each, 2, case)
    totals = [{total for _, _, total in told} for told in ranks]
    assert all(told[-1][1] == told[-1][2] for told in ranks)
    assert sum(total for each in totals for total in each) == sum(m.weight.nbytes for m in Layers().children())
    assert all(name.endswith(" (this rank's share)") for told in ranks for name, _, _ in told)


def test_copies_of_a_session_tell_nobody():
    session = CalibrationSession(nn.Linear(4, 4), "W8A8")
    with bytes_done("searching", at_once=False) as progress:
        session.show_progress(progress)
        assert copy.deepcopy(session).observation.progress is None
        assert pickle.loads(pickle.dumps(session)).observation.progress is None


def test_a_bar_that_waits_prints_nothing_before_it_is_told_of_anything(capsys):
    with bytes_done("searching", at_once=False):
        pass
    assert capsys.readouterr().out == ""
    with bytes_done("searching", at_once=False) as advance:
        advance("fc1", 1, 2)
    assert "searching" in capsys.readouterr().out


def test_a_bar_is_one_line_of_a_narrow_terminal(capsys):
    with bytes_done("searching the weights") as advance:
        advance("model.layers.19.self_attn.q_proj (this rank's share)", 424_700_000, 424_700_000)
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert "424.7/424.7 MB" in line
    assert "model.layers.19." in line
