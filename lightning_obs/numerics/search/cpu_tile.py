"""Rows in lanes: how the compiled search lays out values, so that one loop serves rows of every length.

A tile holds some rows (what one scale covers) as float32, cut into steps of ``LANES`` numbers. A row owns a power of
two of the lanes, as many as make about 16 steps of it: short rows lie side by side, a long one fills all lanes. So sums
need no freedom to be reordered, and what a row adds up does not depend on others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_obs.numerics.kernels.jit import jit, value_of

LANES = 256
f32 = np.float32


@jit()
def load(bits: Any, first: int, count: int, columns: int, strides: Any, pieces: int, size: int, tile: Any) -> None:
    """Copy rows into a tile ``(blocks, steps, LANES)``: value e of row r of a block is its number ``e * side + r``.

    Args:
        bits: memory of a tensor ``(A, columns, pieces, size)``, whose first two dimensions number the rows.
        first, count: which rows.
        columns, pieces, size: see ``bits``.
        strides: of all four dimensions.
        tile: to write to; what the rows do not fill becomes zero.
    """
    side, room = LANES // lanes_of(pieces * size), tile.shape[1] * LANES
    flat = tile.reshape(-1)
    if count % side or pieces * size * side != room:
        flat[:] = f32(0)
    for q in range(count):
        row = first + q
        start = (row // columns) * strides[0] + (row % columns) * strides[1]
        to = (q // side) * room + q % side
        for n in range(pieces):
            at = start + n * strides[2]
            # Slices are indexed from 0, or nothing is vectorised.
            values, lanes = bits[at : at + (size - 1) * strides[3] + 1], flat[to : to + size * side]
            if side == 1 and strides[3] == 1:
                for g in range(size):
                    lanes[g] = value_of(values[g])
            elif strides[3] == 1:
                for g in range(size):
                    lanes[g * side] = value_of(values[g])
            else:
                for g in range(size):
                    lanes[g * side] = value_of(values[g * strides[3]])
            to += size * side


@jit()
def lanes_of(size: int) -> int:
    """Lanes that a row of so many values is spread over: a power of two, for about 16 steps."""
    lanes = 1
    while lanes < LANES and lanes * 16 < size:
        lanes *= 2
    return lanes


@jit()
def some_lanes() -> Any:
    """Four numbers per lane; apart, because loops over rows of one array are not vectorised."""
    return np.zeros(LANES, f32), np.zeros(LANES, f32), np.zeros(LANES, f32), np.zeros(LANES, f32)


@jit()
def spread(lanes: Any, side: int) -> None:
    """Give every lane the number of its row: lane i belongs to row ``i % side``, a power of two."""
    width = side
    while width < LANES:
        for i in range(width):
            lanes[width + i] = lanes[i]
        width *= 2


@jit()
def add_up(lanes: Any, side: int) -> None:
    """Leave the sum of each row's lanes in the first of them."""
    width = LANES // 2
    while width >= side:
        for i in range(width):
            lanes[i] += lanes[width + i]
        width //= 2
