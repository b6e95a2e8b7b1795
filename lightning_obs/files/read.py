"""The reader of JSON files from users: any fault of the file is an error that names it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_obs.errors import CalibrationError


def read_json(path: str | os.PathLike[str], *, expected: str | None = None, remedy: str | None = None) -> Any:
    """The JSON object in a file.

    Raises:
        CalibrationError: the file does not exist, is not valid JSON (cut off, not UTF-8, nested too deep), or holds no
            object. ``expected`` and ``remedy`` become part of it.
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
    """Turn any exception of a reader of a damaged file into a :class:`CalibrationError` that names the file."""
    try:
        yield
    except CalibrationError:
        raise
    except Exception as error:  # a damaged file makes its readers raise anything
        text = str(error).strip().partition("\n")[0]
        raise CalibrationError(
            f"{os.fspath(path)} cannot be read",
            got=f"{type(error).__name__}: {text[:300]}",
            expected=expected,
            remedy=remedy,
        ) from error
