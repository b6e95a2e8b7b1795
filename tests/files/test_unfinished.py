"""States of a long run: whole or not there, and refused where they were damaged."""

from __future__ import annotations

import resource
from contextlib import contextmanager

import pytest
import torch

from lightning_obs import CalibrationError
from lightning_obs.files.unfinished import Unfinished

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


@pytest.fixture
def unfinished(tmp_path):
    made = Unfinished(tmp_path / "out", rank=0, ranks=1)
    yield made
    made.close()


def states(unfinished):
    return sorted(path.name for path in unfinished.folder.iterdir() if path.name != "lock")


def test_a_state_comes_back_as_it_was_saved(unfinished):
    unfinished.save(1, STATE)
    unfinished.save(2, STATE)
    assert same(unfinished.load(2), STATE)
    assert states(unfinished) == ["state-2-0.pt"]


@pytest.mark.parametrize("room", [0, 300, 2000])
def test_a_disk_that_is_full_leaves_the_state_before_and_nothing_half_written(room, unfinished):
    unfinished.save(1, STATE)
    before = (unfinished.folder / "state-1-0.pt").read_bytes()
    message = r"state-2-0.pt cannot be written. Got .*File too large.*Remedy: .*has room"
    with largest_file(room), pytest.raises(CalibrationError, match=message):
        unfinished.save(2, STATE)
    assert states(unfinished) == ["state-1-0.pt"]
    assert (unfinished.folder / "state-1-0.pt").read_bytes() == before
    unfinished.save(2, STATE)
    assert same(unfinished.load(2), STATE)


def test_a_state_of_another_step_or_rank_is_refused(unfinished, tmp_path):
    unfinished.save(2, STATE)
    (unfinished.folder / "state-2-0.pt").rename(unfinished.folder / "state-3-0.pt")
    with pytest.raises(CalibrationError, match=r"state-3-0.pt holds another state. Got step and rank \[2, 0\]"):
        unfinished.load(3)
    (unfinished.folder / "state-3-0.pt").rename(unfinished.folder / "state-2-1.pt")
    of_rank_1 = Unfinished(tmp_path / "out", rank=1, ranks=2)
    with pytest.raises(CalibrationError, match=r"state-2-1.pt holds another state. .*expected \[2, 1\]"):
        of_rank_1.load(2)
    of_rank_1.close()


def test_a_state_that_another_program_wrote_is_refused(unfinished):
    for written in ({}, {"outputs": []}, [], 3):
        torch.save(written, unfinished.folder / "state-1-0.pt")
        message = r"state-1-0.pt (has changed|cannot be read).*delete .* to start over"
        with pytest.raises(CalibrationError, match=message):
            unfinished.load(1)


def test_every_changed_byte_of_a_state_is_refused_or_says_nothing(unfinished):
    unfinished.save(1, STATE)
    path = unfinished.folder / "state-1-0.pt"
    whole = path.read_bytes()
    refused = 0
    for at in range(0, len(whole), 41):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        try:
            assert same(unfinished.load(1), STATE), at
        except CalibrationError:
            refused += 1
    assert refused > len(whole) // 41 // 2


def test_files_of_others_in_the_folder_of_an_unfinished_run_stay(tmp_path):
    folder = tmp_path / "out.unfinished"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for has_state in (False, True):
        made = Unfinished(tmp_path / "out", rank=0, ranks=1)
        if has_state:
            made.save(1, STATE)
            made.remove()
        made.close()
        assert [path.name for path in folder.iterdir()] == ["notes.txt"]
