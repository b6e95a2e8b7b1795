"""A rounded weight whose scales are learned: each step moves them against the sign of a gradient.

The numbers of the weight stay as the rounding left them, so the dequantized weight is linear in each scale, and the
gradient of a scale is a sum of products. The sign of the gradient alone is used: the logarithms of all scales move by
one length a step, and a learning rate that decays to zero bounds how far any of them goes.

No graph is kept of any of it: the caller computes the gradient of the dequantized weight.
"""

from __future__ import annotations

import math

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy

from lightning_obs.numerics.fake_quantize import dequantize, elementwise, learned_scale, sum_per_scale
from lightning_obs.numerics.qparams import QParamsDict

# A learned scale is at most so many times larger, or smaller, than the calibrated one.
_LARGEST_FACTOR = 2.0


def can_learn_scale(args: QuantizationArgs) -> bool:
    """Whether small steps can move a weight's scale.

    Not a power of two (MX), whose smallest step doubles it; nor a scale per tensor, which fused modules may share.
    """
    return args.scale_dtype != torch.uint8 and args.strategy != QuantizationStrategy.TENSOR


class LearnedWeight:
    """A weight while its scales are learned. ``calibration/block_learning.py`` has one for each weight of a block.

    Args:
        codes: ``(R, C)``, as :func:`~lightning_obs.numerics.rounding.round_by_hessian` gives them; they stay.
        qparams: as compressed-tensors stores them for ``args``; not changed.
        args: number format and strategy, of a scale that can be learned (:func:`can_learn_scale`).

    Reference:
        Cheng et al., Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs, 2023,
        arXiv:2309.05516 (steps against signs of gradients, block by block; there of the numbers, too).

    >>> args = QuantizationArgs(num_bits=4, strategy="channel")
    >>> learned = LearnedWeight(torch.tensor([[1, 2]]), {"scale": torch.tensor([[1.0]])}, args)
    >>> learned.step(torch.tensor([[1.0, 1.0]]), rate=0.1)
    >>> learned.dequantized()
    tensor([[0.9048, 1.8097]])
    """

    def __init__(self, codes: torch.Tensor, qparams: QParamsDict, args: QuantizationArgs) -> None:
        self._args = args
        self._codes = codes
        self._calibrated = qparams["scale"]
        self._zero_point = qparams.get("zero_point")
        self._global_scale = qparams.get("global_scale")
        self._log_factor = torch.zeros_like(self._calibrated, dtype=torch.float32)

    @torch.no_grad()
    def scale(self) -> torch.Tensor:
        """The scale now, as it is stored: in the shape, dtype and sign of the calibrated one."""
        stored = self._args.scale_dtype
        if self._args.strategy == QuantizationStrategy.TENSOR_GROUP:
            stored = torch.float8_e4m3fn
        return learned_scale(self._calibrated, self._log_factor, stored)

    @torch.no_grad()
    def dequantized(self) -> torch.Tensor:
        """The weight ``(R, C)`` that the numbers stand for now, in float32."""
        return dequantize(
            self._codes.float(), self.scale(), self._zero_point, self._args, global_scale=self._global_scale
        )

    @torch.no_grad()
    def step(self, gradient: torch.Tensor, rate: float) -> None:
        """Move the scales against their gradients.

        Args:
            gradient: ``(R, C)``, of what is to become small, at :meth:`dequantized`.
            rate: by how much the logarithm of each scale moves.
        """
        steps = self._codes.float()
        if self._zero_point is not None:
            steps -= elementwise(self._zero_point.float(), steps, self._args)
        gradient_of_scale = sum_per_scale(steps.mul_(gradient), self._calibrated, self._args)
        direction = gradient_of_scale.mul_(self._calibrated.float()).sign_()
        largest = math.log(_LARGEST_FACTOR)
        self._log_factor.sub_(direction, alpha=rate).clamp_(-largest, largest)
