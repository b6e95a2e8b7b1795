"""Measure all candidates of some scales in one visit of their values: the search loop that numba compiles for a CPU.

``numba_loop.py`` calls :func:`measure_rows`, which calls the other functions. A row holds the values of one scale. A
block of rows is read into lanes (:mod:`.lanes`), and measured with one candidate after the other.

Values are read in units: each row is multiplied by its *unit*, one over a power of two near its largest magnitude, and
so are its scales. So errors neither overflow nor vanish. A block's errors are compared while they are in the cache, and
not kept.

If a block has few rows, each with many values, a candidate may be given up before all values are measured: when the
error of the clipped smallest or largest value, or of the values measured so far, is certainly above the error of an
earlier candidate. That saves a third of the time for 8 bits.

``jit("contract")`` lets the compiler fuse a product and a sum, which makes the functions that compute errors faster.
:func:`measure_rows` and :func:`compare` only call these functions and compare their results, and do not ask for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_obs.numerics.kernels.jit import jit
from lightning_obs.numerics.search.arithmetic import error_of, power_of
from lightning_obs.numerics.search.lane_scales import (
    Scales,
    divide,
    divide_widths,
    take_exponents,
    take_powers,
    take_units,
)
from lightning_obs.numerics.search.lanes import LANES, Source, add_up, lanes, lanes_of, load, spread

# A candidate may be given up only in a block of at most this many rows; it is checked after each _STEPS steps.
_MOST_ROWS = 4
_STEPS = 8
f32 = np.float32
i32 = np.int32
# An error that is larger than another by this factor is certainly larger, although both are rounded.
_CERTAINLY = f32(1.01)
_INFINITY = f32(np.inf)


class Span(NamedTuple):
    """Which rows a call of :func:`measure_rows` measures: rows ``start`` to ``stop`` of R rows with candidates.

    ``numba_loop.py`` makes one for each call in a thread.
    """

    first: int  # index of the first of the R rows in the tensor of values
    start: int  # index, among the R rows, of the first row to measure
    stop: int  # index, among the R rows, behind the last row to measure
    is_whole: bool  # whether the call has all values of its rows, so that a candidate may be given up


class Measure(NamedTuple):
    """How errors are measured; ``numba_loop.py`` makes one for each search loop."""

    numbers: Any  # the numbers of the format, ``arithmetic.Numbers``
    exponent: Any  # the exponent of an error, ``arithmetic.Exponent``


class Outcome(NamedTuple):
    """The result for R whole rows: which of C candidates improve which rows.

    ``numba_loop.py`` makes it, and returns its arrays as a ``candidates.Improvements``.
    """

    improved: Any  # receives whether a candidate's error is below that of all candidates before it, (C, R)
    least: Any  # the least error of earlier candidates on each row; receives the least error of all, (R,)


class Block(NamedTuple):
    """Memory for a block of rows in lanes; :func:`measure_rows` makes it, and fills it again for each block."""

    side: int  # number of rows of a full block
    values: Any  # (steps, LANES)
    weights: Any  # weights of the values' errors, (steps, LANES); (0, LANES) if all weights are 1
    units: Any  # factor on the values and scales of each row, (side,)


class Candidate(NamedTuple):
    """Memory for one candidate of the rows of a block, a number for each lane, and for the sums of its errors."""

    inverse: Any  # one over the scale
    scale: Any
    zero: Any  # the zero point of each row
    low: Any  # the smallest number of the format, less the zero point
    high: Any  # the largest number of the format, less the zero point
    total: Any  # sum of the errors of each lane
    sums: Any  # sum of the errors of each row so far, to decide whether to give up
    exponents: Any  # exponents of MX scales, in the bits of float32


class Least(NamedTuple):
    """Memory for the numbers that decide whether a candidate is given up; those of the block's row r are at index r."""

    low: Any  # the smallest value of the row, at most 0
    high: Any  # the largest value of the row, at least 0
    error: Any  # the least error of earlier candidates


