"""Errors of all candidates of a scale in one visit of its values, in lanes (:mod:`.cpu_tile`): numba loops.

An error is ``sum(|u - round(u)| ** norm)``, ``u = value / scale``, in units of the first candidate's scale; the power
is a polynomial (:mod:`.cpu_power`). How far the result can be from the definition's is bounded by Minkowski's
inequality: distances of vectors differ by no more than the vector of differences is long, and each of these is at most
``_ROUNDINGS`` roundings of its value. So ``error ** (1 / norm)`` is off by at most
``_ROUNDINGS * 2**-24 * sum(|value / scale| ** norm) ** (1 / norm)``, and the polynomial's error is known. A row whose
least error has a rival within that, or whose powers come near the ends of float32, is left to the definition.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_obs.numerics.kernels.jit import jit
from lightning_obs.numerics.search.cpu_format import Format, nearest, qparams, shrunk
from lightning_obs.numerics.search.cpu_power import Power
from lightning_obs.numerics.search.cpu_tile import LANES, Source, add_up, lanes, lanes_of, load, spread

#: numbers that a lane of a long row adds up in float32
STEPS = 32
#: instead of the number of the one rival: the definition decides among all candidates
ALL = -2
# Roundings of float32 between a value and its distance, of the loops and the definition together; where zero points are
# added, there are more.
_ROUNDINGS, _ROUNDINGS_SHIFTED = 10.0, 3.0
# Polynomials and sums beyond this relative error are not trusted to leave a candidate out.
_MOST_DOUBT = 0.004
f32, i32 = np.float32, np.int32


class Measure(NamedTuple):
    """How errors are measured: the format, and the power of a distance to its numbers."""

    form: Format
    power: Power


class Rows(NamedTuple):
    """The rows of a block, a number for each; row r is in lane r, and in the lanes that many further on."""

    side: int  # rows of a full block, a power of two
    count: Any  # rows of this one
    least: Any  # the smallest value
    most: Any  # the largest
    low: Any  # the range that is searched: both times a factor
    high: Any
    squares: Any  # sum of the weighed squares
    weight: Any  # sum of the weights
    unit: Any  # one over the first candidate's scale, in every lane
    best: Any  # the least error
    index: Any  # its candidate, int32
    doubt: Any  # see :func:`doubt`


class Candidate(NamedTuple):
    """A candidate of each row, in every lane, and its error."""

    inverse: Any  # one over the scale
    ratio: Any  # the scale in units of the first candidate's
    zero: Any  # the zero point
    before: Any  # ``inverse`` of the candidate before
    shift: Any  # its zero point
    total: Any  # sum of errors
    distance: Any  # memory to write over


class Choices(NamedTuple):
    """The results of a search: for each row (R), and how many rows each candidate (C) improved."""

    low: Any  # the range that was searched, (R,)
    high: Any
    index: Any  # the best candidate, (R,)
    rival: Any  # the one candidate that may be as good, -1 (none) or :data:`ALL`, (R,)
    maybe: Any  # bit k % 31: candidate k may be better than all before, and that is not certain, (R,)
    improved: Any  # rows that are certainly better by it than by all before, (C,)


power_of = jit("contract", inline=True)(Power.__call__)


@jit("contract", inline=True)
def add_errors(tile: Any, weights: Any, candidate: Candidate, measure: Measure) -> None:
    """Add the errors of a candidate to its total, lane by lane; ``weights`` without steps: all 1."""
    low, high, power, form = measure.form.low, measure.form.high, measure.power, measure.form
    inverse, ratio, zero, total = candidate.inverse, candidate.ratio, candidate.zero, candidate.total
    for s in range(tile.shape[0]):
        values = tile[s]  # one loop to the sum: memory between two would cost a quarter more
        if weights.shape[0]:
            weight = weights[s]
            for i in range(LANES):
                u = values[i] * inverse[i] + zero[i]
                total[i] += power_of(power, abs(u - nearest(min(max(u, low), high), form.steps)) * ratio[i]) * weight[i]
        else:
            for i in range(LANES):
                u = values[i] * inverse[i] + zero[i]
                total[i] += power_of(power, abs(u - nearest(min(max(u, low), high), form.steps)) * ratio[i])


@jit()
def root_above(x: Any, exponent: Any) -> Any:
    """At least ``x ** exponent`` (and at most a quarter more), exponent in (0, 1], x positive: logarithm by bits."""
    return i32(i32(f32(i32(f32(x).view(i32) - i32(0x3F800000))) * exponent) + i32(0x3F800000)).view(f32) * f32(1.14)


@jit()
def doubt(best: Any, unit: Any, size: Any, squares: Any, weight: Any, steps: int, measure: Measure) -> Any:
    """A bound on how wrong a row's least error and another candidate's can be together, relative to it; -1: not known.

    ``size`` is the row's largest magnitude, ``steps`` how many terms are added up in float32; see :class:`Rows`.
    """
    form, power = measure.form, measure.power
    if squares == f32(0) and (size == f32(0) or weight == f32(0)):
        return f32(0)  # nothing is lost by any candidate
    unit = abs(unit)
    share, root = weight / best, f32(1) / power.norm
    length = size * unit * root_above(squares / (size * size) / best if power.norm >= f32(2) else share, root)
    off = f32(_ROUNDINGS) * length
    if not form.symmetric:
        off += f32(_ROUNDINGS_SHIFTED) * (form.high - form.low) * root_above(share, root)
    off = f32(2.2) * power.norm * off + f32(2 * steps + 128)
    off = off * f32(2.0**-24) + f32(2) * power.error * (f32(1) + power.usual * share)
    # Powers of errors that float32 holds to the last bit, in both executions.
    ends = power.norm * f32(i32(i32(f32(unit).view(i32) >> i32(23)) - i32(127)))
    heavy = f32(i32(i32(f32(weight).view(i32) >> i32(23)) - i32(127)))
    fits = ends < f32(80) + min(heavy, f32(0)) and ends > heavy + f32(9) * power.norm - f32(110)
    fits = fits and form.least < size and size * unit < form.most and squares < f32(1e37) and off < f32(_MOST_DOUBT)
    return off if fits else f32(-1)


@jit()
def search(
    values: Source, weights: Source, first: int, factors: Any, expand: Any, measure: Measure, found: Choices
) -> None:
    """Find the best candidate of some rows, and whether that is certain.

    Args:
        values: the rows.
        weights: of each value, the same; empty: all 1.
        first: number of the first row.
        factors: candidates, ``(C,)`` in float32.
        expand: factor on the observed range.
        measure: of the errors.
        found: receives the result; as long as there are rows. Its counts are added to.
    """
    size, count = values.shape[2] * values.shape[3], found.low.size
    side, steps = LANES // lanes_of(size), -(-size // lanes_of(size))
    candidate = Candidate(lanes(), lanes(), lanes(), lanes(), lanes(), lanes(), lanes())
    room = (lanes(), lanes(), lanes(), lanes(), lanes(), lanes(), lanes(), lanes(), np.zeros(LANES, i32), lanes())
    errors = np.empty((factors.size, side), f32)
    block, weight = np.empty((steps, LANES), f32), np.empty((steps if weights.bits.size else 0, LANES), f32)
    for start in range(0, count, side):
        rows = Rows(side, min(side, count - start), *room)
        load(values, first + start, rows.count, block)
        if weight.shape[0]:
            load(weights, first + start, rows.count, weight)
        read(block, weight, size, rows)
        shrunk(rows.least, expand, measure.form, rows.low)
        shrunk(rows.most, expand, measure.form, rows.high)
        measure_all(block, weight, rows, factors, candidate, measure, errors)
        choose(errors, rows, steps, measure, found, start)


@jit("contract")
def read(block: Any, weight: Any, size: int, rows: Rows) -> None:
    """Extremes and sums of the rows of a block, of ``size`` values each."""
    side, share = rows.side, LANES // rows.side
    least, most, squares, weighed = rows.least, rows.most, rows.squares, rows.weight
    least[:], most[:], squares[:], weighed[:] = np.inf, -np.inf, f32(0), f32(0)
    for s in range(block.shape[0]):
        held = min(share, size - s * share) * side
        values = block[s]
        for i in range(held):
            x = values[i]
            least[i] = x if x < least[i] else least[i]
            most[i] = x if x > most[i] else most[i]
        if weight.shape[0]:
            scaled = weight[s]
            for i in range(held):
                squares[i] += values[i] * values[i] * scaled[i]
                weighed[i] += scaled[i]
        else:
            for i in range(held):
                squares[i] += values[i] * values[i]
                weighed[i] += f32(1)
    width = LANES // 2
    while width >= side:
        for i in range(width):
            least[i] = least[width + i] if least[width + i] < least[i] else least[i]
            most[i] = most[width + i] if most[width + i] > most[i] else most[i]
        width //= 2
    add_up(squares, side)
    add_up(weighed, side)


@jit("contract")
def measure_all(
    block: Any, weight: Any, rows: Rows, factors: Any, candidate: Candidate, measure: Measure, errors: Any
) -> None:
    """Errors ``(C, rows)`` of all candidates; infinite where one cannot be the best, or equals the one before.

    Not inlined, because :func:`search` is compiled for each dtype of the values.
    """
    inverse, ratio, zero, before, shift, total, distance = candidate
    side, best, at, steps, form = rows.side, rows.best, rows.index, block.shape[0], measure.form
    few = side <= 4
    best[:], at[:], before[:], shift[:] = np.inf, 0, f32(0), f32(0)
    for k in range(factors.size):
        if form.exact or k == 0:
            take(candidate, k, factors, rows, form)
        else:
            narrower, wider, unit = factors[k] / factors[0], factors[0] / factors[k], rows.unit
            for i in range(LANES):
                ratio[i], inverse[i] = narrower, unit[i] * wider
        hopeless = k > 0 and few and weight.shape[0] == 0 and clips_too_much(candidate, rows, measure)
        total[:] = f32(0)
        s = 0
        while s < steps and not hopeless:
            stop = min(steps, s + 8) if few else steps
            add_errors(block[s:stop], weight[s:stop], candidate, measure)
            s = stop
            if few and s < steps:  # the rest cannot make up for it
                hopeless = True
                distance[:] = total
                add_up(distance, side)
                for r in range(rows.count):
                    hopeless &= distance[r] > best[r] * f32(1.01)
        if hopeless:
            errors[k] = np.inf
            continue
        add_up(total, side)
        for r in range(side):
            again = k > 0 and inverse[r] == before[r] and zero[r] == shift[r]
            error = f32(np.inf) if again else total[r]  # the first of two equals wins
            before[r], shift[r] = inverse[r], zero[r]
            errors[k, r] = error
            at[r] = k if error < best[r] else at[r]
            best[r] = error if error < best[r] else best[r]


@jit("contract", inline=True)
def take(candidate: Candidate, k: int, factors: Any, rows: Rows, form: Format) -> None:
    """Make ``candidate`` the one of number ``k``."""
    inverse, ratio, zero, unit, side = candidate.inverse, candidate.ratio, candidate.zero, rows.unit, rows.side
    low, high, factor = candidate.total[:side], candidate.distance[:side], factors[k]
    shrunk(rows.low, factor, form, low)
    shrunk(rows.high, factor, form, high)
    qparams(low, high, form, ratio[:side], zero)
    for r in range(side):
        inverse[r] = f32(1) / ratio[r]
    if k == 0:
        unit[:side] = inverse[:side]
        spread(unit, side)
    for r in range(side):
        ratio[r] = abs(ratio[r] * unit[r])
    spread(inverse, side)
    spread(ratio, side)
    spread(zero, side)


@jit("contract", inline=True)
def clips_too_much(candidate: Candidate, rows: Rows, measure: Measure) -> bool:
    """Whether the smallest or the largest value of every row alone loses more than the best candidate so far."""
    form, hopeless, least, most, best = measure.form, True, rows.least, rows.most, rows.best
    inverse, ratio, zero = candidate.inverse, candidate.ratio, candidate.zero
    for r in range(rows.count):
        ends = least[r] * inverse[r], most[r] * inverse[r]
        cut = max(max(ends) + zero[r] - form.high, form.low - zero[r] - min(ends))
        lost = (cut * f32(0.99) * ratio[r]) ** measure.power.norm
        hopeless &= cut > f32(0.1) and lost > best[r] * f32(1.01)
    return hopeless


@jit("contract")
def choose(errors: Any, rows: Rows, steps: int, measure: Measure, found: Choices, first: int) -> None:
    """Write down the best candidate of each row of a block, from row ``first`` of the result on, and how certain it
    is, by ``errors`` ``(C, rows)``."""
    candidates, count, best, at, bound = errors.shape[0], rows.count, rows.best, rows.index, rows.doubt
    least, most, squares, weight, unit = rows.least, rows.most, rows.squares, rows.weight, rows.unit
    index, rival = found.index[first : first + count], found.rival[first : first + count]
    maybe = found.maybe[first : first + count]
    for r in range(count):
        bound[r] = doubt(best[r], unit[r], max(-least[r], most[r]), squares[r], weight[r], steps, measure)
        found.low[first + r], found.high[first + r] = rows.low[r], rows.high[r]
        index[r], rival[r], maybe[r] = at[r], -1 if bound[r] >= f32(0) else ALL, 0
    for k in range(candidates):
        for r in range(count):
            if k != at[r] and errors[k, r] <= best[r] * (f32(1) + bound[r]) and bound[r] > f32(0):
                rival[r] = k if rival[r] == -1 else ALL
    best[:] = np.inf
    for k in range(candidates):
        sure, bit = 0, i32(1 << (k % 31))
        for r in range(count):
            error = errors[k, r] if bound[r] > f32(0) else f32(np.inf)
            # Where nothing can be lost, the first candidate is as good as any.
            if bound[r] == f32(0) and k == 0:
                error = f32(0)
            certain = error < best[r] * (f32(1) - bound[r])
            sure += certain
            maybe[r] |= bit if not certain and error < best[r] * (f32(1) + bound[r]) else i32(0)
            best[r] = min(best[r], error)
        found.improved[k] += sure


@jit("contract")
def sum_errors(
    values: Source, weights: Source, scales: Any, zeros: Any, unit: Any, measure: Measure, sums: Any
) -> None:
    """Errors of candidates on a piece of a long row, the sum of its weighed squares, and of its weights.

    Args:
        values, weights, measure: as of :func:`search`; the piece is a single row.
        scales, zeros: of the candidates, ``(C,)``.
        unit: the scale that errors are measured in.
        sums: receives the result, ``(C + 2,)`` in float64; the sum of weights only where there are any.
    """
    inverse, ratio, zero, total = lanes(), lanes(), lanes(), lanes()
    candidate = Candidate(inverse, ratio, zero, inverse, zero, total, lanes())
    size = values.shape[2] * values.shape[3]
    steps = -(-size // lanes_of(size))
    block, weight = np.empty((steps, LANES), f32), np.empty((steps if weights.bits.size else 0, LANES), f32)
    load(values, 0, 1, block)
    if weight.shape[0]:
        load(weights, 0, 1, weight)
    for k in range(scales.size):
        inverse[:], ratio[:], zero[:] = f32(1) / scales[k], abs(scales[k] / unit), zeros[k]
        for s in range(0, block.shape[0], STEPS):
            total[:] = f32(0)
            add_errors(block[s : s + STEPS], weight[s : s + STEPS], candidate, measure)
            for i in range(LANES):
                sums[k] += total[i]
    for s in range(block.shape[0]):
        for i in range(LANES):
            heavy = weight[s, i] if weight.shape[0] else f32(1)
            sums[-2] += block[s, i] * block[s, i] * heavy
            sums[-1] += heavy
