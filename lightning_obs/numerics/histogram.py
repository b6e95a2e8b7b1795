"""Count every value by its own bfloat16 bit pattern.

Method: a value is rounded to bfloat16 (to nearest, ties to even), and its 16 bits are the number of its bin. Signed,
so 65,536 bins. Counts are int64, so merging two histograms is addition, and a sum of integers has the same bits
whatever the batches, their order and the ranks. Nothing has to be known in advance, and nothing is scaled by the data:
a range that the first batch decided would make the result depend on which batch was first.

Choice: bins are relative (128 per power of two), so clipping near the end of the range and rounding near zero are both
resolved. bfloat16 data lose nothing: every percentile and every error is that of the data themselves. float32 and
float16 are rounded by at most 2^-9 of each value; their exact smallest and largest value stand beside the counts, and
no value read from the counts lies outside them.

Trade-off: 512 KiB per scale, however small the data, against fewer bins that would have to be placed. So this is for
one scale per tensor or per attention head, and not for channels, groups or blocks. NaN and infinity have bins
of their own.

Once counted, data of any size cost the same: about 6,000 of the bins are occupied by a bell-shaped tensor, and each
criterion looks at these only.
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

BINS = 1 << 16
_TILE = 1 << 22  # values whose codes lie beside them at once
_CELLS = 1 << 16  # candidates x bins that a criterion looks at together: 512 KiB in float64

_NAN_FROM = 0x7F81  # patterns above infinity, of either sign


class Histogram(NamedTuple):
    """Counts and exact range of a tensor with Q scales.

    ``counts`` is ``(Q, 65536)`` in int64; ``low`` and ``high`` are ``(Q,)`` in the dtype of the counted values.
    """

    counts: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


class Support(NamedTuple):
    """The occupied bins of one scale: ``values`` ascending in float32, ``counts`` in int64, both ``(B,)``."""

    values: torch.Tensor
    counts: torch.Tensor


def count_values(observed: torch.Tensor) -> Histogram:
    """Count all values of ``(N, Q, G)``, separately for each of the Q scales.

    A NaN makes ``low`` and ``high`` NaN, an infinity makes one of them infinite: neither can be overlooked.
    """
    if not launch.can_read(observed):
        return _count_plainly(observed)
    parts = zip(*(_count_flat(observed[:, q].reshape(-1)) for q in range(observed.shape[1])), strict=True)
    # Half a megabyte of one scale need not be copied.
    return Histogram(*(torch.stack(each) if len(each) > 1 else each[0].unsqueeze(0) for each in parts))


def count_nan(counts: torch.Tensor) -> int:
    """How many NaN were counted in ``(..., 65536)``. A reduction over ranks may lose the one in a minimum."""
    return int(counts[..., _NAN_FROM:0x8000].sum() + counts[..., 0x8000 + _NAN_FROM :].sum())


def support(counts: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> Support:
    """The occupied bins of one scale, ascending.

    Args:
        counts: ``(65536,)``.
        low: the exact smallest value, a scalar. A bin that rounding put below it stands for it.
        high: the exact largest value, a scalar.
    """
    codes = _ascending(counts)
    return Support(value_of(codes).float().clamp(low.float(), high.float()), counts[codes])


def support_of(value: torch.Tensor) -> Support:
    """The occupied bins of all values of one tensor."""
    counted = count_values(value.detach().reshape(-1, 1, 1))
    return support(*(part[0] for part in counted))


def join_supports(one: Support, other: Support) -> Support:
    """The occupied bins of both tensors together."""
    values, places = torch.cat([one.values, other.values]).unique(return_inverse=True)
    counts = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    return Support(values, counts.index_add_(0, places, torch.cat([one.counts, other.counts])))


def linear_bins(found: Support, bins: int) -> tuple[float, float, list[int]]:
    """The smallest value, the largest value, and how many lie in each of ``bins`` equal parts of that range.

    >>> linear_bins(Support(torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([1, 5, 2])), 2)
    (-1.0, 1.0, [1, 7])
    """
    low, high = float(found.values[0]), float(found.values[-1])
    place = (found.values.double() - low) / (high - low or 1.0) * bins
    counts = torch.zeros(bins, dtype=torch.int64, device=found.values.device)
    counts.index_add_(0, place.long().clamp(0, bins - 1), found.counts)
    return low, high, counts.tolist()


def median_size(found: Support) -> float:
    """The magnitude that half of all values do not exceed; the report compares it with the largest value.

    >>> median_size(Support(torch.tensor([-8.0, -1.0, 0.0, 2.0]), torch.tensor([1, 3, 2, 3])))
    1.0
    """
    sizes, order = found.values.abs().sort()
    ends = found.counts[order].cumsum(0)
    return float(sizes[torch.searchsorted(ends, (int(ends[-1]) + 1) // 2)])


def percentile_range(
    counts: torch.Tensor, low: torch.Tensor, high: torch.Tensor, percentile: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest value with ``percentile`` of all at or below it, and its mirror image. For one scale.

    With n values, sorted, these are number ``n - k`` and ``k - 1`` (from 0), ``k = ceil(n * percentile / 100)``: values
    of the data, never between two. numpy calls it ``inverted_cdf``.

    Args:
        counts: ``(65536,)``.
        low: exact smallest value, a scalar; returned as it is where ``k`` is n.
        high: exact largest value, a scalar.
        percentile: in percent, in (50, 100].
    """
    values, numbers = support(counts, low, high)
    cumulative = numbers.cumsum(0)
    total = int(cumulative[-1])
    rank = math.ceil(Fraction(str(percentile)) * total / 100)  # exact: 99.9 is 999/1000 here, not the nearest float
    if rank >= total:
        return low, high
    at = torch.searchsorted(cumulative, cumulative.new_tensor([total - rank + 1, rank]))
    return values[at[0]].to(low.dtype), values[at[1]].to(high.dtype)


