"""A module that quantizes its weight once more in the backward, so that no quantized weight waits there.

Autograd would keep one for each Linear and convolution of a model, in the size of the parameters, and the mask of
clipped values. Both follow from the weight and its scale, which are in memory anyway.

torch's activation checkpointing would compute them again, too, but it also keeps the input of a Linear whose weight is
frozen, which plain training does not. Hooks of saved tensors would take the place of the user's: of nested ones torch
calls the innermost alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from lightning_obs.forward.products import Product


class Quantizer(Protocol):
    """From a weight and its scale, the weight to compute with; differentiable, and the same each time."""

    def __call__(self, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The quantized weight, in the dtype of ``value``."""

    def borrowed(self, value: torch.Tensor, scale: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """The quantized weight for a ``with`` block, without gradients; its memory is another's afterwards."""

    def value_gradient(self, gradient: torch.Tensor, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The gradient of ``value`` from that of the quantized one, which may be changed in place."""


def recomputed_product(
    product: Product,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    quantize: Quantizer,
    *,
    merge: Callable[[torch.Tensor], torch.Tensor],
    parameters: Sequence[torch.Tensor],
) -> torch.Tensor:
    """``product(input, quantize(weight, scale), bias)``, with the same bits and gradients, also second ones.

    The quantized forward of a Linear or a convolution (:mod:`.quantized_forward`) calls it where autograd records.

    Args:
        product: what the module computes.
        input: quantized if it is to be.
        weight: in the module's own shape, adapters merged. It is not kept for the backward.
        bias: or None.
        scale: of the weight.
        quantize: gives the quantized weight in the shape and dtype of ``weight``.
        merge: gives ``weight`` from the first of ``parameters``: adds the adapters.
        parameters: the module's weight, and the adapters' parameters. One that is changed in place before the backward
            is an error there, as in plain training.
    """
    output: torch.Tensor = _RecomputedProduct.apply(product, input, weight, bias, scale, quantize, merge, *parameters)
    return output


class _RecomputedProduct(torch.autograd.Function):
    """See :func:`recomputed_product`."""

    @staticmethod
    def forward(
        product: Product,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scale: torch.Tensor,
        quantize: Quantizer,
        merge: Callable[[torch.Tensor], torch.Tensor],
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
        weight = ctx.merge(parameters[0])
        needs_graph = needs_scale or torch.is_grad_enabled()  # the latter for second gradients
        if needs_graph:
            with torch.enable_grad():
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
    """The gradients of a weight and its scale from that of the quantized weight; None for one that needs none."""
    sources = [source for source in (weight, scale) if source.requires_grad]
    gradients = torch.autograd.grad(
        quantized, sources, quantized_grad, create_graph=torch.is_grad_enabled(), allow_unused=True
    )
    by_source = dict(zip(map(id, sources), gradients, strict=True))
    return by_source.get(id(weight)), by_source.get(id(scale))
