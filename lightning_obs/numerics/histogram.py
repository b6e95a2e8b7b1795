"""Count every value by its own bfloat16 bit pattern.

The observers ``histogram`` and ``percentile`` keep such counts (``observers/counting.py``), range searches count long
bfloat16 rows, and the report draws the counts of a module's inputs.

Method: a value is rounded to bfloat16 (to nearest, ties to even), and its 16 bits, sign included, are the index of its
bin, so there are 65,536 bins. Counts are int64, so merging two histograms is addition, and a sum of integers has the
same bits whatever the batches, their order and the ranks. Nothing has to be known in advance, and nothing is scaled by
the data: a range that the first batch decided would make the result depend on which batch was first.

Choice: bins are relative (128 per power of two), so clipping near the end of the range and rounding near zero are both
resolved. bfloat16 data lose nothing: every percentile and every error is that of the data themselves. float32 and
float16 are rounded by at most 2^-9 of each value; their exact smallest and largest value are kept with the counts, and
values read from the counts are clamped to them.

Trade-off: 512 KiB per scale, however small the data, against fewer bins that would have to be placed. So this is for
one scale per tensor or per attention head, and not for channels, groups or blocks. NaN and infinity have bins
of their own.

Once counted, data of any size cost the same: a bell-shaped tensor occupies about 6,000 of the bins, and each criterion
reads only the occupied bins.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.numerics import on_gpu
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.kernels import launch
from lightning_obs.numerics.qparams import compute_qparams, observed_range, tile_size

# One bin for each bit pattern of bfloat16.
BINS = 1 << 16
# Values that are counted at once on a CPU: a tile takes memory for its values and for the index of each value's bin.
_TILE = 1 << 22
# Candidates times bins for which the entropy criterion is computed at once: 512 KiB in float64.
_CELLS = 1 << 16

# The first pattern above infinity; all from there on are NaN.
_NAN_FROM = 0x7F81
# The sign bit of a pattern.
_SIGN = 0x8000


class Histogram(NamedTuple):
    """Counts and exact range of a tensor with Q scales; :func:`count_values` makes one for each observed batch.

    ``counts`` is ``(Q, 65536)`` in int64; ``low`` and ``high`` are ``(Q,)`` in the dtype of the counted values.
    """

    counts: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


class Support(NamedTuple):
    """The B occupied bins of one scale: their ``values``, ascending in float32, and ``counts`` in int64, ``(B,)`` each.

    :func:`support` makes it from counts. The counting observers, the range search and the report read it.
    """

    values: torch.Tensor
    counts: torch.Tensor


def count_values(observed: torch.Tensor) -> Histogram:
    """Count all values of ``(N, Q, G)``, separately for each of the Q scales.

    Called by the counting observers (``observers/counting.py``) for each batch, by the range search for long rows, and
    by :func:`support_of`. A NaN makes ``low`` and ``high`` NaN, an infinity makes one of them infinite, so callers see
    both without looking through the bins.
    """
    if not launch.can_read(observed):
        return _count_plainly(observed)
    histograms = [_count_flat(values.reshape(-1)) for values in observed.unbind(1)]
    counts = [histogram.counts for histogram in histograms]
    lows = [histogram.low for histogram in histograms]
    highs = [histogram.high for histogram in histograms]
    return Histogram(_stacked(counts), _stacked(lows), _stacked(highs))


def _stacked(statistics: list[torch.Tensor]) -> torch.Tensor:
    """Stack the statistics of several scales; the counts of a single scale (half a megabyte) are not copied."""
    if len(statistics) == 1:
        return statistics[0].unsqueeze(0)
    return torch.stack(statistics)


def count_nan(counts: torch.Tensor) -> int:
    """How many NaN were counted in ``(..., 65536)``.

    The counting observers call it before qparams are computed: the smallest value may have been NaN on one rank, and
    the minimum over ranks may drop that NaN, but the counts keep it.
    """
    positive = counts[..., _NAN_FROM:_SIGN]
    negative = counts[..., _SIGN + _NAN_FROM :]
    return int(positive.sum() + negative.sum())


def support(counts: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> Support:
    """The occupied bins of one scale, in ascending order of their values.

    Called for each scale by the criteria of the counting observers when qparams are computed, and by the range search
    for long bfloat16 rows.

    Args:
        counts: ``(65536,)``.
        low: the exact smallest value, a scalar. The value of a bin that lies below it, by rounding, is raised to it.
        high: the exact largest value, a scalar. The value of a bin that lies above it is lowered to it.
    """
    bins = _ascending(counts)
    values = value_of(bins).float()
    values = values.clamp(low.float(), high.float())
    return Support(values, counts[bins])


def support_of(value: torch.Tensor) -> Support:
    """The occupied bins of all values of one tensor.

    Called by the report's layer errors for a module's inputs, batch by batch.
    """
    values = value.detach().reshape(-1, 1, 1)
    counts, low, high = count_values(values)
    return support(counts[0], low[0], high[0])


def join_supports(first: Support, second: Support) -> Support:
    """Merge the occupied bins of two tensors: their counts are added.

    Called by the report's layer errors to add a batch to the batches before it.
    """
    values = torch.cat([first.values, second.values])
    counts = torch.cat([first.counts, second.counts])
    distinct, places = values.unique(return_inverse=True)
    sums = torch.zeros(len(distinct), dtype=torch.int64, device=distinct.device)
    sums.index_add_(0, places, counts)
    return Support(distinct, sums)


def linear_bins(occupied: Support, bins: int) -> tuple[float, float, list[int]]:
    """The smallest value, the largest value, and how many lie in each of ``bins`` equal parts of that range.

    Called by the report's page, which draws them.

    >>> linear_bins(Support(torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([1, 5, 2])), 2)
    (-1.0, 1.0, [1, 7])
    """
    values = occupied.values
    low = float(values[0])
    high = float(values[-1])
    width = high - low
    if width == 0:
        width = 1.0
    share = (values.double() - low) / width
    place = (share * bins).long().clamp(0, bins - 1)
    counts = torch.zeros(bins, dtype=torch.int64, device=place.device)
    counts.index_add_(0, place, occupied.counts)
    return low, high, counts.tolist()


def median_size(occupied: Support) -> float:
    """The magnitude that half of all values do not exceed.

    Called by ``report/cause.py``, which compares it with the largest value.

    >>> median_size(Support(torch.tensor([-8.0, -1.0, 0.0, 2.0]), torch.tensor([1, 3, 2, 3])))
    1.0
    """
    sizes, order = occupied.values.abs().sort()
    cumulative = occupied.counts[order].cumsum(0)
    total = int(cumulative[-1])
    place = torch.searchsorted(cumulative, (total + 1) // 2)
    return float(sizes[place])


def percentile_range(
    counts: torch.Tensor, low: torch.Tensor, high: torch.Tensor, percentile: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The range of one scale that cuts off the same number of values at either end.

    Called by the percentile observer when qparams are computed.

    The upper end is the smallest value with at least ``percentile`` percent of the values at or below it; the lower end
    is the largest value with as many at or above it. With n sorted values, numbered from 0, and
    ``k = ceil(n * percentile / 100)``, the range is from value ``n - k`` to value ``k - 1``. Both ends are values of
    the data, never between two of them; numpy calls this method ``inverted_cdf``.

    Args:
        counts: ``(65536,)``.
        low: exact smallest value, a scalar; the lower end if nothing is cut off (``k`` is n).
        high: exact largest value, a scalar; the upper end if nothing is cut off.
        percentile: the share of values to cover, in percent, in (50, 100].

    Returns:
        The lower and the upper end, scalars in the dtype of ``low``.
    """
    values, numbers = support(counts, low, high)
    cumulative = numbers.cumsum(0)
    total = int(cumulative[-1])
    percent = Fraction(str(percentile))  # exact: 99.9 % is 999/1000 here, not the nearest float
    share = percent / 100
    covered = share * total
    rank = math.ceil(covered)
    if rank >= total:
        return low, high
    ranks = cumulative.new_tensor([total - rank + 1, rank])
    places = torch.searchsorted(cumulative, ranks)
    smallest, largest = values[places].to(low.dtype)
    return smallest, largest


