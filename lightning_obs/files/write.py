"""Atomic writes: a path always holds the complete old or the complete new content.

Everything that the package writes for a user passes here: exports by :func:`whole_folder`, reports, ONNX files and
states by :func:`whole_file`.

Whatever is written begins in a hidden folder beside its path:

    .lightning_obs.<random>.partial/
        lock             locked by the writer as long as it lives
        new/<name>       what is being written; after an exchange, the folder that was replaced
        replaced/<name>  the folder that was replaced, where the file system cannot exchange two names

A file takes its name by one rename. A folder that replaces another takes it by an exchange (Linux' ``renameat2``). File
systems without it need two renames, and a kill between them leaves nothing under the name: the next process that writes
there, or loads from there, puts the replaced folder back. It also deletes what killed writers left.

A folder that was written lists its files with their checksums (``lightning_obs.json``). So damage is named, and a
folder is replaced only if an export wrote every file in it.
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

from lightning_obs.errors import CalibrationError, refuse, require_bool
from lightning_obs.files.read import naming, read_json

#: the list of a folder's files: ``{"files": {relative path: CRC-32 of a file, null for a folder}}``
CONTENTS_FILE = "lightning_obs.json"
#: suffixes of files that hold a model: a checkpoint's folder with such a name would be taken for a file
MODEL_FILES = (".bin", ".ckpt", ".engine", ".gguf", ".onnx", ".pt", ".pt2", ".pte", ".pth", ".safetensors")
_WRITE_AGAIN = "copy or export the checkpoint again."
_PREFIX = ".lightning_obs."
_SUFFIX = ".partial"
#: constants of Linux for ``renameat2``: paths are relative to the working folder; exchange the two
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
#: bytes of a file that are read at once for its checksum
_BLOCK = 1 << 22


def require_new_file(file: Path, overwrite: bool) -> None:
    """Refuse a file that exists if ``overwrite`` is False, a folder of its name, and a place that cannot be written.

    The writers of ONNX files, GGUF files and programs call it before anything is calibrated or traced.

    Raises:
        CalibrationError: the name is taken, or nothing can be written there.
    """
    if file.exists() and not (overwrite and file.is_file()):
        raise CalibrationError(
            f"{file} is already there",
            remedy="choose another name, or set overwrite=True (a callback's export_overwrite=True).",
        )
    with _errors_name(file):
        _require_writable(_real_path(file.parent) / file.name)


def require_folder_name(folder: str | os.PathLike[str]) -> None:
    """Refuse a name for a checkpoint's folder that is the name of a file; a callback's ``export`` calls it.

    Raises:
        CalibrationError: the name ends like a file that holds a model.
    """
    if Path(folder).suffix.lower() in MODEL_FILES:
        raise CalibrationError(
            "export writes a checkpoint, which is a folder",
            where=[os.fspath(folder)],
            got="the name of a file",
            remedy="give a folder; files are written by export_onnx, export_program and export_gguf.",
        )


def require_free(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that an export could not create, or could not replace if ``overwrite`` is set.

    First, what killed writers have left beside ``folder`` is deleted, and a folder that such a writer was replacing is
    put back (:func:`clean_up_after_killed_writers`).

    Callbacks (``callbacks/destinations.py``) and the command line call it before anything is calibrated;
    :func:`whole_folder` calls it again before a folder is written.

    Args:
        folder: the folder that will be written.
        overwrite: whether a checkpoint in it may be replaced.

    Raises:
        CalibrationError: the folder cannot be written; it holds files and ``overwrite`` is off, or files that no export
            wrote; it is a file, the working folder or a mount point, which cannot be renamed.
    """
    require_bool(overwrite=overwrite)
    with _errors_name(folder):
        target = _real_path(folder)
        clean_up_after_killed_writers(target.parent)
        try:
            target.lstat()  # exists() hides that a name is too long
        except FileNotFoundError:
            _require_writable(target)
            return
        _refuse_unmovable(target, folder)
        if not target.is_dir():
            raise CalibrationError(f"{folder} is already there, and is not a folder", remedy="choose another folder.")
        if any(target.iterdir()) and not overwrite:
            raise CalibrationError(
                f"{folder} is already there",
                remedy="choose another folder, or set overwrite=True, which replaces a checkpoint (a callback's "
                "export_overwrite=True).",
            )
        _refuse_foreign_while_others_write(target, folder)


