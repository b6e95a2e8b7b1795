"""The finished steps of a long run, in a folder beside its output, so that a killed run continues after them.

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


class Unfinished:
    """The folder beside ``out`` of one rank of ``ranks``.

    Raises:
        CalibrationError: another process writes there.
    """

    def __init__(self, out: Path, rank: int, ranks: int) -> None:
        target = Path(os.path.realpath(out))
        self.folder, self.rank = target.with_name(f"{target.name}.unfinished"), rank
        #: ranks are at most a step apart
        self._kept = 1 if ranks == 1 else 2
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
    def steps(self) -> set[int]:
        """The steps that this rank has a state of."""
        found = (re.fullmatch(rf"state-(\d+)-{self.rank}\.pt", path.name) for path in self.folder.glob("*"))
        return {int(match[1]) for match in found if match}

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write this rank's state after a step; earlier ones that no rank needs any more are removed."""
        with whole_file(self._path(step)) as partial:
            torch.save(state, partial)
        for earlier in sorted(self.steps)[: -self._kept]:
            self._path(earlier).unlink()

    def load(self, step: int) -> dict[str, Any]:
        """This rank's state after a step: tensors, numbers, strings, and lists, tuples, dicts of them."""
        with naming(self._path(step), remedy=f"delete {self.folder} to begin anew."):
            state: dict[str, Any] = torch.load(self._path(step), weights_only=True)
        return state

    def _path(self, step: int) -> Path:
        return self.folder / f"state-{step}-{self.rank}.pt"

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Let others write there. A folder without a finished step is deleted."""
        if self.rank == 0 and not self.steps:
            self.remove()
        os.close(self._lock)
