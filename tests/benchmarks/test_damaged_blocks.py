"""A run layer by layer goes on from nothing that was damaged, or made of something else: a part of the benchmark."""

import runpy
from pathlib import Path

import pytest

BLOCKS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "faults" / "damaged_blocks.py"))


@pytest.mark.slow
@pytest.mark.parametrize("damages", [28, pytest.param(84, marks=pytest.mark.nightly)])
@pytest.mark.filterwarnings("ignore")
def test_a_run_that_goes_on_from_damage_is_refused_or_ends_with_the_right_files(damages):
    refused = 0
    for name, counted, faults in BLOCKS["damaged"](damages, 1):
        assert not faults, name
        refused += counted["refused"]
    assert refused
