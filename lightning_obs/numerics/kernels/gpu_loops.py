"""Loops that Triton compiles for a GPU, where torch would need a launch for each candidate or column, or copies.

Triton comes with torch's builds for CUDA. Only :mod:`lightning_obs.numerics.on_gpu` imports this module: it launches
the loops, and its functions document what they compute. A *program* is one of the parallel calls of a loop.

``round_panel`` computes as :class:`~lightning_obs.numerics.formats.NumberGrid` does, operation for operation: divisions
are rounded to nearest, products and sums are not fused. The scales of ``measure_ranges`` are computed so, too; its
errors are not: a value is multiplied by one over its scale, and a power is ``exp2(norm * log2(|d|))``, to six digits.

In all loops, strides are in elements, and an index beyond the data is masked.
"""

# Triton reads the source of these functions, and its own annotations.
# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def count_patterns(
    values, tables, size, wide, stride_n, stride_q, stride_g, scales, number_of_tables, BLOCK: tl.constexpr
):
    """Count the 16-bit patterns of ``values`` (N, Q, G), as int16, in ``tables``, (T, Q, 65536) integers.

    ``on_gpu.count_patterns`` launches it for each tile of an observed tensor. A program counts BLOCK of the ``size``
    values of one scale, and adds to the table of its index modulo T. ``wide`` is G, ``scales`` is Q,
    ``number_of_tables`` is T. The zeros of a program are summed and added once, because atomic additions to one address
    wait for each other, and half of a ReLU's output is zero.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = start + tl.arange(0, BLOCK)
    scale = tl.program_id(1).to(tl.int64)
    within = place < size
    n = place // wide
    g = place % wide
    at = scale * stride_q
    at += n * stride_n
    at += g * stride_g
    bits = tl.load(values + at, within, other=0)
    pattern = bits.to(tl.int32) & 0xFFFF
    number = tables.dtype.element_ty
    of_table = tl.program_id(0) % number_of_tables * scales
    table = tables + (of_table + scale) * 65536
    is_zero = within & (pattern == 0)
    zeros = tl.sum(is_zero.to(number))
    tl.atomic_add(table, zeros, sem="relaxed")
    ones = tl.full((BLOCK,), 1, number)
    is_other = within & (pattern != 0)
    tl.atomic_add(table + pattern, ones, is_other, sem="relaxed")


@triton.jit
def moments(values, out, size, wide, stride_n, stride_q, stride_g, scales, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum and the sum of squares of each scale of ``values`` (N, Q, G) to ``out``, (pieces, 2, Q) in float64.

    ``on_gpu.moments`` launches it for each batch of the normal observer. A program adds up a piece of SPAN values of
    one scale, BLOCK at a time, in float64, in which the square of a float32 is exact. ``size`` is the number of values
    of a scale, ``wide`` is G, ``scales`` is Q.
    """
    scale = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1).to(tl.int64) * SPAN
    total = tl.zeros((BLOCK,), tl.float64)
    squares = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, SPAN, BLOCK):
        place = start + first + tl.arange(0, BLOCK)
        n = place // wide
        g = place % wide
        at = scale * stride_q
        at += n * stride_n
        at += g * stride_g
        stored = tl.load(values + at, place < size, other=0.0)
        value = stored.to(tl.float64)
        total += value
        squares += value * value
    piece = out + tl.program_id(1) * 2 * scales
    row = piece + scale
    tl.store(row, tl.sum(total))
    tl.store(row + scales, tl.sum(squares))


