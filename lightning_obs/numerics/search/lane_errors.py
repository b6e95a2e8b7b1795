"""All candidates of a scale in one visit of its values: the loop that numba compiles for a CPU.

A block of rows is read into lanes (:mod:`.lanes`), and measured with one candidate after the other. Rows are read in
units of a power of two near their largest magnitude, so no error overflows and none vanishes; scales are taken in the
same unit. A block's errors are compared while they are near the core: of whole rows none is kept.

A candidate of long rows is given up where it certainly loses more than an earlier one: where the clipping of the
largest value alone does, or the values that were measured so far. That saves a third of the time for 8 bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_obs.numerics.kernels.jit import jit
from lightning_obs.numerics.search.arithmetic import error_of, power_of
from lightning_obs.numerics.search.lane_scales import Scales, divide, take_exponents, take_powers, take_units
from lightning_obs.numerics.search.lanes import LANES, Source, add_up, lanes, lanes_of, load, spread

# In a block of at most so many rows a candidate may be given up, each time after so many steps.
_MOST_ROWS = 4
_STEPS = 8
f32 = np.float32
i32 = np.int32
# An error that is larger than another by this factor is certainly larger.
_CERTAINLY = f32(1.01)
_INFINITY = f32(np.inf)


class Span(NamedTuple):
    """Which of R rows are measured."""

    first: int  # number of the first of the R rows where their values are
    start: int  # the first of the R rows that is measured
    stop: int  # the one after the last
    is_whole: bool  # whether all values of a row are there, so that a candidate may be given up


class Measure(NamedTuple):
    """How errors are measured: the numbers of the format, and the exponent of an error."""

    numbers: Any
    exponent: Any


class Outcome(NamedTuple):
    """What candidates bring to R whole rows."""

    improved: Any  # whether a candidate has less error than all before it, (C, R)
    least: Any  # the least error of each row before, and after, (R,)


class Block(NamedTuple):
    """Memory for rows in lanes."""

    side: int  # rows of a full block
    values: Any  # (steps, LANES)
    weights: Any  # the same; no steps: all weigh 1
    units: Any  # factor on the values of each row, and on its scales


class Candidate(NamedTuple):
    """One candidate of the rows of a block, in every lane, and its errors."""

    inverse: Any  # one over the scale
    scale: Any
    low: Any  # the smallest number of the format, less the zero point
    high: Any  # the largest number, less the zero point
    total: Any  # sum of the errors
    sums: Any  # of each row, while the total is not complete
    exponents: Any  # of MX scales, in the bits of float32


class Least(NamedTuple):
    """What decides in which rows a candidate is given up; row r is in lane r."""

    low: Any  # the smallest value, or 0
    high: Any  # the largest value, or 0
    error: Any  # the least error of all candidates before


@jit()
def measure_rows(
    values: Source, weights: Source, span: Span, scales: Scales, measure: Measure, errors: Any, outcome: Outcome
) -> None:
    """Measure candidates on some rows.

    Args:
        values: where the rows are.
        weights: weights of the values' errors, in rows of the same numbers; without values: all weigh 1.
        span: the R rows, and those of them that are measured.
        scales: the candidates of the R rows.
        measure: numbers and exponent.
        errors: memory for the errors of a block, ``(C, rows of a block)``. At the end it has those of the last block,
            in the unit of each row: infinite where one is not finite, and where a candidate is given up.
        outcome: receives what the candidates bring; without rows nothing is compared.
    """
    size = values.shape[2] * values.shape[3]
    share = lanes_of(size)
    side = LANES // share
    steps = -(-size // share)
    is_weighed = weights.bits.size > 0
    memory = np.empty((steps, LANES), f32)
    weight_memory = np.empty((steps if is_weighed else 0, LANES), f32)
    block = Block(side, memory, weight_memory, np.empty(side, f32))
    candidate = Candidate(lanes(), lanes(), lanes(), lanes(), lanes(), lanes(), np.zeros(LANES, i32))
    candidate.low[:] = measure.numbers.low
    candidate.high[:] = measure.numbers.high
    least = Least(lanes(), lanes(), lanes())
    ones = np.ones(side, f32)
    may_give_up = span.is_whole and side <= _MOST_ROWS
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
    """Note what the candidates bring to the rows of a block.

    Args:
        errors: of the rows, ``(C, rows)``.
        start: number of the first of them among the R rows of ``outcome``.
        stop: the one after the last.
        outcome: receives it.
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
    """Write the errors of the rows of a block. Apart from :func:`measure_rows`, which is compiled for each dtype.

    Args:
        block: the rows.
        start: number of the first of them among the R rows of ``scales``.
        stop: the one after the last.
        scales: the candidates of the R rows.
        measure: numbers and exponent.
        may_give_up: whether candidates may be given up.
        candidate: memory.
        least: memory.
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
            candidate_errors[r] = error if error < _INFINITY else _INFINITY  # a NaN
        if may_give_up:
            for r in range(count):
                least.error[r] = min(least.error[r], candidate_errors[r])


@jit("contract", inline=True)
def take(candidate: Candidate, k: int, start: int, stop: int, scales: Scales, numbers: Any, block: Block) -> None:
    """Make ``candidate`` the one of number ``k`` for the rows from ``start`` to ``stop``."""
    # Slices of one row of a matrix: others are not known to be contiguous, and loops over them are not vectorised.
    largest = scales.largest[start:stop]
    scale = candidate.scale[: stop - start]
    if scales.stored.shape[0]:
        scale[:] = scales.stored[k][start:stop]
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
    if scales.zeros.shape[0]:
        zeros = scales.zeros[k][start:stop]
        for r in range(zeros.size):
            candidate.low[r] = numbers.low - zeros[r]
            candidate.high[r] = numbers.high - zeros[r]
        spread(candidate.low, side)
        spread(candidate.high, side)


@jit("contract", inline=True)
def add_candidate(
    block: Block, measure: Measure, may_give_up: bool, rows: int, candidate: Candidate, least: Least
) -> bool:
    """Add up a candidate's errors in each lane; True where it is given up."""
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
    """Add the errors of some steps to the total of each lane; no weights: all weigh 1."""
    count = values.shape[0]
    steps = measure.numbers.steps
    exponent = measure.exponent
    inverse = candidate.inverse
    scale = candidate.scale
    low = candidate.low
    high = candidate.high
    total = candidate.total
    for step in range(count):
        value = values[step]
        # One loop from the value to the sum: memory between two loops would cost a quarter more.
        if weights.shape[0]:
            weight = weights[step]
            for i in range(LANES):
                error = error_of(value[i], inverse[i], scale[i], low[i], high[i], steps)
                power = power_of(error, exponent)
                total[i] += power * weight[i]
        else:
            for i in range(LANES):
                error = error_of(value[i], inverse[i], scale[i], low[i], high[i], steps)
                total[i] += power_of(error, exponent)