def candidate_divergences(
    found: Support, lows: torch.Tensor, highs: torch.Tensor, args: QuantizationArgs
) -> torch.Tensor:
    """Kullback-Leibler divergence of the quantized distribution from the observed one, ``(C,)`` in float64.

    For each candidate, P holds the counts inside the range, with the counts outside added to its outermost bins. Q
    holds the counts inside, summed over the bins that quantize to one level and spread over them again, evenly over
    the values that the occupied bins cover. ``sum P log(P / Q) - P + Q``, in shares of all that was counted; infinite
    if nothing lies inside.

    Migacz normalises Q. For a small share s that is clipped, that differs by s ** 2 / 2. But a range with one occupied
    bin inside has P = Q = 1 then, even if it clips all else: data away from zero lost everything. Here Q keeps mass.

    Migacz's bins are linear, so evenly over values is there evenly over bins. The bins here are not, so their width is
    the measure. The levels follow from ``args``: asymmetric and floating formats are served too. Exact zeros, which
    every range quantizes without error, are left out: a spike of them (ReLU) would reward the narrowest range.

    Reference:
        Migacz, 8-bit Inference with TensorRT, GTC 2017.
    """
    kept = found.values != 0
    values, numbers = found.values[kept], found.counts[kept].double()
    if not len(values):
        return torch.zeros(len(lows), dtype=torch.float64, device=lows.device)
    total = numbers.sum()
    widths = torch.frexp(values)[1].double().exp2()  # of a bin, up to a factor that all bins share
    divergences = []
    grid, qparams = NumberGrid.of(args), compute_qparams(lows, highs, args)
    # Zero is in every range, as in compute_qparams.
    columns = qparams["scale"], qparams["zero_point"], lows.clamp(max=0), highs.clamp(min=0)
    parts = (each.float()[:, None].split(max(1, _CELLS // len(values))) for each in columns)
    for scale, zero_point, low, high in zip(*parts, strict=True):
        quantized = grid.round((values / scale).add_(zero_point))
        if args.symmetric:  # the format's range, not only the observed one
            high = torch.maximum(-low, high)
            low = -high
        inside = (values >= low) & (values <= high)
        # Quantizing keeps the order, so a level is a run of bins.
        level = torch.nn.functional.pad((quantized[:, 1:] != quantized[:, :-1]).cumsum(1), (1, 0))
        counted, width = inside * numbers, inside * widths
        of_level = torch.zeros_like(counted).scatter_add_(1, level, counted).gather(1, level)
        spread = of_level * width / torch.zeros_like(width).scatter_add_(1, level, width).gather(1, level)
        covered = counted.sum(1)
        reference = counted
        reference.scatter_add_(1, inside.int().argmax(1, keepdim=True), ((values < low) * numbers).sum(1, True))
        last = inside.shape[1] - 1 - inside.flip(1).int().argmax(1, keepdim=True)
        reference.scatter_add_(1, last, ((values > high) * numbers).sum(1, True))
        terms = torch.where(inside, reference * (reference / spread).log(), 0)
        divergence = (terms.sum(1) + covered) / total - 1
        divergences.append(torch.where(covered > 0, divergence, torch.inf))
    return torch.cat(divergences)


def _count_flat(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts ``(65536,)``, smallest and largest of a flat tensor, by the compiled loops."""
    counts = launch.count_values(values)
    # Reading few values again is faster than looking through the bins.
    if values.dtype != torch.bfloat16 or len(values) <= _TILE:
        return counts, *torch.aminmax(values)
    low, high = value_of(_ascending(counts)[[0, -1]])
    if count_nan(counts):
        low = high = torch.full_like(low, torch.nan)
    return counts, low, high


def _count_plainly(observed: torch.Tensor) -> Histogram:
    """As :func:`count_values`, all scales in one launch of each operation."""
    scales, device = observed.shape[1], observed.device
    counts = torch.zeros(scales, BINS, dtype=torch.int64, device=device)
    for part in observed.split(max(1, tile_size(device, _TILE) // max(1, observed[0].numel()))):
        if on_gpu.can_run(part):
            on_gpu.count_patterns(part.bfloat16(), counts)
            continue
        # Unsigned, because a bin is not negative; widened, because places are not uint16. An accelerator's host
        # would wait for bincount.
        places = part.bfloat16().view(torch.uint16).to(torch.int32, memory_format=torch.contiguous_format)
        if scales > 1:
            places += torch.arange(0, scales * BINS, BINS, dtype=torch.int32, device=device)[:, None]
        counts.view(-1).index_add_(0, places.view(-1), _one(device).expand(places.numel()))
    return Histogram(counts, *observed_range(observed))


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), dtype=torch.int64, device=device)


def _ascending(counts: torch.Tensor) -> torch.Tensor:
    """The occupied bins in the order of their values."""
    codes = counts.nonzero()[:, 0]
    # Patterns ascend with the value where the sign bit is clear, and descend where it is set.
    split = int(torch.searchsorted(codes, 0x8000))
    return torch.cat([codes[split:].flip(0), codes[:split]])


def value_of(codes: torch.Tensor) -> torch.Tensor:
    """The value of each bin, in bfloat16."""
    return codes.to(torch.uint16).view(torch.bfloat16)


@functools.cache
def every_value(device: torch.device) -> torch.Tensor:
    """The value of all bins, ``(65536,)`` in bfloat16, with zero in place of NaN; not to be written to."""
    with torch.inference_mode(False):
        return value_of(torch.arange(BINS, device=device)).nan_to_num(0, torch.inf, -torch.inf)
