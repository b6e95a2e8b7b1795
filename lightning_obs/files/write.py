"""Files and folders that take their name when they are complete, and no sooner."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from lightning_obs.errors import CalibrationError
from lightning_obs.files.contents import refuse_foreign, write_contents
from lightning_obs.files.staging import Staging, settle_dead


def require_free(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot be written, or only by deleting what is no checkpoint.

    Raises:
        CalibrationError: something is there and ``overwrite`` is off; with it, something that no export wrote; the
            folder is the working folder or a mount point, which cannot be renamed.
    """
    with _writing(folder) as target:
        settle_dead(target.parent)
        try:
            target.lstat()  # exists() hides that a name is too long
        except FileNotFoundError:
            return
        whole = {"the working folder": Path.cwd().is_relative_to(target), "a mount point": os.path.ismount(target)}
        for kind, is_so in whole.items():
            if is_so:
                raise CalibrationError(
                    f"{folder} is {kind}, which cannot be replaced whole", remedy="choose a folder inside it."
                )
        if not target.is_dir():
            raise CalibrationError(f"{folder} is already there, and no folder", remedy="choose another folder.")
        if any(target.iterdir()) and not overwrite:
            raise CalibrationError(
                f"{folder} is already there",
                remedy="choose another folder, or set overwrite=True, which replaces a checkpoint (a callback's "
                "export_overwrite=True; export.overwrite=true on the command line).",
            )
        _refuse_foreign(target, folder)


@contextmanager
def whole_folder(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Give a temporary folder beside ``folder`` to write into; it takes its name when the block ended well.

    Raises:
        CalibrationError: see :func:`require_free`; nothing can be written there, or the disk is full. What was under
            the name is there as before.
    """
    with _writing(folder) as target:  # a symlink stays, what it points to is replaced
        target.parent.mkdir(parents=True, exist_ok=True)
        require_free(folder, overwrite)
        staging = Staging(target)
        try:
            staging.partial.mkdir()
            yield staging.partial
            write_contents(staging.partial)
            try:
                staging.replace_folder(overwrite)
            except OSError:
                require_free(folder, overwrite)
                raise
        finally:
            staging.close()


@contextmanager
def whole_file(file: str | os.PathLike[str], overwrite: bool = True) -> Iterator[Path]:
    """Give a path beside ``file`` to write to; it takes its name when the block ended well.

    Raises:
        CalibrationError: something is there and ``overwrite`` is off; it cannot be written. What was under the name is
            there as before.
    """
    file = Path(file)
    with _writing(file):
        parent = Path(os.path.realpath(file.parent))
        parent.mkdir(parents=True, exist_ok=True)
        staging = Staging(parent / file.name)  # a symlink under this very name is replaced, not followed
        try:
            yield staging.partial
            try:
                staging.replace_file(overwrite)
            except FileExistsError as error:
                raise CalibrationError(
                    f"{file} is already there", remedy="choose another name, or set overwrite=True."
                ) from error
        finally:
            staging.close()


def write_text(file: str | os.PathLike[str], text: str) -> None:
    """Write text as UTF-8, whole or not at all; what UTF-8 cannot hold (lone surrogates) is escaped."""
    with whole_file(file) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def require_room(partial: Path, size: int) -> None:
    """Refuse to start writing ``size`` bytes to a disk with less free space."""
    free = shutil.disk_usage(partial).free
    if free < size:
        raise OSError(errno.ENOSPC, f"{free:,} bytes are free, the weights have {size:,}")


def _refuse_foreign(target: Path, folder: Path) -> None:
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
def _writing(path: Path) -> Iterator[Path]:
    """The path without symlinks; what the system refuses as an error that names the path."""
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