# ---------------------------------------------------------------------- candidates that are given up


@jit("contract")
def read_ends(block: Block, least: Least) -> None:
    """Note the smallest and the largest value of each row, and that no error is known."""
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
    """Whether the error of every row is certainly above the least."""
    are_above = True
    for r in range(rows):
        are_above &= errors[r] > least[r] * _CERTAINLY
    return are_above


@jit("contract", inline=True)
def clips_too_much(candidate: Candidate, rows: int, measure: Measure, least: Least) -> bool:
    """Whether the smallest or the largest value of every row alone loses more than the best candidate so far."""
    clips = True
    for r in range(rows):
        lowest = power_at(candidate, r, least.low[r], measure)
        highest = power_at(candidate, r, least.high[r], measure)
        loss = max(lowest, highest)
        clips &= loss > least.error[r] * _CERTAINLY
    return clips


@jit("contract", inline=True)
def power_at(candidate: Candidate, lane: int, value: Any, measure: Measure) -> Any:
    """What a value loses by the candidate of one lane."""
    inverse = candidate.inverse[lane]
    scale = candidate.scale[lane]
    low = candidate.low[lane]
    high = candidate.high[lane]
    error = error_of(value, inverse, scale, low, high, measure.numbers.steps)
    return power_of(error, measure.exponent)
