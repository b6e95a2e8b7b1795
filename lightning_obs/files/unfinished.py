"""The states of a long run after its steps, so that a killed run continues after the last one.

A run with output files keeps both in a folder beside its output:

    <name>.unfinished/
        lock                    held by the writer as long as it lives
        <finished files>
        state-<step>-<rank>.pt  of a rank, after a step

A step is finished when the states of all ranks are there; each appears whole, after the files that belong to it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from lightning_obs.errors import CalibrationError
from lightning_obs.files.read import naming
from lightning_obs.files.write import whole_file


class SavedSteps:
    """The states of one rank after steps of a run, in a folder that all ranks share; the last ``kept`` states stay."""

    def __init__(self, folder: Path, rank: int, kept: int) -> None:
        self.folder, self.rank, self._kept = folder, rank, kept

    @property
    def steps(self) -> list[int]:
        """The steps whose state was saved, in ascending order."""
        found = (re.fullmatch(rf"state-(\d+)-{self.rank}\.pt", path.name) for path in self.folder.glob("*"))
        return sorted(int(match[1]) for match in found if match)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write the state after a step; remove the states that no rank needs any more."""
        with whole_file(self._path(step)) as partial:
            torch.save(state, partial)
        for earlier in self.steps[: -self._kept]:
            self.drop(earlier)

    def load(self, step: int) -> dict[str, Any]:
        """The state after a step: tensors, numbers, strings, and lists, tuples, dicts of them."""
        path = self._path(step)
        with naming(path, remedy=f"delete {self.folder} to start over."), torch.inference_mode(False):
            state: dict[str, Any] = torch.load(path, weights_only=True)
        return state

    def drop(self, step: int) -> None:
        """Delete the state after a step."""
        self._path(step).unlink()

    def _path(self, step: int) -> Path:
        return self.folder / f"state-{step}-{self.rank}.pt"


class Unfinished(SavedSteps):
    """The folder beside ``out`` of one rank of ``ranks``, which are at most a step apart.

    Raises:
        CalibrationError: another process writes there.
    """

    def __init__(self, out: Path, rank: int, ranks: int) -> None:
        target = Path(os.path.realpath(out))
        super().__init__(target.with_name(f"{target.name}.unfinished"), rank, kept=1 if ranks == 1 else 2)
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

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Release the lock; delete a folder without a finished step."""
        if self.rank == 0 and not self.steps:
            self.remove()
        os.close(self._lock)
