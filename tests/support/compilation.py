"""Loops of numba are compiled by one process at a time; the others wait, and then read them from numba's cache.

On a machine without that cache all workers and ranks would compile the same loops at the same time.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from pathlib import Path

from lightning_obs.numerics.kernels import launch


class _LockOfProcesses:
    """Stands for the lock of ``launch``: it excludes threads of this process, and other processes that use it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._of_thread = threading.local()

    def __enter__(self) -> None:
        self._of_thread.file = self._path.open("w")
        fcntl.flock(self._of_thread.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self._of_thread.file.close()


def compile_in_turn() -> None:
    """From now on this process compiles while no other one does that has called this."""
    launch._compiling = _LockOfProcesses(Path(tempfile.gettempdir(), f"lightning_obs_tests_{os.getuid()}.lock"))
