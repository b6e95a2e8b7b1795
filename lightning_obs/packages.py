"""Import optional packages, and check that installed packages are new enough for a feature.

Packages that most users never need are in extras of this package: Hydra for the command line, numba for fast loops,
scipy for mixed precision, ONNX. The code that needs such a package imports it with :func:`import_package` when it is
used, and before anything is measured, so that its absence is one error with the command that installs it.
"""

from __future__ import annotations

import importlib
import platform
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from lightning_obs.errors import CalibrationError

#: the extra of this package that brings a package, by the name under which the package is imported
EXTRAS = {
    "hydra": "cli",
    "numba": "fast",
    "scipy": "mixed",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "onnxruntime": "onnx",
    "gguf": "gguf",
}


def install_command(name: str) -> str:
    """Return the command that installs a package, for the remedy of an error.

    ``name`` is the name under which the package, or a module of it, is imported.

    >>> install_command("scipy.optimize")
    'pip install "lightning-obs[mixed]"'
    >>> install_command("timm")
    'pip install timm'
    """
    package = name.partition(".")[0]
    if package in EXTRAS:
        return f'pip install "lightning-obs[{EXTRAS[package]}]"'
    return f"pip install {package}"


def import_package(name: str, purpose: str, remedy: str | None = None) -> Any:
    """Import a package that this one does not require, or the user's own module.

    Args:
        name: the name under which it is imported.
        purpose: what the user asked for, which needs the package; the error begins with it.
        remedy: how to get it; default: the command that installs it.

    Returns:
        The module.

    Raises:
        CalibrationError: it cannot be imported.

    >>> import_package("onnx_of_nobody", "export_onnx")
    Traceback (most recent call last):
    lightning_obs.errors.CalibrationError: export_onnx needs the package onnx_of_nobody, which cannot be imported. \
Got No module named 'onnx_of_nobody'. Remedy: pip install onnx_of_nobody
    """
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # the latter from a torchvision that is built for another torch
        raise CalibrationError(
            f"{purpose} needs the package {name}, which cannot be imported",
            got=str(error),
            remedy=remedy or install_command(name),
        ) from error


def require_release(name: str, oldest: str, purpose: str, python: str | None = None) -> None:
    """Raise a :class:`CalibrationError` where a package is older than ``purpose`` needs.

    Called before anything is measured or written: by ``check_onnx_file`` for onnxscript, which it has imported; and for
    transformers, on which this package depends, by ``require_transformers`` (before a model is planned or a checkpoint
    loaded) and by ``model/conversions.py`` (before weights are converted).

    Args:
        name: the name of the package, as pip knows it.
        oldest: the oldest release that serves.
        purpose: what the user asked for; the error begins with it.
        python: the oldest Python for which there is such a release; None: any that this package runs on.

    Raises:
        CalibrationError: the installed release is older.
        PackageNotFoundError: of ``importlib.metadata``: the package is not installed.

    >>> require_release("torch", "99.0", "a model of tomorrow")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lightning_obs.errors.CalibrationError: a model of tomorrow needs torch>=99.0. Got torch ... \
Remedy: pip install -U "torch>=99.0"
    """
    installed = version(name)
    if Version(installed) >= Version(oldest):
        return
    remedy = f'pip install -U "{name}>={oldest}"'
    if python is not None and Version(platform.python_version()) < Version(python):
        remedy += f", under Python {python} or newer: there is none for Python {platform.python_version()}."
    raise CalibrationError(f"{purpose} needs {name}>={oldest}", got=f"{name} {installed}", remedy=remedy)
