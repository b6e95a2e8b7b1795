"""A folder that appears under its name whole or not at all, and takes nobody else's place.

It is written beside its final name and renamed. It lists its own files, so that what replaces it later knows what may
go (anything else that lies there stops the replacement), and who loads it sees what is missing or was damaged.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from lightning_obs.errors import CalibrationError, refuse

#: what the folder holds: ``{"files": {relative path: CRC-32 of the file, null of a folder}}``
CONTENTS_FILE = "lightning_obs.json"
_DAMAGED = "copy or export the checkpoint again."


def require_free(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot be written, or only by deleting what is no checkpoint.

    Raises:
        CalibrationError: something is there and ``overwrite`` is off; with it, something that no export wrote; the
            folder is the working folder or a mount point, which cannot be renamed.
    """
    with _named(folder):
        target = Path(os.path.realpath(folder))
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
        _refuse_foreign(folder, target)


@contextmanager
def whole_or_not_at_all(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Give a temporary folder beside ``folder`` to write into; it takes its name when the block ended well.

    Raises:
        CalibrationError: see :func:`require_free`; nothing can be written there, or the disk is full. What was under
            the name is there as before.
    """
    with _named(folder):
        target = Path(os.path.realpath(folder))  # a symlink stays, what it points to is replaced
        target.parent.mkdir(parents=True, exist_ok=True)
        require_free(folder, overwrite)
        partial = Path(tempfile.mkdtemp(prefix=".lightning_obs.", suffix=".partial", dir=target.parent))
        try:
            yield partial
            _finish(partial)
            _rename(partial, target, folder, overwrite)
        finally:
            if not partial.exists():  # Ctrl-C may have come while what was replaced was deleted
                shutil.rmtree(partial.with_suffix(".old"), ignore_errors=True)
            shutil.rmtree(partial, ignore_errors=True)


def require_room(partial: Path, size: int) -> None:
    """Refuse to start writing ``size`` bytes to a disk that has not so many left."""
    free = shutil.disk_usage(partial).free
    if free < size:
        raise OSError(errno.ENOSPC, f"{free:,} bytes are free, the weights have {size:,}")


def _rename(partial: Path, target: Path, folder: Path, overwrite: bool) -> None:
    """Give ``partial`` its name. What was there meanwhile has another, and gets it back unless it was replaced."""
    old = partial.with_suffix(".old")
    try:
        if overwrite and os.path.lexists(target):
            require_free(folder, overwrite)
            os.rename(target, old)
            _refuse_foreign(folder, old)  # nothing can be added to it under its name any more
        try:
            os.rename(partial, target)  # onto nothing or an empty folder, else it fails
        except OSError:
            require_free(folder, overwrite=False)
            raise
    finally:
        # What lies on the disk tells how far it came, also where Ctrl-C ended it.
        if old.exists() and partial.exists():
            os.rename(old, target)
        shutil.rmtree(old, ignore_errors=True)


def refuse_damage(folder: Path, names: Collection[str]) -> None:
    """Refuse files that are not as they were written, as far as the folder says what it holds.

    Raises:
        CalibrationError: a file is missing, or its bytes have changed.
    """
    if not (folder / CONTENTS_FILE).exists():
        return
    written = _contents(folder)
    refuse(
        [name for name in names if name in written and not (folder / name).is_file()],
        f"files of {folder} are missing",
        remedy=_DAMAGED,
    )
    refuse(
        [name for name in names if name in written and written[name] != _checksum(folder / name)],
        f"files of {folder} have changed since they were written",
        remedy=f"{_DAMAGED} If you changed them on purpose, delete {CONTENTS_FILE}.",
    )


def _contents(folder: Path) -> dict[str, int | None]:
    try:
        return dict(json.loads((folder / CONTENTS_FILE).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CalibrationError(f"{folder / CONTENTS_FILE} cannot be read", got=str(error), remedy=_DAMAGED) from error


def _finish(partial: Path) -> None:
    paths = sorted(partial.rglob("*"))
    files = {path.relative_to(partial).as_posix(): _checksum(path) if path.is_file() else None for path in paths}
    (partial / CONTENTS_FILE).write_text(json.dumps({"files": files}, indent=1) + "\n")
    partial.chmod(0o777 & ~_umask())
    for path in partial.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _refuse_foreign(folder: Path, target: Path) -> None:
    try:
        own = {*_contents(target), CONTENTS_FILE}
    except CalibrationError:
        own = set()
    refuse(
        sorted(name for path in target.rglob("*") if (name := path.relative_to(target).as_posix()) not in own),
        f"{folder} holds what no export wrote, and overwrite=True would delete it",
        remedy="choose another folder, or move these files away.",
    )


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CalibrationError(
            f"{folder} cannot be written",
            got=str(error),
            remedy="choose a folder on a disk that can be written and has room.",
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
