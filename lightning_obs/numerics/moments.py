"""Mean and variance of data that come in batches and on ranks; sums of squares and of products of channels.

Mean and variance are kept as number, sum and sum of squares in float64, because batches and ranks are combined by
addition: Chan's combination of (number, mean, squared deviations) needs both means at once and is not a sum. The price
is cancellation: a relative error of about ``1e-16 * (mean / std) ** 2`` in the variance. The square of a float32 is
exact in float64, and the variance of data whose mean is a thousand times their deviation still has ten digits.

Reference:
    Chan, Golub, LeVeque, Algorithms for Computing the Sample Variance, 1983.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_obs.numerics import on_gpu
from lightning_obs.numerics.kernels import launch
from lightning_obs.numerics.qparams import exact_products, tile_size

# Elements that a CPU adds up at once, in float64: 512 KiB.
_TILE = 1 << 16


class Moments(NamedTuple):
    """``number`` (values per scale) is ``(1,)`` in int64, ``sums`` and ``squares`` are ``(*Q,)`` in float64."""

    number: torch.Tensor
    sums: torch.Tensor
    squares: torch.Tensor


def measure_moments(observed: torch.Tensor) -> Moments:
    """Moments of ``(N, *Q, G)`` over the first and the last dimension; the normal observer's measurement of a batch."""
    flat = observed.flatten(1, -2)
    shape = observed.shape[1:-1]
    values_per_scale = flat.shape[0] * flat.shape[2]
    number = torch.full((1,), values_per_scale, device=observed.device)  # no upload
    measure = on_gpu.moments if on_gpu.can_run(flat) else _moments_plainly
    sums, squares = measure(flat)
    sums = sums.reshape(shape)
    squares = squares.reshape(shape)
    return Moments(number, sums, squares)


def _moments_plainly(observed: torch.Tensor) -> torch.Tensor:
    """As :func:`~lightning_obs.numerics.on_gpu.moments`, operation by operation: ``(2, Q)`` in float64."""
    by_scale = observed.transpose(0, 1)
    values = by_scale.flatten(1)
    scales = len(values)
    sums = torch.zeros(2, scales, dtype=torch.float64, device=observed.device)
    columns = tile_size(observed.device, _TILE)
    height = max(1, columns // values.shape[1])
    for start in range(0, scales, height):
        stop = start + height
        rows = slice(start, stop)
        for tile in values[rows].split(columns, dim=1):
            wide = tile.double()
            sums[0, rows] += wide.sum(1)
            wide.square_()
            sums[1, rows] += wide.sum(1)
    return sums


def mean_and_std(moments: Moments) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and sample standard deviation (n - 1; 0 for a single value), ``(*Q,)`` each in float64."""
    number, sums, squares = moments
    mean = sums / number
    degrees_of_freedom = (number - 1).clamp(min=1)
    squares_of_mean = sums * mean
    squared_deviations = squares - squares_of_mean
    variance = squared_deviations / degrees_of_freedom
    variance = variance.clamp(min=0)
    std = variance.sqrt()
    return mean, std


def channel_squares(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of squares per channel of ``(..., C)``, ``(C,)`` in float64, and the number of rows, ``(1,)`` in int64.

    The importance of input channels for the imatrix observers, which call it for each batch. Tiles are added up in
    float64, on an accelerator in float32.
    """
    channels = value.shape[-1]
    rows = value.reshape(-1, channels)
    number = _count_rows(rows)
    if launch.can_read(rows) and rows.stride(1) == 1:
        sums = launch.channel_squares(rows)
        return sums, number
    sums = torch.zeros(channels, dtype=torch.float64, device=rows.device)
    dtype = torch.float64 if rows.device.type == "cpu" else torch.float32
    height = tile_size(rows.device, _TILE) // max(1, channels)
    height = max(1, height)
    for tile in rows.split(height):
        wide = tile.to(dtype)
        squares = wide.square()
        sums += squares.sum(0)
    return sums, number


def _count_rows(rows: torch.Tensor) -> torch.Tensor:
    """The number of rows, ``(1,)`` in int64, made on their device: uploading it would make the host wait."""
    return torch.full((1,), len(rows), device=rows.device)


def channel_products(value: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The Hessian of each group of channels, summed over a batch, and the number of rows, ``(1,)``.

    Called by the Hessian observers for each batch that they observe.

    Args:
        value: ``(..., C)``.
        width: channels of a group.

    Returns:
        The sums of ``x x^T`` over rows x, ``(C/width, width, width)`` in float32; where ``width`` does not divide C,
        the last of them ends in zeros. And the number of rows, in int64.
    """
    with torch.autocast(value.device.type, enabled=False), exact_products():  # else in half precision, or in TF32
        channels = value.shape[-1]
        rows = value.reshape(-1, channels).float()
        missing_channels = -channels % width
        rows = torch.nn.functional.pad(rows, (0, missing_channels))
        groups = rows.unflatten(1, (-1, width))
        groups = groups.transpose(0, 1)
        products = torch.bmm(groups.mT, groups)
    return products, _count_rows(rows)


def cross_products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The sum of ``x y^T`` over rows x of ``left`` and the same rows y of ``right``, ``(..., C)`` each.

    Returns:
        ``(C, C)`` in float32.
    """
    with torch.autocast(left.device.type, enabled=False), exact_products():
        left_rows = left.reshape(-1, left.shape[-1]).float()
        right_rows = right.reshape(-1, right.shape[-1]).float()
        return left_rows.mT @ right_rows
