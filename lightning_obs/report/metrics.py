"""How far quantized tensors are from the tensors themselves, for all layers at once; how far scales have drifted.

The error of rounding a tensor to a grid is measured by :data:`SUMS`: sums, counts and extremes, so that batches and
ranks are merged by addition, extremes by minimum and maximum. A tensor is visited once, in tiles that fit the cache,
and its quantized form is never kept.

A model has hundreds of layers, and sums for each by itself would make ranks talk hundreds of times. So the sums of all
layers are a few tensors whose first dimension is the layer, and ranks add theirs in three collectives. Each number of a
layer is a function of these sums, a row of :data:`NUMBERS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.many_tensors import to_host
from lightning_obs.numerics.qparams import flatten_for_calibration, tile_size
from lightning_obs.ranks.collectives import Collectives

# ---------------------------------------------------------------------- the error of one tensor


#: names of the sums: number of values, squares, squared errors, value times error, number of rows, their SQNR in dB,
#: number of clipped values
SUMS = ("values", "signal", "noise", "cross", "rows", "decibels", "clipped")
#: number of codes that 8 bits tell apart: the length of a tensor's counts
CODES = 256
# Values that a CPU visits at once: 512 KiB in float32.
_TILE = 1 << 17


class ErrorSums(NamedTuple):
    """The sums and extremes of one tensor's error, on the tensor's device: nothing is read by the host.

    The functions below make one for each tensor that is measured, and :meth:`LayerSums.update` adds it up.

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
        value: a weight's matrix, or an input with its channels last; with one scale, of any shape. It must not be
            empty.
        scale: the scales, one number for each group, row, block or tensor as ``args.strategy`` says. Where the format
            has a global scale (NVFP4), the caller passes the stored scales divided by it.
        zero_point: the zero points, in the shape of ``scale``; None if symmetric.
        args: number format and strategy.
        base_name: weight, input or output.
        by_token: the ratio of signal to noise is computed for each token, or, where a token has several scales, for
            each of its groups; off: for the whole tensor.
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
    sums, code_counts = _sums_by_tiles(flat, scale, zero_point, args, levels, by_token)
    low, high = torch.aminmax(flat)
    total = ErrorSums(sums, low, high, code_counts)
    return total if by_token else _with_one_row(total)


