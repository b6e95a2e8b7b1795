"""Find the grid on which the values of a scale already lie: weights that were quantized before.

The observer ``lattice`` calls :func:`find_lattice`. Checkpoints of quantization-aware training and dequantized files
hold ``s * n``: a step s times an integer n of few bits, rounded to the dtype of the file. A range search would move
such values to another grid and round them a second time. Quantizing with the step s reproduces them.

Method. The value of largest magnitude is ``s * k`` for a small integer k. Each k that the format can hold is tried, the
coarsest grid first. The product ``s * n`` rounds to a stored value v if s lies in ``[(v - h) / n, (v + h) / n]``, with
h half the distance from v to the next number of the dtype. The step is the middle of the intersection of these
intervals over all values. An empty intersection shows that there is no such grid.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.numerics.qparams import tile_size

#: values of a tile, in float32
_TILE = 1 << 20
#: values of a row that are tried first: in a weight without a grid, these rule out most rows
_FIRST = 8
#: dtypes that values may have been rounded to before they were widened to float32, coarsest first
_NARROW = (torch.bfloat16, torch.float16)
#: how far an empty intersection may be from touching, in units of the step times ``roundoff``: it allows for values
#: that were rounded once more than the intervals assume
_SLACK = 1.0
#: with a tolerance above a quarter of a step, half of all numbers would count as integers
_TELLING_DISTANCE = 0.25


class Lattice(NamedTuple):
    """The grid of each scale, in three tensors ``(*Q,)``; :func:`find_lattice` makes it for the observer ``lattice``.

    Attributes:
        step: distance of neighbouring numbers; negative where a symmetric format can hold the integers only with
            opposite signs; 0 where the values lie on no grid, and where all of them are zero.
        lowest: the integer n for which the format's lowest code stands.
        exact: whether integer times step, in the dtype of the values, gives back every value bit for bit; True where
            all values are zero.
    """

    step: torch.Tensor
    lowest: torch.Tensor
    exact: torch.Tensor


@torch.no_grad()
def find_lattice(observed: torch.Tensor, args: QuantizationArgs, signed: bool) -> Lattice:
    """The grid of each scale's values, for an integer format; the observer ``lattice`` calls it for each weight.

    Args:
        observed: ``(N, *Q, G)``: N observations, Q the shape of the scales, G values per scale.
        args: number of bits, and whether the format is symmetric.
        signed: whether the step of a symmetric format may be negative.

    >>> values = torch.tensor([[[-0.8, 0.3, 0.7], [-0.8, 0.31, 0.7]]])
    >>> find_lattice(values, QuantizationArgs(num_bits=4, symmetric=True), signed=False).step
    tensor([0.1000, 0.0000])
    """
    shape = observed.shape[1:-1]
    rows = observed.flatten(1, -2).transpose(0, 1).flatten(1)
    roundoff = _roundoff_of(rows)
    width = max(1, rows.shape[1])
    height = max(1, tile_size(rows.device, _TILE) // width)
    tiles = []
    for tile in rows.split(height):
        tiles.append(_find_in_rows(tile, args, signed, roundoff))
    step, lowest, exact = map(torch.cat, zip(*tiles, strict=True))
    return Lattice(step.reshape(shape), lowest.reshape(shape), exact.reshape(shape))


def _roundoff_of(rows: torch.Tensor) -> float:
    """The largest relative rounding error of the narrowest dtype that holds all values exactly."""
    dtype = rows.dtype
    for narrow in _NARROW:
        if dtype.itemsize > narrow.itemsize and torch.equal(rows.to(narrow).to(dtype), rows):
            dtype = narrow
            break
    return torch.finfo(dtype).eps / 2


def _find_in_rows(rows: torch.Tensor, args: QuantizationArgs, signed: bool, roundoff: float) -> Lattice:
    """The grid of each row of values ``(n, G)``; the result's tensors are ``(n,)``. See the module for the method."""
    values = rows if rows.dtype == torch.float64 else rows.float()
    magnitude = values.abs().amax(1, keepdim=True)
    ratios = values / torch.where(magnitude == 0, 1.0, magnitude)
    first_ratios = ratios[:, :_FIRST].contiguous()
    step = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    is_open = magnitude[:, 0] > 0
    levels = 2**args.num_bits
    largest = levels // 2 if args.symmetric else levels - 1
    # How far a ratio times k may be from its integer, over k. Value and largest value are rounded once each, some once
    # more (_SLACK): three times roundoff. The quotient and the product here are rounded to half an eps each; four eps
    # leave room.
    relative_tolerance = 3 * roundoff + 4 * torch.finfo(values.dtype).eps
    for k in range(1, largest + 1):
        if 3 * roundoff * k > _TELLING_DISTANCE:
            break
        tolerance = k * relative_tolerance
        first_fit = _distance_to_integers(first_ratios * k) <= tolerance
        may_fit = is_open & first_fit
        candidates = may_fit.nonzero()[:, 0]
        in_steps = ratios[candidates] * k
        fits = _distance_to_integers(in_steps) <= tolerance
        candidates = candidates[fits]
        integers = in_steps[fits].round()
        sign = _sign_of_step(integers, levels, args.symmetric, signed)
        candidate_values = values[candidates]
        steps = _step_in_all_intervals(candidate_values.double(), integers.double(), roundoff)
        step[candidates] = steps * sign
        is_open = is_open & (step == 0)
    return _lattice_of(rows, values, step, levels, args.symmetric)