def _require_writable(target: Path) -> None:
    """Raise ``OSError`` if the hidden folder of a writer cannot be made beside a path.

    :func:`require_free` and :func:`require_new_file` call this, so that a run does not fail at its end. The folder is
    made and deleted, since permissions do not tell of disks that are full or read-only.

    Args:
        target: the path without symlinks; it and folders above it may be missing.
    """
    parent = target.parent
    while not parent.exists():
        parent = parent.parent
    Staging(parent / target.name).close()


def _refuse_unmovable(target: Path, folder: Path) -> None:
    """Refuse a folder that cannot be renamed: the working folder, one around it, or a mount point.

    Args:
        target: the folder without symlinks.
        folder: the folder's path as the user wrote it, for the error.
    """
    kind = None
    if Path.cwd().is_relative_to(target):
        kind = "the working folder"
    elif os.path.ismount(target):
        kind = "a mount point"
    if kind is not None:
        raise CalibrationError(
            f"{folder} is {kind}, which cannot be replaced whole", remedy="choose a folder inside it."
        )


def _refuse_foreign_while_others_write(target: Path, folder: Path) -> None:
    """Refuse files that no export wrote (:func:`refuse_foreign`).

    Another export may replace the folder while it is read here, and cause the failure: then the new folder is read.
    """
    while True:
        status_before = target.stat()
        try:
            refuse_foreign(target, folder)
            return
        except (CalibrationError, OSError):
            status = target.stat()
            if _identity(status) == _identity(status_before):
                raise


def _identity(status: os.stat_result) -> tuple[int, int]:
    """A pair of numbers that changes when another folder takes the name, or the folder itself changes."""
    return status.st_ino, status.st_ctime_ns


