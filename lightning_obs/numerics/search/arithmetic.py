"""The error of one value, for the search loop of a CPU: the nearest number of a format, and a power of the error.

``lane_errors.py`` calls :func:`error_of` and :func:`power_of` for each value and candidate; ``numba_loop.py`` passes it
the format (:func:`numbers_of`) and the exponent (:func:`exponent_of`).

A loop over lanes (see ``lanes.py``) is fast if nothing in it is a call or a branch. So each kind of format and each
kind of exponent has a type of its own, for which numba compiles a separate loop. A power is a handful of
multiplications: ``2 ** (norm * log2(d))`` with two polynomials, or fewer for a common exponent. Its relative error is
below 4e-6 where ``d`` is at least 1e-5 of the row's largest value; two candidates count as different only if their
errors differ by 1e-5.

The trade-off: libm's power would be exact, but would take most of the time of a search.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from lightning_obs.numerics.formats import NumberFormat, NumberGrid
from lightning_obs.numerics.kernels.jit import jit

f32 = np.float32
i32 = np.int32

# ---------------------------------------------------------------------- the nearest number of a format

#: adding and subtracting 1.5 * 2 ** 23 leaves an integer, ties to even
_ROUNDER = f32(1.5 * 2**23)
_EXPONENT = i32(0x7F800000)


class FloatSteps(NamedTuple):
    """The numbers by which :func:`nearest` rounds to a floating format, as bits of float32; made by :func:`numbers_of`.

    A value is rounded by adding and subtracting ``1.5 * 2 ** (23 - mantissa)`` times its power of two, which is at
    least the smallest normal number. ``smallest`` holds the bits of that number. ``rounder`` is added to the bits of
    the power of two to multiply it by this factor.
    """

    smallest: Any
    rounder: Any


class Numbers(NamedTuple):
    """The numbers of a format, made by :func:`numbers_of`: ``low`` is the smallest, ``high`` the largest, in float32.

    ``steps`` says where the numbers between them are; None: they are the integers.
    """

    low: Any
    high: Any
    steps: Any


def numbers_of(grid: NumberGrid) -> Numbers:
    """The numbers of a grid, as the loop reads them. Called by ``numba_loop.py`` for each call of the loop."""
    steps = None if grid.number is None else _steps_of(grid.number)
    return Numbers(f32(grid.low), f32(grid.high), steps)


def _steps_of(number: NumberFormat) -> FloatSteps:
    """The steps of a floating format; 127 is float32's exponent bias, and 23 its number of mantissa bits."""
    smallest = (number.smallest + 127) << 23
    rounder = ((23 - number.mantissa) << 23) + (1 << 22)
    return FloatSteps(i32(smallest), i32(rounder))


def nearest(value: Any, steps: Any) -> Any:
    """The number of a format with these ``steps`` nearest to a value between its ends, ties to even.

    Only compiled loops can call it: numba compiles in its place what :func:`_nearest` returns.
    """
    raise NotImplementedError


@overload(nearest, inline="always")  # type: ignore[untyped-decorator]
def _nearest(value: Any, steps: Any) -> Any:
    """The function that numba compiles for a call of :func:`nearest`; the arguments are numba types."""
    return _nearest_integer if isinstance(steps, types.NoneType) else _nearest_float


def _nearest_integer(value: Any, steps: Any) -> Any:
    """:func:`nearest` where ``steps`` is None."""
    return (value + _ROUNDER) - _ROUNDER


def _nearest_float(value: Any, steps: Any) -> Any:
    """:func:`nearest` for a floating format."""
    power = i32(f32(value).view(i32) & _EXPONENT)
    shift = i32(max(power, steps.smallest) + steps.rounder).view(f32)
    return (value + shift) - shift


# ---------------------------------------------------------------------- the power of an error


# A class for each exponent that has a formula of its own: exponent_of makes an object of it, and numba compiles the
# search loop for its class. ``exponent`` is its value in float32.


class Square(NamedTuple):
    """The exponent 2."""

    exponent: Any


class Cube(NamedTuple):
    """The exponent 3, of ``imatrix_mse``."""

    exponent: Any


class TwelveFifths(NamedTuple):
    """The exponent 2.4, of ``memoryless_mse`` and ``mse``."""

    exponent: Any


class AnyExponent(NamedTuple):
    """Any other positive exponent."""

    exponent: Any


Exponent = Square | Cube | TwelveFifths | AnyExponent


def exponent_of(norm: float) -> Exponent:
    """The exponent of an error, as the loop reads it. Called by ``numba_loop.py`` for each call of the loop.

    >>> type(exponent_of(2.4)).__name__
    'TwelveFifths'
    """
    kinds: dict[float, type[Exponent]] = {2.0: Square, 2.4: TwelveFifths, 3.0: Cube}
    kind = kinds.get(norm, AnyExponent)
    return kind(f32(norm))


def power_of(error: Any, exponent: Any) -> Any:
    """``abs(error) ** exponent`` of a float32; not finite if the error is not finite. See the module for its accuracy.

    Only compiled loops can call it: numba compiles in its place what :func:`_power_of` returns.
    """
    raise NotImplementedError


@overload(power_of, inline="always")  # type: ignore[untyped-decorator]
def _power_of(error: Any, exponent: Any) -> Any:
    """The function that numba compiles for a call of :func:`power_of`; the arguments are numba types."""
    formulas = {Square: _square, Cube: _cube, TwelveFifths: _twelve_fifths, AnyExponent: _any_power}
    return formulas[exponent.instance_class]