def _sums_by_tiles(
    flat: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    levels: torch.Tensor | None,
    by_token: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of a matrix, and how often each code stands in it; :func:`grid_error` calls this.

    The rows are rounded in tiles that fit into a cache.

    Args:
        flat: ``(R, W)``.
        scale: ``(R, 1)``, or ``(1, 1)`` for all rows.
        zero_point: as ``scale``; None if symmetric.
        args: number format and strategy.
        levels: the numbers of the format ``(R, W)``; None: the nearest ones.
        by_token: whether the ratio of signal to noise is computed for each row.
    """
    sums = []
    code_counts = []
    is_one_scale = scale.numel() == 1
    width = max(1, flat.shape[1])
    height = max(1, tile_size(flat.device, _TILE) // width)
    for start in range(0, len(flat), height):
        stop = start + height
        rows = slice(start, stop)
        scale_rows = slice(None) if is_one_scale else rows
        tile = flat[rows].float()
        tile_scale = scale[scale_rows].float()
        tile_zero_point = None if zero_point is None else zero_point[scale_rows]
        tile_levels = None if levels is None else levels[rows]
        error, clipped, codes = _rounded(tile, tile_scale, tile_zero_point, args, tile_levels)
        tile_sums = _row_sums(tile, error, clipped, by_token)
        sums.append(tile_sums)
        code_counts.append(_count_codes(codes, tile.device))
    sums_of_tiles = torch.stack(sums)
    counts_of_tiles = torch.stack(code_counts)
    return sums_of_tiles.sum(0), counts_of_tiles.sum(0)


def _as_matrix(view: torch.Tensor) -> torch.Tensor:
    """``(..., G)`` as ``(rows, G)``."""
    width = view.shape[-1]
    return view.reshape(-1, width)


def _for_each_row(parameter: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """The scale or zero point of each row of G values in ``view`` ``(N, *Q, G)``, as ``(N * Q, 1)``.

    ``parameter`` has one number for each place in Q; the N repetitions share it.
    """
    rows_shape = view.shape[:-1]  # (N, *Q)
    qparam_shape = rows_shape[1:]
    by_scale = parameter.reshape(1, *qparam_shape)
    by_row = by_scale.expand(rows_shape)
    return by_row.reshape(-1, 1)


def counted_error(
    values: torch.Tensor, counts: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None,
    args: QuantizationArgs,
) -> ErrorSums:  # fmt: skip
    """The error of ``values`` ``(B,)`` that occurred ``counts`` ``(B,)`` times each, rounded to the grid of one scale.

    ``known_layer_errors`` calls it for inputs whose observer keeps a histogram, when a model is not run.
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
    """The range of a tensor that has no static grid, without errors.

    The hook of ``measure_layer_errors`` calls it for inputs whose scales are dynamic, or that are not quantized.
    """
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
    # Values up to half a step outside are rounded to the last number, not clipped; 1e-3 is for errors of float32.
    slack = 0.5 * grid.last_step() * (1 + 1e-3)
    is_below = steps < grid.low - slack
    clipped = is_below.logical_or_(steps > grid.high + slack)
    if levels is None:
        levels = grid.round(steps)
    codes = _codes_of(levels, grid)
    error = levels - steps
    error.mul_(scale)
    return error, clipped, codes


def _codes_of(levels: torch.Tensor, grid: NumberGrid) -> torch.Tensor | None:
    """The code of each level, from 0 to 255, in int32; None for integers above 8 bits.

    The code of an integer is its distance from the lowest one, and that of NaN 0. The code of a float is its bit
    pattern in ``NumberFormat.codes``, a dtype of one byte that holds all numbers of the format, float8_e4m3fn for a
    4-bit float.
    """
    number = grid.number  # the format of a float; None: integers
    if number is not None:
        patterns = levels.to(number.codes).view(torch.uint8)
        return patterns.int()
    if grid.args.num_bits <= 8:
        from_lowest = levels - grid.low
        return from_lowest.nan_to_num_(nan=0.0).int()
    return None


def _count_codes(codes: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """How often each code occurs, ``(256,)`` in int64; zeros for None.

    Called for the codes of each tile of a tensor, and with None for a tensor whose codes are not known.
    """
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
        decibels_of_rows = _decibels(signal, noise)
        decibels = decibels_of_rows.sum()
    number_of_values = zero + values.numel()
    clipped_values = clipped.sum().double()
    totals = [signal.sum(), noise.sum(), cross.sum()]
    return torch.stack([number_of_values, *totals, number_of_rows, decibels, clipped_values])


def _products_by_row(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """For each row of ``(r, G)``, the sum of products, ``(r,)`` in float64."""
    products = first * second
    return products.sum(1).double()


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


# ---------------------------------------------------------------------- the errors of many layers


#: errors that are kept before they are added up, 2 KiB each
_PENDING = 4096


@dataclass(frozen=True)
class TensorError:
    """The effect of rounding on one tensor; None: unknown.

    :meth:`LayerSums.errors` makes one for each tensor that was measured. Rows of the page have each field as
    ``input_<field>``, ``weight_<field>`` and ``output_<field>``.

    Attributes:
        sqnr, mse, cosine, clipped, bits: the :data:`NUMBERS` of these names.
        low, high: the smallest and the largest value before rounding, of all batches and ranks.
    """

    sqnr: float | None = None
    mse: float | None = None
    cosine: float | None = None
    clipped: float | None = None
    low: float | None = None
    high: float | None = None
    bits: float | None = None


class LayerSums:
    """Sums of the errors of many layers, and the numbers that follow from them.

    ``layer_errors.py`` makes one for the weights, one for the inputs and one for the outputs of a model's layers.

    Attributes:
        sums: ``(layers, 7)`` in float64, see :data:`~lightning_obs.report.metrics.SUMS`.
        codes: how often each code was taken, ``(layers, 256)`` in int64.
        low, high: extremes ``(layers,)`` in float64; infinite where nothing was seen.

    Examples:
        >>> from compressed_tensors.quantization import QuantizationArgs
        >>> from lightning_obs.report.metrics import grid_error
        >>> layers = LayerSums(["fc"])
        >>> layers.update("fc", grid_error(torch.tensor([[1.0, -2.0]]), torch.tensor([1.0]), None, QuantizationArgs(),
        ...                                "input"))
        >>> layers.compute()["cosine"], layers.compute()["bits"]
        (tensor([1.], dtype=torch.float64), tensor([1.]))
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._rows = {name: row for row, name in enumerate(names)}
        count = len(self._rows)
        self._pending: list[tuple[int, ErrorSums]] = []  # not added yet, so that one transfer brings them to the host
        self.sums = torch.zeros(count, len(SUMS), dtype=torch.float64)
        self.codes = torch.zeros(count, CODES, dtype=torch.int64)
        self.low = torch.full((count,), math.inf, dtype=torch.float64)
        self.high = -self.low

    def update(self, name: str, error: ErrorSums) -> None:
        """Add the error of a tensor of the layer ``name``; up to 4096 errors wait on the device for one transfer.

        Called by ``layer_errors.py`` for each weight, and in a forward hook for the input and output of each call.
        """
        self._pending.append((self._rows[name], error))
        if len(self._pending) >= _PENDING:
            self._add_up()

    def _add_up(self) -> None:
        """Bring the pending errors to the host in one transfer, and add them to the sums, extremes and counts."""
        tensors: list[torch.Tensor] = []
        for _, error in self._pending:
            tensors += error
        on_host = iter(to_host(tensors))
        for row, pending in self._pending:
            error = ErrorSums(*islice(on_host, len(pending)))
            self.sums[row] += error.sums
            self.low[row] = torch.fmin(self.low[row], error.low)
            self.high[row] = torch.fmax(self.high[row], error.high)
            self.codes[row] += error.codes
        self._pending.clear()

    def reduce_ranks(self, collectives: Collectives) -> None:
        """Add the other ranks' sums, in three collectives; every rank must call this. It writes in place.

        ``layer_errors.py`` calls it for the errors of weights, of which each rank has measured its share.
        """
        self._add_up()
        for sums in (self.sums, self.codes):
            total = collectives.reduce(sums.flatten().to(collectives.device), "sum")
            sums.copy_(total.view_as(sums))
        ends = torch.cat([self.low, -self.high])
        least_ends = collectives.reduce(ends.to(collectives.device), "min")
        low, high = least_ends.chunk(2)
        self.low.copy_(low)
        self.high.copy_(-high)

    def of(self, name: str) -> torch.Tensor:
        """The sum that ``name`` names in :data:`SUMS`, ``(layers,)``; the functions of :data:`NUMBERS` read it."""
        return self.sums[:, SUMS.index(name)]

    def compute(self) -> dict[str, torch.Tensor]:
        """Each of :data:`NUMBERS`, and ``low`` and ``high``, ``(layers,)``; NaN where it is not known.

        :meth:`errors` calls it. Errors that still wait on the device are read in one transfer.
        """
        self._add_up()
        numbers = {name: number(self) for name, number in NUMBERS.items()}
        numbers["low"] = self.low.where(self.low.isfinite(), torch.nan)
        numbers["high"] = self.high.where(self.high.isfinite(), torch.nan)
        return numbers

    def errors(self) -> dict[str, TensorError]:
        """The numbers of each layer with a measured tensor, by the layer's name.

        ``layer_errors.py`` calls it once all tensors are measured, and makes a :class:`.LayerError` of them.
        """
        columns = {key: values.tolist() for key, values in self.compute().items()}
        has_run = (self.low.isfinite() | (self.of("values") > 0)).tolist()
        errors: dict[str, TensorError] = {}
        for name, row in self._rows.items():
            if has_run[row]:
                numbers = {}
                for key, column in columns.items():
                    if not math.isnan(column[row]):
                        numbers[key] = column[row]
                errors[name] = TensorError(**numbers)
        return errors


def sqnr(layers: LayerSums) -> torch.Tensor:
    """Signal-to-quantization-noise ratio [dB], mean over tokens; a weight, and values that were counted, are one row.

    ``10 log10(sum x^2 / sum (q - x)^2)`` of each row. A bit is worth about 6 dB.
    """
    return layers.of("decibels") / layers.of("rows")


def mean_squared_error(layers: LayerSums) -> torch.Tensor:
    """Mean of the squared errors, in the units of the tensor squared."""
    return layers.of("noise") / layers.of("values")


def cosine(layers: LayerSums) -> torch.Tensor:
    """Cosine similarity of a tensor and its quantized form, as vectors of all their values.

    The quantized form is x + e, so its sums follow from the sums of x and e.
    """
    signal = layers.of("signal")
    cross = layers.of("cross")
    quantized_signal = signal + 2 * cross + layers.of("noise")
    return (signal + cross) / (signal * quantized_signal).sqrt()


def clipped_share(layers: LayerSums) -> torch.Tensor:
    """Share of the values that lie outside the range of their scale, by more than half a step [%]."""
    return 100 * layers.of("clipped") / layers.of("values")


def bits_in_use(layers: LayerSums) -> torch.Tensor:
    """Entropy of the codes [bit]: how many of the format's bits carry information. NaN where codes are not known.

    A tensor whose values spread evenly over the grid uses all bits; one with few values far out uses few.
    """
    share = layers.codes / layers.codes.sum(1, keepdim=True)
    return torch.special.entr(share).sum(1) / math.log(2)


#: by name, a number of a layer as a function of its sums; :meth:`LayerSums.compute` calls each for all layers at once
NUMBERS: dict[str, Callable[[LayerSums], torch.Tensor]] = {
    "sqnr": sqnr,
    "mse": mean_squared_error,
    "cosine": cosine,
    "clipped": clipped_share,
    "bits": bits_in_use,
}


# ---------------------------------------------------------------------- the scales of several calibrations


@dataclass
class ScaleDrift:
    """The history of a model's scales, in powers of two: a drift of 1 is a scale that has doubled or halved.

    A callback's results (``callbacks/results.py``) keep one from the first calibration on, and the page draws it.
    """

    steps: list[int] = field(default_factory=list)  # when scales were added
    #: by name of the scale, the mean of ``|log2(scale / first scale)|`` at each of these steps, up to the last step at
    #: which the scale was there
    drifts: dict[str, list[float]] = field(default_factory=dict)
    #: by name of the scale, the logarithms of the scales that were added first
    _first: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, step: int, qparams: Mapping[str, torch.Tensor]) -> None:
        """Add the scales of ``{"layer.weight_scale": tensor}`` at a step; scales of another shape start again.

        A scale that first appears at a later step gets a drift of 0 for the steps before. For steps at which a scale
        was absent, as that of a module without data, it gets its last drift once it is there again.
        ``Results.log_calibration`` calls this at the end of each calibration of a callback.
        """
        self.steps.append(step)
        for name, scale in qparams.items():
            if not name.endswith("_scale") or name.endswith("_global_scale"):
                continue
            logarithm = scale.detach().float().cpu().abs().log2()
            first = self._first.get(name)
            if first is None or first.shape != logarithm.shape:
                first = self._first[name] = logarithm
            # a scale of 0 has no finite logarithm, and counts as unmoved
            drift = (logarithm - first).abs().nan_to_num(nan=0.0, posinf=0.0).mean()
            earlier_steps = len(self.steps) - 1
            history = self.drifts.setdefault(name, [0.0] * earlier_steps)
            absent_steps = earlier_steps - len(history)
            history += history[-1:] * absent_steps
            history.append(float(drift))

    def numbers(self) -> dict[str, float]:
        """The largest and the mean drift of the scales that were added at the last step.

        Empty until scales were added twice. ``Results.log_calibration`` logs them after each calibration.

        >>> drift = ScaleDrift()
        >>> for step, scale in enumerate((1.0, 2.0)):
        ...     drift.add(step, {"fc.weight_scale": torch.tensor([scale]), "fc.weight_zero_point": torch.zeros(1)})
        >>> drift.numbers()
        {'scale_drift_max': 1.0, 'scale_drift_mean': 1.0}
        """
        last = []
        for history in self.drifts.values():
            if len(history) == len(self.steps):
                last.append(history[-1])
        if len(self.steps) < 2 or not last:
            return {}
        return {"scale_drift_max": max(last), "scale_drift_mean": sum(last) / len(last)}