@jit()
def measure_rows(
    values: Source, weights: Source, span: Span, scales: Scales, measure: Measure, errors: Any, outcome: Outcome
) -> None:
    """Measure candidates on some rows, block by block. ``numba_loop.py`` calls it in each thread.

    Args:
        values: the tensor that holds the rows.
        weights: weights of the values' errors, with the same row indices; if it holds no values, all weights are 1.
        span: which rows are measured.
        scales: the candidates of the R rows.
        measure: format and exponent.
        errors: memory for the errors of a block, ``(C, rows of a block)``. In the end it holds the errors of the last
            block, in the unit of each row: infinite if they are not finite or the candidate was given up.
        outcome: receives which candidates improve the rows. If it has no rows, nothing is compared; the caller reads
            ``errors`` (pieces of a long row).
    """
    lines = values.shape[2]
    width = values.shape[3]
    size = lines * width
    share = lanes_of(size)
    side = LANES // share
    steps = -(-size // share)
    is_weighed = weights.bits.size > 0
    memory = np.empty((steps, LANES), f32)
    weight_memory = np.empty((steps if is_weighed else 0, LANES), f32)
    block = Block(side, memory, weight_memory, np.empty(side, f32))
    candidate = Candidate(lanes(), lanes(), lanes(), lanes(), lanes(), lanes(), lanes(), np.zeros(LANES, i32))
    candidate.low[:] = measure.numbers.low
    candidate.high[:] = measure.numbers.high
    least = Least(lanes(), lanes(), lanes())
    ones = np.ones(side, f32)
    has_few_rows = side <= _MOST_ROWS
    may_give_up = span.is_whole and has_few_rows
    for row in range(span.start, span.stop, side):
        end = min(row + side, span.stop)
        units = block.units[: end - row]
        take_units(scales.largest[row:end], units)
        load(values, span.first + row, units, block.values)
        if is_weighed:
            load(weights, span.first + row, ones[: end - row], block.weights)
        measure_block(block, row, end, scales, measure, may_give_up, candidate, least, errors)
        if outcome.least.size:
            compare(errors, row, end, outcome)


@jit()
def compare(errors: Any, start: int, stop: int, outcome: Outcome) -> None:
    """Compare the errors of the candidates on the rows of a block, and write the result to ``outcome``.

    Args:
        errors: the errors of the candidates on the block's rows, ``(C, rows)``.
        start: index of the block's first row among the R rows of ``outcome``.
        stop: index behind its last row.
        outcome: receives which candidates improve these rows, and their least errors.
    """
    least = outcome.least[start:stop]
    candidates = errors.shape[0]
    for k in range(candidates):
        candidate_errors = errors[k]
        improved = outcome.improved[k][start:stop]
        for r in range(least.size):
            error = candidate_errors[r]
            improved[r] = error < least[r]
            least[r] = min(error, least[r])


@jit("contract")
def measure_block(
    block: Block,
    start: int,
    stop: int,
    scales: Scales,
    measure: Measure,
    may_give_up: bool,
    candidate: Candidate,
    least: Least,
    errors: Any,
) -> None:
    """Measure all candidates on the rows of a block, and write the errors to ``errors``.

    It is no part of :func:`measure_rows`, which is compiled for each dtype of values; this function is compiled once.

    Args:
        block: the rows.
        start: index of the block's first row among the R rows of ``scales``.
        stop: index behind its last row.
        scales: the candidates of the R rows.
        measure: format and exponent.
        may_give_up: whether candidates may be given up.
        candidate: memory to work in.
        least: memory to work in.
        errors: receives the errors, ``(C, rows)``.
    """
    count = stop - start
    candidates = errors.shape[0]
    if may_give_up:
        read_ends(block, least)
    may_clip = may_give_up and block.weights.shape[0] == 0
    for k in range(candidates):
        candidate_errors = errors[k][:count]
        take(candidate, k, start, stop, scales, measure.numbers, block)
        is_given_up = may_clip and clips_too_much(candidate, count, measure, least)
        if not is_given_up:
            is_given_up = add_candidate(block, measure, may_give_up, count, candidate, least)
        if is_given_up:
            candidate_errors[:] = _INFINITY
            continue
        add_up(candidate.total, block.side)
        for r in range(count):
            error = candidate.total[r]
            candidate_errors[r] = error if error < _INFINITY else _INFINITY  # infinity for a NaN
        if may_give_up:
            for r in range(count):
                least.error[r] = min(least.error[r], candidate_errors[r])


@jit("contract", inline=True)
def take(candidate: Candidate, k: int, start: int, stop: int, scales: Scales, numbers: Any, block: Block) -> None:
    """Write the scales of candidate ``k`` on rows ``start`` to ``stop`` to all lanes of ``candidate``.

    One over each scale is written, too. Where there are zero points, so are the ends of the format less the zero point.
    Scales and zero points are those that torch computed (``scales.stored``, ``scales.zeros``), or they are computed
    here from the rows' ranges and the candidate's factor (``scales.factors``) by ``scales.rule``: powers of two for an
    MX format (``mx_round`` is not 0), else quotients.
    """
    # A slice of one row of a matrix is known to be contiguous, so loops over it are vectorised.
    largest = scales.largest[start:stop]
    scale = candidate.scale[: stop - start]
    zero = candidate.zero[: stop - start]
    has_zeros = scales.rule.has_zeros or scales.zeros.shape[0] > 0
    if scales.stored.shape[0]:
        scale[:] = scales.stored[k][start:stop]
        if has_zeros:
            zero[:] = scales.zeros[k][start:stop]
    elif has_zeros:
        lows = scales.lows[start:stop]
        highs = scales.highs[start:stop]
        divide_widths(lows, highs, scales.factors[k], scales.rule, numbers, scale, zero)
    elif scales.rule.mx_round:
        exponents = candidate.exponents[: stop - start]
        take_exponents(largest, scales.factors[k], scales.rule, exponents)
        take_powers(exponents, scales.rule, scale)
    else:
        divide(largest, scales.factors[k], scales.rule, scale)
    units = block.units
    side = block.side
    for r in range(scale.size):
        scale[r] *= units[r]
        candidate.inverse[r] = f32(1) / scale[r]
    spread(candidate.scale, side)
    spread(candidate.inverse, side)
    if has_zeros:
        for r in range(zero.size):
            candidate.low[r] = numbers.low - zero[r]
            candidate.high[r] = numbers.high - zero[r]
        spread(candidate.low, side)
        spread(candidate.high, side)


@jit("contract", inline=True)
def add_candidate(
    block: Block, measure: Measure, may_give_up: bool, rows: int, candidate: Candidate, least: Least
) -> bool:
    """Add up a candidate's errors in each lane; return whether it was given up, with the sums incomplete."""
    steps = block.values.shape[0]
    stride = _STEPS if may_give_up else steps
    candidate.total[:] = f32(0)
    for step in range(0, steps, stride):
        stop = min(steps, step + stride)
        add_errors(block.values[step:stop], block.weights[step:stop], candidate, measure)
        if stop < steps:
            candidate.sums[:] = candidate.total
            add_up(candidate.sums, block.side)
            if all_are_above(candidate.sums, least.error, rows):
                return True
    return False


@jit("contract", inline=True)
def add_errors(values: Any, weights: Any, candidate: Candidate, measure: Measure) -> None:
    """Add the errors of some steps ``(steps, LANES)`` to the total of each lane; empty ``weights``: all are 1.

    A step is one value of each lane.
    """
    count = values.shape[0]
    spacing = measure.numbers.steps  # where the format's numbers lie between its ends; None: they are the integers
    exponent = measure.exponent
    inverse = candidate.inverse
    scale = candidate.scale
    low = candidate.low
    high = candidate.high
    total = candidate.total
    for step in range(count):
        value = values[step]
        # One loop computes error, power and sum: a buffer between two loops would cost a quarter more time.
        if weights.shape[0]:
            weight = weights[step]
            for i in range(LANES):
                error = error_of(value[i], inverse[i], scale[i], low[i], high[i], spacing)
                power = power_of(error, exponent)
                total[i] += power * weight[i]
        else:
            for i in range(LANES):
                error = error_of(value[i], inverse[i], scale[i], low[i], high[i], spacing)
                total[i] += power_of(error, exponent)


# ---------------------------------------------------------------------- candidates that are given up


@jit("contract")
def read_ends(block: Block, least: Least) -> None:
    """Write the smallest and the largest value of each row of a block to ``least``, and infinity as the least error."""
    low = least.low
    high = least.high
    low[:] = f32(0)
    high[:] = f32(0)
    least.error[:] = _INFINITY
    values = block.values
    steps = values.shape[0]
    for step in range(steps):
        value = values[step]
        for i in range(LANES):
            number = value[i]
            low[i] = number if number < low[i] else low[i]
            high[i] = number if number > high[i] else high[i]
    width = LANES // 2
    while width >= block.side:
        for i in range(width):
            low[i] = min(low[i], low[width + i])
            high[i] = max(high[i], high[width + i])
        width //= 2


@jit("contract", inline=True)
def all_are_above(errors: Any, least: Any, rows: int) -> bool:
    """Whether the error of every row is certainly above the least error of earlier candidates."""
    are_above = True
    for r in range(rows):
        are_above &= errors[r] > least[r] * _CERTAINLY
    return are_above


@jit("contract", inline=True)
def clips_too_much(candidate: Candidate, rows: int, measure: Measure, least: Least) -> bool:
    """Whether in every row the error of the smallest or the largest value alone is certainly above the least error."""
    clips = True
    for r in range(rows):
        lowest = power_at(candidate, r, least.low[r], measure)
        highest = power_at(candidate, r, least.high[r], measure)
        loss = max(lowest, highest)
        clips &= loss > least.error[r] * _CERTAINLY
    return clips


@jit("contract", inline=True)
def power_at(candidate: Candidate, lane: int, value: Any, measure: Measure) -> Any:
    """The error of a value with the candidate of one lane, raised to the exponent."""
    inverse = candidate.inverse[lane]
    scale = candidate.scale[lane]
    low = candidate.low[lane]
    high = candidate.high[lane]
    error = error_of(value, inverse, scale, low, high, measure.numbers.steps)
    return power_of(error, measure.exponent)
