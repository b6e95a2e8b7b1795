"""States of a long run: whole or not there, and refused where they were damaged."""

from __future__ import annotations

import resource
from contextlib import contextmanager

import pytest
import torch

from lightning_obs import CalibrationError
from lightning_obs.files.unfinished import SavedSteps, Unfinished

STATE = {
    "outputs": [(torch.arange(600.0), None)],
    "result": {"input_ranges": {"fc": (0.0, 1.5)}},
    "read": {("a", 3): 5},
}


@contextmanager
def largest_file(size):
    """No file can grow beyond ``size`` bytes: writing fails as it does on a full disk, in the middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def same(one, other):
    return repr(one) == repr(other)


def test_a_state_comes_back_as_it_was_saved(tmp_path):
    steps = SavedSteps(tmp_path, rank=0, kept=1)
    steps.save(1, STATE)
    steps.save(2, STATE)
    assert same(steps.load(2), STATE)
    assert [path.name for path in tmp_path.iterdir()] == ["state-2-0.pt"]


@pytest.mark.parametrize("room", [0, 300, 2000])
def test_a_disk_that_is_full_leaves_the_state_before_and_nothing_half_written(room, tmp_path):
    steps = SavedSteps(tmp_path, rank=0, kept=1)
    steps.save(1, STATE)
    before = (tmp_path / "state-1-0.pt").read_bytes()
    with (
        largest_file(room),
        pytest.raises(
            CalibrationError, match=r"state-2-0.pt cannot be written. Got .*File too large.*Remedy: .*has room"
        ),
    ):
        steps.save(2, STATE)
    assert [path.name for path in tmp_path.iterdir()] == ["state-1-0.pt"]
    assert (tmp_path / "state-1-0.pt").read_bytes() == before
    steps.save(2, STATE)
    assert same(steps.load(2), STATE)


@pytest.mark.parametrize(
    ("rank", "step", "message"),
    [
        (0, 3, r"state-3-0.pt holds another state. Got step and rank \[2, 0\]"),
        (1, 2, r"state-2-1.pt holds another state"),
    ],
)
def test_a_state_of_another_step_or_rank_is_refused(rank, step, message, tmp_path):
    SavedSteps(tmp_path, rank=0, kept=1).save(2, STATE)
    (tmp_path / "state-2-0.pt").rename(tmp_path / f"state-{step}-{rank}.pt")
    with pytest.raises(CalibrationError, match=message):
        SavedSteps(tmp_path, rank, kept=1).load(step)


def test_a_state_that_another_program_wrote_is_refused(tmp_path):
    for written in ({}, {"outputs": []}, [], 3):
        torch.save(written, tmp_path / "state-1-0.pt")
        with pytest.raises(
            CalibrationError, match=r"state-1-0.pt (has changed|cannot be read).*delete .* to start over"
        ):
            SavedSteps(tmp_path, rank=0, kept=1).load(1)


def test_every_changed_byte_of_a_state_is_refused_or_says_nothing(tmp_path):
    steps = SavedSteps(tmp_path, rank=0, kept=1)
    steps.save(1, STATE)
    path = tmp_path / "state-1-0.pt"
    whole = path.read_bytes()
    refused = 0
    for at in range(0, len(whole), 41):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        try:
            assert same(steps.load(1), STATE), at
        except CalibrationError:
            refused += 1
    assert refused > len(whole) // 41 // 2


def test_files_of_others_in_the_folder_of_an_unfinished_run_stay(tmp_path):
    folder = tmp_path / "out.unfinished"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for has_state in (False, True):
        unfinished = Unfinished(tmp_path / "out", rank=0, ranks=1)
        if has_state:
            unfinished.save(1, STATE)
            unfinished.remove()
        unfinished.close()
        assert [path.name for path in folder.iterdir()] == ["notes.txt"]
