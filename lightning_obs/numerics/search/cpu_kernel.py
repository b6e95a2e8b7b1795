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
from lightning_obs.numerics.search.cpu_power import Power
from lightning_obs.numerics.search.cpu_tile import LANES, add_up, lanes_of, some_lanes, spread

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


class Format(NamedTuple):
    """Numbers of a format, and how a range becomes a scale: float32 and int32, so that a loop stays in them.

    Rounding to a floating format adds and subtracts ``1.5 * 2**(23 - mantissa)`` times the power of two of the value,
    which is at least that of the smallest normal number: ``normal`` and ``magic`` hold both as bits.
    """

    low: Any
    high: Any
    is_float: bool
    normal: Any
    magic: Any
    symmetric: bool
    signed: bool  # whether the scale is negative where the range reaches farther above zero
    divisor: Any  # of the range: the scale
    exact: bool  # whether scales are rounded to less than float32, or zero points or signs depend on the last bit
    range: Any  # (normal, magic, largest number) of the range's dtype; magic 0: float32
    scale: Any  # the same of the scale's; magic 0: the range's
    mx_round: Any  # power of two scales (MX): what is added to the bits before the mantissa goes; 0: none
    mx_offset: Any
    eps: Any  # instead of a scale of zero
    least: Any  # no magnitude that is smaller is searched here
    most: Any  # nor one that is more scales


power_of = jit("contract")(Power.__call__)


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


@jit()
def stored(x: Any, form: Format) -> Any:
    """Rounded to the dtype of the range; infinite beyond its largest number, which float16 reaches early."""
    if not form.range[1]:
        return x
    rounded = near(x, form.range[0], form.range[1])
    return rounded if abs(rounded) <= form.range[2] else x * f32(np.inf)


@jit()
def qparams(low: Any, high: Any, form: Format) -> Any:
    """Scale and zero point as compressed-tensors computes them, rounding after every operation as it does."""
    low, high = min(low, f32(0)), max(high, f32(0))
    zero = f32(0)
    if form.symmetric:
        size = max(-low, high)
        if form.mx_round:
            power = i32(i32(f32(size).view(i32) + form.mx_round) & i32(0x7F800000))
            scale = i32(max(i32(power - form.mx_offset), i32(0))).view(f32)
            if form.range[1] and power.view(f32) > form.range[2]:  # the power of two is taken in the range's dtype
                scale = f32(np.inf)
        else:
            scale = stored(size / form.divisor, form)
            if form.signed and high > -low:
                scale = -scale
    else:
        scale = stored(stored(high - low, form) / form.divisor, form)
        zero = near_integer(min(max(stored(form.low - stored(low / scale, form), form), form.low), form.high))
    if form.scale[1]:
        scale = near(min(scale, form.scale[2]), form.scale[0], form.scale[1])
    return (scale if scale != f32(0) else form.eps), zero


@jit("contract")
def add_errors(
    tile: Any, weights: Any, inverse: Any, ratio: Any, zero: Any, form: Format, power: Power, total: Any, distance: Any
) -> None:
    """Add the errors of one candidate to ``total (LANES,)``; ``weights`` without steps: all 1."""
    low, high, normal, magic = form.low, form.high, form.normal, form.magic
    for s in range(tile.shape[0]):
        values = tile[s]
        if form.is_float:
            for i in range(LANES):
                u = values[i] * inverse[i]
                distance[i] = abs(u - near(min(max(u, low), high), normal, magic)) * ratio[i]
        else:
            for i in range(LANES):
                u = values[i] * inverse[i] + zero[i]
                distance[i] = abs(u - near_integer(min(max(u, low), high))) * ratio[i]
        if weights.shape[0]:
            weight = weights[s]
            for i in range(LANES):
                total[i] += power_of(power, distance[i]) * weight[i]
        else:
            for i in range(LANES):
                total[i] += power_of(power, distance[i])


