"""Killed at any call to the file system: the old or the new is under the name, whole."""

import runpy
from pathlib import Path

import pytest

KILLS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "faults" / "kills.py"))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", sorted(KILLS["KINDS"]))
def test_a_kill_at_any_call_leaves_the_old_or_the_new(kind, tmp_path):
    found, at, killed = [], 1, True
    while killed:
        (folder := tmp_path / str(at)).mkdir()
        killed, what = KILLS["trial"](kind, folder, at=at)
        found.append(what)
        at += 1 if kind == "file" else 3  # benchmarks/faults/kills.py takes each
    assert set(found) == {"old", "new"}


def test_a_name_that_two_processes_overwrite_is_never_absent(tmp_path):
    looked, absent = KILLS["looks"](tmp_path, 0.7)
    assert looked > 50
    assert absent == 0
