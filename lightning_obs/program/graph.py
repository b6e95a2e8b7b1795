"""Change the graph of a traced model: fold batch norms, drop what nothing reads.

``program_file.py`` calls :func:`finish` once, on the program as a module, before it is exported again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

_ATEN = torch.ops.aten
_CONVOLUTIONS = (_ATEN.conv1d, _ATEN.conv2d, _ATEN.conv3d)


def finish(graph_module: fx.GraphModule) -> None:
    """Fold batch norms, and drop operations and tensors that nothing reads, such as the weights in float.

    ``program_file.py`` calls it after the first trace, before the graph is exported again.

    Args:
        graph_module: the module of a program of torch.export, with its tensors as attributes; changed in place.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if _calls(node, _ATEN.batch_norm):
            _fold(graph_module, node)
    graph.eliminate_dead_code()
    _drop_unread_tensors(graph_module)
    graph_module.recompile()


# ---------------------------------------------------------------------- batch norms


class _QuantizedWeight(NamedTuple):
    """The constants of a dequantize operation that makes a weight.

    :func:`_quantized_weight` reads them from the graph, and :func:`_fold` multiplies a batch norm into them.
    """

    codes: torch.Tensor  # int8, (channels, ...): the shape of the weight, with the output channels first
    scales: torch.Tensor  # (channels,)
    zero_points: torch.Tensor  # (channels,)

    def times(self, factor: torch.Tensor, lowest: int) -> _QuantizedWeight | None:
        """Return the weight times a factor for each output channel; ``_fold`` multiplies a batch norm into it.

        Kernels take only positive scales. So in channels with a negative factor, codes and zero points change their
        signs, and the scale is multiplied by the factor's absolute value. A channel whose scale would become 0 (a batch
        norm with a ``gamma`` of 0), or smaller than the normal numbers of float32, keeps its scale, and all its codes
        become the zero point.

        Args:
            factor: ``(channels,)`` in float64.
            lowest: the smallest code, ``-2 ** (bits - 1)``. Codes are signed, so it has no counterpart of the other
                sign.

        Returns:
            None if a code or zero point that would change its sign is the smallest code.
        """
        is_negative = factor < 0
        for values in (self.codes, self.zero_points):
            if bool((values[is_negative] == lowest).any()):
                return None
        sign = torch.where(is_negative, -1, 1)
        ones = [1] * (self.codes.ndim - 1)
        sign_of_rows = sign.reshape(-1, *ones)
        codes = self.codes * sign_of_rows.to(self.codes.dtype)
        zero_points = self.zero_points * sign
        wide_scales = factor.abs() * self.scales.double()
        scales = wide_scales.float()
        is_off = scales < torch.finfo(torch.float32).tiny
        zero_of_rows = zero_points.reshape(-1, *ones).to(codes.dtype)
        codes = torch.where(is_off.reshape(-1, *ones), zero_of_rows, codes)
        scales = torch.where(is_off, self.scales, scales)
        return _QuantizedWeight(codes, scales, zero_points)