def _distance_to_integers(rows: torch.Tensor) -> torch.Tensor:
    """For each row, the largest distance of a number to its nearest integer, ``(n,)``."""
    distances = (rows - rows.round()).abs()
    return distances.amax(1)


def _sign_of_step(integers: torch.Tensor, levels: int, symmetric: bool, signed: bool) -> torch.Tensor:
    """The sign ``(n,)`` of the step with which the format can hold each row's integers ``(n, G)``; 0: it cannot."""
    low = integers.amin(1).clamp_max(0)
    high = integers.amax(1).clamp_min(0)
    if not symmetric:
        return (high - low < levels).double()
    half = levels // 2
    fits = (low >= -half) & (high < half)
    fits_turned = signed & (high <= half) & (low > -half)
    sign_of_misfits = torch.where(fits_turned, -1.0, 0.0)
    sign = torch.where(fits, 1.0, sign_of_misfits)
    return sign.double()


def _step_in_all_intervals(values: torch.Tensor, integers: torch.Tensor, roundoff: float) -> torch.Tensor:
    """The positive step ``(n,)`` with which the integers give all values ``(n, G)`` of a row; 0 where there is none."""
    _, exponent = torch.frexp(values)
    roundoffs = torch.full_like(values, roundoff)
    half_distance = torch.ldexp(roundoffs, exponent - 1)
    is_zero = integers == 0
    divisor = torch.where(is_zero, 1.0, integers).abs()
    magnitude = values.abs()
    lows = (magnitude - half_distance) / divisor
    highs = (magnitude + half_distance) / divisor
    low = lows.masked_fill_(is_zero, 0.0).amax(1)
    high = highs.masked_fill_(is_zero, torch.inf).amin(1)
    middle = (low + high) / 2
    slack = _SLACK * roundoff * middle
    values_of_zeros = values.masked_fill(~is_zero, 0.0)
    zeros_are_zero = (values_of_zeros == 0).all(1)
    has_step = zeros_are_zero & (low - high <= slack)
    return torch.where(has_step, middle, 0.0)


def _lattice_of(rows: torch.Tensor, values: torch.Tensor, step: torch.Tensor, levels: int, symmetric: bool) -> Lattice:
    """The result for rows ``(n, G)`` with their steps, in the dtype of the rows.

    ``values`` are the rows in float32 or wider; ``step`` is ``(n,)``; ``levels`` is the number of codes of the format.
    """
    stored = step.to(rows.dtype)
    divisor = torch.where(stored == 0, 1.0, stored.to(values.dtype))
    integers = (values / divisor[:, None]).round()
    half = levels // 2
    lowest = torch.full_like(stored, -half)
    if not symmetric:
        # As close to a symmetric range as the integers allow.
        high = integers.amax(1).clamp_min(0)
        low = integers.amin(1).clamp_max(0)
        reaching_high = (high - (levels - 1)).clamp_min(-half)
        lowest = torch.minimum(reaching_high, low).to(rows.dtype)
    products = integers.to(rows.dtype) * stored[:, None]
    exact = (products == rows).all(1)
    return Lattice(stored, lowest, exact)
