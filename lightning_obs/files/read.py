"""Read files of users (configs, indexes, reports, checkpoints): any fault of a file is an error that names the file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_obs.errors import CalibrationError


def read_json(path: str | os.PathLike[str], *, expected: str | None = None, remedy: str | None = None) -> Any:
    """Read a file that holds one JSON object.

    Called for the config and index of a checkpoint, the list of a folder's files, and reports of earlier runs.

    Args:
        path: the file.
        expected: the content that the file should have, for the error.
        remedy: the remedy that the error names.

    Returns:
        The object, a dict.

    Raises:
        CalibrationError: the file does not exist, is not valid JSON (cut off, not UTF-8, nested too deep), or holds no
            object.
    """
    with naming(path, expected=expected, remedy=remedy):
        try:
            value = json.loads(Path(path).read_bytes())
        except FileNotFoundError as error:
            raise CalibrationError(f"{os.fspath(path)} does not exist", expected=expected, remedy=remedy) from error
        if not isinstance(value, dict):
            raise TypeError(f"a JSON object is expected, not {type(value).__name__}")
    return value


@contextmanager
def naming(path: str | os.PathLike[str], *, expected: str | None = None, remedy: str | None = None) -> Iterator[None]:
    """Turn any exception in a ``with`` block that reads ``path`` into a :class:`CalibrationError` that names the
    path.

    A :class:`CalibrationError` passes unchanged. Called around all code that reads a file of the user's: checkpoints,
    configs, reports, data, saved states.

    Args:
        path: the file or folder that is read.
        expected: the content that the file should have, for the error.
        remedy: the remedy that the error names.
    """
    try:
        yield
    except CalibrationError:
        raise
    except Exception as error:  # a damaged file makes its readers raise anything
        first_line = str(error).strip().partition("\n")[0]
        raise CalibrationError(
            f"{os.fspath(path)} cannot be read",
            got=f"{type(error).__name__}: {first_line[:300]}",
            expected=expected,
            remedy=remedy,
        ) from error
