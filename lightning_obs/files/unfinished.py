"""The state of a long run after each of its steps, so that a killed run continues after the last finished step.

Such a run is the calibration layer by layer (``streaming/layerwise.py``), where a step is a block of layers. The states
are in a folder beside the run's output, together with the output files that are finished:

    <name>.unfinished/
        lock                    locked by rank 0 as long as it lives
        <finished files>
        state-<step>-<rank>.pt  the state of a rank after a step

A step is finished when the states of all ranks are there. A rank's state appears whole, after the files that belong to
it. Every state is sealed: a state that was damaged, or belongs to another step or rank, is refused.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lightning_obs.errors import CalibrationError
from lightning_obs.files.read import naming
from lightning_obs.files.sealed import SEAL, require_whole, sealed
from lightning_obs.files.write import whole_file

#: the key under which a state names its step and rank
_STEP_AND_RANK = "step and rank"
#: names of the files that such a run writes
_WRITTEN_NAMES = re.compile(r"lock|state-\d+-\d+\.pt|model-\d{5}-of-\d{5}\.safetensors|\.lightning_obs\..*")


class Unfinished:
    """The folder of states beside the output of a run.

    The calibration layer by layer opens one at its beginning, saves a state after each block of layers, and closes it
    at its end.

    Args:
        out: the folder that the run writes when it is complete.
        rank: the rank of this process.
        ranks: how many ranks there are; they are at most one step apart.

    Attributes:
        folder: the path of the folder of states; all ranks share it.
        rank: the rank of this process.

    Raises:
        CalibrationError: another process writes there.
    """

    def __init__(self, out: Path, rank: int, ranks: int) -> None:
        target = Path(os.path.realpath(out))
        self.folder = target.with_name(f"{target.name}.unfinished")
        self.rank = rank
        # Of each rank: ranks are at most one step apart, and all of them continue after the same step.
        self._states_to_keep = 1 if ranks == 1 else 2
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        if rank == 0:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(self._lock)
                raise CalibrationError(
                    f"another process is writing {self.folder}", remedy="wait for it, or choose another folder."
                ) from error

    @property
    def steps(self) -> list[int]:
        """The steps of which this rank has a state, in ascending order; a run that begins reads them."""
        pattern = re.compile(rf"state-(\d+)-{self.rank}\.pt")
        steps = []
        for path in self.folder.glob("*"):
            match = pattern.fullmatch(path.name)
            if match:
                steps.append(int(match[1]))
        return sorted(steps)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write this rank's state after a step, sealed; delete earlier states that no rank needs any more.

        Called when a step is finished, after the files that belong to it are written.

        Args:
            step: the number of the step.
            state: everything that the run needs to continue after this step.

        Raises:
            CalibrationError: it cannot be written (a full disk). The earlier states stay.
        """
        whole_state = sealed({**state, _STEP_AND_RANK: [step, self.rank]})
        with whole_file(self._path(step)) as partial, partial.open("wb") as file:
            # From a file that Python opened, torch reports the system's reason (a full disk).
            torch.save(whole_state, file)
        for earlier_step in self.steps[: -self._states_to_keep]:
            _delete(self._path(earlier_step))

    def load(self, step: int) -> dict[str, Any]:
        """Read this rank's state after a step, as it was given to :meth:`save`.

        Called when a run begins and a killed run has left states. A state may hold tensors, numbers, strings, and
        lists, tuples and dicts of them.

        Raises:
            CalibrationError: the state cannot be read, has changed since it was saved, or is of another step or rank.
        """
        path = self._path(step)
        remedy = f"delete {self.folder} to start over."
        with naming(path, remedy=remedy), torch.inference_mode(False):
            state: dict[str, Any] = torch.load(path, weights_only=True)
        require_whole(state, str(path), remedy)
        del state[SEAL]
        step_and_rank = state.pop(_STEP_AND_RANK, None)
        if step_and_rank != [step, self.rank]:
            raise CalibrationError(
                f"{path} holds another state",
                got=f"step and rank {step_and_rank}",
                expected=[step, self.rank],
                remedy=remedy,
            )
        return state

    def _path(self, step: int) -> Path:
        """The file of this rank's state after a step."""
        return self.folder / f"state-{step}-{self.rank}.pt"

    def remove(self) -> None:
        """Delete the files of all ranks, and the folder if nothing else is in it.

        Called when the run has written its output, and by :meth:`close`.
        """
        for path in self.folder.glob("*"):
            if _WRITTEN_NAMES.fullmatch(path.name):
                _delete(path)
        with suppress(OSError):
            self.folder.rmdir()

    def close(self) -> None:
        """Release the lock at the end of the run, finished or not; rank 0 deletes a folder in which it has no state."""
        if self.rank == 0 and not self.steps:
            self.remove()
        os.close(self._lock)


def _delete(path: Path) -> None:
    """Delete a file, or a folder that somebody put in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
