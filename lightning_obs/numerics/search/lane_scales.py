"""Compute the scales of candidates in the search loop of a CPU, bit for bit as compressed-tensors.

``numba_loop.py`` calls :func:`scales_of` before the loop; the loop (``lane_errors.py``) calls the compiled functions
for each candidate of each block of rows.

With groups of 16 values there is a scale for each candidate of each 16 values, so computing the scales by torch and
reading them from memory would take a third of a search's time; scales and zero points of groups of 64 values, a fifth.
The loop computes the scales when it needs them, in three cases: symmetric formats whose scales are not rounded (the
magnitude of the range times a factor, divided by a number of steps), integers with zero points whose scales are not
rounded (the width of the range, divided likewise), and MX formats (a power of two). Each operation is rounded to the
dtype of the range, as torch rounds it, so a product and a sum must not be fused here. All other scales are computed by
torch before the loop, which reads them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from compressed_tensors.quantization.utils import should_generate_mx_scales

from lightning_obs.numerics.candidates import Candidates, half_of_range
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.kernels.jit import jit
from lightning_obs.numerics.search.arithmetic import Numbers, nearest

f32 = np.float32
i32 = np.int32
#: the exponent bits of a float32 infinity
_INFINITE = i32(0xFF)
#: the number of mantissa bits of float32, above which the exponent bits begin
_MANTISSA_BITS = i32(23)
# float32 stores the power of two p with the exponent bits p + 127. For a number between 2 ** p and 2 ** (p + 1) with
# exponent bits e, the reciprocal of 2 ** (p + 1) therefore has the exponent bits 253 - e.
_INVERSE = i32(253)
# The loop computes the scales of ranges in these dtypes. Not of float16, whose exponent bits differ from float32's.
_DTYPES = (torch.float32, torch.bfloat16)


class ScaleRule(NamedTuple):
    """How the loop computes a scale from a range times a factor; :func:`scales_of` makes it."""

    has_zeros: bool  # whether there are zero points: the width of the range is divided, not its magnitude
    divisor: Any  # the number of steps by which the width or the magnitude is divided
    is_bfloat16: bool  # whether each result is rounded to bfloat16, the dtype of the range; else it is float32
    mx_round: Any  # for MX: added to the bits of a magnitude to round it, before its mantissa is cut off; else 0
    mx_offset: Any  # for MX: exponent of the format's largest number
    of_zero: Any  # the scale in place of 0


class Scales(NamedTuple):
    """The candidates of R rows, as the loop reads them; :func:`scales_of` makes it for each call of the loop."""

    largest: Any  # magnitude of each row's range, (R,)
    lows: Any  # smallest value of each row's range, at most 0, (R,)
    highs: Any  # largest value of each row's range, at least 0, (R,)
    factors: Any  # factors of the candidates, (C,)
    rule: ScaleRule  # how scales are computed, if `stored` is empty
    stored: Any  # scales that torch computed, (C, R); (0, 0) if the loop computes them
    zeros: Any  # zero points that torch computed, (C, R); (0, 0) if all are 0 or the loop computes them


def scales_of(candidates: Candidates, grid: NumberGrid) -> Scales:
    """Convert candidates to numpy arrays for the loop; torch computes the scales that the loop cannot compute.

    Called by ``numba_loop.py`` before each call of the loop.
    """
    dtype = candidates.low.dtype
    lows = candidates.low.clamp(max=0).float()
    highs = candidates.high.clamp(min=0).float()
    ranges = torch.maximum(-lows, highs).numpy(), lows.numpy(), highs.numpy()
    factors = candidates.factors.float().numpy()
    nothing = np.empty((0, 0), f32)
    rule = _rule_of(grid, dtype) if dtype in _DTYPES else None
    if rule is not None:
        return Scales(*ranges, factors, rule, nothing, nothing)
    scale, zero_point = candidates.qparams(grid)
    zeros = nothing if zero_point is None else zero_point.contiguous().numpy()
    unused = ScaleRule(False, f32(1), False, i32(0), i32(0), f32(0))
    return Scales(*ranges, factors, unused, scale.contiguous().numpy(), zeros)


def _rule_of(grid: NumberGrid, dtype: torch.dtype) -> ScaleRule | None:
    """The rule by which the loop computes scales for ranges in a dtype; None: torch has to compute them."""
    zero = torch.zeros(1, dtype=dtype)
    scale_of_zero, _ = grid.qparams(zero, zero)
    of_zero = f32(scale_of_zero.item())
    is_bfloat16 = dtype == torch.bfloat16
    if should_generate_mx_scales(grid.args):
        assert grid.number is not None
        # Half a unit of the last mantissa bit that is kept, among float32's 23 mantissa bits.
        mx_round = i32(1 << (22 - grid.number.mx_mantissa))
        mx_offset = i32(math.floor(math.log2(grid.high)))
        return ScaleRule(False, f32(1), is_bfloat16, mx_round, mx_offset, of_zero)
    half = half_of_range(grid, dtype)
    if half is not None:
        return ScaleRule(False, f32(half), is_bfloat16, i32(0), i32(0), of_zero)
    if not grid.args.symmetric and grid.scale_dtype is None and grid.global_scale is None:
        return ScaleRule(True, f32(grid.high - grid.low), is_bfloat16, i32(0), i32(0), of_zero)
    return None


@jit(inline=True)
def rounded(value: Any, is_bfloat16: bool) -> Any:
    """Round a float32 to bfloat16, ties to even, if ``is_bfloat16``; the result is float32 in either case."""
    bits = f32(value).view(i32)
    is_odd = i32(i32(bits >> i32(16)) & i32(1))
    near = i32(i32(bits + i32(0x7FFF)) + is_odd)
    upper_half = i32(near & i32(-0x10000))
    return upper_half.view(f32) if is_bfloat16 else value


@jit()
def divide(largest: Any, factor: Any, rule: ScaleRule, scales: Any) -> None:
    """Write the scales ``(r,)`` of one candidate: the magnitudes ``largest`` times its factor, over the divisor.

    The loop calls it for symmetric formats that are not MX.
    """
    for r in range(scales.size):
        magnitude = rounded(f32(largest[r] * factor), rule.is_bfloat16)
        scale = rounded(f32(magnitude / rule.divisor), rule.is_bfloat16)
        scales[r] = scale if scale != f32(0) else rule.of_zero


@jit()
def divide_widths(
    lows: Any, highs: Any, factor: Any, rule: ScaleRule, numbers: Numbers, scales: Any, zeros: Any
) -> None:
    """Write the scales and the zero points ``(r,)`` of one candidate: the widths of the ranges over the divisor.

    The loop calls it for integers with zero points. ``numbers`` are those of the format.
    """
    for r in range(scales.size):
        low = rounded(f32(lows[r] * factor), rule.is_bfloat16)
        high = rounded(f32(highs[r] * factor), rule.is_bfloat16)
        width = rounded(f32(high - low), rule.is_bfloat16)
        scale = rounded(f32(width / rule.divisor), rule.is_bfloat16)
        steps_below_zero = rounded(f32(low / scale), rule.is_bfloat16)
        zero = rounded(f32(numbers.low - steps_below_zero), rule.is_bfloat16)
        within = min(max(zero, numbers.low), numbers.high)
        zeros[r] = nearest(within, None) if zero == zero else f32(0)  # 0 for a NaN, of an empty range
        scales[r] = scale if scale != f32(0) else rule.of_zero


@jit()
def take_exponents(largest: Any, factor: Any, rule: ScaleRule, exponents: Any) -> None:
    """Write the exponent bits ``(r,)`` of magnitudes times a candidate's factor, rounded to few bits, for MX.

    The loop calls it before :func:`take_powers`.
    """
    for r in range(exponents.size):
        magnitude = rounded(f32(largest[r] * factor), rule.is_bfloat16)
        bits = i32(f32(magnitude).view(i32) + rule.mx_round)
        exponents[r] = i32(bits >> _MANTISSA_BITS)


@jit()
def take_powers(exponents: Any, rule: ScaleRule, scales: Any) -> None:
    """Write the MX scales ``(r,)`` for the exponent bits of :func:`take_exponents`: powers of two."""
    for r in range(scales.size):
        exponent = i32(max(i32(exponents[r] - rule.mx_offset), i32(0)))
        power = i32(exponent << _MANTISSA_BITS).view(f32)
        scale = power if exponent != i32(0) else rule.of_zero
        scales[r] = scale if exponents[r] < _INFINITE else f32(np.inf)


@jit()
def take_units(largest: Any, units: Any) -> None:
    """Write to ``units`` the reciprocal of a power of two near each magnitude ``(r,)``.

    ``measure_rows`` calls it once for each block of rows, before it reads the block. The values of a row, and later its
    candidates' scales, are multiplied by the row's unit, so that errors neither overflow nor vanish.

    Args:
        largest: magnitudes of the ranges of the block's rows, ``(r,)``.
        units: receives the units, ``(r,)``: reciprocals of the next power of two above each magnitude, limited to
            normal numbers of float32, from the smallest one to ``2 ** 126``.
    """
    for r in range(units.size):
        exponent = i32(f32(largest[r]).view(i32) >> _MANTISSA_BITS)
        inverse = i32(min(max(i32(_INVERSE - exponent), i32(1)), _INVERSE))
        units[r] = i32(inverse << _MANTISSA_BITS).view(f32)
