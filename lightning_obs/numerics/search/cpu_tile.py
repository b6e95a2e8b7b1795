"""Rows in lanes: how the compiled search lays out values, so that one loop serves rows of every length.

A block holds some rows (what one scale covers) as float32, cut into steps of ``LANES`` numbers. A row owns a power of
two of the lanes, as many as make about 16 steps of it: short rows lie side by side, a long one fills all lanes. So sums
need no freedom to be reordered, and a row's sums do not depend on other rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_obs.numerics.kernels.jit import jit, value_of

LANES = 256
f32 = np.float32


class Source(NamedTuple):
    """Where the values of rows are: a tensor ``(A, B, N, G)``, whose first two dimensions number them."""

    bits: Any  # its memory; empty: there are no values
    shape: Any
    strides: Any


@jit()
def load(source: Source, first: int, count: int, block: Any) -> None:
    """Copy rows, from ``first`` on, into a block ``(steps, LANES)``: value e of its row r is number ``e * side + r``.

    What the rows do not fill becomes zero.
    """
    bits, strides = source.bits, source.strides
    _, columns, pieces, size = source.shape
    side = LANES // lanes_of(pieces * size)
    flat = block.reshape(-1)
    if count < side or pieces * size * side < flat.size:
        flat[:] = f32(0)
    for r in range(count):
        row, to = first + r, r
        start = (row // columns) * strides[0] + (row % columns) * strides[1]
        for n in range(pieces):
            at = start + n * strides[2]
            # Slices are indexed from 0, or nothing is vectorised.
            values, numbers = bits[at : at + (size - 1) * strides[3] + 1], flat[to : to + size * side]
            if side == 1 and strides[3] == 1:
                for g in range(size):
                    numbers[g] = value_of(values[g])
            elif strides[3] == 1:
                for g in range(size):
                    numbers[g * side] = value_of(values[g])
            else:
                for g in range(size):
                    numbers[g * side] = value_of(values[g * strides[3]])
            to += size * side


@jit()
def lanes_of(size: int) -> int:
    """Lanes that a row of this many values is spread over: a power of two, for about 16 steps."""
    share = 1
    while share < LANES and share * 16 < size:
        share *= 2
    return share


@jit()
def lanes() -> Any:
    """A number per lane; arrays apart, because loops over rows of one array are not vectorised."""
    return np.zeros(LANES, f32)


@jit()
def spread(values: Any, side: int) -> None:
    """Give every lane the number of its row: lane i belongs to row ``i % side``, a power of two."""
    width = side
    while width < LANES:
        for i in range(width):
            values[width + i] = values[i]
        width *= 2


@jit()
def add_up(values: Any, side: int) -> None:
    """Leave the sum of each row's lanes in the first of them."""
    width = LANES // 2
    while width >= side:
        for i in range(width):
            values[i] += values[width + i]
        width //= 2