def _folded_bias(
    factor: torch.Tensor, mean: torch.Tensor, beta: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """The bias of a product behind which a batch norm is folded in, ``factor (b - mean) + beta``, in float64.

    :func:`_fold` calls this.

    Args:
        factor: ``(C,)`` float64, by which the batch norm multiplies each channel.
        mean: of the batch norm, ``(C,)``.
        beta: of the batch norm; None: it has none.
        bias: of the product; None: it has none.
    """
    folded = -factor * mean.double()
    if bias is not None:
        folded = folded + factor * bias.double()
    if beta is not None:
        folded = folded + beta.double()
    return folded


def _fold(graph_module: fx.GraphModule, batch_norm: fx.Node) -> None:
    """Fold a batch norm into the quantized convolution or Linear before it. A batch norm behind anything else stays.

    A product ``W x + b`` with ``W = scale * (codes - zero)`` before a batch norm ``factor (y - mean) + beta`` is a
    product with ``scale' = factor * scale``, ``b' = factor (b - mean) + beta`` and the same codes. The batch
    norm stays where :meth:`_QuantizedWeight.times` gives None, where it takes the statistics of its batch, and where
    one of the numbers is computed in the graph. :func:`finish` calls it for each batch norm of the graph.
    """
    product = batch_norm.args[0]
    if not isinstance(product, fx.Node) or not _is_product(product) or len(product.users) != 1:
        return
    dequantize = product.args[1]
    weight = _quantized_weight(graph_module, dequantize)
    # batch_norm(input, gamma, beta, mean, variance, training, momentum, epsilon, ...)
    parameters = batch_norm.args[1:5]
    takes_statistics_of_batch = batch_norm.args[5]
    epsilon: Any = batch_norm.args[7]
    has_bias = len(product.args) > 2
    bias_argument = product.args[2] if has_bias else None
    if takes_statistics_of_batch or any(_is_computed(argument) for argument in (*parameters, bias_argument)):
        return
    gamma, beta, mean, variance = [_tensor(graph_module, argument) for argument in parameters]
    if weight is None or mean is None or variance is None:
        return
    assert isinstance(dequantize, fx.Node)
    factor = 1 / (variance.double() + epsilon).sqrt()
    if gamma is not None:
        factor = factor * gamma.double()
    lowest, highest, dtype = dequantize.args[-3:]
    assert isinstance(lowest, int)
    folded = weight.times(factor, lowest)
    if folded is None:
        return
    bias = _folded_bias(factor, mean, beta, _tensor(graph_module, bias_argument))
    name = batch_norm.name
    with graph_module.graph.inserting_before(product):
        weight_node = _dequantize_node(graph_module, name, folded, (lowest, highest, dtype))
        bias_node = _constant(graph_module, f"{name}_bias", bias.float())
    value = product.args[0]
    further_arguments = product.args[3:]
    product.args = (value, weight_node, bias_node, *further_arguments)
    batch_norm.replace_all_uses_with(product)
    graph_module.graph.erase_node(batch_norm)


def _dequantize_node(
    graph_module: fx.GraphModule, name: str, weight: _QuantizedWeight, codes_range: tuple[Any, Any, Any]
) -> fx.Node:
    """Add a weight's constants to the graph, and the operation that dequantizes them; :func:`_fold` calls this.

    Args:
        graph_module: the nodes go where its graph inserts at present.
        name: what the names of the constants begin with.
        weight: the constants.
        codes_range: the smallest code, the largest code, and the dtype of the codes.
    """
    codes = _constant(graph_module, f"{name}_codes", weight.codes)
    scales = _constant(graph_module, f"{name}_step", weight.scales)
    zero_points = _constant(graph_module, f"{name}_zero", weight.zero_points)
    dequantize = torch.ops.quantized_decomposed.dequantize_per_channel.default
    channel_axis = 0
    arguments = (codes, scales, zero_points, channel_axis, *codes_range)
    return graph_module.graph.call_function(dequantize, arguments)


def _is_product(node: fx.Node) -> bool:
    """Whether a node is a convolution, or a Linear of vectors, whose channels a batch norm would scale."""
    if node.kwargs:
        return False
    if any(_calls(node, convolution) for convolution in _CONVOLUTIONS):
        return True
    if not _calls(node, _ATEN.linear):
        return False
    output = node.meta["val"]
    return output.ndim == 2


def _quantized_weight(graph_module: fx.GraphModule, dequantize: Any) -> _QuantizedWeight | None:
    """The constants of the operation that makes a product's weight; :func:`_fold` calls this for each product.

    None if ``dequantize`` is no operation that dequantizes constants by channel or by tensor. A weight with a scale for
    each group of columns is made by another operation, so it gives None, too.
    """
    operations = torch.ops.quantized_decomposed
    if _calls(dequantize, operations.dequantize_per_channel):
        codes, scales, zero_points = [_tensor(graph_module, argument) for argument in dequantize.args[:3]]
    elif _calls(dequantize, operations.dequantize_per_tensor):
        codes = _tensor(graph_module, dequantize.args[0])
        if codes is None:
            return None
        shape = (len(codes),)
        scales = torch.full(shape, dequantize.args[1])
        zero_points = torch.full(shape, dequantize.args[2])
    else:
        return None
    if codes is None or scales is None or zero_points is None:
        return None
    return _QuantizedWeight(codes, scales, zero_points)


def _calls(node: Any, operation: Any) -> bool:
    """Whether ``node``, a node or an argument of one, is a call of an operation, in any of its overloads."""
    if not isinstance(node, fx.Node):
        return False
    overloads = getattr(node.target, "overloadpacket", None)
    return overloads is operation


# ---------------------------------------------------------------------- constants


def _is_computed(argument: Any) -> bool:
    """Whether an argument of a call is a tensor that the graph computes, or an input of the graph."""
    return isinstance(argument, fx.Node) and argument.op != "get_attr"


def _tensor(graph_module: fx.GraphModule, argument: Any) -> torch.Tensor | None:
    """The tensor of a ``get_attr`` node; None if the argument is no constant (:func:`_is_computed`) or None."""
    if not isinstance(argument, fx.Node) or argument.op != "get_attr":
        return None
    path, _, name = str(argument.target).rpartition(".")
    value = getattr(graph_module.get_submodule(path), name)
    return value.detach() if isinstance(value, torch.Tensor) else None


def _constant(graph_module: fx.GraphModule, name: str, value: torch.Tensor) -> fx.Node:
    """A new buffer of the graph's module, and the node that reads it."""
    graph_module.register_buffer(name, value)
    return graph_module.graph.get_attr(name)


def _drop_unread_tensors(graph_module: fx.GraphModule) -> None:
    """Delete the parameters and buffers that no node reads."""
    targets: set[str] = set()
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            targets.add(str(node.target))
    for path, module in graph_module.named_modules():
        for table in (module._parameters, module._buffers):
            for name in list(table):
                if f"{path}.{name}".lstrip(".") not in targets:
                    del table[name]
