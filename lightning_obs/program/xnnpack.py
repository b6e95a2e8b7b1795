"""Replace operations that XNNPACK lacks by operations that it has, so that it runs a whole net as one delegate.

XNNPACK, the backend of ExecuTorch for CPUs, has matrix products, sums and exponentials, but no layer norm, no mean over
one dimension, and no attention in one operation. Where it lacks one, ExecuTorch cuts the net and copies its data out
and in again, which costs more than the operation. Here a mean over the last dimension becomes a product with
``1 / size``, a layer norm becomes two such means, and attention two products with a softmax between them.

Outputs change as much as by another order of float sums. ``program_file.py`` calls :func:`write_for_xnnpack` between
tracing and saving.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

_ATEN = torch.ops.aten


def write_for_xnnpack(graph_module: fx.GraphModule) -> None:
    """Replace layer norms, means and attention whose sizes are all numbers; calls with other sizes stay.

    ``program_file.py`` calls it for ``backend="xnnpack"``, after the first trace.

    Args:
        graph_module: the module of a program of torch.export, with its tensors as attributes; changed in place.
    """
    for node in list(graph_module.graph.nodes):
        write = _WRITERS.get(getattr(node.target, "overloadpacket", None))
        if write is None or not _has_known_sizes(node):
            continue
        with graph_module.graph.inserting_before(node):
            replacement = write(_Nodes(graph_module, node.name), node)
        if replacement is not None:
            replacement.meta = dict(node.meta)
            node.replace_all_uses_with(replacement)
            graph_module.graph.erase_node(node)


def _has_known_sizes(node: fx.Node) -> bool:
    """Whether all dimensions of a node's output and of its inputs are numbers."""
    for value in (node, *node.all_input_nodes):
        tensor = value.meta.get("val")
        if isinstance(tensor, torch.Tensor) and not all(isinstance(size, int) for size in tensor.shape):
            return False
    return True


def _shape(node: Any) -> list[int]:
    """The shape of a node's output; the sizes are numbers, since other nodes are not rewritten."""
    return list(node.meta["val"].shape)


class _Nodes:
    """Adds nodes and constants to a graph, at its current insertion point.

    :func:`write_for_xnnpack` makes one for each node that it replaces.

    Args:
        graph_module: holds the graph.
        name: prefix of the constants' names.
    """

    def __init__(self, graph_module: fx.GraphModule, name: str) -> None:
        self._graph_module = graph_module
        self._name = name
        self._constants = 0

    def call(self, operation: Any, *args: Any) -> fx.Node:
        """A node that calls an operation."""
        return self._graph_module.graph.call_function(operation, args)

    def constant(self, value: torch.Tensor) -> fx.Node:
        """Register a constant, and return the node that reads it."""
        name = f"{self._name}_constant_{self._constants}"
        self._constants += 1
        self._graph_module.register_buffer(name, value)
        return self._graph_module.graph.get_attr(name)

    def mean(self, value: fx.Node, size: int) -> fx.Node:
        """The mean over the last dimension, which becomes 1: a product with a row of ``1 / size``.

        The row is in float32, as ``value`` is: ``export_program`` takes models in float32.
        """
        row = torch.full((1, size), 1 / size)
        constant = self.constant(row)
        return self.call(_ATEN.linear.default, value, constant)

    def view(self, value: fx.Node, shape: Sequence[int]) -> fx.Node:
        """Return a node that gives the same values in another shape."""
        return self.call(_ATEN.reshape.default, value, list(shape))


# ---------------------------------------------------------------------- one function for each operation


def _write_layer_norm(nodes: _Nodes, node: fx.Node) -> fx.Node | None:
    """A layer norm over the last dimension; None for one over several."""
    value, normalized_shape, weight, bias, epsilon = _arguments(node, 5)
    if len(normalized_shape) != 1:
        return None
    [size] = normalized_shape
    if epsilon is None:
        epsilon = 1e-5  # the default of aten's layer_norm
    mean = nodes.mean(value, size)
    centered = nodes.call(_ATEN.sub.Tensor, value, mean)
    squares = nodes.call(_ATEN.mul.Tensor, centered, centered)
    variance = nodes.mean(squares, size)
    variance = nodes.call(_ATEN.add.Tensor, variance, epsilon)
    factor = nodes.call(_ATEN.rsqrt.default, variance)
    output = nodes.call(_ATEN.mul.Tensor, centered, factor)
    if weight is not None:
        output = nodes.call(_ATEN.mul.Tensor, output, weight)
    if bias is not None:
        output = nodes.call(_ATEN.add.Tensor, output, bias)
    return output


