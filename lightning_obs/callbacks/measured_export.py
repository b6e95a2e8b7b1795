"""Write an ONNX file and run it at once, so that a user is told how fast and how exact it is."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_obs.errors import warn
from lightning_obs.onnx.measured_file import measure_onnx
from lightning_obs.onnx.onnx_file import export_onnx


def export_and_measure(model: nn.Module, file: str | os.PathLike[str], example: Any, **options: Any) -> Path:
    """Write an ONNX file, run it in the installed onnxruntime, and print how it compares with the model in float.

    Called by ``callback.export_onnx``, and at a run's end for an ONNX file of ``export_to``. Without onnxruntime the
    file is only written.

    Args:
        model: calibrated.
        file, example, **options: as :func:`~lightning_obs.export_onnx` takes them.

    Returns:
        The path of the file. It is kept if onnxruntime fails to run it: there is a warning then.

    Raises:
        CalibrationError: the file cannot be written.
    """
    path = export_onnx(model, file, example, **options)
    if find_spec("onnxruntime") is None:
        return path
    try:
        measurement = measure_onnx(model, path, example)
    except Exception as error:  # onnxruntime's own classes derive from Exception alone
        warn(f"wrote {path}, but the installed onnxruntime does not run it: {error}")
    else:
        rank_zero_info(f"wrote {path}; {measurement}")
    return path
