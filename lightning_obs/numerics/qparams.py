"""Ranges become quantization parameters.

The arithmetic is compressed-tensors' own (`calculate_qparams`, `generate_gparam`), so that a scale found here is
bit for bit the scale that its kernels and the rest of its ecosystem would have computed from the same range.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam


class QParamsDict(TypedDict, total=False):
    """Quantization parameters of one observed tensor.

    ``scale`` and ``zero_point`` have the shape that the strategy gives (see
    :func:`~lightning_obs.numerics.reshape.flatten_for_calibration`); ``global_scale`` is ``(1,)`` in float32 for
    tensor_group and None otherwise.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor
    global_scale: torch.Tensor | None


def compute_global_scale(
    ranges: Iterable[tuple[torch.Tensor, torch.Tensor]], args: QuantizationArgs
) -> torch.Tensor | None:
    """Global scale of a fused set: from the largest magnitude among all members' ranges.

    Args:
        ranges: (min, max) of every member of the group, any shapes.
        args: None is returned unless its strategy is tensor_group.
    """
    if args.strategy != QuantizationStrategy.TENSOR_GROUP:
        return None
    magnitudes = [torch.maximum(-low.min(), high.max()) for low, high in ranges]
    absmax = torch.stack(magnitudes).max().reshape(1)
    return generate_gparam(-absmax, absmax)


def power_of_two(global_scale: torch.Tensor) -> torch.Tensor:
    """The largest power of two that is not larger."""
    return torch.exp2(torch.log2(global_scale).floor())


def compute_qparams(
    min_vals: torch.Tensor,
    max_vals: torch.Tensor,
    args: QuantizationArgs,
    global_scale: torch.Tensor | None = None,
    signed: bool = False,
) -> QParamsDict:
    """Scale and zero point of a range.

    Args:
        min_vals: smallest values ``(*qparam_shape,)``; zero is included if it was outside.
        max_vals: largest values ``(*qparam_shape,)``.
        args: bits, type, symmetry, scale dtype.
        global_scale: ``(1,)``, only for tensor_group.
        signed: see :func:`signed_scale`.

    Returns:
        ``scale`` in the dtype of the range (an all-zero range gives that dtype's eps, never 0), ``zero_point`` in
        ``args.zp_dtype``, ``global_scale`` as given.
    """
    scale, zero_point = calculate_qparams(min_vals, max_vals, args, global_scale=global_scale)
    if signed:
        scale = signed_scale(min_vals, max_vals, args)
    return {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}


def signed_scale(low: torch.Tensor, high: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """The scale of a symmetric integer format whose sign gives the lowest code to the end that is farther from zero.

    The lowest code ``-2 ** (bits - 1)`` has no counterpart, so a positive scale leaves the largest positive value half
    a step beyond the last code. A negative scale turns the codes around. Of equal ends the scale is positive, and an
    all-zero range gives the dtype's eps.

    >>> signed_scale(torch.tensor([-1.0, -2.0]), torch.tensor([2.0, 1.0]), QuantizationArgs(num_bits=4))
    tensor([-0.2500,  0.2500])
    """
    below, above = -low.clamp(max=0), high.clamp(min=0)
    scale = torch.where(above > below, -above, below) / 2 ** (args.num_bits - 1)
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def can_be_signed(base_name: str, args: QuantizationArgs) -> bool:
    """Whether scales of a tensor may be negative: of weights in symmetric integer formats, stored as they are."""
    is_integer = args.type == QuantizationType.INT and args.symmetric and args.scale_dtype is None
    return base_name == "weight" and bool(is_integer)
