"""What is changed in an ONNX graph after torch's exporter has written it: batch norms, 4-bit integers, leftovers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, RemoveUnusedNodesPass


def fold_batch_norms(model: Any) -> None:
    """Take the factor of each batch norm into the scales of the convolution before it, the rest into its bias.

    Of a convolution ``W x + b`` with ``W = scale * (codes - zero)`` and a batch norm ``f (y - mean) + beta``, what is
    left is ``scale' = f * scale`` and ``b' = f (b - mean) + beta``, the codes as they were.

    Args:
        model: an ``onnx_ir`` model, changed in place.
    """
    graph = model.graph
    for norm in [node for node in graph if node.op_type == "BatchNormalization"]:
        conv = norm.inputs[0].producer()
        if conv is None or conv.op_type != "Conv" or len(norm.inputs[0].uses()) != 1:
            continue
        weight, bias = conv.inputs[1].producer(), conv.inputs[2] if len(conv.inputs) > 2 else None
        read = [*norm.inputs[1:], *([] if bias is None else [bias])]
        if weight is None or weight.op_type != "DequantizeLinear" or len(weight.outputs[0].uses()) != 1:
            continue
        if any(value.const_value is None for value in (*read, *weight.inputs)):
            continue
        gamma, beta, mean, variance = (value.const_value.numpy().astype(np.float64) for value in norm.inputs[1:5])
        epsilon = norm.attributes["epsilon"].as_float() if "epsilon" in norm.attributes else 1e-5
        factor = gamma / np.sqrt(variance + epsilon)
        before = 0.0 if bias is None else bias.const_value.numpy().astype(np.float64)
        _, scale, zero = weight.inputs
        # One scale for the whole weight becomes one for each channel; so does its zero point.
        steps = _constant(
            graph, f"{norm.name}_scale", factor * scale.const_value.numpy().astype(np.float64), np.float32
        )
        zeros = _constant(graph, f"{norm.name}_zero", np.broadcast_to(zero.const_value.numpy(), factor.shape), np.int8)
        shift = _constant(graph, f"{norm.name}_bias", factor * (before - mean) + beta, np.float32)
        weight.replace_input_with(1, steps)
        weight.replace_input_with(2, zeros)
        weight.attributes["axis"] = ir.AttrInt64("axis", 0)
        conv.resize_inputs(3)
        conv.replace_input_with(2, shift)
        norm.outputs[0].replace_all_uses_with(conv.outputs[0], replace_graph_outputs=True)
        graph.remove(norm, safe=True)


def store_4_bit(model: Any, names: Collection[str]) -> None:
    """Store integers that fit into 4 bits in 4 bits, two in a byte.

    Args:
        model: an ``onnx_ir`` model, changed in place.
        names: of the weights' initializers.
    """
    narrow: dict[str, Any] = {}
    for node in [node for node in model.graph if node.op_type == "DequantizeLinear"]:
        codes, _, zero = node.inputs
        if codes.name not in names:
            continue
        # Equal initializers are one: that of the zero point may be read by others, in 8 bits.
        for index, value in ((0, codes), (2, zero)):
            if value.name not in narrow:
                array = value.const_value.numpy()
                narrow[value.name] = _constant(model.graph, f"{value.name}_int4", array, ml_dtypes.int4)
            node.replace_input_with(index, narrow[value.name])


def remove_unused(model: Any) -> None:
    """Drop what nothing reads: float weights, batch norms' statistics, the exporter's notes on lines of Python."""
    RemoveUnusedNodesPass()(model)
    ClearMetadataAndDocStringPass()(model)


def _constant(graph: Any, name: str, array: Any, dtype: Any) -> Any:
    tensor = ir.tensor(np.ascontiguousarray(array, dtype=dtype), name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value
