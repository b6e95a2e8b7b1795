"""Changes of an ONNX graph after torch's exporter has written it: batch norms, 4-bit integers, leftovers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, RemoveUnusedNodesPass


def finish(model: Any, names: Collection[str]) -> None:
    """Fold batch norms, store narrow integers in 4 bits, drop unused nodes and the exporter's notes.

    Args:
        model: an ``onnx_ir`` model, changed in place.
        names: of the initializers whose integers fit into 4 bits.
    """
    for norm in [node for node in model.graph if node.op_type == "BatchNormalization"]:
        _fold(model.graph, norm)
    _store_4_bit(model.graph, names)
    RemoveUnusedNodesPass()(model)
    ClearMetadataAndDocStringPass()(model)


def _fold(graph: Any, norm: Any) -> None:
    """Take the factor of a batch norm into the scales of the convolution before it, the rest into its bias.

    Of a convolution ``W x + b`` with ``W = scale * (codes - zero)`` and a batch norm ``f (y - mean) + beta``, what is
    left is ``scale' = f * scale`` and ``b' = f (b - mean) + beta``, the codes as they were.
    """
    conv = norm.inputs[0].producer()
    weight = conv.inputs[1].producer() if conv is not None and conv.op_type == "Conv" else None
    if weight is None or weight.op_type != "DequantizeLinear":
        return
    bias = list(conv.inputs[2:3])
    constants = (*norm.inputs[1:], *weight.inputs, *bias)
    alone = all(len(value.uses()) == 1 for value in (norm.inputs[0], weight.outputs[0]))
    if not alone or any(value.const_value is None for value in constants):
        return
    wide = (value.const_value.numpy().astype(np.float64) for value in (*norm.inputs[1:5], weight.inputs[1], *bias))
    gamma, beta, mean, variance, scale, *before = wide
    factor = gamma / np.sqrt(variance + norm.attributes["epsilon"].as_float())
    # One scale for the whole weight becomes one for each channel; so does its zero point.
    zeros = np.broadcast_to(weight.inputs[2].const_value.numpy(), factor.shape)
    weight.replace_input_with(1, _constant(graph, f"{norm.name}_scale", factor * scale, np.float32))
    weight.replace_input_with(2, _constant(graph, f"{norm.name}_zero", zeros, np.int8))
    weight.attributes["axis"] = ir.AttrInt64("axis", 0)
    shift = factor * (sum(before) - mean) + beta
    conv.resize_inputs(3)
    conv.replace_input_with(2, _constant(graph, f"{norm.name}_bias", shift, np.float32))
    norm.outputs[0].replace_all_uses_with(conv.outputs[0], replace_graph_outputs=True)
    graph.remove(norm, safe=True)


def _store_4_bit(graph: Any, names: Collection[str]) -> None:
    narrow: dict[str, Any] = {}
    for node in [node for node in graph if node.op_type == "DequantizeLinear" and node.inputs[0].name in names]:
        # Equal initializers are one: that of the zero point may be read by others, in 8 bits.
        for index in (0, 2):
            value = node.inputs[index]
            if value.name not in narrow:
                array = value.const_value.numpy()
                narrow[value.name] = _constant(graph, f"{value.name}_int4", array, ml_dtypes.int4)
            node.replace_input_with(index, narrow[value.name])


def _constant(graph: Any, name: str, array: Any, dtype: Any) -> Any:
    tensor = ir.tensor(np.ascontiguousarray(array, dtype=dtype), name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value
