"""Files and folders that take their name when they are complete: the old or the new is under it, whole, at any time.

Files are written into a hidden folder beside the name:

    .lightning_obs.<random>.partial/
        lock            held by the writer as long as it lives
        writing/<name>  incomplete
        whole/<name>    complete; after an exchange, the folder that had the name before
        old/<name>      taken from under the name, where the file system cannot exchange

A folder lists its own files and their checksums (``lightning_obs.json``). So missing and damaged files are named, and
files that no export wrote are never deleted.

A file replaces another by one rename. A folder needs an exchange (Linux' ``renameat2``); where there is none it takes
two renames, and a kill between them leaves nothing under the name. Whoever writes beside it next, or loads it, puts
back folders that dead writers took and removes their leftovers.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from lightning_obs.errors import CalibrationError, refuse, require_bool, warn
from lightning_obs.files.read import naming, read_json

#: contents of the folder: ``{"files": {relative path: CRC-32 of the file, null of a folder}}``
CONTENTS_FILE = "lightning_obs.json"
_DAMAGED = "copy or export the checkpoint again."
_PREFIX, _SUFFIX = ".lightning_obs.", ".partial"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def require_free(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot be written, or that holds anything but a checkpoint.

    Raises:
        CalibrationError: something is there and ``overwrite`` is off, or it is nothing that an export wrote; the folder
            is the working folder or a mount point, which cannot be renamed.
    """
    require_bool(overwrite=overwrite)
    with _writing(folder) as target:
        settle_dead(target.parent)
        try:
            target.lstat()  # exists() hides that a name is too long
        except FileNotFoundError:
            return
        fixed = {"the working folder": Path.cwd().is_relative_to(target), "a mount point": os.path.ismount(target)}
        for kind, is_so in fixed.items():
            if is_so:
                remedy = "choose a folder inside it."
                raise CalibrationError(f"{folder} is {kind}, which cannot be replaced whole", remedy=remedy)
        if not target.is_dir():
            raise CalibrationError(f"{folder} is already there, and is not a folder", remedy="choose another folder.")
        if any(target.iterdir()) and not overwrite:
            raise CalibrationError(
                f"{folder} is already there",
                remedy="choose another folder, or set overwrite=True, which replaces a checkpoint (a callback's "
                "export_overwrite=True).",
            )
        while True:
            found = target.stat()
            try:
                refuse_foreign(target, folder)
                return
            except (CalibrationError, OSError):
                now = target.stat()
                if (found.st_ino, found.st_ctime_ns) == (now.st_ino, now.st_ctime_ns):
                    raise  # otherwise another export has replaced it meanwhile