@jit()
def root_above(x: Any, exponent: Any) -> Any:
    """At least ``x ** exponent`` (and at most a quarter more), exponent in (0, 1], x positive: logarithm by bits."""
    return i32(i32(f32(i32(f32(x).view(i32) - i32(0x3F800000))) * exponent) + i32(0x3F800000)).view(f32) * f32(1.14)


@jit()
def doubt(best: Any, unit: Any, size: Any, squares: Any, weight: Any, steps: int, form: Format, power: Power) -> Any:
    """By how much, relative to it, the least error of a row and another's can be wrong together; -1: not known.

    Args:
        best: the least error.
        unit: one over the first scale.
        size: the largest magnitude.
        squares: sum of the weighed squares.
        weight: sum of the weights.
        steps: how many terms are added up in float32.
        form, power: of the search.
    """
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


@jit("contract")
def search(
    tile: Any,
    weights: Any,
    count: int,
    size: int,
    factors: Any,
    expand: Any,
    form: Format,
    power: Power,
    low: Any,
    high: Any,
    index: Any,
    rival: Any,
    improved: Any,
    unsure: Any,
) -> None:
    """Find the best candidate of every row of a tile, and whether that is certain.

    Args:
        tile: from :func:`.cpu_tile.load`.
        weights: of each value, the same; without blocks: all 1.
        count, size: rows of the tile, values of a row.
        factors: candidates, ``(C,)`` in float32.
        expand: factor on the observed range.
        form, power: of the search.
        low, high: receive the expanded range of each row, ``(count,)``.
        index: receives the best candidate, ``(count,)``.
        rival: receives the one candidate that may be as good, -1 (none) or :data:`ALL`, ``(count,)``.
        improved: counts, per candidate, rows that are certainly better by it than by all before.
        unsure: counts, per candidate, rows that may be.
    """
    steps, candidates, share = tile.shape[1], factors.size, lanes_of(size)
    side = LANES // share
    few = side <= 4 and size > 512
    below, above, squares, weighed = some_lanes()
    total, distance, inverse, ratio = some_lanes()
    zero, unit, best, before = some_lanes()
    shift, bound, least, most = some_lanes()
    at = np.zeros(LANES, i32)
    errors = np.empty((candidates, side), f32)
    for b in range(tile.shape[0]):
        first = b * side
        rows = min(side, count - first)
        if rows <= 0:
            break
        block, weight = tile[b], weights[b] if weights.shape[0] else tile[b, :0]

        below[:], above[:], squares[:], weighed[:] = np.inf, -np.inf, f32(0), f32(0)
        for s in range(steps):
            held = min(share, size - s * share) * side
            values = block[s]
            for i in range(held):
                x = values[i]
                below[i] = x if x < below[i] else below[i]
                above[i] = x if x > above[i] else above[i]
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
                below[i] = below[width + i] if below[width + i] < below[i] else below[i]
                above[i] = above[width + i] if above[width + i] > above[i] else above[i]
            width //= 2
        add_up(squares, side)
        add_up(weighed, side)
        for r in range(side):
            least[r], most[r] = below[r], above[r]
            below[r], above[r] = stored(below[r] * expand, form), stored(above[r] * expand, form)
            best[r], at[r], before[r], shift[r] = np.inf, 0, f32(0), f32(0)
        for r in range(rows):
            low[first + r], high[first + r] = below[r], above[r]

        for k in range(candidates):
            if form.exact or k == 0:
                for r in range(side):
                    factor = factors[k]
                    scale, zero[r] = qparams(stored(below[r] * factor, form), stored(above[r] * factor, form), form)
                    inverse[r] = f32(1) / scale
                    if k == 0:
                        unit[r] = inverse[r]
                    ratio[r] = abs(scale * unit[r])
                spread(inverse, side)
                spread(ratio, side)
                spread(zero, side)
                if k == 0:
                    spread(unit, side)
            else:
                narrower, wider = factors[k] / factors[0], factors[0] / factors[k]
                for i in range(LANES):
                    ratio[i], inverse[i] = narrower, unit[i] * wider
            hopeless = few and k > 0 and weight.shape[0] == 0
            for r in range(rows if hopeless else 0):  # what the largest and the smallest value lose
                ends = least[r] * inverse[r], most[r] * inverse[r]
                cut = max(max(ends) + zero[r] - form.high, form.low - zero[r] - min(ends))
                hopeless &= cut > f32(0.1) and (cut * f32(0.99) * ratio[r]) ** power.norm > best[r] * f32(1.01)
            if hopeless:
                errors[k] = np.inf
                continue
            total[:] = f32(0)
            s = 0
            while s < steps and not hopeless:
                stop = min(steps, s + 8) if few else steps
                add_errors(block[s:stop], weight[s:stop], inverse, ratio, zero, form, power, total, distance)
                s = stop
                if few and s < steps:  # the rest cannot make up for it
                    hopeless = True
                    distance[:] = total
                    add_up(distance, side)
                    for r in range(rows):
                        hopeless &= distance[r] > best[r] * f32(1.01)
            if hopeless:
                errors[k] = np.inf
                continue
            add_up(total, side)
            for r in range(side):
                again = k > 0 and inverse[r] == before[r] and zero[r] == shift[r]  # the first of two equals wins
                error = f32(np.inf) if again else total[r]
                before[r], shift[r] = inverse[r], zero[r]
                errors[k, r] = error
                at[r] = k if error < best[r] else at[r]
                best[r] = error if error < best[r] else best[r]

        for r in range(side):
            largest = max(-least[r], most[r])
            bound[r] = doubt(best[r], unit[r], largest, squares[r], weighed[r], steps, form, power)
        for r in range(rows):
            index[first + r], rival[first + r] = at[r], -1 if bound[r] >= f32(0) else ALL
        for k in range(candidates):
            for r in range(rows):
                if k != at[r] and errors[k, r] <= best[r] * (f32(1) + bound[r]) and bound[r] > f32(0):
                    rival[first + r] = k if rival[first + r] == -1 else ALL
        best[:] = np.inf
        for k in range(candidates):
            sure = maybe = 0
            for r in range(rows):
                error = errors[k, r] if bound[r] > f32(0) else f32(np.inf)
                # Where nothing can be lost, the first candidate is as good as any.
                if bound[r] == f32(0) and k == 0:
                    error = f32(0)
                sure += error < best[r] * (f32(1) - bound[r])
                maybe += error < best[r] * (f32(1) + bound[r])
                best[r] = min(best[r], error)
            improved[k] += sure
            unsure[k] += maybe - sure


