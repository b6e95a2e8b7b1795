from __future__ import annotations

import pytest
from torch import nn

from lightning_obs import CalibrationSession
from lightning_obs.engines.engine import FUSED_SETS
from lightning_obs.errors import CalibrationError
from lightning_obs.schemes.planned_modules import check_own_sets, find_fused


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj"], [["a.q_proj", "a.k_proj", "a.v_proj"]]),
        (["a.v_proj", "a.q_proj", "a.k_proj"], [["a.q_proj", "a.k_proj", "a.v_proj"]]),
        (["a.q_proj", "a.k_proj"], [["a.q_proj", "a.k_proj"]]),
        (["a.up_proj", "b.gate_proj"], []),
        (["a.up_proj"], []),
        (["up_proj", "gate_proj"], [["gate_proj", "up_proj"]]),
        (["a.q_a_proj", "a.kv_a_proj_with_mqa", "a.q_b_proj"], [["a.q_a_proj", "a.kv_a_proj_with_mqa"]]),
        (["e.0.w1", "e.0.w2", "e.0.w3", "e.1.w3", "e.1.w1"], [["e.0.w1", "e.0.w3"], ["e.1.w1", "e.1.w3"]]),
        (["a.my_q_proj", "a.my_k_proj"], []),
        ([], []),
    ],
    ids=[
        "q k v",
        "the order of the group",
        "a missing member",
        "another parent",
        "alone",
        "no parent",
        "MLA",
        "experts",
        "part of a name",
        "nothing",
    ],
)
def test_modules_of_one_parent_are_fused(names, groups):
    assert find_fused(names, FUSED_SETS) == groups


def test_sets_of_one_s_own_replace_the_known_ones():
    assert find_fused(["a.q_proj", "a.k_proj", "a.x", "a.y"], [("x", "y")]) == [["a.x", "a.y"]]


def test_sets_of_one_s_own_are_added_to_the_known_ones():
    names = ["a.q_proj", "a.k_proj", "a.x", "a.y"]
    model = nn.ModuleDict({"a": nn.ModuleDict({name[2:]: nn.Linear(2, 2) for name in names})})
    session = CalibrationSession(model, "FP8", fused_sets=[["x", "y"]])
    assert session.plan.fused == [["a.q_proj", "a.k_proj"], ["a.x", "a.y"]]


def test_a_known_name_in_a_set_of_one_s_own_belongs_there():
    groups = [*FUSED_SETS, ["q_proj", "k_proj", "v_proj", "gate"]]
    assert find_fused(["a.gate", "a.v_proj", "a.q_proj"], groups) == [["a.q_proj", "a.v_proj", "a.gate"]]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["q_proj", "k_proj"], "a list of lists"),
        ("ab", "a list of lists"),
        ([["alone"]], r"not a fused set: \['alone'\]"),
        ([["same", "same"]], "not a fused set"),
        ([["attn.q", "attn.k"]], r"not a fused set: attn\.q, attn\.k.*without dots"),
        ([["a", 3]], "not a fused set: 3"),
        ([["a", "b"], ["b", "c"]], r"is in two fused sets: b\. Remedy: make them one"),
    ],
)
def test_what_is_no_fused_set_is_refused(groups, message):
    with pytest.raises(CalibrationError, match=message):
        check_own_sets(groups)
