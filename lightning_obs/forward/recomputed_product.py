"""The product of an input and a quantized weight that quantizes the weight once more in the backward.

For each Linear and convolution, autograd would keep the quantized weight, which is as large as the parameter, and the
mask of clipped values. Both follow from the weight and its scale, which are in memory anyway. So this file has its own
gradients of a product, equal to autograd's bit for bit, and the quantized weight lies in memory that all modules share.

torch's activation checkpointing would also compute the quantized weight again. But it keeps the input of a Linear whose
weight is frozen, which plain training does not. Hooks of saved tensors would replace the hooks of the user, since torch
calls only the innermost of nested hooks.

The quantizers stand here because the backward applies them, too: :class:`StaticQuantizer` to any tensor of a module,
:class:`WeightQuantizer` to its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from lightning_obs.model.kinds import from_matrix, is_conv1d_of_transformers, to_matrix
from lightning_obs.numerics.fake_quantize import (
    clip_gradient_,
    dequantize,
    fake_quantize,
    fake_quantize_without_graph,
    straight_through,
)

# ---------------------------------------------------------------------- products and their gradients

#: the gradients of input, weight and bias; None in place of a gradient that is not asked for
Gradients: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

#: torch's own methods of convolutions; a class with another method computes something else
_CONV_FORWARDS = (nn.Conv1d._conv_forward, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward)


class Product(Protocol):
    """The function that a layer computes from input, weight and bias, and its gradients.

    :func:`product_of` chooses one for a module; :func:`recomputed_product` runs it.

    Attributes:
        reads_input: whether a backward that computes no gradient of the weight needs the input, too.
    """

    reads_input: bool

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the output; called in the forward, with the quantized weight. ``bias`` may be None."""

    def gradients(
        self, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, needs: tuple[bool, bool, bool]
    ) -> Gradients:
        """Return the gradients of input, weight and bias; the backward of :func:`recomputed_product` calls it.

        Args:
            grad: gradient of the output; the result has its dtype.
            input, weight: the tensors of the forward.
            needs: whether input, weight and bias need a gradient; the result has None for each that does not.
        """


@dataclass(frozen=True)
class LinearProduct:
    """``F.linear``: an input ``(..., C)``, a weight ``(R, C)``.

    Made for each quantized call of a Linear; :func:`recomputed_product` runs it.
    """

    reads_input = False

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The output ``(..., R)``; called in the forward, with the quantized weight."""
        return F.linear(input, weight, bias)

    def gradients(
        self, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, needs: tuple[bool, bool, bool]
    ) -> Gradients:
        """Return the gradients, as :class:`Product` says; ``input`` is read for the gradient of the weight alone."""
        needs_input, needs_weight, needs_bias = needs
        rows = grad.reshape(-1, grad.shape[-1])
        input_grad = grad @ weight.to(grad.dtype) if needs_input else None
        weight_grad = None
        if needs_weight:
            input_rows = input.reshape(-1, input.shape[-1])
            weight_grad = rows.t() @ input_rows.to(grad.dtype)
        bias_grad = rows.sum(0) if needs_bias else None
        return input_grad, weight_grad, bias_grad


@dataclass(frozen=True)
class TransposedProduct:
    """The product of transformers' ``Conv1D``: an input ``(..., C)``, a weight ``(C, R)``.

    :func:`product_of` makes it for each call of such a module in training; :func:`recomputed_product` runs it.
    """

    reads_input = False

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The output ``(..., R)``; called in the forward, with the quantized weight."""
        assert bias is not None  # Conv1D always has one
        rows = input.view(-1, input.shape[-1])
        return torch.addmm(bias, rows, weight).view(*input.shape[:-1], weight.shape[1])

    def gradients(
        self, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, needs: tuple[bool, bool, bool]
    ) -> Gradients:
        """Return the gradients, as :class:`Product` says; ``input`` is read for the gradient of the weight alone."""
        needs_input, needs_weight, needs_bias = needs
        rows = grad.reshape(-1, grad.shape[-1])
        input_grad = None
        if needs_input:
            product = rows @ weight.to(grad.dtype).t()
            input_grad = product.view(*grad.shape[:-1], weight.shape[0])
        weight_grad = None
        if needs_weight:
            input_rows = input.reshape(-1, input.shape[-1])
            weight_grad = input_rows.to(grad.dtype).t() @ rows
        bias_grad = rows.sum(0) if needs_bias else None
        return input_grad, weight_grad, bias_grad


