"""The error of rounding a tensor to a grid: the sums from which error metrics are computed.

All of them are sums, counts or extremes, so that batches and ranks are merged by addition, extremes by minimum and
maximum. A tensor is visited once, in tiles that fit the cache, and its quantized form is never kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.qparams import flatten_for_calibration, tile_size

#: names of the sums: values, of squares, of squared errors, of value times error, rows (and their SQNR in dB), clipped
SUMS = ("values", "signal", "noise", "cross", "rows", "decibels", "clipped")
#: codes of up to 8 bits
CODES = 256
_TILE = 1 << 17  # values at once on a CPU: 512 KiB in float32


class ErrorSums(NamedTuple):
    """``sums`` is ``(7,)`` in float64, in the order of :data:`SUMS`; ``low`` and ``high`` are the extremes; ``codes``
    ``(256,)`` in int64, how often each number of the format was used, all 0 where that is not known.

    All are on the tensor's device: nothing is read by the host.
    """

    sums: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    codes: torch.Tensor


def grid_error(
    value: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    base_name: str,
    *,
    by_token: bool = False,
    rounded: torch.Tensor | None = None,
) -> ErrorSums:
    """The error of a tensor rounded to its grid.

    Args:
        value: as :func:`~lightning_obs.numerics.qparams.flatten_for_calibration` takes it.
        scale: one per ``qparam_shape``; a global scale divided out.
        zero_point: of the same shape; None if symmetric.
        args: number format and strategy.
        base_name: weight, input or output.
        by_token: the ratio of signal to noise is taken of each token; off: of the whole tensor.
        rounded: the numbers of the format, in the shape of ``value``; None: the nearest ones.
    """
    one = scale.numel() == 1
    given = [value.detach(), *([] if rounded is None else [rounded.float()])]
    shaped = [x if one else flatten_for_calibration(x, base_name, args) for x in given]
    flat, *levels = (x.reshape(-1, x.shape[-1]) for x in shaped)
    lead = (1,) if one else shaped[0].shape[:-1]
    scale = scale.reshape(1, *lead[1:]).expand(lead).reshape(-1, 1)
    zero_point = None if zero_point is None else zero_point.reshape(1, *lead[1:]).expand(lead).reshape(-1, 1)
    parts = []
    height = max(1, tile_size(flat.device, _TILE) // max(1, flat.shape[1]))
    for start in range(0, len(flat), height):
        rows = slice(start, start + height)
        own, x = slice(None) if one else rows, flat[rows].float()
        shift = None if zero_point is None else zero_point[own]
        error, clipped, codes = _rounded(x, scale[own].float(), shift, args, levels[0][rows] if levels else None)
        parts.append((_row_sums(x, error, clipped, by_token), _how_often(codes, x.device)))
    sums, used = (torch.stack(each).sum(0) for each in zip(*parts, strict=True))
    whole = ErrorSums(sums, *torch.aminmax(flat), used)
    return whole if by_token else _with_one_row(whole)


def counted_error(
    values: torch.Tensor, counts: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None,
    args: QuantizationArgs,
) -> ErrorSums:  # fmt: skip
    """The error of values that were counted, ``(B,)`` each, rounded to the grid of one scale."""
    shift = None if zero_point is None else zero_point.reshape(1, 1)
    error, clipped, codes = _rounded(values.float()[None], scale.float().reshape(1, 1), shift, args)
    x, e, weights = values.double(), error[0].double(), counts.double()
    products = torch.stack([torch.ones_like(x), x * x, e * e, x * e, clipped[0].double()]) @ weights
    zero = products.new_zeros(1)
    sums = torch.cat([products[:4], zero, zero, products[4:]])
    used = _how_often(None, values.device)
    if codes is not None:
        used.index_add_(0, codes[0], counts)
    return _with_one_row(ErrorSums(sums, *torch.aminmax(values), used))


def difference_error(quantized: torch.Tensor, original: torch.Tensor) -> ErrorSums:
    """The error of a layer's output ``(..., C)``, token by token."""
    x, q = (t.detach().reshape(-1, t.shape[-1]).float() for t in (original, quantized))
    sums = _row_sums(x, q - x, x.new_zeros(1), by_token=True)  # there is no grid to be outside of
    return ErrorSums(sums, *torch.aminmax(x), _how_often(None, x.device))


def only_range(value: torch.Tensor) -> ErrorSums:
    """The range of a tensor whose grid is not known beforehand."""
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=value.device)
    return ErrorSums(sums, *torch.aminmax(value.detach()), _how_often(None, value.device))


def _rounded(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    levels: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Error, whether clipped, and code of each value; no codes above 8 bits."""
    grid = NumberGrid.of(args)
    steps = x / scale
    if zero_point is not None:
        steps += zero_point
    slack = 0.5 * grid.last_step * (1 + 1e-3)  # rounding alone would not move a value that far
    clipped = (steps < grid.low - slack).logical_or_(steps > grid.high + slack)
    levels = grid.round(steps) if levels is None else levels
    codes = None
    if grid.number is not None and grid.number.codes is not None:
        codes = levels.to(grid.number.codes).view(torch.uint8).int()
    elif args.num_bits <= 8:
        codes = (levels - grid.low).int()
    return (levels - steps).mul_(scale), clipped, codes


def _how_often(codes: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if codes is not None and device.type == "cpu":
        return torch.bincount(codes.flatten(), minlength=CODES)
    used = torch.zeros(CODES, dtype=torch.int64, device=device)
    # An accelerator's host would wait for bincount.
    return used if codes is None else used.index_add_(0, codes.flatten(), used.new_ones(()).expand(codes.numel()))


def _row_sums(x: torch.Tensor, error: torch.Tensor, clipped: torch.Tensor, by_token: bool) -> torch.Tensor:
    pairs = ((x, x), (error, error), (x, error))
    if by_token:
        signal, noise, cross = ((a * b).sum(1).double() for a, b in pairs)
    else:
        signal, noise, cross = (torch.dot(a.reshape(-1), b.reshape(-1)).double() for a, b in pairs)
    none = signal.new_zeros(())
    return torch.stack(
        [
            none + x.numel(),
            signal.sum(),
            noise.sum(),
            cross.sum(),
            none + (len(x) if by_token else 0),
            _decibels(signal, noise).sum() if by_token else none,
            clipped.sum().double(),
        ]
    )


def _decibels(signal: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    # Both in float32's smallest step, as torchmetrics' SignalNoiseRatio: no noise at all is a finite number.
    eps = torch.finfo(torch.float32).eps
    return 10 * torch.log10((signal + eps) / (noise + eps))


def _with_one_row(whole: ErrorSums) -> ErrorSums:
    sums = whole.sums.clone()
    sums[4], sums[5] = 1, _decibels(sums[1], sums[2])
    return whole._replace(sums=sums)
