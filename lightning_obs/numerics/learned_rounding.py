"""A weight whose numbers and scales are learned: each step moves them against the sign of a gradient.

Rounding to the nearest number has no gradient. So the weight in steps of its scale gets an offset before it is rounded,
and the gradient of the rounded weight passes straight through to the offset. The sign of the gradient alone is used:
offsets all move by one length a step, so weights that are close to the middle of two numbers change theirs, and a
learning rate that decays to zero bounds how far any weight goes.

No graph is kept of any of it: the caller computes the gradient of the dequantized weight, in which offset and scale are
linear as long as no number changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy

from lightning_obs.numerics.fake_quantize import dequantize, elementwise, learned_scale, sum_per_scale
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.qparams import QParamsDict

# The farthest that a weight may lie from its first number, as a share of the way to the next: 0.5 is the middle.
_WITHIN = 0.45
# An offset moves a number to a neighbour at the farthest.
_LARGEST_OFFSET = 0.5
# A learned scale is at most so many times larger, or smaller, than the calibrated one.
_LARGEST_FACTOR = 2.0


@dataclass(frozen=True)
class LearnedNumbers:
    """The numbers of a weight's format, and the scales, after some step.

    Attributes:
        codes: ``(R, C)``, as :func:`~lightning_obs.numerics.rounding.round_by_hessian` gives them.
        scale: in the shape, dtype and sign of the calibrated one.
    """

    codes: torch.Tensor
    scale: torch.Tensor


def can_learn_scale(args: QuantizationArgs) -> bool:
    """Whether small steps can move a weight's scale.

    Not a power of two (MX), whose smallest step doubles it; nor a scale per tensor, which fused modules may share.
    """
    return args.scale_dtype != torch.uint8 and args.strategy != QuantizationStrategy.TENSOR


class LearnedWeight:
    """One weight while its rounding is learned. ``calibration/block_learning.py`` has one for each weight of a block.

    Args:
        weight: ``(R, C)`` in full precision; it is not changed or kept.
        qparams: as compressed-tensors stores them for ``args``; not changed.
        args: number format and strategy.
        codes: the numbers to start from, ``(R, C)``; None: the nearest.
        learns_scale: whether scales move, where they can (:func:`can_learn_scale`).

    Reference:
        Cheng et al., Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs, 2023,
        arXiv:2309.05516, equations 3 to 5; Nagel et al., Up or Down? Adaptive Rounding for Post-Training Quantization,
        2020, arXiv:2004.10568 (rounding learned by layer).

    >>> args = QuantizationArgs(num_bits=4, strategy="channel")
    >>> learned = LearnedWeight(torch.tensor([[0.4, 1.2]]), {"scale": torch.tensor([[1.0]])}, args, learns_scale=False)
    >>> learned.numbers().codes
    tensor([[0, 1]], dtype=torch.int8)
    >>> learned.step(torch.tensor([[-1.0, 1.0]]), rounding_rate=0.2, scale_rate=0.0)
    >>> learned.numbers().codes
    tensor([[1, 1]], dtype=torch.int8)
    """

    def __init__(
        self,
        weight: torch.Tensor,
        qparams: QParamsDict,
        args: QuantizationArgs,
        codes: torch.Tensor | None = None,
        *,
        learns_scale: bool = True,
    ) -> None:
        self._args = args
        self._grid = NumberGrid.of(args)
        self._calibrated = qparams["scale"]
        self._zero_point = qparams.get("zero_point")
        self._global_scale = qparams.get("global_scale")
        self._learns_scale = learns_scale and can_learn_scale(args)
        self._log_factor = torch.zeros_like(self._calibrated, dtype=torch.float32)
        step = elementwise(self._step(), weight, args)
        exact = weight.float() / step
        if self._zero_point is not None:
            exact += elementwise(self._zero_point.float(), weight, args)
        first = self._grid.round(exact.clone()) if codes is None else codes.float()
        #: of each number to its neighbour on the side of zero
        self._gap = self._grid.gap(first)
        farthest = _WITHIN * self._gap
        self._start = torch.clamp(exact, first - farthest, first + farthest)
        self._offset = torch.zeros_like(self._start)

    @torch.no_grad()
    def numbers(self) -> LearnedNumbers:
        """The numbers and scales now."""
        number = self._grid.number
        codes = self._levels().to(torch.int8 if number is None else number.codes)
        return LearnedNumbers(codes, self._scale())

    @torch.no_grad()
    def dequantized(self) -> torch.Tensor:
        """The weight ``(R, C)`` that they stand for, in float32."""
        return dequantize(self._levels(), self._scale(), self._zero_point, self._args, global_scale=self._global_scale)

    @torch.no_grad()
    def step(self, gradient: torch.Tensor, rounding_rate: float, scale_rate: float) -> None:
        """Move the offsets and the scales against their gradients.

        Args:
            gradient: ``(R, C)``, of what is to become small, at :meth:`dequantized`; it may be overwritten.
            rounding_rate: by how much each offset moves, as a share of the distance of two numbers.
            scale_rate: by how much the logarithm of each scale moves.
        """
        if self._learns_scale and scale_rate:
            steps = self._levels()
            if self._zero_point is not None:
                steps -= elementwise(self._zero_point.float(), steps, self._args)
            gradient_of_scale = sum_per_scale(steps.mul_(gradient), self._calibrated, self._args)
            direction = gradient_of_scale.mul_(self._calibrated.float()).sign_()
            largest = math.log(_LARGEST_FACTOR)
            self._log_factor.sub_(direction, alpha=scale_rate).clamp_(-largest, largest)
        sign_of_scale = elementwise(self._calibrated.float().sign(), gradient, self._args)
        direction = gradient.sign_().mul_(sign_of_scale).mul_(self._gap)
        self._offset.sub_(direction, alpha=rounding_rate)
        bound = _LARGEST_OFFSET * self._gap
        torch.clamp(self._offset, -bound, bound, out=self._offset)

    def _levels(self) -> torch.Tensor:
        """The numbers of the format, ``(R, C)`` in float32, a new tensor."""
        return self._grid.round(self._start + self._offset)

    def _scale(self) -> torch.Tensor:
        """The scale now, as it is stored."""
        if not self._learns_scale:
            return self._calibrated
        stored = self._args.scale_dtype
        if self._args.strategy == QuantizationStrategy.TENSOR_GROUP:
            stored = torch.float8_e4m3fn
        return learned_scale(self._calibrated, self._log_factor, stored)

    def _step(self) -> torch.Tensor:
        """The calibrated distance of two neighbouring integers, one for each scale, in float32."""
        scale = self._calibrated.float()
        return scale if self._global_scale is None else scale / self._global_scale
