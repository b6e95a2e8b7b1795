"""A folder's list of its own files: what is missing, damaged, or somebody else's."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.files.read import naming, read_json

#: what the folder holds: ``{"files": {relative path: CRC-32 of the file, null of a folder}}``
CONTENTS_FILE = "lightning_obs.json"
_DAMAGED = "copy or export the checkpoint again."


def write_contents(folder: Path) -> None:
    """List all that lies in ``folder``."""
    files = {path.relative_to(folder).as_posix(): _checksum(path) for path in sorted(folder.rglob("*"))}
    (folder / CONTENTS_FILE).write_text(json.dumps({"files": files}, indent=1) + "\n")


def refuse_damage(folder: Path) -> None:
    """Refuse a folder in which a file is missing or has other bytes than were written, if it says what they were."""
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
            [name for name in written if written[name] != _checksum(folder / name)],
            f"files of {folder} have changed since they were written",
            remedy=f"{_DAMAGED} If you changed them on purpose, delete {CONTENTS_FILE}.",
        )


def foreign(folder: Path) -> list[str]:
    """What lies in ``folder`` and is not, byte for byte, what was written there."""
    try:
        own = _contents(folder)
    except CalibrationError:
        own = {}
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    added = [name for name in found if name not in own and not (own and name == CONTENTS_FILE)]
    changed = [name for name in found if name in own and own[name] != _checksum(folder / name)]
    return [*added, *(f"{name} (changed since)" for name in changed)]


def refuse_foreign(folder: Path, name: Path | None = None) -> None:
    """Refuse to replace a folder that holds what no export wrote; ``name``: its own, where it lies elsewhere now."""
    refuse(
        foreign(folder),
        f"{name or folder} holds what no export wrote, and overwrite=True would delete it",
        remedy="choose another folder, or move these files away.",
    )


def _contents(folder: Path) -> dict[str, int | None]:
    path = folder / CONTENTS_FILE
    found = read_json(path, remedy=_DAMAGED)
    with naming(path, remedy=_DAMAGED):
        return dict(found["files"])


def _checksum(path: Path) -> int | None:
    if path.is_dir():
        return None
    if not path.is_file():  # a pipe, a device, a link to nothing
        return -1
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum
