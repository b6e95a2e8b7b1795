"""Write beside a name, then take it in one step: under the name is the old or the new, whole, whenever one looks.

What is being written lies in a hidden folder beside the name:

    .lightning_obs.<random>.partial/
        lock            held by the writer as long as it lives
        writing/<name>  incomplete
        whole/<name>    complete; after an exchange, what was under the name before
        old/<name>      taken from under the name, where the file system cannot exchange

A file replaces another by one rename. A folder needs an exchange (Linux' ``renameat2``); where there is none it takes
two renames, and a kill between them leaves nothing under the name. Whoever writes beside it next, or loads it, puts
back what dead writers took and removes what they left.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lightning_obs.errors import warn
from lightning_obs.files.contents import foreign, refuse_foreign

try:
    import fcntl
except ImportError:  # Windows: no writer is known to be dead
    fcntl = None  # type: ignore[assignment]

_PREFIX, _SUFFIX = ".lightning_obs.", ".partial"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Staging:
    """A hidden folder to write into until :meth:`replace_file` or :meth:`replace_folder`.

    Args:
        target: the name that is to be taken, with no symlink in the path to it.

    Attributes:
        partial: where to write.
    """

    def __init__(self, target: Path) -> None:
        settle_dead(target.parent)
        self.target = target
        self._folder, self._lock = _locked_folder(target.parent)
        (self._folder / "writing").mkdir()
        self.partial = self._folder / "writing" / target.name

    def close(self) -> None:
        """Remove what is left; put back what was taken, where an interrupt came between two renames."""
        try:
            _settle(self._folder)
        except KeyboardInterrupt:  # it may have come while what was replaced was deleted
            _settle(self._folder)
            raise
        finally:
            os.close(self._lock)

    def replace_file(self, overwrite: bool) -> None:
        """Give the file its name."""
        self._finish([self.partial])
        if not overwrite:
            try:
                os.link(self.partial, self.target)  # a rename would replace what is there
                return
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                if os.path.lexists(self.target):
                    raise
        os.replace(self.partial, self.target)

    def replace_folder(self, overwrite: bool) -> None:
        """Give the folder its name.

        Raises:
            CalibrationError: what is under the name holds what no export wrote.
            OSError: something is under the name, and ``overwrite`` is off.
        """
        self._finish(path for path in self.partial.rglob("*") if path.is_file())
        os.rename(self._folder / "writing", self._folder / "whole")
        new = self._folder / "whole" / self.target.name
        try:
            os.rename(new, self.target)  # onto nothing or an empty folder, else it fails
        except OSError:
            if not overwrite or not self.target.is_dir():
                raise
            if not _exchange(new, self.target):
                self._replace_in_two(new)
                return
            try:
                refuse_foreign(new, self.target)  # now that nothing can be added to it under its name
            except BaseException:
                _exchange(new, self.target)
                raise
            os.rename(self._folder / "whole", self._folder / "checked")

    def _replace_in_two(self, new: Path) -> None:
        old = self._folder / "old" / self.target.name
        old.parent.mkdir()
        os.rename(self.target, old)  # close() puts it back, unless the second rename follows
        refuse_foreign(old, self.target)
        os.rename(new, self.target)
        os.rename(old.parent, self._folder / "checked")

    def _finish(self, files: Iterable[Path]) -> None:
        """The umask decides who may read (safetensors writes for the owner alone); all of it is on the disk."""
        mode = os.fstat(self._lock).st_mode & 0o777
        for path in files:
            path.chmod(mode)
            with path.open("rb") as file:
                os.fsync(file.fileno())


def settle_dead(parent: Path) -> None:
    """Put back what killed writers took from under names in ``parent``, and remove what else they left."""
    try:
        left = [path for path in parent.iterdir() if path.name.startswith(_PREFIX) and path.name.endswith(_SUFFIX)]
    except OSError:  # whoever writes there says why
        return
    for folder in left:
        lock = _lock_of_dead(folder)
        if lock is not None:
            _settle(folder)
            os.close(lock)


def _settle(folder: Path) -> None:
    for taken in _within(folder / "old"):
        target = folder.parent / taken.name
        if not os.path.lexists(target):
            os.rename(taken, target)
    for name in ("whole", "old"):
        for path in _within(folder / name):
            if foreign(path):
                warn(
                    f"{path} was {folder.parent / path.name} until an overwrite of it was killed, and holds what no "
                    "export wrote. It stays there: move it away, or delete it."
                )
                return
    shutil.rmtree(folder, ignore_errors=True)


def _within(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _locked_folder(parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, suffix=_SUFFIX, dir=parent))
        # Before it is locked, another writer may take this one for dead and remove the folder.
        with suppress(FileNotFoundError):
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            with suppress(OSError):  # a file system without locks: no writer there is known to be dead
                if fcntl is not None:
                    fcntl.flock(lock, fcntl.LOCK_EX)
            if (folder / "lock").exists():
                return folder, lock
            os.close(lock)


def _lock_of_dead(folder: Path) -> int | None:
    """The lock of a folder of ours whose writer has ended; None: it lives, or nobody can tell."""
    if fcntl is None or folder.is_symlink():
        return None
    try:
        if folder.stat().st_uid != os.getuid():
            return None
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _exchange(one: Path, other: Path) -> bool:
    """Let two names change places at once; False where the system or file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    paths = os.fsencode(one), os.fsencode(other)
    return renameat2 is not None and not renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE)