def candidate_divergences(
    occupied: Support, lows: torch.Tensor, highs: torch.Tensor, args: QuantizationArgs
) -> torch.Tensor:
    """Kullback-Leibler divergence of the quantized distribution from the observed one, for each of C candidate ranges.

    Called by the histogram observer, criterion ``entropy``, when qparams are computed.

    For each candidate, P holds the counts inside the range, and the counts outside are added to its outermost bins. Q
    holds the counts inside only: those of all bins that quantize to one level are summed, and the sum is spread over
    these bins again, in proportion to the width of the occupied bins. The divergence is ``sum P log(P / Q) - P + Q``,
    divided by the number of values that are not zero; it is infinite if no value lies inside.

    Migacz normalises Q to the sum of P. Where a small share s of the values is clipped, that changes the divergence by
    ``s ** 2 / 2``. But with that normalisation a range with one occupied bin inside has P = Q = 1, so it would be
    chosen for data away from zero although it clips all other values. Here Q is not normalised.

    Migacz's bins have equal widths, so he spreads a level's counts evenly over its bins. Levels are those of ``args``,
    so asymmetric and floating formats are served too. Exact zeros, which every range quantizes without error, are left
    out: a spike of them (ReLU) would reward the narrowest range.

    Args:
        occupied: the occupied bins of one scale.
        lows: smallest value of each candidate range, ``(C,)``.
        highs: largest value of each candidate range, ``(C,)``.
        args: the number format.

    Returns:
        ``(C,)`` in float64; zeros if all values are zero.

    Reference:
        Migacz, 8-bit Inference with TensorRT, GTC 2017.
    """
    is_nonzero = occupied.values != 0
    values = occupied.values[is_nonzero]
    numbers = occupied.counts[is_nonzero].double()
    if not len(values):
        return torch.zeros(len(lows), dtype=torch.float64, device=lows.device)
    distribution = _Distribution(values, numbers, args)
    qparams = compute_qparams(lows, highs, args)
    candidates = max(1, _CELLS // len(values))  # compared at once
    scales = _columns(qparams["scale"], candidates)
    zero_points = _columns(qparams["zero_point"], candidates)
    # Zero is in every range, as in compute_qparams.
    lows = lows.clamp(max=0)
    highs = highs.clamp(min=0)
    lower_ends = _columns(lows, candidates)
    upper_ends = _columns(highs, candidates)
    divergences = []
    for scale, zero_point, low, high in zip(scales, zero_points, lower_ends, upper_ends, strict=True):
        if args.symmetric:  # widen to the range that the scale covers
            high = torch.maximum(-low, high)
            low = -high
        divergences.append(distribution.divergences(scale, zero_point, low, high))
    return torch.cat(divergences)


def _columns(numbers: torch.Tensor, candidates: int) -> tuple[torch.Tensor, ...]:
    """Cut one number per candidate, ``(C,)``, into float32 columns ``(candidates, 1)`` that broadcast against bins."""
    column = numbers.float()[:, None]
    return column.split(candidates)


class _Distribution:
    """The observed distribution of one scale, with which :func:`candidate_divergences` compares each candidate.

    Args:
        values: value of each occupied bin, ascending, ``(B,)`` in float32; without zero.
        numbers: how many values were counted in each bin, ``(B,)`` in float64.
        args: the number format.
    """

    def __init__(self, values: torch.Tensor, numbers: torch.Tensor, args: QuantizationArgs) -> None:
        self.values = values
        self.numbers = numbers
        self.total = numbers.sum()
        self.grid = NumberGrid.of(args)
        exponents = torch.frexp(values).exponent
        self.widths = exponents.double().exp2()  # of the bins, up to a factor that all bins share

    def divergences(
        self, scale: torch.Tensor, zero_point: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> torch.Tensor:
        """The divergence of each of C candidates, ``(C,)``; called for a few candidates at a time.

        The arguments are the candidates' scales, zero points, and lower and upper ends, ``(C, 1)`` each.
        """
        reaches_low = self.values >= low
        is_up_to_high = self.values <= high
        inside = reaches_low & is_up_to_high
        counts = inside * self.numbers
        widths = inside * self.widths
        level = self._levels(scale, zero_point)
        counts_of_level = _sum_by_level(counts, level)
        widths_of_level = _sum_by_level(widths, level)
        spread = counts_of_level * widths / widths_of_level
        covered = counts.sum(1)
        reference = self._with_clipped(counts, inside, low, high)
        ratio = reference / spread
        log_ratio = ratio.log()
        terms = reference * log_ratio
        terms = torch.where(inside, terms, 0)
        total = terms.sum(1) + covered
        divergence = total / self.total - 1
        return torch.where(covered > 0, divergence, torch.inf)

    def _levels(self, scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
        """The index of the level to which each bin quantizes, counted from 0 at the lowest, ``(C, B)``."""
        steps = (self.values / scale).add_(zero_point)
        quantized = self.grid.round(steps)
        # Quantizing keeps the order, so a level is a run of bins.
        starts_level = quantized[:, 1:] != quantized[:, :-1]
        level = starts_level.cumsum(1)
        return torch.nn.functional.pad(level, (1, 0))

    def _with_clipped(
        self, counts: torch.Tensor, inside: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> torch.Tensor:
        """Add the counts outside each range to its outermost bins, in place; returns ``counts``, ``(C, B)``."""
        is_below = self.values < low
        is_above = self.values > high
        below = is_below * self.numbers
        above = is_above * self.numbers
        number_of_bins = len(self.values)
        first = inside.int().argmax(1, keepdim=True)
        from_last = inside.flip(1).int().argmax(1, keepdim=True)
        last = number_of_bins - 1 - from_last
        counts.scatter_add_(1, first, below.sum(1, keepdim=True))
        counts.scatter_add_(1, last, above.sum(1, keepdim=True))
        return counts


def _sum_by_level(values: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """For each bin, the sum of ``values`` over all bins of its level, ``(C, B)``."""
    sums = torch.zeros_like(values).scatter_add_(1, level, values)
    return sums.gather(1, level)


def _count_flat(values: torch.Tensor) -> Histogram:
    """Count a flat tensor by the compiled loops: ``counts`` is ``(65536,)``, ``low`` and ``high`` are scalars."""
    counts = launch.count_values(values)
    # Reading few values again is faster than looking through the bins.
    if values.dtype != torch.bfloat16 or len(values) <= _TILE:
        low, high = torch.aminmax(values)
        return Histogram(counts, low, high)
    bins = _ascending(counts)
    low, high = value_of(bins[[0, -1]])
    if count_nan(counts):
        low = high = torch.full_like(low, torch.nan)
    return Histogram(counts, low, high)


def _count_plainly(observed: torch.Tensor) -> Histogram:
    """:func:`count_values` by torch's operations, or on a GPU by the compiled loop: all scales at once."""
    scales = observed.shape[1]
    device = observed.device
    counts = torch.zeros(scales, BINS, dtype=torch.int64, device=device)
    size_of_observation = max(1, observed[0].numel())
    values_at_once = tile_size(device, _TILE)
    observations = values_at_once // size_of_observation
    observations = max(1, observations)
    for tile in observed.split(observations):
        values = tile.bfloat16()
        if on_gpu.can_run(tile):
            on_gpu.count_patterns(values, counts)
            continue
        # Unsigned, because a bin is not negative; widened, because an index cannot be uint16. An accelerator's host
        # would wait for bincount.
        bins = values.view(torch.uint16)
        bins = bins.to(torch.int32, memory_format=torch.contiguous_format)
        if scales > 1:
            first_bins = torch.arange(0, scales * BINS, BINS, dtype=torch.int32, device=device)
            bins += first_bins[:, None]
        ones = _one(device).expand(bins.numel())
        all_counts = counts.view(-1)
        all_counts.index_add_(0, bins.view(-1), ones)
    low, high = observed_range(observed)
    return Histogram(counts, low, high)


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    """The integer 1 on a device, kept there: uploading it for each tile would make the host wait."""
    return torch.ones((), dtype=torch.int64, device=device)


def _ascending(counts: torch.Tensor) -> torch.Tensor:
    """The indices of the occupied bins of ``(65536,)``, in ascending order of the bins' values."""
    bins = counts.nonzero()[:, 0]
    # Patterns ascend with the value where the sign bit is clear, and descend where it is set.
    first_negative = int(torch.searchsorted(bins, _SIGN))
    positive = bins[:first_negative]
    negative = bins[first_negative:]
    return torch.cat([negative.flip(0), positive])


def value_of(bins: torch.Tensor) -> torch.Tensor:
    """The value in bfloat16 that each bin index stands for; called wherever counts are read (in this file)."""
    return bins.to(torch.uint16).view(torch.bfloat16)


@functools.cache
def every_value(device: torch.device) -> torch.Tensor:
    """The values of all bins, ``(65536,)`` in bfloat16, with zero in place of NaN; the caller must not write to it.

    ``search/rows.py`` calls it on an accelerator for each tensor with long bfloat16 rows; the values are computed once
    for each device.
    """
    with torch.inference_mode(False):
        bins = torch.arange(BINS, device=device)
        values = value_of(bins)
        return values.nan_to_num(0, torch.inf, -torch.inf)
