"""Ranges become quantization parameters.

The arithmetic is compressed-tensors' own (`calculate_qparams`, `generate_gparam`), so that a scale found here is
bit for bit the scale that its kernels and the rest of its ecosystem would have computed from the same range.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
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
    """Global scale of a fused group: from the largest magnitude among all members' ranges.

    Args:
        ranges: (min, max) of every member of the group, any shapes.
        args: None is returned unless its strategy is tensor_group.
    """
    if args.strategy != QuantizationStrategy.TENSOR_GROUP:
        return None
    magnitudes = [torch.maximum(-low.min(), high.max()) for low, high in ranges]
    absmax = torch.stack(magnitudes).max().reshape(1)
    return generate_gparam(-absmax, absmax)


def compute_qparams(
    min_vals: torch.Tensor,
    max_vals: torch.Tensor,
    args: QuantizationArgs,
    global_scale: torch.Tensor | None = None,
) -> QParamsDict:
    """Scale and zero point of a range.

    Args:
        min_vals: smallest values ``(*qparam_shape,)``; zero is included if it was outside.
        max_vals: largest values ``(*qparam_shape,)``.
        args: bits, type, symmetry, scale dtype.
        global_scale: ``(1,)``, only for tensor_group.

    Returns:
        ``scale`` in the dtype of the range (an all-zero range gives that dtype's eps, never 0), ``zero_point`` in
        ``args.zp_dtype``, ``global_scale`` as given.
    """
    scale, zero_point = calculate_qparams(min_vals, max_vals, args, global_scale=global_scale)
    return {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}