@dataclass(frozen=True)
class Convolution:
    """``F.conv1d`` to ``F.conv3d``: an input ``(N, C, ...)`` or ``(C, ...)``, a weight ``(R, C / groups, ...)``.

    :meth:`of` makes it for each call of a convolution in training; :func:`recomputed_product` runs it.

    Attributes:
        function: ``F.conv1d``, ``F.conv2d`` or ``F.conv3d``.
        stride, padding, dilation, groups: arguments of ``function``.
    """

    function: Callable[..., torch.Tensor]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    reads_input = True

    @classmethod
    def of(cls, module: _ConvNd) -> Convolution | None:
        """Make the product of a convolution of torch; None unless it pads with zeros, equally on both sides.

        :func:`product_of` calls it.
        """
        functions: dict[Any, Callable[..., torch.Tensor]] = {
            nn.Conv1d.forward: F.conv1d,
            nn.Conv2d.forward: F.conv2d,
            nn.Conv3d.forward: F.conv3d,
        }
        function = functions.get(type(module).forward)
        if function is None or module.padding_mode != "zeros" or isinstance(module.padding, str):
            return None
        return cls(function, module.stride, module.padding, module.dilation, module.groups)

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The output ``(N, R, ...)`` or ``(R, ...)``; called in the forward, with the quantized weight."""
        return self.function(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def gradients(
        self, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, needs: tuple[bool, bool, bool]
    ) -> Gradients:
        """Return the gradients, as :class:`Product` says; ``input`` is read for each of them.

        torch's one function for all three takes it in any case. Without a batch dimension, one of size 1 is added for
        the computation.
        """
        is_single = input.ndim < weight.ndim
        if is_single:
            grad = grad.unsqueeze(0)
            input = input.unsqueeze(0)
        input_grad, weight_grad, bias_grad = torch.ops.aten.convolution_backward(
            grad,
            input.to(grad.dtype),
            weight.to(grad.dtype),
            [weight.shape[0]],
            self.stride,
            self.padding,
            self.dilation,
            False,  # not transposed
            [0] * len(self.stride),
            self.groups,
            list(needs),
        )
        if is_single and input_grad is not None:
            input_grad = input_grad.squeeze(0)
        return input_grad, weight_grad, bias_grad


def product_of(module: nn.Module) -> Product | None:
    """The product that the class of a module computes, if the class computes nothing else; None for any other module.

    The quantized forward of every module but a Linear calls this at each call in training; a Linear's takes
    :class:`LinearProduct` itself. None also for a transposed convolution, and for a convolution whose padding is a word
    (``"same"``) or is not filled with zeros.
    """
    if is_conv1d_of_transformers(module) and type(module).__name__ == "Conv1D":
        return TransposedProduct()
    if isinstance(module, _ConvNd) and getattr(type(module), "_conv_forward", None) in _CONV_FORWARDS:
        return Convolution.of(module)
    return None


# ---------------------------------------------------------------------- memory for one weight after the other


class Scratch:
    """Lends memory for a tensor in float32, and keeps the memory that came back last for the next call.

    Memory that is too small for a tensor is replaced, so mostly the memory of the largest tensor is kept.

    A CPU's allocator returns blocks of some megabytes to the system and requests them again at once, with every page
    cleared. Between tensors that stay, it leaves gaps that no later tensor fits.

    All modules of a model in training share one (:class:`~lightning_obs.forward.quantized_module.Switch`), and borrow
    from it in each forward and backward. Several threads may borrow at once, and a block inside another block gets
    other memory. Copies and pickles start empty.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def __reduce__(self) -> Any:
        return Scratch, ()

    @contextmanager
    def lend(self, like: torch.Tensor) -> Iterator[torch.Tensor | None]:
        """For a ``with`` block, memory of the shape of ``like``, which may not be read after the block.

        Quantizers of weights enter it for a quantized weight, and in the backward for a gradient.

        Yields:
            A contiguous tensor with any values; None where ``like`` is not on a CPU or not in float32, or where it is
            of a subclass of Tensor (a DTensor, for instance), for which plain memory is no replacement.
        """
        if like.device.type != "cpu" or like.dtype != torch.float32 or type(like) not in (torch.Tensor, nn.Parameter):
            yield None
            return
        count = like.numel()
        try:
            memory = self._free.pop()
        except IndexError:
            memory = like.new_empty(count)
        if memory.numel() < count:
            memory = like.new_empty(count)
        try:
            yield memory[:count].view(like.shape)
        finally:
            self._free[:] = [memory]


# ---------------------------------------------------------------------- quantizers


