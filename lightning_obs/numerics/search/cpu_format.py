"""A number format for the compiled loops: its numbers, and how a range becomes a scale."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from compressed_tensors.quantization.utils import should_generate_mx_scales
from numba import types
from numba.extending import overload

from lightning_obs.numerics.formats import NumberFormat, format_of_dtype
from lightning_obs.numerics.kernels.jit import jit
from lightning_obs.numerics.search.definition import GridSearch

f32, i32 = np.float32, np.int32


class Format(NamedTuple):
    """Numbers of a format, and how a range becomes a scale: float32 and int32, so that a loop stays in them.

    Rounding to a floating format adds and subtracts ``1.5 * 2**(23 - mantissa)`` times the power of two of the value,
    which is at least that of the smallest normal number: ``normal`` and ``magic`` hold both as bits.
    """

    low: Any
    high: Any
    steps: Any  # of a floating format (normal, magic); of integers None: each is a type, and has loops of its own
    symmetric: bool
    signed: bool  # whether the scale is negative where the range reaches farther above zero
    divisor: Any  # of the range: the scale
    exact: bool  # whether scales are rounded to less than float32, or zero points or signs depend on the last bit
    range: Any  # (normal, magic, largest number) of the range's dtype; magic 0: float32
    scale: Any  # the same of the scale's; magic 0: the range's
    mx_round: Any  # power of two scales (MX): added to the bits before the mantissa is cut; 0: none
    mx_offset: Any
    eps: Any  # instead of a scale of zero
    least: Any  # no magnitude that is smaller is searched here
    most: Any  # nor one that is more scales


def loop_format(search: GridSearch, dtype: torch.dtype) -> tuple[Format, float]:
    """A format's parameters for the loops, and the largest distance of a value to its number, in first scales."""
    grid, factors = search.grid, search.factors
    number, mx = grid.number, should_generate_mx_scales(grid.args)
    half = format_of_dtype(dtype)
    rounded = None if mx or grid.scale_dtype in (None, dtype) else format_of_dtype(grid.scale_dtype)
    # A scale may be narrower than its range asks for, by the last bit of its mantissa.
    slack = 2.0 if mx else 1.01 if rounded is None else 1 + 0.56 * 2.0**-rounded.mantissa
    span = -grid.low if grid.signed else (grid.high - grid.low) / (2 if grid.args.symmetric else 1)
    most, narrowest = span * slack / (search.expand * factors[0]), min(factors) / factors[0]
    distance = max(grid.last_step() * max(factors) / factors[0], most - (span - 1) * narrowest / slack + 1)
    zero = torch.zeros(1, dtype=dtype)
    form = Format(
        *(f32(grid.low), f32(grid.high), number and _bits(number)[:2], grid.args.symmetric, grid.signed),
        divisor=f32(span),
        exact=half is not None or rounded is not None or mx or not grid.args.symmetric or grid.signed,
        range=_bits(half),
        scale=_bits(rounded),
        mx_round=i32(1 << (22 - number.mx_mantissa) if mx and number is not None else 0),
        mx_offset=i32(math.floor(math.log2(grid.high)) << 23),
        eps=f32(grid.qparams(zero, zero)[0].item()),
        least=f32(2.0 ** (-100 if half is None or not mx else max(-100, half.smallest + 1))),
        most=f32(most * 1.01),
    )
    return form, distance


def _bits(number: NumberFormat | None) -> tuple[Any, Any, Any]:
    """``normal`` and ``magic`` of a floating format, and its largest number; None: ``magic`` is 0."""
    if number is None:
        return i32(127 << 23), i32(0), f32(0)
    magic = ((23 - number.mantissa) << 23) + (1 << 22)
    return i32((number.smallest + 127) << 23), i32(magic), f32(number.last)


@jit()
def near(x: Any, normal: Any, magic: Any) -> Any:
    """The nearest number of a floating format, ties to even, without its largest number."""
    power = i32(f32(x).view(i32) & i32(0x7F800000))
    shift = i32(max(power, normal) + magic).view(f32)
    return (x + shift) - shift


@jit()
def near_integer(x: Any) -> Any:
    """The nearest integer, ties to even, up to 2**22."""
    return (x + f32(12582912.0)) - f32(12582912.0)


def nearest(x: Any, steps: Any) -> Any:
    """The nearest number of a format with these ``steps``."""
    raise NotImplementedError


@overload(nearest, inline="always")  # type: ignore[untyped-decorator]
def _nearest(x: Any, steps: Any) -> Any:
    return _nearest_integer if isinstance(steps, types.NoneType) else _nearest_float


def _nearest_integer(x: Any, steps: Any) -> Any:
    return near_integer(x)


def _nearest_float(x: Any, steps: Any) -> Any:
    return near(x, steps[0], steps[1])


@jit(inline=True)
def stored(x: Any, form: Format) -> Any:
    """Rounded to the dtype of the range; infinite beyond its largest number, which float16 reaches early."""
    rounded = near(x, form.range[0], form.range[1])
    rounded = rounded if abs(rounded) <= form.range[2] else x * f32(np.inf)
    return rounded if form.range[1] else x


@jit()
def shrunk(ends: Any, factor: Any, form: Format, found: Any) -> None:
    """Ends of ranges times a factor, as they are stored."""
    for r in range(found.size):
        found[r] = stored(ends[r] * factor, form)


@jit()
def qparams(lows: Any, highs: Any, form: Format, scales: Any, zeros: Any) -> None:
    """Scales and zero points as compressed-tensors computes them, rounding after every operation as it does."""
    for r in range(scales.size):  # without a call, and without products to fuse: it is vectorised
        low, high, zero = min(lows[r], f32(0)), max(highs[r], f32(0)), f32(0)
        size = max(-low, high)
        if not form.symmetric:
            scale = stored(stored(high - low, form) / form.divisor, form)
            zero = near_integer(min(max(stored(form.low - stored(low / scale, form), form), form.low), form.high))
        elif form.mx_round:
            power = i32(i32(f32(size).view(i32) + form.mx_round) & i32(0x7F800000))
            scale = i32(max(i32(power - form.mx_offset), i32(0))).view(f32)
            if form.range[1] and power.view(f32) > form.range[2]:  # the power of two is taken in the range's dtype
                scale = f32(np.inf)
        else:
            scale = stored(size / form.divisor, form)
            scale = -scale if form.signed and high > -low else scale
        if form.scale[1]:
            scale = near(min(scale, form.scale[2]), form.scale[0], form.scale[1])
        scales[r], zeros[r] = scale if scale != f32(0) else form.eps, zero
