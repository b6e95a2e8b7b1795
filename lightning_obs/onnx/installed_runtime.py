"""Find out, by loading a small graph, whether the installed onnxruntime has a known fault."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

#: as ``export_onnx`` writes: the opset, and the version of the file format (IR) of onnx 1.16, which brought this opset.
#: An installed onnx would take its newest version of both, which an older onnxruntime refuses.
_OPSET = 21
_IR_VERSION = 10


@functools.cache
def takes_signed_activations() -> bool:
    """Whether onnxruntime loads a product of three-dimensional signed activations; True where it is not installed.

    ``export_onnx`` calls it to choose between signed and unsigned activations; the answer is kept for the process. On
    x86 onnxruntime makes signed activations unsigned. Up to the release 1.32 this fails if the product has three
    dimensions and a bias, because onnxruntime has turned the product into a ``Reshape`` and a ``Gemm`` before.
    """
    try:
        import onnxruntime
    except ImportError:
        return True
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # the failure is the answer
    try:
        onnxruntime.InferenceSession(_signed_product(), options, providers=["CPUExecutionProvider"])
    except Exception:  # its own classes, which derive from Exception alone
        return False
    return True


def _signed_product() -> bytes:
    """A Linear of ``(1, 2, 4)`` in QDQ form, with symmetric activations as signed integers, as a file's content.

    :func:`takes_signed_activations` gives it to onnxruntime.
    """
    from onnx import TensorProto, helper, numpy_helper

    arrays = {
        "codes": np.ones((4, 4), np.int8),
        "bias": np.ones(4, np.float32),
        "step": np.float32(0.1),
        "zero": np.int8(0),
    }
    initializers = [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]

    def node(kind: str, inputs: list[str], output: str) -> Any:
        return helper.make_node(kind, inputs, [output])

    nodes = [
        node("QuantizeLinear", ["x", "step", "zero"], "x_codes"),
        node("DequantizeLinear", ["x_codes", "step", "zero"], "x_quantized"),
        node("DequantizeLinear", ["codes", "step", "zero"], "weight"),
        node("MatMul", ["x_quantized", "weight"], "product"),
        node("Add", ["product", "bias"], "y"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, 4])
    graph = helper.make_graph(nodes, "signed_product", [x], [y], initializers)
    opset = helper.make_opsetid("", _OPSET)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION)
    content: bytes = model.SerializeToString()
    return content
