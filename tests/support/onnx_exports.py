"""Exports to ONNX that cost less than a user's, with the same files.

torch fills a table of its operators anew at each export, which takes most of a second, and names all operators of C++
once for each library of operators, which takes a fifth of the rest. onnxruntime's speed is measured for two seconds
beside each file.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from lightning_obs.onnx import measured_file


@contextmanager
def cheap_exports() -> Iterator[None]:
    """For a ``with`` block in which torch keeps its table of operators, and onnxruntime is measured in a few runs."""
    export = torch.onnx.export

    def export_with_kept_table(*arguments: Any, **options: Any) -> Any:
        _keep_table()  # not before an export: the import of torch's exporter takes a second
        from torch._export import utils

        with pytest.MonkeyPatch.context() as during_export:
            during_export.setattr(utils, "_materialize_cpp_cia_ops", cache(utils._materialize_cpp_cia_ops))
            return export(*arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.onnx, "export", export_with_kept_table)
        patched.setattr(measured_file, "_SECONDS", 0.0)
        yield


@cache
def _keep_table() -> None:
    """Fill the table of each version of ONNX once in this process; each export gets a copy."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    filled = cache(ONNXRegistry.from_torchlib)

    def from_torchlib(*version: int, **named_version: int) -> ONNXRegistry:
        table = copy.copy(filled(*version, **named_version))
        table.functions = {target: list(functions) for target, functions in table.functions.items()}
        return table

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)