@contextmanager
def whole_folder(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Write a folder: yields a temporary folder beside it, which takes its name when the block ended without an error.

    Every export of a checkpoint writes inside this block.

    Args:
        folder: the folder to write.
        overwrite: whether a checkpoint that is there may be replaced.

    Raises:
        CalibrationError: the folder may not be written (:func:`require_free`), or writing failed. The path then holds
            its earlier content.
    """
    with _errors_name(folder):
        target = _real_path(folder)  # a symlink stays, its target is replaced
        target.parent.mkdir(parents=True, exist_ok=True)
        require_free(folder, overwrite)
        with closing(Staging(target)) as staging:
            staging.partial.mkdir()
            yield staging.partial
            write_contents(staging.partial)
            try:
                staging.replace_folder(overwrite)
            except OSError:
                require_free(folder, overwrite)  # raises the error that names the reason, if there is one
                raise


@contextmanager
def whole_file(file: str | os.PathLike[str], overwrite: bool = True) -> Iterator[Path]:
    """Write a file: yields a temporary path; the file there takes its name when the block ended without an error.

    The writers of ONNX files, GGUF files and programs, of reports, and of the states of a long run write inside this
    block.

    Args:
        file: the file to write.
        overwrite: whether a file that is there is replaced.

    Raises:
        CalibrationError: ``file`` exists and ``overwrite`` is off; or writing failed. The path then holds its earlier
            content.
    """
    require_bool(overwrite=overwrite)
    file = Path(file)
    with _errors_name(file):
        parent = _real_path(file.parent)
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
    """Write text as UTF-8 by :func:`whole_file`, in place of a file that is there.

    Called for reports, and for the plans and schemes that the command line writes. Characters that UTF-8 lacks (lone
    surrogates) are escaped.
    """
    with whole_file(file) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def require_room(partial: Path, size: int) -> None:
    """Raise ``OSError`` if the disk that holds the folder ``partial`` has less than ``size`` bytes free.

    Called before the weights of a checkpoint are written, once their size is known. The ``with`` block of
    :func:`whole_folder` around the call turns the error into one that names the folder.
    """
    free = shutil.disk_usage(partial).free
    if free < size:
        raise OSError(errno.ENOSPC, f"{free:,} bytes are free, the weights have {size:,}")


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """For a ``with`` block that writes: errors of the system become a :class:`CalibrationError` that names ``path``."""
    try:
        if "\0" in str(path):
            raise OSError(errno.EINVAL, "a path cannot hold a NUL")
        yield
    except (OSError, SafetensorError, UnicodeEncodeError) as error:
        raise CalibrationError(
            f"{path} cannot be written",
            got=str(error),
            remedy="choose a name on a disk that can be written and has room.",
        ) from error


def _real_path(path: Path) -> Path:
    """The path without symlinks."""
    return Path(os.path.realpath(path))


# ---------------------------------------------------------------------- the list of a folder's files


def write_contents(folder: Path) -> None:
    """Write :data:`CONTENTS_FILE`, the list of everything in ``folder``; :func:`whole_folder` calls it last."""
    checksums = {name: file_checksum(folder / name) for name in _names_in(folder)}
    (folder / CONTENTS_FILE).write_text(json.dumps({"files": checksums}, indent=1) + "\n")


def refuse_damage(folder: Path) -> None:
    """Refuse a folder in which a listed file (:data:`CONTENTS_FILE`) is missing or has changed.

    Called when a checkpoint is loaded, or quantized from its files. A folder without a list, which other programs
    write, is accepted.
    """
    if not (folder / CONTENTS_FILE).exists():
        return
    checksums = _listed_checksums(folder)
    with naming(folder, remedy=_WRITE_AGAIN):
        refuse(
            [name for name in checksums if not (folder / name).exists()],
            f"files of {folder} are missing",
            remedy=_WRITE_AGAIN,
        )
        refuse(
            [name for name, checksum in checksums.items() if file_checksum(folder / name) != checksum],
            f"files of {folder} have changed since they were written",
            remedy=f"{_WRITE_AGAIN} If you changed them on purpose, delete {CONTENTS_FILE}.",
        )


def refuse_foreign(folder: Path, shown: Path | None = None) -> None:
    """Refuse to replace a folder that holds files which no export wrote, or which have changed since.

    Called before a folder is replaced, and again at the moment when nobody can add a file to it any more.

    Args:
        folder: where the files are now.
        shown: the path that the error names; None: ``folder``.
    """
    try:
        checksums = _listed_checksums(folder)
    except CalibrationError:  # no list, or none that can be read: no file is known
        checksums = {}
    added = []
    changed = []
    for name in _names_in(folder):
        if name in checksums:
            if checksums[name] != file_checksum(folder / name):
                changed.append(f"{name} (changed since)")
        elif not (checksums and name == CONTENTS_FILE):
            added.append(name)
    refuse(
        added + changed,
        f"{shown or folder} holds files that no export wrote, and overwrite=True would delete them",
        remedy="choose another folder, or move these files away.",
    )


def _names_in(folder: Path) -> list[str]:
    """The relative paths of all files and folders inside ``folder``, sorted, with ``/``."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def _listed_checksums(folder: Path) -> dict[str, int | None]:
    """The checksum of each file in the folder's list (:data:`CONTENTS_FILE`), by relative path."""
    path = folder / CONTENTS_FILE
    contents = read_json(path, remedy=_WRITE_AGAIN)
    with naming(path, remedy=_WRITE_AGAIN):
        return dict(contents["files"])


def file_checksum(path: Path) -> int | None:
    """CRC-32 of a file's bytes; None for a folder, -1 for anything else (a pipe, a device, a dead link).

    Called when the list of a folder's files is written or compared with the folder, and for the files of an unfinished
    run.
    """
    if path.is_dir():
        return None
    if not path.is_file():
        return -1
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


# ---------------------------------------------------------------------- the hidden folder


class Staging:
    """The hidden folder in which new content is written before it takes its name; see the module's docstring.

    :func:`whole_folder` and :func:`whole_file` make one for each write, and close it.

    Args:
        target: the path that the content will take, without symlinks.

    Attributes:
        target: the path that the content will take.
        partial: a path inside the hidden folder, at which the caller writes the content.
    """

    def __init__(self, target: Path) -> None:
        clean_up_after_killed_writers(target.parent)
        self.target = target
        self._folder, self._lock = _make_locked_folder(target.parent)
        self.partial = self._folder / "new" / target.name
        self.partial.parent.mkdir()

    def close(self) -> None:
        """Delete the hidden folder; called when the write has ended, with or without an error.

        A replaced folder goes back to its name if an interrupt came between two renames.
        """
        try:
            _put_back_and_delete(self._folder)
        except KeyboardInterrupt:  # it may have come while the replaced folder was deleted
            _put_back_and_delete(self._folder)
            raise
        finally:
            os.close(self._lock)

    def replace_file(self, overwrite: bool) -> None:
        """Give the complete file its name; called at the end of :func:`whole_file`.

        Raises:
            FileExistsError: the name is taken and ``overwrite`` is off.
        """
        self._make_final([self.partial])
        if not overwrite:
            try:
                os.link(self.partial, self.target)  # a rename would replace an existing file
                return
            except OSError:
                if os.path.lexists(self.target):
                    raise
                # The file system has no hard links, and the name is free.
        os.replace(self.partial, self.target)

    def replace_folder(self, overwrite: bool) -> None:
        """Give the complete folder its name; called at the end of :func:`whole_folder`.

        A folder that has the name is replaced if ``overwrite`` is set.

        Raises:
            CalibrationError: the folder to replace holds files that no export wrote. Nothing is replaced.
            OSError: the folder that has the name may not be replaced, or cannot be renamed.
        """
        self._make_final([path for path in self.partial.rglob("*") if path.is_file()])
        try:
            os.rename(self.partial, self.target)  # fails unless the name is free or an empty folder has it
            return
        except OSError:
            if not overwrite or not self.target.is_dir():
                raise
        if _exchange(self.partial, self.target):
            try:
                # Only now can nobody add a file to the replaced folder by its name.
                refuse_foreign(self.partial, self.target)
            except BaseException:
                _exchange(self.partial, self.target)
                raise
        else:
            replaced = self._folder / "replaced" / self.target.name
            replaced.parent.mkdir()
            os.rename(self.target, replaced)  # close() puts it back, unless the second rename follows
            refuse_foreign(replaced, self.target)
            os.rename(self.partial, self.target)

    def _make_final(self, files: Iterable[Path]) -> None:
        """Give files the permissions of the umask (safetensors writes for the owner alone); flush them to the disk."""
        mode = os.fstat(self._lock).st_mode & 0o777
        for path in files:
            path.chmod(mode)
            with path.open("rb") as file:
                os.fsync(file.fileno())


def clean_up_after_killed_writers(parent: Path) -> None:
    """Delete the hidden folders that killed writers have left in ``parent``.

    If a writer was killed between its two renames, the folder that it was replacing is put back.

    Called before anything is written into ``parent``, and before a checkpoint that is missing there is loaded.
    """
    try:
        children = list(parent.iterdir())
    except OSError:  # whoever writes or reads there next says why
        return
    for path in children:
        if path.name.startswith(_PREFIX) and path.name.endswith(_SUFFIX):
            lock = _lock_of_killed_writer(path)
            if lock is not None:
                _put_back_and_delete(path)
                os.close(lock)


def _put_back_and_delete(hidden: Path) -> None:
    """Delete a hidden folder; a replaced folder in it goes back to its name if the name is free."""
    for replaced in list(hidden.glob("replaced/*")):
        target = hidden.parent / replaced.name
        if not os.path.lexists(target):
            os.rename(replaced, target)
    shutil.rmtree(hidden, ignore_errors=True)


def _make_locked_folder(parent: Path) -> tuple[Path, int]:
    """A new hidden folder in ``parent``, and the file descriptor of its lock."""
    while True:
        hidden = Path(tempfile.mkdtemp(prefix=_PREFIX, suffix=_SUFFIX, dir=parent))
        # Until it is locked, another process may take its writer for killed and delete the folder.
        with suppress(FileNotFoundError):
            lock = os.open(hidden / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            with suppress(OSError):  # a file system without locks: no writer there is taken for killed
                fcntl.flock(lock, fcntl.LOCK_EX)
            if (hidden / "lock").exists():
                return hidden, lock
            os.close(lock)


def _lock_of_killed_writer(hidden: Path) -> int | None:
    """Lock a hidden folder whose writer has ended.

    Returns:
        The file descriptor of the lock; None if the writer lives, or this cannot be told.
    """
    try:
        if hidden.is_symlink() or hidden.stat().st_uid != os.getuid():
            return None
        lock = os.open(hidden / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _exchange(first: Path, second: Path) -> bool:
    """Let two paths change places in one step; return False, and change nothing, where the system cannot do that."""
    if not sys.platform.startswith("linux"):
        return False
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    error = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return not error
