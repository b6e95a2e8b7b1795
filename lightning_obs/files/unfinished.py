"""The states of a long run after its steps, so that a killed run continues after the last one.

A run with output files keeps both in a folder beside its output:

    <name>.unfinished/
        lock                    held by the writer as long as it lives
        <finished files>
        state-<step>-<rank>.pt  of a rank, after a step

A step is finished when the states of all ranks are there; each appears whole, after the files that belong to it.
Every state is sealed: one that was damaged, or belongs to another step or rank, is refused.
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

#: where a state says of which step and rank it is
_PLACE = "step and rank"
_OF_A_RUN = re.compile(r"lock|state-\d+-\d+\.pt|model-\d{5}-of-\d{5}\.safetensors|\.lightning_obs\..*")


class Unfinished:
    """The folder beside ``out`` of one rank of ``ranks``, which are at most a step apart.

    Attributes:
        folder: its path; all ranks share it.
        rank: of this process.

    Raises:
        CalibrationError: another process writes there.
    """

    def __init__(self, out: Path, rank: int, ranks: int) -> None:
        target = Path(os.path.realpath(out))
        self.folder = target.with_name(f"{target.name}.unfinished")
        self.rank = rank
        self._kept = 1 if ranks == 1 else 2  # states of each rank
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
        """The steps whose state was saved, in ascending order."""
        found = (re.fullmatch(rf"state-(\d+)-{self.rank}\.pt", path.name) for path in self.folder.glob("*"))
        return sorted(int(match[1]) for match in found if match)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write the state after a step, sealed; remove the states that no rank needs any more.

        Raises:
            CalibrationError: it cannot be written (a full disk). The earlier states stay.
        """
        with whole_file(self._path(step)) as partial, partial.open("wb") as file:
            # torch says what the system said only where Python opened the file.
            torch.save(sealed({**state, _PLACE: [step, self.rank]}), file)
        for earlier in self.steps[: -self._kept]:
            _delete(self._path(earlier))

    def load(self, step: int) -> dict[str, Any]:
        """The state after a step: tensors, numbers, strings, and lists, tuples, dicts of them.

        Raises:
            CalibrationError: it cannot be read, has changed since it was saved, or is of another step or rank.
        """
        path, remedy = self._path(step), f"delete {self.folder} to start over."
        with naming(path, remedy=remedy), torch.inference_mode(False):
            state: dict[str, Any] = torch.load(path, weights_only=True)
        require_whole(state, str(path), remedy)
        del state[SEAL]
        place = state.pop(_PLACE, None)
        if place != [step, self.rank]:
            raise CalibrationError(
                f"{path} holds another state",
                got=f"step and rank {place}",
                expected=[step, self.rank],
                remedy=remedy,
            )
        return state

    def _path(self, step: int) -> Path:
        return self.folder / f"state-{step}-{self.rank}.pt"

    def remove(self) -> None:
        """Delete the files that such a run writes, of any rank; and the folder, if nothing else is in it."""
        for path in self.folder.glob("*"):
            if _OF_A_RUN.fullmatch(path.name):
                _delete(path)
        with suppress(OSError):
            self.folder.rmdir()

    def close(self) -> None:
        """Release the lock; delete a folder without a finished step."""
        if self.rank == 0 and not self.steps:
            self.remove()
        os.close(self._lock)


def _delete(path: Path) -> None:
    """Delete a file, or a folder that a damage has put in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
