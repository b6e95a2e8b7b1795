"""The loops that read a tensor once: extremes, counts of bit patterns, sums of squares."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_obs.numerics.kernels.jit import jit, value_of


@jit()
def extremes(bits: Any, strides: Any, shape: Any, mask: int, low: Any, high: Any) -> None:
    """Smallest and largest key of each row of ``(A, B, N, G)``: integers that sort as the floats do.

    Args:
        bits: memory of the tensor, signed.
        strides, shape: of the tensor.
        mask: all bits but the sign.
        low, high: ``(A, B)`` in int32; receive the result, and start with the largest and the smallest integer.
    """
    for a in range(shape[0]):
        for n in range(shape[2]):  # in the order of memory
            for b in range(shape[1]):
                at = a * strides[0] + b * strides[1] + n * strides[2]
                least, most = low[a, b], high[a, b]
                if strides[3] == 1:
                    for g in range(shape[3]):
                        key = key_of(bits[at + g], mask)
                        least, most = np.int32(min(least, key)), np.int32(max(most, key))
                else:
                    for g in range(shape[3]):
                        key = key_of(bits[at + g * strides[3]], mask)
                        least, most = np.int32(min(least, key)), np.int32(max(most, key))
                low[a, b], high[a, b] = least, most


@jit()
def key_of(bits: Any, mask: int) -> Any:
    """An integer that sorts as the float with these bits does."""
    pattern = np.int32(bits)
    return np.int32(pattern ^ np.int32(np.int32(pattern >> np.int32(31)) & np.int32(mask)))


@jit()
def count(bits: Any, kind: int, counts: Any) -> None:
    """Add how often each bfloat16 pattern occurs, values rounded to it, to ``(65536,)``.

    Two tables, so that of two equal neighbours none waits for the other.
    """
    even, odd = np.zeros((2, 65536), np.uint32)
    half = bits.size // 2
    if kind == 1:
        for i in range(half):
            even[bits[2 * i]] += np.uint32(1)
            odd[bits[2 * i + 1]] += np.uint32(1)
        for i in range(2 * half, bits.size):
            even[bits[i]] += np.uint32(1)
    else:
        for i in range(half):
            even[pattern_of(bits[2 * i], kind)] += np.uint32(1)
            odd[pattern_of(bits[2 * i + 1], kind)] += np.uint32(1)
        for i in range(2 * half, bits.size):
            even[pattern_of(bits[i], kind)] += np.uint32(1)
    for code in range(65536):
        counts[code] += np.int64(even[code]) + np.int64(odd[code])


@jit()
def pattern_of(bits: Any, kind: int) -> Any:
    """The bfloat16 pattern of a value rounded to nearest, ties to even; any NaN's is torch's one."""
    wide = value_of(bits, kind).view(np.uint32)
    if np.uint32(wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint32(0x7FC0)
    return np.uint32(np.uint32(wide + np.uint32(0x7FFF) + np.uint32(np.uint32(wide >> 16) & np.uint32(1))) >> 16)


@jit("contract")
def squares(bits: Any, kind: int, columns: int, stride: int, sums: Any) -> None:
    """Add the square of each value of ``(rows, columns)`` to ``(columns,)`` in float64; ``stride`` is that of a row."""
    rows = (bits.size - columns) // stride + 1
    for row in range(rows):
        at = row * stride
        for c in range(columns):
            value = np.float64(value_of(bits[at + c], kind))
            sums[c] += value * value
