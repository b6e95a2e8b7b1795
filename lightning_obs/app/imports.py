"""Packages that this one does not require, and the user's own modules."""

from __future__ import annotations

import importlib
from typing import Any

from lightning_obs.errors import CalibrationError


def import_for(what: str, name: str, remedy: str | None = None) -> Any:
    """Import a module; an error says that ``what`` needs it."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # the latter from a torchvision that is built for another torch
        raise CalibrationError(
            f"{what} needs the package {name}, which cannot be imported",
            got=str(error),
            remedy=remedy or f"pip install {name}",
        ) from error