def _write_mean(nodes: _Nodes, node: fx.Node) -> fx.Node | None:
    """A mean over one dimension, or over height and width of images: XNNPACK has the latter if dimensions are kept.

    None for a mean over other dimensions, and for one that names the dtype of its result.
    """
    value, dimensions, keeps_dimensions = _arguments(node, 3)
    if dimensions is None or node.kwargs.get("dtype") is not None:  # the dtype is a keyword alone
        return None
    rank = len(_shape(value))
    positions = sorted(dimension % rank for dimension in dimensions)
    if rank == 4 and positions == [2, 3]:
        mean = nodes.call(_ATEN.mean.dim, value, [-1, -2], True)
    elif len(positions) == 1:
        mean = _mean_over_one(nodes, value, positions[0])
    else:
        return None
    return mean if keeps_dimensions else nodes.view(mean, _shape(node))


def _mean_over_one(nodes: _Nodes, value: fx.Node, position: int) -> fx.Node:
    """The mean over one dimension, which becomes 1; it is swapped with the last one before the mean and after."""
    last = len(_shape(value)) - 1
    size = _shape(value)[position]
    if position == last:
        return nodes.mean(value, size)
    swapped = nodes.call(_ATEN.transpose.int, value, position, last)
    mean = nodes.mean(swapped, size)
    return nodes.call(_ATEN.transpose.int, mean, position, last)


def _write_attention(nodes: _Nodes, node: fx.Node) -> fx.Node | None:
    """Attention with as many heads in keys as in queries, plus a mask; None for a boolean mask, or with dropout."""
    query, key, value, mask, dropout, is_causal = _arguments(node, 6)
    scale = node.kwargs.get("scale")
    shape, key_shape = _shape(query), _shape(key)
    if shape[:-2] != key_shape[:-2] or dropout or node.kwargs.get("enable_gqa"):
        return None
    if mask is not None and mask.meta["val"].dtype == torch.bool:
        return None
    *heads, queries, width = shape
    keys = key_shape[-2]
    count = math.prod(heads)
    factor = width**-0.5 if scale is None else scale
    scaled = nodes.call(_ATEN.mul.Tensor, query, factor)
    scaled = nodes.view(scaled, (count, queries, width))
    all_keys = nodes.view(key, (count, keys, width))
    transposed = nodes.call(_ATEN.transpose.int, all_keys, 1, 2)
    scores = nodes.call(_ATEN.bmm.default, scaled, transposed)
    if is_causal:
        future = torch.full((queries, keys), -math.inf).triu(1)
        constant = nodes.constant(future)
        scores = nodes.call(_ATEN.add.Tensor, scores, constant)
    if mask is not None:
        by_head = nodes.view(scores, (*heads, queries, keys))
        masked = nodes.call(_ATEN.add.Tensor, by_head, mask)
        scores = nodes.view(masked, (count, queries, keys))
    weights = nodes.call(_ATEN.softmax.int, scores, -1)
    value_width = _shape(value)[-1]
    values = nodes.view(value, (count, keys, value_width))
    output = nodes.call(_ATEN.bmm.default, weights, values)
    return nodes.view(output, _shape(node))


def _arguments(node: fx.Node, count: int) -> list[Any]:
    """The first arguments of a call; None in place of those that are not given."""
    arguments: list[Any] = list(node.args[:count])
    return arguments + [None] * (count - len(arguments))


#: by operation, the function that writes a call of it; it gives the output's node, or None to leave the call
_WRITERS: dict[Any, Callable[[_Nodes, fx.Node], fx.Node | None]] = {
    _ATEN.layer_norm: _write_layer_norm,
    _ATEN.mean: _write_mean,
    _ATEN.scaled_dot_product_attention: _write_attention,
}
