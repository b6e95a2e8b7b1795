"""A row of the clients' table: what a package's own way of training gives with the callbacks, told step by step.

A client is a script. It calls the methods in the order of the table's columns; each checks its step, and prints the
entry of its column for ``tests.clients.run``, which runs the scripts and prints the table.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from lightning_obs.report.summary import layer_table, print_report

#: the columns of the table after the client's name
COLUMNS = ("fit", "quantized metric", "export", "reload", "QAT", "resume")
#: so many of the layers with the largest errors are printed
LAYERS = 3
#: begins the lines that are entries of the table
MARK = "ROW "


class Row:
    """The row of one client; ``folder`` is an empty folder for what it writes."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.folder = Path(tempfile.mkdtemp(prefix="clients-"))
        self._began = time.perf_counter()
        self._steps = 0  # of the first fit

    def fit(self, callback) -> None:
        """A fit has ended, in which the callback has measured the quantized model beside the model itself."""
        self._steps = int(callback.results.curves[-1]["step"])
        self._tell("fit", f"{self._steps} steps, {time.perf_counter() - self._began:.1f} s")
        name, (original, quantized) = next(iter(callback.metrics.items()))
        self._tell("quantized metric", f"{name} {original:.4g} -> {quantized:.4g}")
        print_report(layer_table(callback.layer_errors()[:LAYERS]))

    def export(self, callback, folder: Path) -> None:
        """The callback has written its checkpoint."""
        size = sum(file.stat().st_size for file in folder.iterdir())
        self._tell("export", f"{len(callback.result.modules)} modules, {size / 1e3:,.0f} kB")

    def reload(self, loaded, quantized, original=None) -> None:
        """Outputs of a new model with the checkpoint, of the calibrated one under ``quantized()``, and of its own."""
        difference = _difference(loaded, quantized)
        text = f"differs by {difference:g}"
        if original is not None:
            rounding = _difference(quantized, original)
            assert rounding > 0, "the quantized model has the outputs of the original"
            text += f" (quantized from float: {rounding:.2g})"
        assert difference == 0, text
        self._tell("reload", text)

    def qat(self, callback) -> None:
        """A fit through the quantization has ended, and can be exported."""
        callback.export(self.folder / "qat")
        last = dict(callback.results.curves[-1])
        steps = int(last.pop("step"))
        name = next((name for name in last if "val" in name), next(iter(last)))
        self._tell("QAT", f"{steps} steps, {name} {last[name]:.4g}")

    def resume(self, callback) -> None:
        """A fit from the first one's checkpoint has ended, and has calibrated."""
        steps = int(callback.results.curves[-1]["step"])
        assert steps > self._steps, f"{steps} steps, {self._steps} before"
        assert callback.result.modules
        self._tell("resume", f"{self._steps} -> {steps} steps")
        shutil.rmtree(self.folder)

    def refused(self, column: str, rule: str) -> None:
        """The client itself has no such step; ``rule`` names why."""
        self._tell(column, f"no: {rule}")

    def _tell(self, column: str, text: str) -> None:
        print(MARK + json.dumps([self.client, column, text]), flush=True)


def _difference(one, other) -> float:
    """The largest difference of two outputs: tensors, arrays, or lists, tuples and dicts of them."""
    if isinstance(one, dict):
        one, other = list(one.values()), [other[key] for key in one]
    if isinstance(one, Iterable) and not hasattr(one, "shape"):
        return max(_difference(a, b) for a, b in zip(one, other, strict=True))
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    assert one.shape == other.shape
    return float((one.double() - other.double()).abs().max())