@triton.jit
def nearest(value, low, high, INTEGERS: tl.constexpr, smallest, rounder):
    """The number of a format nearest to ``value``, ties to even; for the two loops below.

    ``low`` and ``high`` are the smallest and the largest number. For a floating format (INTEGERS False), ``smallest``
    is its smallest normal number, and adding and subtracting ``rounder`` times the value's power of two rounds.
    """
    above = tl.maximum(value, low)
    near = tl.minimum(above, high)
    if INTEGERS:
        return (near + 12582912.0) - 12582912.0  # 1.5 * 2**23: float32 holds integers only there
    bits = near.to(tl.int32, bitcast=True)
    exponent = bits & 0x7F800000
    power = exponent.to(tl.float32, bitcast=True)
    shift = tl.maximum(power, smallest) * rounder
    return (near + shift) - shift


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
    """Add up ``|q(x) - x| ** norm * importance`` for each candidate, over COLUMNS values of ROWS rows.

    ``on_gpu.measure_ranges`` launches it for each part of the rows of a range search.

    If WHOLE, a program has all values of its rows and compares the candidates: it writes to ``out``, (candidates,
    rows), whether a candidate's error is below that of all before it, and to ``least_errors``, (rows,), the least
    error, which holds that of earlier candidates at first. If not WHOLE, a program has a piece of its rows and writes
    errors to ``out``, (pieces of a row, candidates, rows).

    If SCALED, a candidate's scale is read from ``scales``, (candidates, rows). If not, it is computed: the magnitude of
    the row's range (``low_ends``, ``high_ends``, (rows,)) times one of ``factors``, divided by ``half``, which is half
    of the number of steps from ``low`` to ``high``; each result is rounded to the dtype of the ends, and a scale of
    zero is replaced by ``eps``, that of the same dtype. If SHIFTED, zero points are read from ``zeros``, (candidates,
    rows). If WEIGHED, errors are multiplied by ``importance``, (``repeats``, G): row r by its row ``r % repeats``.

    ``values`` is (A, B, N, G): ``across`` is B, ``wide`` is G, ``size`` is N * G; ``first`` is the index of the first
    of ``rows`` rows. ``low`` to INTEGERS describe the format, see ``nearest``.
    """
    first_row = tl.program_id(0) * ROWS
    row_of_tile = tl.arange(0, ROWS)
    row = first_row + row_of_tile
    first_place = tl.program_id(1) * COLUMNS
    column_of_tile = tl.arange(0, COLUMNS)
    place = first_place + column_of_tile
    is_row = row < rows
    is_place = place < size
    within = is_row[:, None] & is_place[None, :]
    number = (first + row).to(tl.int64)
    a = number // across
    b = number % across
    of_row = a * stride_a
    of_row += b * stride_b
    n = place // wide
    g = place % wide
    of_place = n.to(tl.int64) * stride_n + g.to(tl.int64) * stride_g
    at_value = of_row[:, None] + of_place[None, :]
    x = tl.load(values + at_value, within, other=0.0).to(tl.float32)
    weight = x  # a placeholder, not read: Triton needs the name outside of the branch
    if WEIGHED:
        weight_row = number % repeats
        of_weights = weight_row * wide
        at_weight = of_weights[:, None] + g[None, :]
        weight = tl.load(importance + at_weight, within, other=0.0)
    dtype = low_ends.dtype.element_ty
    least = tl.load(low_ends + row, is_row, other=0.0).to(tl.float32)
    most = tl.load(high_ends + row, is_row, other=0.0).to(tl.float32)
    if WHOLE:
        least_error = tl.load(least_errors + row, is_row, other=0.0)
    for candidate in range(candidates):
        of_candidate = candidate * rows
        at = of_candidate + row
        if SCALED:
            scale = tl.load(scales + at, is_row, other=1.0)
        else:
            factor = tl.load(factors + candidate)
            scale = scale_of(least, most, factor, half, eps, dtype)
        one = tl.full((ROWS,), 1.0, tl.float32)
        inverse = tl.div_rn(one, scale)
        level = x * inverse[:, None]
        zero = level  # a placeholder, not read
        if SHIFTED:
            zero_point = tl.load(zeros + at, is_row, other=0.0)
            zero = zero_point[:, None]
            level = level + zero
        level = nearest(level, low, high, INTEGERS, smallest, rounder)
        if SHIFTED:
            level = level - zero
        distance = tl.abs(level * scale[:, None] - x)
        lost = tl.exp2(norm * tl.log2(distance))
        if WEIGHED:
            lost = lost * weight
        lost = tl.where(within, lost, 0.0)
        total = tl.sum(lost, 1)
        if WHOLE:
            improves = total < least_error
            tl.store(out + at, improves, is_row)
            least_error = tl.where(improves, total, least_error)
        else:
            piece = tl.program_id(1).to(tl.int64)
            out_of_piece = out + piece * candidates * rows
            tl.store(out_of_piece + at, total, is_row)
    if WHOLE:
        tl.store(least_errors + row, least_error, is_row)


@triton.jit
def scale_of(least, most, factor, half, eps, dtype: tl.constexpr):
    """The scales of the ranges from ``least`` to ``most``, (ROWS,) each, times a factor; for ``measure_ranges``.

    A scale is the magnitude of a range over ``half``, or ``eps`` if that is zero. Ends and scales are rounded to
    ``dtype``.
    """
    below = rounded(least * factor, dtype)
    above = rounded(most * factor, dtype)
    magnitude = tl.maximum(tl.maximum(-below, above), 0.0)
    steps = tl.full(magnitude.shape, 0.0, tl.float32) + half
    scale = rounded(tl.div_rn(magnitude, steps), dtype)
    return tl.where(scale == 0, eps, scale)


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """Round a float32 to ``dtype``, as torch rounds a range or a scale of that dtype; the result is float32.

    ``scale_of`` calls it for each range and scale.
    """
    stored = value.to(dtype)
    return stored.to(tl.float32)


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
    """Round the columns of a panel one after the other; each is corrected by the errors of the columns before it.

    ``on_gpu.round_panel`` launches it for each panel of a GPTQ rounding. A program rounds ROWS rows. It reads the
    weight ``left``, the scales ``step`` and the zero points ``zeros``, and writes ``levels`` and ``errors``; all are
    (columns, rows), so a column of the weight is contiguous. ``factor`` is the panel's part of the upper Cholesky
    factor of the inverse Hessian (``rounding.inverse_factor``), (columns, columns), its rows ``stride`` apart. An error
    is written as it corrects later columns: divided by the factor's diagonal. PANEL is the smallest power of two that
    is at least ``columns``. ``low`` to INTEGERS describe the format, see ``nearest``.
    """
    first_row = tl.program_id(0) * ROWS
    row_of_tile = tl.arange(0, ROWS)
    row = first_row + row_of_tile
    known = tl.arange(0, PANEL)
    within = row < rows
    done = tl.zeros((PANEL, ROWS), tl.float32)
    for i in range(columns):
        # The factor is upper triangular, so only columns before this one count.
        at_factor = known.to(tl.int64) * stride + i
        taken = tl.load(factor + at_factor, known < i, other=0.0)
        of_column = i * rows
        at = of_column + row
        correction = tl.sum(done * taken[:, None], 0)
        value = tl.load(left + at, within, other=0.0) - correction
        scale = tl.load(step + at, within, other=1.0)
        zero = tl.load(zeros + at, within, other=0.0)
        steps = tl.div_rn(value, scale) + zero
        level = nearest(steps, low, high, INTEGERS, smallest, rounder)
        difference = value - (level - zero) * scale
        at_diagonal = i * (stride + 1) + row * 0  # the same place for all rows: div_rn takes two tensors
        diagonal = tl.load(factor + at_diagonal)
        error = tl.div_rn(difference, diagonal)
        tl.store(levels + at, level, within)
        tl.store(errors + at, error, within)
        is_column = known == i
        done = tl.where(is_column[:, None], error[None, :], done)
