"""Sums from which observers compute means, variances and Hessians of data that come in batches and on ranks.

Observers call these functions for each batch: ``normal_observer`` for mean and variance (:func:`measure_moments`), the
imatrix observers for the squares of input channels (:func:`channel_squares`), the Hessian observers and rounding for
the products of input channels (:func:`channel_products`, :func:`cross_products`).

Mean and variance are kept as the number of values, their sum and the sum of their squares in float64, because batches
and ranks are combined by addition. Chan's formula for combining (number, mean, squared deviations) is no sum: it needs
both means at once. The price is cancellation: a relative error of about ``1e-16 * (mean / std) ** 2`` in the variance.
The square of a float32 is exact in float64, and the variance of data whose mean is a thousand times their deviation
still has ten digits.

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
    """The moments of the values of each scale: their number, sum and sum of squares.

    :func:`measure_moments` makes one for each batch; ``normal_observer`` adds them up and passes the sums to
    :func:`mean_and_std`. ``number`` (values per scale) is ``(1,)`` in int64; ``sums`` and ``squares`` are ``(*Q,)`` in
    float64.
    """

    number: torch.Tensor
    sums: torch.Tensor
    squares: torch.Tensor


def measure_moments(observed: torch.Tensor) -> Moments:
    """The moments of ``(N, *Q, G)`` over the first and the last dimension.

    ``normal_observer`` calls it for each batch.
    """
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
    """Sum and sum of squares of ``(N, Q, G)`` as ``(2, Q)`` in float64, by torch's operations, tile by tile.

    It gives what :func:`~lightning_obs.numerics.on_gpu.moments` gives, on devices without the compiled loops.
    """
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
    """Mean and sample standard deviation (n - 1; 0 for a single value), ``(*Q,)`` each in float64.

    Called by ``normal_observer`` when qparams are computed.
    """
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
    """The sum of squares of each channel of ``(..., C)``, ``(C,)`` in float64, and the number of rows, ``(1,)``.

    The imatrix observers call it for each batch of inputs; they weigh the columns of a weight by the mean squares.
    Within a tile, squares are added in float64 on a CPU and in float32 on an accelerator; tiles are added in float64.
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
    """The number of rows, ``(1,)`` in int64, created on their device, because an upload would make the host wait."""
    return torch.full((1,), len(rows), device=rows.device)


def channel_products(value: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The Hessian of each group of channels, summed over the rows of a batch, and the number of rows.

    The Hessian observers call it for each batch of inputs.

    Args:
        value: ``(..., C)``.
        width: number of channels of a group.

    Returns:
        The sums of ``x x^T`` over rows x, ``(C / width, width, width)`` in float32. Where ``width`` does not divide C,
        there is one more group, padded with zeros. Then the number of rows, ``(1,)`` in int64.
    """
    with torch.autocast(value.device.type, enabled=False), exact_products():  # neither half precision nor TF32
        channels = value.shape[-1]
        rows = value.reshape(-1, channels).float()
        missing_channels = -channels % width
        rows = torch.nn.functional.pad(rows, (0, missing_channels))
        groups = rows.unflatten(1, (-1, width))
        groups = groups.transpose(0, 1)
        products = torch.bmm(groups.mT, groups)
    return products, _count_rows(rows)


def cross_products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The sum of ``x y^T`` over rows x of ``left`` and the corresponding rows y of ``right``, ``(..., C)`` each.

    ``calibration/input_errors.py`` calls it for each batch that is observed in full precision and quantized, for a
    rounding on quantized inputs.

    Returns:
        ``(C, C)`` in float32.
    """
    with torch.autocast(left.device.type, enabled=False), exact_products():
        left_rows = left.reshape(-1, left.shape[-1]).float()
        right_rows = right.reshape(-1, right.shape[-1]).float()
        return left_rows.mT @ right_rows