@dataclass  # not frozen: torch 2.11 and older do not trace how a frozen one is made
class StaticQuantizer:
    """Quantizes and dequantizes a tensor by the quantization parameters that calibration wrote to a module.

    The quantized forward of a module makes one anew for each tensor at each call, so it has the parameters of that
    moment.

    Attributes:
        args: number format and strategy.
        zero_point: the module's zero point for the tensor; None: the format has none.
        global_scale: the module's global scale, which all scales of the tensor share; None: the format has none.
        codes: the integers of a weight that a rounding chose instead of the nearest ones; None: the nearest are taken.
        is_scale_learned: whether the scale is learned. Then gradients go through ``codes`` to the scale, else past
            them to the weight.
        observations: how many observations (tokens) an activation stacks, a factor of a learned scale's gradient.
    """

    args: QuantizationArgs
    zero_point: torch.Tensor | None
    global_scale: torch.Tensor | None
    codes: torch.Tensor | None
    is_scale_learned: bool
    observations: int = 1

    def __call__(self, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The tensor after quantize and dequantize, in its dtype, with gradients to it and to the scale."""
        if self.codes is not None:
            rounded = dequantize(self.codes, scale, self.zero_point, self.args, global_scale=self.global_scale)
            return rounded.to(value.dtype) if self.is_scale_learned else straight_through(value, rounded)
        return fake_quantize(
            value,
            scale,
            self.zero_point,
            self.args,
            global_scale=self.global_scale,
            observations=self.observations,
        )

    def without_graph(self, value: torch.Tensor, scale: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
        """The tensor after quantize and dequantize, without gradients; called by :class:`WeightQuantizer`.

        It may lie in ``memory``, of the tensor's shape, whose values are overwritten; None: memory is allocated.
        """
        if self.codes is not None:
            return self(value, scale)
        return fake_quantize_without_graph(
            value, scale, self.zero_point, self.args, global_scale=self.global_scale, memory=memory
        )

    def value_gradient(
        self, gradient: torch.Tensor, value: torch.Tensor, scale: torch.Tensor, memory: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the gradient of the tensor, from the gradient of the quantized tensor; called in the backward.

        It is zero where the tensor was clipped. Integers that a rounding chose pass the whole gradient.

        Args:
            gradient: the gradient of the quantized tensor; it may be overwritten.
            value: the tensor.
            scale: the scale of the tensor.
            memory: overwritten, in the shape of ``value``; None: memory is allocated.
        """
        if self.codes is not None:
            return gradient
        return clip_gradient_(
            gradient, value, scale, self.zero_point, self.args, global_scale=self.global_scale, memory=memory
        )


@dataclass(frozen=True)
class WeightQuantizer:
    """Quantizes and dequantizes a module's weight, in its own shape, in the backward as in the forward.

    ``quantized_module.weight_quantizer`` makes it at each forward in training; :func:`recomputed_product` calls it in
    that forward and its backward.

    Attributes:
        layout: the module whose class says how the weight is laid out as a matrix; None: the weight is a matrix.
        quantizer: the quantizer of that matrix.
        scratch: the lender of memory for the quantized weight and for gradients.
    """

    layout: nn.Module | None
    quantizer: StaticQuantizer
    scratch: Scratch

    def __call__(self, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The quantized weight in the dtype of the weight ``value``, with gradients to the weight and the ``scale``.

        The backward calls it where a scale is learned, or for second gradients.
        """
        return self._from_matrix(self.quantizer(self._to_matrix(value), scale), value.shape)

    @contextmanager
    def borrowed(self, value: torch.Tensor, scale: torch.Tensor) -> Iterator[torch.Tensor]:
        """The quantized weight for a ``with`` block, without gradients, in memory that is overwritten afterwards.

        Each forward enters it for the product, and the backward once more.
        """
        with self.scratch.lend(value) as memory:
            matrix = self.quantizer.without_graph(self._to_matrix(value), scale, self._memory(memory))
            yield self._from_matrix(matrix, value.shape)

    def value_gradient(self, gradient: torch.Tensor, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weight, from the gradient of the quantized weight, which may be overwritten.

        The backward calls it where no scale is learned.
        """
        with self.scratch.lend(value) as memory:
            matrix = self._to_matrix(value)
            gradient_matrix = self.quantizer.value_gradient(
                self._to_matrix(gradient), matrix, scale, self._memory(memory)
            )
            return self._from_matrix(gradient_matrix, value.shape)

    def _memory(self, memory: torch.Tensor | None) -> torch.Tensor | None:
        """Lent ``memory`` of the weight's shape as the matrix ``(R, C)``; None: no memory was lent."""
        return None if memory is None else self._to_matrix(memory)

    def _to_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """A tensor in the weight's shape as the matrix ``(R, C)``."""
        if self.layout is None:
            return weight
        matrix = to_matrix(self.layout, weight)
        assert matrix is not None  # weight_quantizer has asked
        return matrix

    def _from_matrix(self, matrix: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """A matrix ``(R, C)`` in the weight's shape."""
        weight = matrix if self.layout is None else from_matrix(self.layout, matrix, shape)
        return weight.contiguous()


# ---------------------------------------------------------------------- the product with a weight that is not kept


def recomputed_product(
    product: Product,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    quantize: WeightQuantizer,
    *,
    merge: Callable[[torch.Tensor], torch.Tensor] | None,
    parameters: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Compute ``product(input, quantize(weight, scale), bias)``; the quantized weight is not kept for the backward.

    Output, gradients and second gradients are bit for bit those of plain autograd, which keeps the quantized weight.

    The quantized forward of a Linear, a Conv1D of transformers or a convolution (:mod:`.quantized_module`) calls it
    while autograd records.

    Args:
        product: what the module computes.
        input: the module's input, quantized already where the scheme quantizes inputs.
        weight: the weight in the module's own shape, adapters merged. It is not kept for the backward.
        bias: the module's bias, or None.
        scale: the scale of the weight.
        quantize: gives the quantized weight in the shape and dtype of ``weight``.
        merge: adds the adapters to the first of ``parameters``, which gives ``weight``. None: there are no adapters,
            and that parameter is the weight.
        parameters: the module's weight, and the adapters' parameters. One that is changed in place before the backward
            is an error there, as in plain training.
    """
    output: torch.Tensor = _RecomputedProduct.apply(product, input, weight, bias, scale, quantize, merge, *parameters)
    return output


class _RecomputedProduct(torch.autograd.Function):
    """The autograd function behind :func:`recomputed_product`, which documents the arguments of ``forward``.

    It is applied in training where a module computes a product whose weight is quantized in each call; not under
    torch.compile, nor where :func:`product_of` knows no product of the module or the quantized weight is kept.

    torch calls ``forward`` and ``setup_context`` in the forward, and ``backward`` in the backward. ``setup_context``
    keeps the input (if the backward reads it), the scale and the parameters; ``backward`` quantizes the weight again.
    """

    @staticmethod
    def forward(
        product: Product,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scale: torch.Tensor,
        quantize: WeightQuantizer,
        merge: Callable[[torch.Tensor], torch.Tensor] | None,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        with quantize.borrowed(weight, scale) as quantized:
            return product(input, quantized, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        product, input, _, bias, scale, quantize, merge, *parameters = inputs
        ctx.product = product
        ctx.quantize = quantize
        ctx.merge = merge
        ctx.input_dtype = input.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        _, _, needs_weight, _, needs_scale, *_ = ctx.needs_input_grad
        kept_input = input if needs_weight or needs_scale or product.reads_input else None
        ctx.save_for_backward(kept_input, scale, *parameters)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, scale, *parameters = ctx.saved_tensors
        _, needs_input, needs_weight, needs_bias, needs_scale, *_ = ctx.needs_input_grad
        needs_graph = needs_scale or torch.is_grad_enabled()  # the latter for second gradients
        with torch.set_grad_enabled(needs_graph):  # a weight merged without gradients would not require one
            weight = parameters[0] if ctx.merge is None else ctx.merge(parameters[0])
            if needs_graph:
                # Views, so that gradients stop here and reach no hook of a parameter.
                weight = weight.view_as(weight)
                scale = scale.view_as(scale)
                block: Any = nullcontext(ctx.quantize(weight, scale))
            else:
                block = ctx.quantize.borrowed(weight, scale)
        weight_grad = scale_grad = None
        with block as quantized:
            needs = needs_input, needs_weight or needs_scale, needs_bias
            input_grad, quantized_grad, bias_grad = ctx.product.gradients(grad, input, quantized, needs)
            if quantized_grad is not None:  # autocast has computed in the dtype of the output
                quantized_grad = quantized_grad.to(weight.dtype)
            if quantized_grad is not None and needs_graph:
                weight_grad, scale_grad = _gradients(quantized, weight, scale, quantized_grad)
        if quantized_grad is not None and not needs_graph:
            weight_grad = ctx.quantize.value_gradient(quantized_grad, weight, scale)
        if input_grad is not None:
            input_grad = input_grad.to(ctx.input_dtype)
        if bias_grad is not None:
            bias_grad = bias_grad.to(ctx.bias_dtype)
        return None, input_grad, weight_grad, bias_grad, scale_grad, None, None, *(None for _ in parameters)


def _gradients(
    quantized: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, quantized_grad: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of a weight and its scale, from the gradient of the quantized weight.

    Called in a backward that has a graph from the weight and scale to the quantized weight. None in place of the
    gradient of a tensor that does not require one.
    """
    sources = [source for source in (weight, scale) if source.requires_grad]
    gradients = torch.autograd.grad(
        quantized, sources, quantized_grad, create_graph=torch.is_grad_enabled(), allow_unused=True
    )
    by_source = dict(zip(map(id, sources), gradients, strict=True))
    return by_source.get(id(weight)), by_source.get(id(scale))
