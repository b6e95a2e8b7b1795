"""Run an ONNX file in the installed onnxruntime: how much runs in integers, how fast, and how far outputs are off.

:func:`measure_onnx` is public; callbacks and the command line call it after they have written a file.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_obs.errors import name_list
from lightning_obs.forward.extra_runs import left_as_it_was
from lightning_obs.forward.quantized_forward import quantized
from lightning_obs.forward.tracing import Example
from lightning_obs.onnx.onnx_file import trace_onnx
from lightning_obs.packages import import_package

#: operations of onnxruntime that multiply integers
_IN_INTEGERS = frozenset({
    "QLinearConv", "QGemm", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul",
    "ConvInteger", "MatMulNBits",
})  # fmt: skip
#: operations that multiply matrices, or convolve, in float
_IN_FLOAT = frozenset({
    "Conv", "FusedConv", "NhwcFusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "Einsum",
    "Attention", "MultiHeadAttention", "LSTM", "GRU", "RNN",
})  # fmt: skip
#: seconds that each of the two files is run for, and the least number of its runs
_SECONDS = 1.0
_RUNS = 5


@dataclass(frozen=True)
class OnnxMeasurement:
    """The result of :func:`measure_onnx`. ``str`` makes the line that a callback logs and a closing report shows.

    Attributes:
        runtime: name and release of the engine.
        products: the number of convolutions and matrix products that the engine runs.
        in_float: the products that the engine computes in float, each ``"module/operation"``; the others multiply
            integers.
        milliseconds: median duration of one run of the file.
        float_milliseconds: median duration of one run of the same model in float.
        difference: the largest absolute difference between the outputs of the file and of the model under
            :func:`~lightning_obs.quantized`; NaN if any output holds NaN.
    """

    runtime: str
    products: int
    in_float: list[str]
    milliseconds: float
    float_milliseconds: float
    difference: float

    @property
    def speed(self) -> float:
        """The speed relative to the model in float, which ``str`` shows: above 1 the file is faster."""
        return self.float_milliseconds / self.milliseconds

    def __str__(self) -> str:
        in_integers = self.products - len(self.in_float)
        text = f"{self.runtime}: {in_integers} of {self.products} products in integers, {self.speed:.2f}x the speed of "
        text += f"float ({self.float_milliseconds:.2f} ms -> {self.milliseconds:.2f} ms), largest difference from "
        text += f"quantized() {self.difference:.2g}"
        if self.in_float:
            text += f"; in float: {name_list(self.in_float)}"
        return text


def measure_onnx(
    model: nn.Module, file: str | os.PathLike[str], example: torch.Tensor | Sequence[Any] | Mapping[str, Any]
) -> OnnxMeasurement:
    """Run a file of :func:`~lightning_obs.export_onnx` in the installed onnxruntime, beside the same model in float.

    Both run in turn in this process, with the threads that onnxruntime takes by itself, for about a second each. The
    user calls it, and callbacks and the command line call it after they have written a file.

    Args:
        model: the calibrated model that was exported. It is not changed.
        file: the file.
        example: inputs to run, as ``export_onnx`` takes them.

    Raises:
        CalibrationError: onnx, onnxscript or onnxruntime is not installed; torch's exporter cannot trace the model in
            float.
    """
    for package in ("onnx", "onnxscript"):
        import_package(package, "measure_onnx")
    onnxruntime = import_package("onnxruntime", "measure_onnx")
    arguments = Example.of(model, example, dynamic_shapes=None)  # the model in float is traced in the example's shapes
    # Inside ``left_as_it_was`` the model is in evaluation mode, as in the file; its own mode comes back at the end.
    with tempfile.TemporaryDirectory() as folder, left_as_it_was(model):
        float_file = Path(folder, "float.onnx")
        float_program = trace_onnx(model, arguments)
        float_program.save(float_file)
        optimized_file = Path(folder, "optimized.onnx")
        session = _session(onnxruntime, file)
        in_float, products = _products(onnxruntime, file, optimized_file)
        feeds = _feeds(session, arguments)
        milliseconds, float_milliseconds = _medians([session, _session(onnxruntime, float_file)], feeds)
        with torch.no_grad(), quantized(model):
            expected = model(*arguments.positional, **arguments.by_name)
        outputs = session.run(None, feeds)
    return OnnxMeasurement(
        runtime=f"onnxruntime {onnxruntime.__version__}",
        products=products,
        in_float=in_float,
        milliseconds=milliseconds,
        float_milliseconds=float_milliseconds,
        difference=_largest_difference(outputs, expected),
    )


def _session(onnxruntime: Any, file: str | os.PathLike[str]) -> Any:
    """A session of onnxruntime on the CPU."""
    return onnxruntime.InferenceSession(str(file), _options(onnxruntime), providers=["CPUExecutionProvider"])


def _options(onnxruntime: Any) -> Any:
    """Options of a session that logs errors (level 3), and no warnings."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return options


