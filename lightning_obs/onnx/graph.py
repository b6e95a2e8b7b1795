"""Change an ONNX graph that torch's exporter has written: fold batch norms, store 4-bit integers, remove leftovers.

An initializer is a constant of the graph, such as a weight. ``onnx_file.py`` calls :func:`finish` once, before saving.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, RemoveUnusedNodesPass

#: the exporter's note of the modules that a node is inside of, from the outermost one to the operation
_SCOPES = "pkg.torch.onnx.name_scopes"


def finish(model: Any, names: Collection[str], output_names: Sequence[str]) -> None:
    """Rewrite a traced graph as engines need it, and remove what the exporter has left over.

    Batch norms are folded into the convolutions before them. A ReLU moves before the quantization that it reads.
    Products whose input has a dynamic range become products of integers. Pools and upsampling to the nearest value give
    integers if they read integers. Sums before layer norms are kept apart. 4-bit integers are stored in 4 bits. Nodes
    are named after modules, and outputs after what the model returns. Unused nodes and the exporter's notes are
    removed. The computed numbers stay the same up to the rounding of float32: folded batch norms and products of
    integers multiply in another order.

    ``export_onnx`` calls it between tracing and saving.

    Args:
        model: an ``onnx_ir`` model, changed in place.
        names: names of the initializers whose integers fit into 4 bits.
        output_names: names of all outputs, in the outputs' order.
    """
    batch_norms = [node for node in model.graph if node.op_type == "BatchNormalization"]
    for batch_norm in batch_norms:
        _fold(model.graph, batch_norm, names)
    for node in list(model.graph):
        if node.op_type == "Relu":
            _rectify_before_quantizing(model.graph, node)
    products = [node for node in model.graph if node.op_type in ("MatMul", "Gemm")]
    for product in products:
        _multiply_integers(model.graph, product)
    for node in list(model.graph):
        if node.op_type == "MaxPool" or _is_nearest_resize(node):
            _quantize_selection(model.graph, node)
        elif node.op_type == "LayerNormalization":
            _keep_sum_apart(node)
    _store_4_bit(model.graph, names)
    RemoveUnusedNodesPass()(model)
    _name_after_modules(model.graph)
    _name_outputs(model.graph, output_names)
    ClearMetadataAndDocStringPass()(model)


def _fold(graph: Any, batch_norm: Any, names: Collection[str]) -> None:
    """Fold a batch norm into the quantized convolution before it. A batch norm behind anything else stays.

    A convolution ``W x + b`` with ``W = scale * (codes - zero)`` before a batch norm ``factor (y - mean) + beta`` is a
    convolution with ``scale' = factor * scale``, ``b' = factor (b - mean) + beta`` and the same codes. In channels with
    a negative factor, codes and zero points change their signs, so that scales are positive, as TensorRT requires. A
    channel that holds the lowest code, which has no counterpart, keeps its signs and gets a negative scale. What
    TensorRT makes of such a channel was not tried. A channel whose scale would become 0 (a ``gamma`` of 0) keeps its
    scale, and all its codes become the zero point.

    Args:
        graph: changed in place.
        batch_norm: its node.
        names: names of the initializers whose integers fit into 4 bits.
    """
    conv = batch_norm.inputs[0].producer()
    weight = _quantized_weight_of(conv)
    if weight is None or not _can_be_folded(batch_norm, conv, weight):
        return
    gamma, beta, mean, variance = [_array(value) for value in batch_norm.inputs[1:5]]
    scale = _array(weight.inputs[1])
    bias = _array(conv.inputs[2]) if len(conv.inputs) > 2 else 0
    epsilon = batch_norm.attributes["epsilon"].as_float()
    factor = gamma / np.sqrt(variance + epsilon)
    # One scale for the whole weight becomes one scale per channel, and so does its zero point.
    zero_points = np.broadcast_to(weight.inputs[2].const_value.numpy(), factor.shape)
    stored_codes = weight.inputs[0]
    codes = stored_codes.const_value.numpy()
    sign = _signs(factor, codes, zero_points, lowest=-8 if stored_codes.name in names else -128)
    zero_points = zero_points * sign
    folded_scale = sign * factor * scale
    is_off = np.abs(folded_scale) < np.finfo(np.float32).tiny
    if (sign < 0).any() or is_off.any():
        by_channel = (-1, *[1] * (codes.ndim - 1))
        signed_codes = codes * sign.reshape(by_channel)
        codes = np.where(is_off.reshape(by_channel), zero_points.reshape(by_channel), signed_codes)
        codes = np.ascontiguousarray(codes, dtype=np.int8)
        stored_codes.const_value = ir.tensor(codes, name=stored_codes.name)
    scale = np.where(is_off, scale, folded_scale)
    weight.replace_input_with(1, _constant(graph, f"{batch_norm.name}_scale", scale, np.float32))
    weight.replace_input_with(2, _constant(graph, f"{batch_norm.name}_zero", zero_points, np.int8))
    weight.attributes["axis"] = ir.AttrInt64("axis", 0)
    folded_bias = factor * (bias - mean) + beta
    conv.resize_inputs(3)
    conv.replace_input_with(2, _constant(graph, f"{batch_norm.name}_bias", folded_bias, np.float32))
    batch_norm.outputs[0].replace_all_uses_with(conv.outputs[0], replace_graph_outputs=True)
    graph.remove(batch_norm, safe=True)


def _signs(factor: Any, codes: Any, zero_points: Any, lowest: int) -> Any:
    """For each output channel, -1 where codes and zero point are to change their signs, else 1.

    Args:
        factor: ``(channels,)``, of a batch norm.
        codes: the codes of the weight, channels first.
        zero_points: ``(channels,)``.
        lowest: the lowest code.
    """
    has_lowest = (codes.reshape(len(codes), -1) == lowest).any(1) | (zero_points == lowest)
    return np.where((factor < 0) & ~has_lowest, -1, 1)


def _quantized_weight_of(conv: Any) -> Any:
    """The DequantizeLinear node that makes a convolution's weight.

    Args:
        conv: the node before a batch norm; None: the batch norm reads an input of the graph.

    Returns:
        None if the node is no convolution, or its weight is in float.
    """
    if conv is None or conv.op_type != "Conv":
        return None
    weight = conv.inputs[1].producer()
    if weight is None or weight.op_type != "DequantizeLinear":
        return None
    return weight


def _can_be_folded(batch_norm: Any, conv: Any, weight: Any) -> bool:
    """Whether a batch norm can be folded: all parameters are constants, and nothing else reads what changes.

    The model may return a tensor that changes; then the batch norm stays, too.

    Args:
        batch_norm: the only node that may read the convolution's output.
        conv: the only node that may read the weight.
        weight: the DequantizeLinear node that makes the weight, and the only reader of its codes.
    """
    for value in (batch_norm.inputs[0], weight.outputs[0], weight.inputs[0]):
        if len(value.uses()) != 1 or value.is_graph_output():
            return False
    parameters = [*batch_norm.inputs[1:], *weight.inputs, *conv.inputs[2:3]]
    return all(value.const_value is not None for value in parameters)


def _rectify_before_quantizing(graph: Any, relu: Any) -> None:
    """Move a ReLU before the quantization that it alone reads, so that engines make it a part of the convolution.

    A ReLU called as ``F.relu`` reads a quantized output. Both orders give the same numbers, since rounding keeps signs
    and zero is one of the levels. Only a zero point of 0 is handled: with another, onnxruntime would compute the
    convolution in float.
    """
    dequantize = relu.inputs[0].producer()
    if dequantize is None or dequantize.op_type != "DequantizeLinear":
        return
    quantize = dequantize.inputs[0].producer()
    if quantize is None or quantize.op_type != "QuantizeLinear":
        return
    zero_point = quantize.inputs[2].const_value
    codes, quantized = quantize.outputs[0], dequantize.outputs[0]
    if zero_point is None or zero_point.numpy() != 0:
        return
    if len(codes.uses()) != 1 or len(quantized.uses()) != 1 or quantized.is_graph_output():
        return
    relu.outputs[0].replace_all_uses_with(quantized, replace_graph_outputs=True)
    relu.replace_input_with(0, quantize.inputs[0])
    quantize.replace_input_with(0, relu.outputs[0])
    graph.remove(relu)
    graph.insert_before(quantize, relu)


def _multiply_integers(graph: Any, product: Any) -> None:
    """Write a product of an input whose range is found at run time as a product of integers.

    ``MatMulInteger`` multiplies codes less zero points. Its result is multiplied by the scales of input and weight, and
    the bias is added. If the product stayed one of dequantized tensors, onnxruntime would quantize the input in another
    way (``MatMulNBits``).

    A Linear's weight is traced as DequantizeLinear of the codes ``(out, in)``, a scale and a zero point for each output
    channel or for the whole weight. A MatMul reads it through a Transpose, a Gemm with or without one (``transB``); the
    product of integers reads the transposed codes in both cases. Before any tracing, an export refuses scales of groups
    for such weights.

    Args:
        graph: changed in place.
        product: a MatMul or Gemm. It stays if its input has a calibrated range or is in float, and if its weight is in
            float.
    """
    dequantize = product.inputs[0].producer()
    quantize = None if dequantize is None else dequantize.inputs[0].producer()
    if quantize is None or quantize.op_type != "DynamicQuantizeLinear":
        return
    weight = product.inputs[1].producer()
    if weight is not None and weight.op_type == "Transpose":
        weight = weight.inputs[0].producer()
    if weight is None or weight.op_type != "DequantizeLinear":
        return
    codes, step, zero = weight.inputs
    name = f"{codes.name}_transposed"
    transposed = graph.initializers.get(name)  # it is there if a product before this one has the same weight
    if transposed is None:
        transposed = _constant(graph, name, codes.const_value.numpy().T, np.int8)
    integers = [quantize.outputs[0], transposed, quantize.outputs[2]]
    if zero.const_value.numpy().any():
        integers.append(zero)
    accumulate = ir.node("MatMulInteger", integers)
    cast = ir.node("Cast", accumulate.outputs, {"to": ir.DataType.FLOAT})
    scale = ir.node("Mul", [quantize.outputs[1], step])
    nodes = [accumulate, cast, scale, ir.node("Mul", [cast.outputs[0], scale.outputs[0]])]
    if product.op_type == "Gemm" and len(product.inputs) > 2:
        nodes.append(ir.node("Add", [nodes[-1].outputs[0], product.inputs[2]]))
    for node in nodes:
        node.metadata_props.update(product.metadata_props)
    output = nodes[-1].outputs[0]
    output.name, output.shape, output.type = product.outputs[0].name, product.outputs[0].shape, product.outputs[0].type
    graph.insert_before(product, nodes)
    product.outputs[0].replace_all_uses_with(output, replace_graph_outputs=True)
    graph.remove(product, safe=True)


def _is_nearest_resize(node: Any) -> bool:
    """Whether a node is a Resize that copies the nearest values, as upsampling in a Unet does.

    A Resize in the mode ``tf_crop_and_resize`` may also fill in values that its input does not have.
    """
    if node.op_type != "Resize":
        return False
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    is_nearest = attributes.get("mode", "nearest") == "nearest"
    return is_nearest and attributes.get("coordinate_transformation_mode") != "tf_crop_and_resize"


def _quantize_selection(graph: Any, selection: Any) -> None:
    """Quantize the output of a node that selects values of a quantized input; the values stay the same.

    Engines pool and resize integers only if the output is quantized as the input is. A residual sum or a concatenation
    that reads the output is computed with integers only if the output is quantized.

    Args:
        graph: changed in place.
        selection: a MaxPool, or a Resize that copies the nearest values. It stays as it is if its input is in float.
    """
    dequantize = selection.inputs[0].producer()
    is_quantized = dequantize is not None and dequantize.op_type == "DequantizeLinear"
    if not is_quantized or len(selection.outputs) > 1:
        return
    output = selection.outputs[0]
    quantize = ir.node("QuantizeLinear", [output, *dequantize.inputs[1:]])
    dequantize_again = ir.node("DequantizeLinear", [quantize.outputs[0], *dequantize.inputs[1:]])
    result = dequantize_again.outputs[0]
    result.shape, result.type = output.shape, output.type
    for node in (quantize, dequantize_again):
        node.metadata_props.update(selection.metadata_props)
    for node, index in list(output.uses()):
        if node is not quantize:
            node.replace_input_with(index, result)
    graph.insert_after(selection, [quantize, dequantize_again])


def _keep_sum_apart(layer_norm: Any) -> None:
    """Write the Add before a layer norm as a Sum, which computes the same.

    onnxruntime (1.30) fuses an Add and a LayerNormalization into one operation, which is slower than the two.
    """
    add = layer_norm.inputs[0].producer()
    if add is not None and add.op_type == "Add":
        add.op_type = "Sum"


def _array(value: Any) -> Any:
    """A constant of the graph as a numpy array in float64."""
    return value.const_value.numpy().astype(np.float64)


def _store_4_bit(graph: Any, names: Collection[str]) -> None:
    """Store codes and zero points of weights in 4 bits.

    Args:
        graph: changed in place.
        names: the initializers that hold such codes; DequantizeLinear nodes that read them are changed.
    """
    narrow_values: dict[str, Any] = {}
    for node in list(graph):
        if node.op_type != "DequantizeLinear" or node.inputs[0].name not in names:
            continue
        # Equal initializers are shared: a node that stays in 8 bits may read the same zero point, so it is copied.
        for index in (0, 2):
            value = node.inputs[index]
            if value.name not in narrow_values:
                array = value.const_value.numpy()
                narrow_values[value.name] = _constant(graph, f"{value.name}_int4", array, ml_dtypes.int4)
            node.replace_input_with(index, narrow_values[value.name])


def _constant(graph: Any, name: str, array: Any, dtype: Any) -> Any:
    """A new initializer of the graph. ``name`` must be that of no other value in the graph; this is not checked."""
    tensor = ir.tensor(np.ascontiguousarray(array, dtype=dtype), name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def _name_after_modules(graph: Any) -> None:
    """Name each node after the module that it is a part of: ``blocks.0.conv1/Conv``; further ones ``.../Conv_1``.

    A node whose note names no module keeps its name. People see these names in viewers, and :mod:`.measured_file` names
    the products that stay in float by them.
    """
    numbers: Counter[str] = Counter()
    for node in graph:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
        if len(scopes) < 2:
            continue
        name = f"{scopes[-2]}/{node.op_type}"
        node.name = f"{name}_{numbers[name]}" if numbers[name] else name
        numbers[name] += 1


def _name_outputs(graph: Any, names: Sequence[str]) -> None:
    """Rename the graph's outputs. Where another value has the name already, a number follows it.

    A value that is both an input and an output of the graph keeps its name.
    """
    taken = set(graph.initializers)
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    taken.update(value.name for value in values if not value.is_graph_output())
    for value, name in zip(graph.outputs, names, strict=True):
        if value.is_graph_input():
            continue
        free_name = name
        number = 0
        while free_name in taken:
            number += 1
            free_name = f"{name}_{number}"
        taken.add(free_name)
        value.name = free_name