def _square(error: Any, exponent: Any) -> Any:
    """:func:`power_of` for :class:`Square`."""
    return error * error


def _cube(error: Any, exponent: Any) -> Any:
    """:func:`power_of` for :class:`Cube`."""
    return error * error * abs(error)


# A float's bits, read as an integer, are about a logarithm; from them s ** -0.8 is computed within 5 %. The slope is
# 0.8 * 2 ** 12.
_SLOPE = i32(3277)
_BITS_OF_ONE = i32(1916931145)  # makes r lie in [0.793, 1.262] for s in [1e-20, 10]
# Minimax polynomial of r ** -0.2 for these r; its relative error is below 2.5e-6.
_R0 = f32(1.4789373874664307)
_R1 = f32(-0.9837466478347778)
_R2 = f32(0.7976735830307007)
_R3 = f32(-0.35990890860557556)
_R4 = f32(0.06704362481832504)


def _twelve_fifths(error: Any, exponent: Any) -> Any:
    """:func:`power_of` for :class:`TwelveFifths`."""
    # With s the square of the error, the result is s ** 1.2 = s * (s * y) for y = s ** -0.8. An approximate y is
    # corrected by the factor r ** -0.2 with r = (s * y) ** 4 * y, which is 1 for the exact y.
    square = error * error
    bits = i32(f32(square).view(i32) >> i32(12))
    y = i32(_BITS_OF_ONE - i32(bits * _SLOPE)).view(f32)
    fifth = square * y
    two_fifths = fifth * fifth
    r = two_fifths * two_fifths * y
    correction = _R4 * r + _R3
    correction = correction * r + _R2
    correction = correction * r + _R1
    correction = correction * r + _R0
    return fifth * square * correction


_ROOT_OF_HALF = i32(0x3F3504F3)
_MANTISSA = i32(0x7FFFFF)
# Minimax polynomial of log2(1 + x) / x for x in [sqrt(1 / 2) - 1, sqrt(2) - 1]; the error of the logarithm is below
# 3.1e-7.
_L0 = f32(1.442699670791626)
_L1 = f32(-0.7213758826255798)
_L2 = f32(0.48046502470970154)
_L3 = f32(-0.3589618504047394)
_L4 = f32(0.297262579202652)
_L5 = f32(-0.27269792556762695)
_L6 = f32(0.170634463429451)
# Minimax polynomial of 2 ** f for f in [-1 / 2, 1 / 2]; its relative error is below 7.5e-8.
_E0 = f32(1.0000001192092896)
_E1 = f32(0.6931469440460205)
_E2 = f32(0.24022120237350464)
_E3 = f32(0.05550713092088699)
_E4 = f32(0.009675540961325169)
_E5 = f32(0.001327647129073739)


def _any_power(error: Any, exponent: Any) -> Any:
    """:func:`power_of` for :class:`AnyExponent`. The least result, also for an error of 0, is about ``2 ** -126.5``."""
    # The distance is 2 ** whole * (1 + x).
    distance = abs(error)
    bits = i32(f32(distance).view(i32) - _ROOT_OF_HALF)
    whole = f32(i32(bits >> i32(23)))
    mantissa = i32(bits & _MANTISSA)
    x = i32(mantissa + _ROOT_OF_HALF).view(f32) - f32(1)
    square = x * x
    low_terms = _L1 * x + _L0
    middle_terms = _L3 * x + _L2
    first = low_terms + middle_terms * square
    high_terms = _L5 * x + _L4
    last = high_terms + _L6 * square
    fourth = square * square
    quotient = last * fourth + first
    logarithm = quotient * x  # of 1 + x
    # The result is 2 ** (number + fraction), limited to float32's range. whole * norm - number is one fused operation,
    # so it is exact.
    norm = exponent.exponent
    product = whole * norm + logarithm * norm
    shifted = min(max(product, f32(-126)), f32(128)) + _ROUNDER
    number = shifted - _ROUNDER
    fraction = (whole * norm - number) + logarithm * norm
    fraction = min(max(fraction, f32(-0.5)), f32(0.5))
    square = fraction * fraction
    low_terms = _E1 * fraction + _E0
    middle_terms = _E3 * fraction + _E2
    high_terms = _E5 * fraction + _E4
    upper_terms = high_terms * square + middle_terms
    power = upper_terms * square + low_terms
    # _ROUNDER has left ``number`` in the lowest bits of ``shifted``. Added at the place of the exponent, these bits
    # multiply by 2 ** number; all higher bits are shifted out.
    exponent_bits = i32(f32(shifted).view(i32) << i32(23))
    scaled = i32(f32(power).view(i32) + exponent_bits).view(f32)
    return scaled + distance * f32(0)  # keeps a NaN or an infinity, which the arithmetic on bits loses


@jit(inline=True)
def error_of(value: Any, inverse: Any, scale: Any, low: Any, high: Any, steps: Any) -> Any:
    """The error of quantizing a value: the value minus its nearest level times the scale, in the unit of the value.

    ``lane_errors.py`` calls it for each value and candidate. The product with the scale and the subtraction are one
    fused operation, so the error is rounded only once.

    Args:
        value: the value, in any unit.
        inverse: one over the scale.
        scale: the scale, in the unit of the value.
        low: the smallest number of the format, less the zero point.
        high: the largest number of the format, less the zero point.
        steps: where the numbers between them are. Formats with a zero point hold integers, which stay integers when
            the zero point is subtracted.
    """
    within = min(max(value * inverse, low), high)
    level = nearest(within, steps)
    return value - level * scale
