"""Loops that read a tensor once, compiled by numba: extremes, counts of bit patterns, sums of squares.

``launch.py`` calls ``extremes``, ``count``, ``count_rounded`` and ``squares``; the other functions serve these. In all
of them ``bits`` is a tensor's memory as integers (``launch.memory``), and an argument that receives the result is last.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_obs.numerics.kernels.jit import jit, value_of

_CODES = 4096  # values rounded at once


@jit()
def extremes(bits: Any, infinity: int, strides: Any, shape: Any, ends: Any) -> None:
    """Write the smallest and the largest value of each row of ``(A, B, N, G)`` to ``ends``; NaN where a row has one.

    ``launch.extremes`` calls it for each chunk of an observed tensor. Floats are compared as integers that sort in the
    same order (:func:`key_of`), because comparisons of floats would have to look for NaN.

    Args:
        bits: memory of the tensor, as signed integers.
        infinity: the bit pattern of infinity in the tensor's dtype.
        strides: the tensor's strides, in elements.
        shape: the tensor's shape, ``(A, B, N, G)``.
        ends: ``(2, A, B)``, bit patterns; receives the result.
    """
    mask = np.int32(0x7FFFFFFF if bits.itemsize == 4 else 0x7FFF)
    low = np.full(shape[:2], mask, np.int32)
    high = np.full(shape[:2], ~mask, np.int32)
    for a in range(shape[0]):
        line_low = low[a]
        line_high = high[a]
        for n in range(shape[2]):  # in the order of memory
            for b in range(shape[1]):
                row_start = a * strides[0] + b * strides[1]
                start = row_start + n * strides[2]
                last = start + (shape[3] - 1) * strides[3]
                stop = last + 1
                piece = bits[start:stop]  # indexed from 0, or nothing is vectorised
                least = line_low[b]
                most = line_high[b]
                if strides[3] == 1:
                    for g in range(piece.size):
                        key = key_of(piece[g], mask)
                        least = key if key < least else least
                        most = key if key > most else most
                else:
                    for g in range(shape[3]):
                        key = key_of(piece[g * strides[3]], mask)
                        least = key if key < least else least
                        most = key if key > most else most
                line_low[b] = least
                line_high[b] = most
    for a in range(shape[0]):
        line_low = low[a]
        line_high = high[a]
        for b in range(shape[1]):
            least = line_low[b]
            most = line_high[b]
            has_nan = most > infinity or least < ~infinity
            ends[0, a, b] = mask if has_nan else key_of(least, mask)
            ends[1, a, b] = mask if has_nan else key_of(most, mask)


@jit()
def key_of(bits: Any, mask: Any) -> Any:
    """Map a float's bits to an integer that sorts in the order of the floats; the function is its own inverse.

    For :func:`extremes`. ``mask`` has all bits set but the sign bit, in the width of the float.
    """
    pattern = np.int32(bits)
    sign = np.int32(pattern >> np.int32(31))  # all bits are set in a negative number
    return np.int32(pattern ^ np.int32(sign & mask))


@jit()
def count_rounded(bits: Any, counts: Any) -> None:
    """Do what :func:`count` does for float32 or float16 values, which are rounded to bfloat16 first.

    ``launch.count_values`` calls it for each chunk of a tensor.
    """
    even = np.zeros(65536, np.uint32)
    odd = np.zeros(65536, np.uint32)
    codes = np.empty(_CODES, np.uint16)
    for start in range(0, bits.size, _CODES):
        piece = bits[start : start + _CODES]
        for i in range(piece.size):
            codes[i] = pattern_of(piece[i])
        count_codes(codes[: piece.size], even, odd)
    add_tables(even, odd, counts)


@jit()
def count(bits: Any, counts: Any) -> None:
    """Add how often each bfloat16 pattern occurs in ``bits`` to ``counts``, ``(65536,)`` in int64.

    ``launch.count_values`` calls it for each chunk of a bfloat16 tensor.
    """
    even = np.zeros(65536, np.uint32)
    odd = np.zeros(65536, np.uint32)
    count_codes(bits, even, odd)
    add_tables(even, odd, counts)


@jit()
def add_tables(even: Any, odd: Any, counts: Any) -> None:
    """Add the two tables of :func:`count_codes`, 32-bit counts, to ``counts``, ``(65536,)`` in int64."""
    for code in range(65536):
        counts[code] += np.int64(even[code])
        counts[code] += np.int64(odd[code])


@jit()
def count_codes(codes: Any, even: Any, odd: Any) -> None:
    """Count the codes at even indices in ``even``, and the codes at odd indices in ``odd``.

    For :func:`count` and :func:`count_rounded`; a code is the pattern of a bfloat16 value. In a single table, the
    addition for a code would have to wait for that of an equal neighbour.
    """
    half = codes.size // 2
    one = np.uint32(1)
    for i in range(half):
        first = codes[2 * i]
        second = codes[2 * i + 1]
        even[first] += one
        odd[second] += one
    if codes.size % 2:
        last = codes[codes.size - 1]
        even[last] += one


@jit()
def pattern_of(bits: Any) -> Any:
    """The pattern of a value rounded to bfloat16 (to nearest, ties to even), for :func:`count_rounded`.

    ``bits`` is the value's own pattern. A NaN gets the pattern that torch uses.
    """
    wide = np.float32(value_of(bits)).view(np.uint32)
    upper_half = np.uint32(wide >> np.uint32(16))
    is_odd = np.uint32(upper_half & np.uint32(1))
    near = np.uint32(np.uint32(wide + np.uint32(0x7FFF)) + is_odd)
    magnitude = np.uint32(wide & np.uint32(0x7FFFFFFF))
    is_nan = magnitude > np.uint32(0x7F800000)
    rounded = np.uint32(near >> np.uint32(16))
    return np.uint16(0x7FC0) if is_nan else np.uint16(rounded)


@jit("contract")
def squares(bits: Any, rows: int, columns: int, stride: int, sums: Any) -> None:
    """Add the squares of a matrix ``(rows, columns)`` to ``sums``, ``(columns,)`` in float64, column by column.

    ``launch.channel_squares`` calls it for each chunk of a batch of inputs. Neighbouring values of a row are adjacent
    in memory, and rows are ``stride`` elements apart; 0: all rows are the same values, in an expanded tensor.
    """
    for row in range(rows):
        start = row * stride
        piece = bits[start : start + columns]
        for c in range(columns):
            value = np.float64(value_of(piece[c]))
            sums[c] += value * value