@jit("contract")
def sum_errors(
    tile: Any, weights: Any, scales: Any, zeros: Any, unit: Any, form: Format, power: Power, sums: Any
) -> None:
    """Errors of candidates on a piece of a long row, the sum of its weighed squares, and of its weights.

    Args:
        tile: ``(steps, LANES)``, from :func:`.cpu_tile.load`.
        weights: the same; without steps: all 1.
        scales, zeros: of the candidates, ``(C,)``.
        unit: the scale in units of which errors are measured.
        form, power: of the search.
        sums: receives the result, ``(C + 2,)`` in float64; the sum of weights only where there are any.
    """
    total, distance, inverse, ratio = some_lanes()
    zero = np.zeros(LANES, f32)
    for k in range(scales.size):
        inverse[:], ratio[:], zero[:] = f32(1) / scales[k], abs(scales[k] / unit), zeros[k]
        for s in range(0, tile.shape[0], STEPS):
            total[:] = f32(0)
            piece = slice(s, s + STEPS)
            add_errors(tile[piece], weights[piece], inverse, ratio, zero, form, power, total, distance)
            for i in range(LANES):
                sums[k] += total[i]
    for s in range(tile.shape[0]):
        for i in range(LANES):
            weight = weights[s, i] if weights.shape[0] else f32(1)
            sums[-2] += tile[s, i] * tile[s, i] * weight
            sums[-1] += weight