@contextmanager
def whole_folder(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Give a temporary folder beside ``folder`` to write into; it takes its name when the block ended well.

    Raises:
        CalibrationError: as of :func:`require_free`; ``folder`` cannot be written. It is then as before.
    """
    with _writing(folder) as target:  # a symlink stays, its target is replaced
        target.parent.mkdir(parents=True, exist_ok=True)
        require_free(folder, overwrite)
        with closing(Staging(target)) as staging:
            staging.partial.mkdir()
            yield staging.partial
            write_contents(staging.partial)
            try:
                staging.replace_folder(overwrite)
            except OSError:
                require_free(folder, overwrite)
                raise


@contextmanager
def whole_file(file: str | os.PathLike[str], overwrite: bool = True) -> Iterator[Path]:
    """Give a path beside ``file`` to write to; it takes its name when the block ended well.

    Raises:
        CalibrationError: ``file`` is there and ``overwrite`` is off; it cannot be written. It is then as before.
    """
    require_bool(overwrite=overwrite)
    file = Path(file)
    with _writing(file):
        parent = Path(os.path.realpath(file.parent))
        parent.mkdir(parents=True, exist_ok=True)
        # A symlink under this very name is replaced, not followed.
        with closing(Staging(parent / file.name)) as staging:
            yield staging.partial
            try:
                staging.replace_file(overwrite)
            except FileExistsError as error:
                raise CalibrationError(
                    f"{file} is already there", remedy="choose another name, or set overwrite=True."
                ) from error


def write_text(file: str | os.PathLike[str], text: str) -> None:
    """Write text as UTF-8, whole or not at all; characters outside of UTF-8 (lone surrogates) are escaped."""
    with whole_file(file) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def require_room(partial: Path, size: int) -> None:
    """Refuse to start writing ``size`` bytes to a disk with less free space."""
    if (free := shutil.disk_usage(partial).free) < size:
        raise OSError(errno.ENOSPC, f"{free:,} bytes are free, the weights have {size:,}")


@contextmanager
def _writing(path: Path) -> Iterator[Path]:
    """The path without symlinks; an error of the system names the path."""
    try:
        if "\0" in str(path):
            raise OSError(errno.EINVAL, "a path cannot hold a NUL")
        yield Path(os.path.realpath(path))
    except (OSError, SafetensorError, UnicodeEncodeError) as error:
        raise CalibrationError(
            f"{path} cannot be written",
            got=str(error),
            remedy="choose a name on a disk that can be written and has room.",
        ) from error


# ---------------------------------------------------------------------- the list of a folder's files


def write_contents(folder: Path) -> None:
    """List all that lies in ``folder``."""
    files = {path.relative_to(folder).as_posix(): file_checksum(path) for path in sorted(folder.rglob("*"))}
    (folder / CONTENTS_FILE).write_text(json.dumps({"files": files}, indent=1) + "\n")


def refuse_damage(folder: Path) -> None:
    """Refuse a folder in which a listed file is missing or has other bytes than were written."""
    if not (folder / CONTENTS_FILE).exists():
        return
    written = _contents(folder)
    with naming(folder, remedy=_DAMAGED):
        refuse(
            [name for name in written if not (folder / name).exists()],
            f"files of {folder} are missing",
            remedy=_DAMAGED,
        )
        refuse(
            [name for name in written if written[name] != file_checksum(folder / name)],
            f"files of {folder} have changed since they were written",
            remedy=f"{_DAMAGED} If you changed them on purpose, delete {CONTENTS_FILE}.",
        )


def foreign(folder: Path) -> list[str]:
    """Files in ``folder`` that are not, byte for byte, the files that were written there."""
    try:
        own = _contents(folder)
    except CalibrationError:
        own = {}
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    added = [name for name in found if name not in own and not (own and name == CONTENTS_FILE)]
    changed = [name for name in found if name in own and own[name] != file_checksum(folder / name)]
    return [*added, *(f"{name} (changed since)" for name in changed)]


def refuse_foreign(folder: Path, name: Path | None = None) -> None:
    """Refuse to replace a folder with files that no export wrote; ``name``: its own, where it lies elsewhere now."""
    refuse(
        foreign(folder),
        f"{name or folder} holds files that no export wrote, and overwrite=True would delete them",
        remedy="choose another folder, or move these files away.",
    )


def _contents(folder: Path) -> dict[str, int | None]:
    path = folder / CONTENTS_FILE
    found = read_json(path, remedy=_DAMAGED)
    with naming(path, remedy=_DAMAGED):
        return dict(found["files"])


def file_checksum(path: Path) -> int | None:
    """CRC-32 of a file's bytes; None of a folder, -1 of anything else."""
    if path.is_dir():
        return None
    if not path.is_file():  # a pipe, a device, a link to nothing
        return -1
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


# ---------------------------------------------------------------------- the hidden folder


class Staging:
    """A hidden folder beside ``target`` (with no symlink in its path); ``partial`` inside it is written to."""

    def __init__(self, target: Path) -> None:
        settle_dead(target.parent)
        self.target = target
        self._folder, self._lock = _locked_folder(target.parent)
        (self._folder / "writing").mkdir()
        self.partial = self._folder / "writing" / target.name

    def close(self) -> None:
        """Remove leftovers; put back a folder that was taken, where an interrupt came between two renames."""
        try:
            _settle(self._folder)
        except KeyboardInterrupt:  # it may have come while the replaced folder was deleted
            _settle(self._folder)
            raise
        finally:
            os.close(self._lock)

    def replace_file(self, overwrite: bool) -> None:
        """Give the file its name."""
        self._finish([self.partial])
        if not overwrite:
            try:
                os.link(self.partial, self.target)  # a rename would replace an existing folder
                return
            except OSError:  # perhaps of a file system without hard links
                if os.path.lexists(self.target):
                    raise
        os.replace(self.partial, self.target)

    def replace_folder(self, overwrite: bool) -> None:
        """Give the folder its name, unless this would delete files that no export wrote."""
        self._finish(path for path in self.partial.rglob("*") if path.is_file())
        os.rename(self._folder / "writing", self._folder / "whole")
        new = self._folder / "whole" / self.target.name
        try:
            os.rename(new, self.target)  # onto nothing or an empty folder, else it fails
        except OSError:
            if not overwrite or not self.target.is_dir():
                raise
            if _exchange(new, self.target):
                old = new
                try:
                    refuse_foreign(old, self.target)  # now that nothing can be added to it under its name
                except BaseException:
                    _exchange(old, self.target)
                    raise
            else:
                old = self._folder / "old" / self.target.name
                old.parent.mkdir()
                os.rename(self.target, old)  # close() puts it back, unless the second rename follows
                refuse_foreign(old, self.target)
                os.rename(new, self.target)
            os.rename(old.parent, self._folder / "checked")

    def _finish(self, files: Iterable[Path]) -> None:
        """Let others read as the umask says (safetensors writes for the owner alone); flush all files to the disk."""
        mode = os.fstat(self._lock).st_mode & 0o777
        for path in files:
            path.chmod(mode)
            with path.open("rb") as file:
                os.fsync(file.fileno())


def settle_dead(parent: Path) -> None:
    """Put back folders that killed writers took from their names in ``parent``, and remove their other leftovers."""
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
    for taken in list(folder.glob("old/*")):
        target = folder.parent / taken.name
        if not os.path.lexists(target):
            os.rename(taken, target)
    for path in (*folder.glob("whole/*"), *folder.glob("old/*")):
        if foreign(path):
            warn(
                f"{path} was {folder.parent / path.name} until an overwrite of it was killed, and holds files "
                "that no export wrote. It stays there: move it away, or delete it."
            )
            return
    shutil.rmtree(folder, ignore_errors=True)


def _locked_folder(parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, suffix=_SUFFIX, dir=parent))
        # Before it is locked, another writer may take this one for dead and remove the folder.
        with suppress(FileNotFoundError):
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            with suppress(OSError):  # a file system without locks: no writer there is known to be dead
                fcntl.flock(lock, fcntl.LOCK_EX)
            if (folder / "lock").exists():
                return folder, lock
            os.close(lock)


def _lock_of_dead(folder: Path) -> int | None:
    """The lock of a folder of ours whose writer has ended; None: it lives, or nobody can tell."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
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
