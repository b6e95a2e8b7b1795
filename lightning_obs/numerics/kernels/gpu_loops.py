"""Loops that Triton compiles for a GPU, where torch would need launches for each candidate and column, or copies.

A rounding computes as :class:`~lightning_obs.numerics.formats.NumberGrid` does, operation for operation: divisions are
rounded to nearest, products and sums not fused. So are the scales of a search; a value is then multiplied by one over
its scale, and a power is ``exp2(norm * log2(|d|))``, to six digits.

Triton comes with torch's builds for CUDA. Only :mod:`lightning_obs.numerics.on_gpu` imports this module.
"""

# Triton reads the source of these functions, and its own annotations.
# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def count_patterns(
    values, tables, size, wide, stride_n, stride_q, stride_g, scales, number_of_tables, BLOCK: tl.constexpr
):
    """Add how often each 16-bit pattern of ``(N, Q, G)`` occurs to one of ``tables``, (T, Q, 65536), integers.

    A program counts BLOCK of the ``size`` values of one scale, ``wide`` is G; ``scales`` is Q, ``number_of_tables`` T.
    Its zeros are one addition: additions to one place wait for each other, and half of a ReLU's output is zero.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.program_id(1).to(tl.int64)
    within = place < size
    at = scale * stride_q + (place // wide) * stride_n + (place % wide) * stride_g
    pattern = tl.load(values + at, within, other=0).to(tl.int32) & 0xFFFF
    number = tables.dtype.element_ty
    table = tables + (tl.program_id(0) % number_of_tables * scales + scale) * 65536
    tl.atomic_add(table, tl.sum((within & (pattern == 0)).to(number)), sem="relaxed")
    tl.atomic_add(table + pattern, tl.full((BLOCK,), 1, number), within & (pattern != 0), sem="relaxed")


@triton.jit
def moments(values, out, size, wide, stride_n, stride_q, stride_g, scales, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """Sum and sum of squares of each scale of ``(N, Q, G)``, in pieces of SPAN values: ``out`` is (pieces, 2, Q).

    ``size`` is the number of values of a scale, ``wide`` is G. In float64, in which the square of a float32 is exact.
    """
    scale = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1).to(tl.int64) * SPAN
    total = tl.zeros((BLOCK,), tl.float64)
    squares = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, SPAN, BLOCK):
        place = start + first + tl.arange(0, BLOCK)
        at = scale * stride_q + (place // wide) * stride_n + (place % wide) * stride_g
        value = tl.load(values + at, place < size, other=0.0).to(tl.float64)
        total += value
        squares += value * value
    row = out + tl.program_id(1) * 2 * scales + scale
    tl.store(row, tl.sum(total))
    tl.store(row + scales, tl.sum(squares))


@triton.jit
def nearest(value, low, high, INTEGERS: tl.constexpr, smallest, rounder):
    """The nearest number of a format, ties to even."""
    near = tl.minimum(tl.maximum(value, low), high)
    if INTEGERS:
        return (near + 12582912.0) - 12582912.0  # 1.5 * 2**23: float32 holds integers only there
    power = (near.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.maximum(power, smallest) * rounder
    return (near + power) - power


@triton.jit
def measure_ranges(
    values,
    importance,
    scales,
    zeros,
    low_ends,
    high_ends,
    factors,
    out,
    least_errors,
    first,
    rows,
    across,
    wide,
    size,
    stride_a,
    stride_b,
    stride_n,
    stride_g,
    repeats,
    candidates,
    half,
    eps,
    norm,
    low,
    high,
    smallest,
    rounder,
    INTEGERS: tl.constexpr,
    WHOLE: tl.constexpr,
    SCALED: tl.constexpr,
    SHIFTED: tl.constexpr,
    WEIGHED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add up ``|q(x) - x| ** norm * importance`` of each candidate, over COLUMNS values of ROWS rows.

    Of WHOLE rows, ``out`` is (candidates, rows): whether a candidate has less error than ``least_errors``, (rows,), of
    those before it, which it takes the place of. Else ``out`` are the errors, (pieces of a row, candidates, rows).

    A candidate's scale is read from ``scales``, (candidates, rows), as ``zeros`` is, or it is the magnitude of the
    row's range times a factor, divided by ``half``, each rounded to the dtype of the ends; ``eps`` if that is zero.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    number = (first + row).to(tl.int64)
    n, g = place // wide, place % wide
    within = (row < rows)[:, None] & (place < size)[None, :]
    start = (number // across) * stride_a + (number % across) * stride_b
    each = n.to(tl.int64) * stride_n + g.to(tl.int64) * stride_g
    x = tl.load(values + start[:, None] + each[None, :], within, other=0.0).to(tl.float32)
    weight = x
    if WEIGHED:
        weight = tl.load(importance + (number % repeats)[:, None] * wide + g[None, :], within, other=0.0)
    least = tl.load(low_ends + row, row < rows, other=0.0)
    most = tl.load(high_ends + row, row < rows, other=0.0)
    if WHOLE:
        least_error = tl.load(least_errors + row, row < rows, other=0.0)
    for candidate in range(candidates):
        at = candidate * rows + row
        if SCALED:
            scale = tl.load(scales + at, row < rows, other=1.0)
        else:
            factor = tl.load(factors + candidate)
            below = (least.to(tl.float32) * factor).to(least.dtype).to(tl.float32)
            above = (most.to(tl.float32) * factor).to(least.dtype).to(tl.float32)
            size_of_range = tl.maximum(tl.maximum(-below, above), 0.0)
            scale = tl.div_rn(size_of_range, tl.zeros((ROWS,), tl.float32) + half).to(least.dtype).to(tl.float32)
            scale = tl.where(scale == 0, eps, scale)
        inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), scale)
        scale = scale[:, None]
        level = x * inverse[:, None]
        zero = scale
        if SHIFTED:
            zero = tl.load(zeros + at, row < rows, other=0.0)[:, None]
            level = level + zero
        level = nearest(level, low, high, INTEGERS, smallest, rounder)
        if SHIFTED:
            level = level - zero
        lost = tl.exp2(norm * tl.log2(tl.abs(level * scale - x)))
        if WEIGHED:
            lost = lost * weight
        total = tl.sum(tl.where(within, lost, 0.0), 1)
        if WHOLE:
            improves = total < least_error
            tl.store(out + at, improves, row < rows)
            least_error = tl.where(improves, total, least_error)
        else:
            piece = tl.program_id(1).to(tl.int64) * candidates * rows
            tl.store(out + piece + at, total, row < rows)
    if WHOLE:
        tl.store(least_errors + row, least_error, row < rows)


@triton.jit
def round_panel(
    left,
    step,
    zeros,
    factor,
    levels,
    errors,
    rows,
    columns,
    stride,
    low,
    high,
    smallest,
    rounder,
    INTEGERS: tl.constexpr,
    ROWS: tl.constexpr,
    PANEL: tl.constexpr,
):
    """Round the columns of a panel one after the other; each takes up the errors of the columns before it.

    ``left``, ``step``, ``zeros``, ``levels`` and ``errors`` are (columns, rows): a column of the weight is contiguous;
    ``factor`` is (columns, columns), its rows ``stride`` apart.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = tl.arange(0, PANEL)
    within = row < rows
    done = tl.zeros((PANEL, ROWS), tl.float32)
    for i in range(columns):
        # Zero below the diagonal, so only columns before this one count.
        taken = tl.load(factor + known.to(tl.int64) * stride + i, known < i, other=0.0)
        at = i * rows + row
        value = tl.load(left + at, within, other=0.0) - tl.sum(done * taken[:, None], 0)
        scale = tl.load(step + at, within, other=1.0)
        zero = tl.load(zeros + at, within, other=0.0)
        level = nearest(tl.div_rn(value, scale) + zero, low, high, INTEGERS, smallest, rounder)
        error = tl.div_rn(value - (level - zero) * scale, tl.load(factor + i * (stride + 1) + row * 0))
        tl.store(levels + at, level, within)
        tl.store(errors + at, error, within)
        done = tl.where((known == i)[:, None], error[None, :], done)
