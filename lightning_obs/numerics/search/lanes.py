"""Lay out rows in lanes, so that one vectorised loop on a CPU serves rows of every length.

The search loop (``lane_errors.py``) copies rows into a block with :func:`load`, measures them lane by lane, and adds up
the lanes of each row. A row holds the values of one scale.

A block is a matrix ``(steps, LANES)`` in float32 that holds some rows; a *lane* is a column, and the loop processes all
lanes of a step together. A row is spread over a power of two of lanes, such that it has about 16 steps: short rows
share the lanes, a long row fills all of them. In a block of ``side`` rows, row r is in the lanes r, r + side, r + 2 *
side and so on. The compiler can vectorise this without reordering a sum, and a row's sums do not depend on other rows.

The alternative, a plain loop over the values of each row, takes 1.7 times as long, and 8 times for rows of 64 values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_obs.numerics.kernels.jit import jit, value_of

#: number of lanes of a block
LANES = 256
#: about the number of steps of a row in a block, unless the row fills all lanes
_STEPS = 16
f32 = np.float32


class Source(NamedTuple):
    """A tensor ``(A, B, N, G)`` that holds rows, as the loop reads it. Its first two dimensions number the rows.

    ``numba_loop.py`` makes one for the values and one for the weights of their errors.
    """

    bits: Any  # the tensor's memory as integers (``launch.memory``); empty for weights that are all 1
    shape: Any  # (A, B, N, G)
    strides: Any  # of the four dimensions, in elements


@jit()
def lanes_of(size: int) -> int:
    """The number of lanes over which a row of ``size`` values is spread: a power of two, for about 16 steps.

    Called before rows are loaded, also by ``numba_loop.py``, to know how many rows a block has.
    """
    share = 1
    while share < LANES and share * _STEPS < size:
        share *= 2
    return share


@jit()
def lanes() -> Any:
    """A new array with a number for each lane, zeros at first.

    Each quantity of a candidate has its own array, because loops over the rows of one matrix are not vectorised.
    """
    return np.zeros(LANES, f32)


@jit()
def load(source: Source, first: int, units: Any, block: Any) -> None:
    """Copy rows into a block, each multiplied by its unit. ``measure_rows`` calls it for each block.

    Value e of the block's row r becomes number ``e * side + r`` of the block.

    Args:
        source: the tensor that holds the rows.
        first: index of the first row to copy.
        units: factor on each row, ``(rows,)``; its length is the number of rows to copy.
        block: ``(steps, LANES)``; receives the values, and zeros in the rest of its memory.
    """
    pieces = source.shape[2]
    size = source.shape[3]
    columns = source.shape[1]
    side = LANES // lanes_of(pieces * size)
    numbers = block.reshape(-1)
    are_filled = units.size == side and pieces * size * side == numbers.size
    if not are_filled:
        numbers[:] = f32(0)
    for r in range(units.size):
        row = first + r
        a = row // columns
        b = row % columns
        start = a * source.strides[0] + b * source.strides[1]
        for n in range(pieces):
            begin = n * size * side + r
            end = begin + (size - 1) * side + 1
            piece = numbers[begin:end]
            piece_start = start + n * source.strides[2]
            load_piece(source, piece_start, units[r], side, piece)


@jit(inline=True)
def load_piece(source: Source, start: int, unit: Any, side: int, numbers: Any) -> None:
    """Copy the G values that begin at ``start`` in the source's memory, times ``unit``, to ``numbers[::side]``."""
    size = source.shape[3]
    stride = source.strides[3]
    # A slice, so that the loops index it from 0: otherwise they are not vectorised.
    values = source.bits[start : start + (size - 1) * stride + 1]
    if stride != 1:
        for g in range(size):
            numbers[g * side] = value_of(values[g * stride]) * unit
    elif side != 1:
        for g in range(size):
            numbers[g * side] = value_of(values[g]) * unit
    else:
        for g in range(size):
            numbers[g] = value_of(values[g]) * unit


@jit()
def spread(values: Any, side: int) -> None:
    """Copy the numbers of the ``side`` rows, in the first lanes, to all lanes: lane i belongs to row ``i % side``.

    Called for the scales and limits of each candidate.
    """
    if side == 1:
        values[:] = values[0]
        return
    width = side
    while width < LANES:
        for i in range(width):
            values[width + i] = values[i]
        width *= 2


@jit()
def add_up(values: Any, side: int) -> None:
    """Add up the lanes of each row, in place: the sum of row r is left in lane r. Called with a candidate's errors."""
    width = LANES // 2
    while width >= side:
        for i in range(width):
            values[i] += values[width + i]
        width //= 2
