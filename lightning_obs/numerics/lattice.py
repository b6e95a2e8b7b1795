"""Find the grid that the values of a scale already lie on: weights that were quantized before.

Checkpoints of quantization-aware training and dequantized files hold ``s * n``, n integers of few bits, rounded to the
dtype that they are stored in. A range search moves such values to another grid and rounds a second time; the step s
that they have gives them back.

Method. The value that is largest in magnitude is ``s * k`` for a small integer k: each k that the format has is tried,
the coarsest grid first. A step rounds ``s * n`` to a stored value v where it lies in ``[(v - h) / n, (v + h) / n]``, h
half the distance to the next number of the dtype; the step is in the middle of the intersection of all intervals of
its values. An empty intersection says that there is no grid, so nothing is assumed of how the values were rounded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.numerics.qparams import tile_size

#: values of a tile, in float32
_TILE = 1 << 20
#: values of a row that are tried first: few rows of a weight without a grid are looked at whole
_FIRST = 8
#: dtypes that values may have been rounded to before they were widened to float32, coarsest first
_NARROW = (torch.bfloat16, torch.float16)
#: how far the ends of the intersection may miss each other, in roundings of the step: one more rounding of the values
_SLACK = 1.0


class Lattice(NamedTuple):
    """The grids of scales, ``(*Q,)`` each.

    Attributes:
        step: between neighbouring numbers, negative where a symmetric format needs it; 0: there is no grid.
        lowest: the integer that the format's lowest code stands for.
        exact: whether code times step, in the dtype of the values, is every value bit for bit.
    """

    step: torch.Tensor
    lowest: torch.Tensor
    exact: torch.Tensor


@torch.no_grad()
def find_lattice(observed: torch.Tensor, args: QuantizationArgs, signed: bool) -> Lattice:
    """The grid of each scale's values, for a format of integers; called by the observer ``lattice`` for a weight.

    Args:
        observed: ``(N, *Q, G)``: N observations, Q the shape of the scales, G values per scale.
        args: bits, and whether there is a zero point.
        signed: whether a step may be negative, where there is no zero point.

    >>> values = torch.tensor([[[-0.8, 0.3, 0.7], [-0.8, 0.31, 0.7]]])
    >>> find_lattice(values, QuantizationArgs(num_bits=4, symmetric=True), signed=False).step
    tensor([0.1000, 0.0000])
    """
    shape = observed.shape[1:-1]
    rows = observed.flatten(1, -2).transpose(0, 1).flatten(1)
    roundoff = _roundoff_of(rows)
    height = max(1, tile_size(rows.device, _TILE) // max(1, rows.shape[1]))
    tiles = []
    for tile in rows.split(height):
        tiles.append(_find_in_rows(tile, args, signed, roundoff))
    step, lowest, exact = (torch.cat(parts) for parts in zip(*tiles, strict=True))
    return Lattice(step.reshape(shape), lowest.reshape(shape), exact.reshape(shape))


def _roundoff_of(rows: torch.Tensor) -> float:
    """The largest relative error of the dtype that the values were rounded to; it may be narrower than their own."""
    dtype = rows.dtype
    for narrow in _NARROW:
        if dtype.itemsize > narrow.itemsize and torch.equal(rows.to(narrow).to(dtype), rows):
            dtype = narrow
            break
    return torch.finfo(dtype).eps / 2


def _find_in_rows(rows: torch.Tensor, args: QuantizationArgs, signed: bool, roundoff: float) -> Lattice:
    """The grid of each row of values ``(n, G)``; all of the result are ``(n,)``."""
    values = rows if rows.dtype == torch.float64 else rows.float()
    magnitude = values.abs().amax(1, keepdim=True)
    ratios = values / torch.where(magnitude == 0, 1.0, magnitude)
    first_ratios = ratios[:, :_FIRST].contiguous()
    step = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    is_open = magnitude[:, 0] > 0
    levels = 2**args.num_bits
    largest = levels // 2 if args.symmetric else levels - 1
    for k in range(1, largest + 1):
        if 12 * roundoff * k > 1:  # rounding moves values by so much of a step that any would fit
            break
        # Both the value and the largest one, of which the step comes, are rounded.
        tolerance = k * (3 * roundoff + 4 * torch.finfo(values.dtype).eps)
        may_fit = is_open & (_distance_to_integers(first_ratios * k) <= tolerance)
        candidates = may_fit.nonzero()[:, 0]
        in_steps = ratios[candidates] * k
        fits = _distance_to_integers(in_steps) <= tolerance
        candidates = candidates[fits]
        integers = in_steps[fits].round()
        sign = _sign_of_step(integers, levels, args.symmetric, signed)
        steps = _step_in_all_intervals(values[candidates].double(), integers.double(), roundoff)
        step[candidates] = steps * sign
        is_open = is_open & (step == 0)
    return _lattice_of(rows, values, step, levels, args.symmetric)


def _distance_to_integers(rows: torch.Tensor) -> torch.Tensor:
    """The largest distance of a row's numbers to their nearest integers, ``(n,)``."""
    return (rows - rows.round()).abs().amax(1)


def _sign_of_step(integers: torch.Tensor, levels: int, symmetric: bool, signed: bool) -> torch.Tensor:
    """1 or -1 where the format can hold the integers ``(n, G)`` of a row with a step of this sign; 0: it cannot."""
    low = integers.amin(1).clamp_max(0)
    high = integers.amax(1).clamp_min(0)
    if not symmetric:
        return (high - low < levels).double()
    half = levels // 2
    fits = (low >= -half) & (high < half)
    fits_turned = signed & (high <= half) & (low > -half)
    return torch.where(fits, 1.0, torch.where(fits_turned, -1.0, 0.0)).double()


def _step_in_all_intervals(values: torch.Tensor, integers: torch.Tensor, roundoff: float) -> torch.Tensor:
    """The step ``(n,)`` that gives all values ``(n, G)`` of a row by their integers; 0 where none does."""
    _, exponent = torch.frexp(values)
    half_distance = torch.ldexp(torch.full_like(values, roundoff), exponent - 1)
    is_zero = integers == 0
    divisor = torch.where(is_zero, 1.0, integers).abs()
    magnitude = values.abs()
    low = ((magnitude - half_distance) / divisor).masked_fill(is_zero, 0.0).amax(1)
    high = ((magnitude + half_distance) / divisor).masked_fill(is_zero, torch.inf).amin(1)
    middle = (low + high) / 2
    zeros_are_zero = (values.masked_fill(~is_zero, 0.0) == 0).all(1)
    has_step = zeros_are_zero & (low - high <= _SLACK * roundoff * middle)
    return torch.where(has_step, middle, 0.0)


def _lattice_of(rows: torch.Tensor, values: torch.Tensor, step: torch.Tensor, levels: int, symmetric: bool) -> Lattice:
    """The lattice of rows whose steps are decided, as it is stored in the dtype of the rows."""
    stored = step.to(rows.dtype)
    divisor = torch.where(stored == 0, 1.0, stored.to(values.dtype))
    integers = (values / divisor[:, None]).round()
    half = levels // 2
    lowest = torch.full_like(stored, -half)
    if not symmetric:
        # As close to a symmetric range as the integers allow.
        above = integers.amax(1).clamp_min(0) - (levels - 1)
        below = integers.amin(1).clamp_max(0)
        lowest = torch.minimum(torch.maximum(torch.full_like(above, -half), above), below).to(rows.dtype)
    products = integers.to(rows.dtype) * stored[:, None]
    exact = (products == rows).all(1)
    return Lattice(stored, lowest, exact)