def _products(onnxruntime: Any, file: str | os.PathLike[str], optimized_file: Path) -> tuple[list[str], int]:
    """The products that onnxruntime computes in float, and the number of all its products.

    :func:`measure_onnx` calls it. It loads the file, lets onnxruntime write the graph that it makes of the file, and
    looks at the operation of each node. ``export_onnx`` names nodes ``"module/operation"``. A node that onnxruntime
    makes of a product and of what follows it has the product's name, perhaps with ``"fused "`` before it and more
    behind it: of a Linear with a bias and a ReLU, ``"fused fc/MatMul/MatMulAddFusion"``.

    Args:
        onnxruntime: the package.
        file: the file.
        optimized_file: path of a new file, to which onnxruntime writes the graph, optimized at the level
            "extended". The session that is timed goes further: it also changes the layout of images, and then the names
            of nodes tell their modules no more.
    """
    import onnx

    options = _options(onnxruntime)
    options.optimized_model_filepath = str(optimized_file)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    # weights go to a file of their own, which is not read: one file could not hold more than 2 GiB
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
    onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    in_float = []
    products = 0
    for node in onnx.load(optimized_file, load_external_data=False).graph.node:
        products += node.op_type in _IN_INTEGERS or node.op_type in _IN_FLOAT
        if node.op_type in _IN_FLOAT:
            module_name, _, _ = node.name.removeprefix("fused ").partition("/")
            in_float.append(f"{module_name}/{node.op_type}")
    return in_float, products


def _feeds(session: Any, arguments: Example) -> dict[str, Any]:
    """The example's tensors by the names of the graph's inputs, which stand in the order of the model's arguments."""
    leaves = tree_leaves((arguments.positional, arguments.by_name))
    arrays = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensor = leaf.detach().cpu()
            arrays.append(tensor.numpy())
    names = [value.name for value in session.get_inputs()]
    return dict(zip(names, arrays, strict=True))


def _medians(sessions: Sequence[Any], feeds: Mapping[str, Any]) -> list[float]:
    """The median milliseconds of a run of each session; the sessions run in turn, and their first runs do not count."""
    milliseconds: list[list[float]] = [[] for _ in sessions]
    began = time.perf_counter()
    while len(milliseconds[0]) < _RUNS or time.perf_counter() - began < _SECONDS * len(sessions):
        for session, times in zip(sessions, milliseconds, strict=True):
            started = time.perf_counter()
            session.run(None, feeds)
            seconds = time.perf_counter() - started
            times.append(1000 * seconds)
    return [median(times[1:]) for times in milliseconds]


def _largest_difference(outputs: Sequence[Any], expected: Any) -> float:
    """The largest absolute difference of the file's outputs from the model's; NaN if any difference is NaN.

    :func:`measure_onnx` calls it last.

    Args:
        outputs: the arrays that the session returned.
        expected: what the model returned under ``quantized``; its tensors stand in the order of the file's outputs.
    """
    tensors = [leaf for leaf in tree_leaves(expected) if isinstance(leaf, torch.Tensor)]
    largest = 0.0
    for output, tensor in zip(outputs, tensors, strict=True):
        wide_output = output.astype(np.float64)
        wide_tensor = tensor.double().cpu()
        difference = np.abs(wide_output - wide_tensor.numpy())
        largest_here = difference.max(initial=0.0)
        largest = float(np.maximum(largest, largest_here))  # it keeps a NaN, as the built-in max does not
    return largest
