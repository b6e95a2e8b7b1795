"""Scales of candidates in the loop of a CPU, bit for bit those of compressed-tensors.

A candidate of 16 values has a scale of its own, so scales that torch computed and memory kept would take a third of a
search's time. The loop computes them where it needs them, for symmetric formats whose scales are not rounded: the
magnitude of the range times a factor, divided by a number of steps; or of an MX format, its power of two. Each
operation is rounded to the dtype of the range, as torch rounds it, so nothing here may be contracted. Other scales are
computed by torch before, and read.
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

f32 = np.float32
i32 = np.int32
#: the exponent of an infinity, as bits of float32 hold it
_INFINITE = i32(0xFF)
_MANTISSA_BITS = i32(23)
# One over a power of two near the number whose exponent bits are e has the exponent bits 253 - e.
_INVERSE = i32(253)
# Ranges in these dtypes have scales that the loop computes; float16 has other powers of two.
_DTYPES = (torch.float32, torch.bfloat16)


class ScaleRule(NamedTuple):
    """How the magnitude of a range, times a factor, becomes a scale."""

    divisor: Any  # the number of steps by which a magnitude is divided
    is_bfloat16: bool  # whether results are rounded to bfloat16, the dtype of the range; else they are float32
    mx_round: Any  # added to the bits of a magnitude before its mantissa is cut; 0: scales are no powers of two
    mx_offset: Any  # exponent of the format's largest number
    of_zero: Any  # the scale in place of 0


class Scales(NamedTuple):
    """The candidates of R rows."""

    largest: Any  # magnitude of each row's range, (R,)
    factors: Any  # of the candidates, (C,)
    rule: ScaleRule
    stored: Any  # scales of each candidate, (C, R); no rows: the rule computes them
    zeros: Any  # zero points, (C, R); no rows: all are 0


def scales_of(candidates: Candidates, grid: NumberGrid) -> Scales:
    """Candidates as the loop reads them."""
    dtype = candidates.low.dtype
    largest = torch.maximum(-candidates.low, candidates.high).clamp(min=0).float().numpy()
    factors = candidates.factors.float().numpy()
    nothing = np.empty((0, 0), f32)
    half = half_of_range(grid, dtype)
    is_mx = should_generate_mx_scales(grid.args)
    if dtype in _DTYPES and (is_mx or half is not None):
        return Scales(largest, factors, _rule_of(grid, dtype, half), nothing, nothing)
    scale, zero_point = candidates.qparams(grid)
    zeros = nothing if zero_point is None else zero_point.contiguous().numpy()
    rule = ScaleRule(f32(1), False, i32(0), i32(0), f32(0))
    return Scales(largest, factors, rule, scale.contiguous().numpy(), zeros)


def _rule_of(grid: NumberGrid, dtype: torch.dtype, half: float | None) -> ScaleRule:
    """The rule of a symmetric format for ranges in a dtype; ``half`` is None for an MX format."""
    zero = torch.zeros(1, dtype=dtype)
    scale_of_zero, _ = grid.qparams(zero, zero)
    of_zero = f32(scale_of_zero.item())
    if half is not None:
        return ScaleRule(f32(half), dtype == torch.bfloat16, i32(0), i32(0), of_zero)
    assert grid.number is not None
    mx_round = i32(1 << (22 - grid.number.mx_mantissa))
    mx_offset = i32(math.floor(math.log2(grid.high)))
    return ScaleRule(f32(1), dtype == torch.bfloat16, mx_round, mx_offset, of_zero)


@jit(inline=True)
def rounded(value: Any, is_bfloat16: bool) -> Any:
    """A value in the dtype of its range, ties to even."""
    bits = f32(value).view(i32)
    is_odd = i32(i32(bits >> i32(16)) & i32(1))
    near = i32(i32(bits + i32(0x7FFF)) + is_odd)
    upper_half = i32(near & i32(-0x10000))
    return upper_half.view(f32) if is_bfloat16 else value


@jit()
def divide(largest: Any, factor: Any, rule: ScaleRule, scales: Any) -> None:
    """The scales of one candidate: magnitudes ``(r,)`` times its factor, divided."""
    for r in range(scales.size):
        magnitude = rounded(f32(largest[r] * factor), rule.is_bfloat16)
        scale = rounded(f32(magnitude / rule.divisor), rule.is_bfloat16)
        scales[r] = scale if scale != f32(0) else rule.of_zero


@jit()
def take_exponents(largest: Any, factor: Any, rule: ScaleRule, exponents: Any) -> None:
    """The exponent bits of magnitudes ``(r,)`` times a candidate's factor, rounded to few bits: of an MX format."""
    for r in range(exponents.size):
        magnitude = rounded(f32(largest[r] * factor), rule.is_bfloat16)
        bits = i32(f32(magnitude).view(i32) + rule.mx_round)
        exponents[r] = i32(bits >> _MANTISSA_BITS)


@jit()
def take_powers(exponents: Any, rule: ScaleRule, scales: Any) -> None:
    """The scales of an MX format that belong to exponent bits ``(r,)``."""
    for r in range(scales.size):
        exponent = i32(max(i32(exponents[r] - rule.mx_offset), i32(0)))
        power = i32(exponent << _MANTISSA_BITS).view(f32)
        scale = power if exponent != i32(0) else rule.of_zero
        scales[r] = scale if exponents[r] < _INFINITE else f32(np.inf)


@jit()
def take_units(largest: Any, units: Any) -> None:
    """One over a power of two near each magnitude ``(r,)``: where float32 has both, else the nearest power."""
    for r in range(units.size):
        exponent = i32(f32(largest[r]).view(i32) >> _MANTISSA_BITS)
        inverse = i32(min(max(i32(_INVERSE - exponent), i32(1)), _INVERSE))
        units[r] = i32(inverse << _MANTISSA_BITS).view(f32)
