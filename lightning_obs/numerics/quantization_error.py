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

#: names of the sums: number of values, squares, squared errors, value times error, number of rows, their SQNR in dB,
#: number of clipped values
SUMS = ("values", "signal", "noise", "cross", "rows", "decibels", "clipped")
#: codes of up to 8 bits
CODES = 256
# Values that a CPU visits at once: 512 KiB in float32.
_TILE = 1 << 17


class ErrorSums(NamedTuple):
    """The sums and extremes of one tensor's error, on the tensor's device: nothing is read by the host.

    Attributes:
        sums: ``(7,)`` in float64, in the order of :data:`SUMS`.
        low: smallest value of the tensor, a scalar.
        high: largest value of the tensor, a scalar.
        codes: how often each number of the format was used, ``(256,)`` in int64; all 0 where that is not known.
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

    Called by the report's layer errors (``report/layer_errors.py``) for each weight, and for the inputs of each call.

    Args:
        value: as :func:`~lightning_obs.numerics.qparams.flatten_for_calibration` takes it.
        scale: one per ``qparam_shape``; a global scale divided out.
        zero_point: of the same shape; None if symmetric.
        args: number format and strategy.
        base_name: weight, input or output.
        by_token: the ratio of signal to noise is computed for each token; off: for the whole tensor.
        rounded: the numbers of the format, in the shape of ``value``; None: the nearest ones.
    """
    is_one_scale = scale.numel() == 1
    view = value.detach()
    levels = None if rounded is None else rounded.float()
    if is_one_scale:
        scale = scale.reshape(1, 1)
        zero_point = None if zero_point is None else zero_point.reshape(1, 1)
    else:
        view = flatten_for_calibration(view, base_name, args)
        levels = None if levels is None else flatten_for_calibration(levels, base_name, args)
        scale = _for_each_row(scale, view)
        zero_point = None if zero_point is None else _for_each_row(zero_point, view)
    flat = _as_matrix(view)
    levels = None if levels is None else _as_matrix(levels)
    sums = []
    code_counts = []
    width = max(1, flat.shape[1])
    height = max(1, tile_size(flat.device, _TILE) // width)
    for start in range(0, len(flat), height):
        rows = slice(start, start + height)
        scale_rows = slice(None) if is_one_scale else rows
        tile = flat[rows].float()
        tile_scale = scale[scale_rows].float()
        tile_zero_point = None if zero_point is None else zero_point[scale_rows]
        tile_levels = None if levels is None else levels[rows]
        error, clipped, codes = _rounded(tile, tile_scale, tile_zero_point, args, tile_levels)
        tile_sums = _row_sums(tile, error, clipped, by_token)
        sums.append(tile_sums)
        code_counts.append(_count_codes(codes, tile.device))
    low, high = torch.aminmax(flat)
    all_sums = torch.stack(sums).sum(0)
    all_code_counts = torch.stack(code_counts).sum(0)
    total = ErrorSums(all_sums, low, high, all_code_counts)
    return total if by_token else _with_one_row(total)


def _as_matrix(view: torch.Tensor) -> torch.Tensor:
    """``(..., G)`` as ``(rows, G)``."""
    width = view.shape[-1]
    return view.reshape(-1, width)


def _for_each_row(parameter: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """A parameter of ``(N, *Q, G)`` for each of its rows of G values, ``(N * Q, 1)``."""
    rows_shape = view.shape[:-1]  # (N, *Q)
    qparam_shape = rows_shape[1:]
    by_scale = parameter.reshape(1, *qparam_shape)
    by_row = by_scale.expand(rows_shape)
    return by_row.reshape(-1, 1)


def counted_error(
    values: torch.Tensor, counts: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None,
    args: QuantizationArgs,
) -> ErrorSums:  # fmt: skip
    """The error of values that were counted, ``(B,)`` each, rounded to the grid of one scale.

    Called by the report's layer errors for inputs whose observer keeps a histogram.
    """
    scale = scale.float().reshape(1, 1)
    zero_point = None if zero_point is None else zero_point.reshape(1, 1)
    row = values.float()[None]
    error, clipped, codes = _rounded(row, scale, zero_point, args)
    wide_values = values.double()
    wide_error = error[0].double()
    signal = wide_values * wide_values
    noise = wide_error * wide_error
    cross = wide_values * wide_error
    ones = torch.ones_like(wide_values)
    terms = torch.stack([ones, signal, noise, cross, clipped[0].double()])
    products = terms @ counts.double()
    zeros = products.new_zeros(2)  # rows and decibels
    sums = torch.cat([products[:4], zeros, products[4:]])
    code_counts = _count_codes(None, values.device)
    if codes is not None:
        code_counts.index_add_(0, codes[0], counts)
    low, high = torch.aminmax(values)
    return _with_one_row(ErrorSums(sums, low, high, code_counts))


def difference_error(quantized: torch.Tensor, original: torch.Tensor) -> ErrorSums:
    """The error of a layer's output ``(..., C)``, token by token.

    Called by the report's layer errors in each call of a layer, with its output under quantization and without.
    """
    expected = _as_matrix(original.detach()).float()
    error = _as_matrix(quantized.detach()).float() - expected
    clipped = expected.new_zeros(1)  # there is no grid to be outside of
    sums = _row_sums(expected, error, clipped, by_token=True)
    low, high = torch.aminmax(expected)
    no_codes = _count_codes(None, expected.device)
    return ErrorSums(sums, low, high, no_codes)


def only_range(value: torch.Tensor) -> ErrorSums:
    """The range of a tensor whose grid is not known beforehand: called by the report for inputs with dynamic scales."""
    value = value.detach()
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=value.device)
    low, high = torch.aminmax(value)
    no_codes = _count_codes(None, value.device)
    return ErrorSums(sums, low, high, no_codes)


def _rounded(
    values: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    levels: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Error, whether clipped, and code of each value, ``(r, G)`` each; None for codes above 8 bits.

    Args:
        values: ``(r, G)`` in float32.
        scale: ``(r, 1)`` or ``(1, 1)`` in float32.
        zero_point: of the same shape; None if symmetric.
        args: the number format.
        levels: the numbers to which values are rounded, ``(r, G)``; None: the nearest ones.
    """
    grid = NumberGrid.of(args)
    steps = values / scale
    if zero_point is not None:
        steps += zero_point
    slack = 0.5 * grid.last_step() * (1 + 1e-3)  # rounding alone would not move a value that far
    is_below = steps < grid.low - slack
    clipped = is_below.logical_or_(steps > grid.high + slack)
    if levels is None:
        levels = grid.round(steps)
    codes = _codes_of(levels, grid)
    error = (levels - steps).mul_(scale)
    return error, clipped, codes


def _codes_of(levels: torch.Tensor, grid: NumberGrid) -> torch.Tensor | None:
    """The code of each level, from 0 to 255, in int32; None above 8 bits."""
    number = grid.number
    if number is not None and number.codes is not None:
        patterns = levels.to(number.codes).view(torch.uint8)
        return patterns.int()
    if grid.args.num_bits <= 8:
        from_lowest = levels - grid.low
        return from_lowest.int()
    return None


def _count_codes(codes: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """How often each code occurs, ``(256,)`` in int64; zeros for None."""
    if codes is not None and device.type == "cpu":
        return torch.bincount(codes.flatten(), minlength=CODES)
    counts = torch.zeros(CODES, dtype=torch.int64, device=device)
    if codes is not None:  # an accelerator's host would wait for bincount
        ones = counts.new_ones(()).expand(codes.numel())
        counts.index_add_(0, codes.flatten(), ones)
    return counts


def _row_sums(values: torch.Tensor, error: torch.Tensor, clipped: torch.Tensor, by_token: bool) -> torch.Tensor:
    """:data:`SUMS` over the rows of a tile ``(r, G)``, ``(7,)`` in float64.

    With ``by_token`` each row is a token, whose SQNR counts; else rows and decibels are 0, and
    :func:`_with_one_row` writes those of the whole tensor.
    """
    products = _products_by_row if by_token else _products
    signal = products(values, values)
    noise = products(error, error)
    cross = products(values, error)
    zero = signal.new_zeros(())
    number_of_rows = zero
    decibels = zero
    if by_token:
        number_of_rows = zero + len(values)
        decibels = _decibels(signal, noise).sum()
    number_of_values = zero + values.numel()
    clipped_values = clipped.sum().double()
    totals = [signal.sum(), noise.sum(), cross.sum()]
    return torch.stack([number_of_values, *totals, number_of_rows, decibels, clipped_values])


def _products_by_row(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """For each row of ``(r, G)``, the sum of products, ``(r,)`` in float64."""
    return (first * second).sum(1).double()


def _products(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The sum of products over all values, a scalar in float64."""
    first_values = first.reshape(-1)
    second_values = second.reshape(-1)
    return torch.dot(first_values, second_values).double()


def _decibels(signal: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The ratio of signal to noise in dB, of any shape."""
    # As in torchmetrics' SignalNoiseRatio, float32's eps is added to both: without noise, the result is finite.
    eps = torch.finfo(torch.float32).eps
    ratio = (signal + eps) / (noise + eps)
    return 10 * torch.log10(ratio)


def _with_one_row(total: ErrorSums) -> ErrorSums:
    """The whole tensor counted as one row, with its SQNR."""
    sums = total.sums.clone()
    signal = sums[SUMS.index("signal")]
    noise = sums[SUMS.index("noise")]
    sums[SUMS.index("rows")] = 1
    sums[SUMS.index("decibels")] = _decibels(signal, noise)
    return total._replace(sums=sums)
