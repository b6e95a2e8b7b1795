"""What modules compute from input, weight and bias, with the gradients that autograd would compute, bit for bit.

:mod:`.recomputed_product` runs them where a weight is quantized in the backward once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from lightning_obs.model.kinds import is_conv1d_of_transformers

#: of input, weight and bias; None for one that is not asked for
Gradients: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

_CONV_FORWARDS = (nn.Conv1d._conv_forward, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward)


class Product(Protocol):
    """An operation on an input, a weight and a bias.

    Attributes:
        reads_input: whether a backward that computes no gradient of the weight needs the input, too.
    """

    reads_input: bool

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The output."""

    def gradients(
        self, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, needs: tuple[bool, bool, bool]
    ) -> Gradients:
        """The gradients of input, weight and bias that are needed, in the dtype of the output's: ``grad``."""


@dataclass(frozen=True)
class LinearProduct:
    """``F.linear``: an input ``(..., C)``, a weight ``(R, C)``."""

    reads_input = False

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The output ``(..., R)``."""
        return F.linear(input, weight, bias)

    def gradients(
        self, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, needs: tuple[bool, bool, bool]
    ) -> Gradients:
        """As of :class:`Product`; ``input`` is read for the weight's alone."""
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
    """The product of transformers' ``Conv1D``: an input ``(..., C)``, a weight ``(C, R)``."""

    reads_input = False

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The output ``(..., R)``."""
        assert bias is not None  # Conv1D always has one
        rows = input.view(-1, input.shape[-1])
        return torch.addmm(bias, rows, weight).view(*input.shape[:-1], weight.shape[1])

    def gradients(
        self, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, needs: tuple[bool, bool, bool]
    ) -> Gradients:
        """As of :class:`Product`; ``input`` is read for the weight's alone."""
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

    Attributes:
        function: of these.
        stride, padding, dilation, groups: its arguments.
    """

    function: Callable[..., torch.Tensor]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    reads_input = True

    @classmethod
    def of(cls, module: _ConvNd) -> Convolution | None:
        """Of a module of torch; None where it pads by more than zeros on both sides alike."""
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
        """The output ``(N, R, ...)`` or ``(R, ...)``."""
        return self.function(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def gradients(
        self, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, needs: tuple[bool, bool, bool]
    ) -> Gradients:
        """As of :class:`Product`."""
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
    """The product that the class of a module computes, if it computes nothing else; None for any other module.

    The quantized forward asks for it. None also for a transposed convolution, and for one that pads otherwise than with
    zeros, or by a word.
    """
    if type(module).forward is nn.Linear.forward:
        return LinearProduct()
    if is_conv1d_of_transformers(module) and type(module).__name__ == "Conv1D":
        return TransposedProduct()
    if isinstance(module, _ConvNd) and getattr(type(module), "_conv_forward", None) in _CONV_FORWARDS:
        return Convolution.of(module)
    return None
