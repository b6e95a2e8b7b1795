"""Mean and variance of data that come in parts.

Kept as number, sum and sum of squares in float64, because batches and ranks are combined by addition: Chan's
combination of (number, mean, squared deviations) needs both means at once and is not a sum. It costs cancellation: a
relative error of about ``1e-16 * (mean / std) ** 2`` in the variance. The square of a float32 is exact in float64, and
the variance of data whose mean is a thousand times their deviation still has ten digits.

Reference:
    Chan, Golub, LeVeque, Algorithms for Computing the Sample Variance, 1983.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_obs.numerics import on_gpu
from lightning_obs.numerics.kernels import launch
from lightning_obs.numerics.qparams import exact_products, tile_size

_TILE = 1 << 16  # elements in float64 at once on a CPU: 512 KiB


class Moments(NamedTuple):
    """``number`` (values per scale) is ``(1,)`` in int64, ``sums`` and ``squares`` are ``(*Q,)`` in float64."""

    number: torch.Tensor
    sums: torch.Tensor
    squares: torch.Tensor


def measure_moments(observed: torch.Tensor) -> Moments:
    """Moments of ``(N, *Q, G)`` over the first and the last dimension."""
    flat = observed.flatten(1, -2)
    number = torch.full((1,), flat.shape[0] * flat.shape[2], device=observed.device)  # no upload
    sums, squares = on_gpu.moments(flat) if on_gpu.can_run(flat) else _moments_plainly(flat)
    return Moments(number, sums.reshape(observed.shape[1:-1]), squares.reshape(observed.shape[1:-1]))


def _moments_plainly(observed: torch.Tensor) -> torch.Tensor:
    """As :func:`~lightning_obs.numerics.on_gpu.moments`, operation by operation."""
    values = observed.transpose(0, 1).flatten(1)
    found = torch.zeros(2, len(values), dtype=torch.float64, device=observed.device)
    at_once = tile_size(observed.device, _TILE)
    height = max(1, at_once // values.shape[1])
    for start in range(0, len(values), height):
        own = slice(start, start + height)
        for tile in values[own].split(at_once, dim=1):
            wide = tile.double()
            found[0, own] += wide.sum(1)
            found[1, own] += wide.square_().sum(1)
    return found


def mean_and_std(moments: Moments) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and sample standard deviation (n - 1; 0 for a single value), ``(*Q,)`` each in float64."""
    number, sums, squares = moments
    mean = sums / number
    variance = (squares - sums * mean) / (number - 1).clamp(min=1)
    return mean, variance.clamp(min=0).sqrt()


def channel_squares(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of squares per channel of ``(..., C)``, ``(C,)`` in float64, and the number of rows, ``(1,)`` in int64.

    In float64; on an accelerator, a tile is added up in float32.
    """
    rows = value.reshape(-1, value.shape[-1])
    number = torch.full((1,), len(rows), device=value.device)  # no upload
    if launch.can_read(rows) and rows.stride(1) == 1:
        return launch.channel_squares(rows), number
    sums = torch.zeros(rows.shape[1], dtype=torch.float64, device=value.device)
    dtype = torch.float64 if rows.device.type == "cpu" else torch.float32
    for tile in rows.split(max(1, tile_size(rows.device, _TILE) // max(1, rows.shape[1]))):
        sums += tile.to(dtype).square().sum(0)
    return sums, number


def channel_products(value: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of ``x x^T`` over the rows x of ``(..., C)``, of ``width`` channels each, and the number of rows, ``(1,)``.

    ``(T, width, width)`` in float32; where ``width`` does not divide C, the last of them ends in zeros.
    """
    with torch.autocast(value.device.type, enabled=False), exact_products():  # else in half precision, or in TF32
        rows = value.reshape(-1, value.shape[-1]).float()
        rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % width))
        parts = rows.unflatten(1, (-1, width)).transpose(0, 1)
        products = torch.bmm(parts.transpose(1, 2), parts)
    return products, torch.full((1,), len(rows), device=value.device)
