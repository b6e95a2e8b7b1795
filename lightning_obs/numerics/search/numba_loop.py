"""The loop of a CPU, which numba compiles: how it is called, and how its work is split over threads.

Rows are measured whole, some in each thread. The errors of a long row are those of its pieces, added up in float64. The
number of threads changes no sum.

Errors are in units of each row's range, so they are finite where an error in the unit of the values would leave
float32: there this loop finds the least one, and the others keep the observed range.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from compressed_tensors.quantization.utils import should_generate_mx_scales

from lightning_obs.numerics.candidates import Candidates, half_of_range, shrink
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.kernels import launch
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.rows import Rows

# Values of a piece of a long row.
_PIECE = 1 << 16
# Values that a thread measures at once.
_SHARE = 1 << 20
# The exponent of 2 up to which float32 has both a number and its inverse.
_LARGEST_EXPONENT = 126
# The bits of float32's exponent: all of them are set in an infinity.
_INFINITE_EXPONENT = 0x7F800000
# Of ranges whose MX scales are the powers of two that float32 gives; float16 has fewer.
_MX_DTYPES = (torch.float32, torch.bfloat16)

#: the steps of searches that the loops would have made; torch makes the limit in about ten seconds
slow_steps = launch.SlowSteps(limit=1 << 30)


def can_run(rows: Rows, search: GridSearch) -> bool:
    """Whether the loop knows these values and this format, and numba is there to compile it."""
    if rows.hessian is not None or not launch.knows(rows.view) or not _knows(search.grid):
        return False
    if launch.numba_fault() is not None:
        slow_steps.add(rows.count * rows.size * len(search.factors))
        return False
    return True


def _knows(grid: NumberGrid) -> bool:
    """Whether a format is symmetric, or its zero points are integers among integers."""
    has_integer_zeros = grid.number is None and grid.args.zp_dtype in (None, torch.int8)
    return bool(grid.args.symmetric) or has_integer_zeros


def errors_of(rows: Rows, part: slice, candidates: Candidates, search: GridSearch) -> torch.Tensor:
    """Errors of candidates on consecutive rows, ``(C, r)``; see :data:`.loops.Loop`."""
    loop = _Loop(rows, search)
    scales = loop.scales_of(candidates)
    if rows.are_long:
        return loop.errors_of_long_rows(part, scales)
    return loop.errors_of_rows(part, scales)


def qparams_of(candidates: Candidates, grid: NumberGrid) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and zero point of each candidate and row, ``(C, r)`` in float32: :meth:`.Candidates.qparams`.

    Of short rows, compressed-tensors' operations on all candidates would take as long as the loop. A symmetric format
    needs few of them.
    """
    dtype = candidates.low.dtype
    half = half_of_range(grid, dtype)
    has_powers_of_two = should_generate_mx_scales(grid.args) and dtype in _MX_DTYPES
    if half is None and not has_powers_of_two:
        return candidates.qparams(grid)
    largest = torch.maximum(-candidates.low, candidates.high).clamp(min=0)
    largest = shrink(largest, candidates.factors[:, None])
    if half is None:
        return _powers_of_two(largest, grid), None
    scale = largest.div_(half)
    if not scale.amin() > 0:
        scale.masked_fill_(scale == 0, torch.finfo(dtype).eps)
    return scale.float(), None


def _powers_of_two(largest: torch.Tensor, grid: NumberGrid) -> torch.Tensor:
    """The scales of an MX format for ranges up to ``largest``, in float32: as compressed-tensors computes them.

    A magnitude is rounded to ``mx_mantissa`` bits behind its first; its exponent, less that of the format's largest
    number, is the scale's.
    """
    assert grid.number is not None
    bits = largest.float().view(torch.int32)
    powers = bits.add_(1 << (22 - grid.number.mx_mantissa)).bitwise_and_(_INFINITE_EXPONENT)
    is_infinite = powers == _INFINITE_EXPONENT
    largest_exponent = math.floor(math.log2(grid.high)) << 23
    scale = powers.sub_(largest_exponent).clamp_(min=0).view(torch.float32)
    zero = torch.zeros(1, dtype=largest.dtype)
    of_zero, _ = grid.qparams(zero, zero)
    scale.masked_fill_(scale == 0, of_zero.item())
    return scale.masked_fill_(is_infinite, torch.inf)


def _units_of(candidates: Candidates) -> torch.Tensor:
    """One over a power of two near the largest magnitude of each row, ``(r,)`` in float32."""
    largest = torch.maximum(-candidates.low, candidates.high).float()
    exponent = torch.frexp(largest).exponent
    return torch.ldexp(torch.ones_like(largest), -exponent.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT))


class _Loop:
    """The compiled loop, with what it is told of all rows.

    Args:
        rows: the rows.
        search: the format and the exponent.
    """

    def __init__(self, rows: Rows, search: GridSearch) -> None:
        # These import numba.
        from lightning_obs.numerics.search import arithmetic, lane_errors, lanes

        self.lanes: Any = lanes
        self.kernel: Any = lane_errors
        self.grid = search.grid
        self.view = rows.view
        self.weights = _weights_of(rows)
        #: values of a row
        self.size = rows.size
        numbers = arithmetic.numbers_of(search.grid)
        exponent = arithmetic.exponent_of(search.norm)
        self.measure = lane_errors.Measure(numbers, exponent)

    def scales_of(self, candidates: Candidates) -> Any:
        """The candidates as the loop reads them."""
        scale, zero_point = qparams_of(candidates, self.grid)
        units = _units_of(candidates)
        zeros = np.empty((0, 0), np.float32) if zero_point is None else zero_point.contiguous().numpy()
        return self.kernel.Scales(units.numpy(), scale.contiguous().numpy(), zeros)

    def errors_of_rows(self, part: slice, scales: Any) -> torch.Tensor:
        """Errors of candidates ``(C, r)`` on rows that are not long."""
        errors = np.empty(scales.scales.shape, np.float32)
        values = self._source(self.view)
        weights = self._source(self.weights)
        count = part.stop - part.start
        side = self.lanes.LANES // self.lanes.lanes_of(self.size)
        blocks = max(1, _SHARE // self.size // side)
        step = blocks * side

        def work(start: int) -> None:
            stop = min(start + step, count)
            span = self.kernel.Span(part.start, start, stop, is_whole=True)
            launch.run(self.kernel.sum_errors, values, weights, span, scales, self.measure, errors)

        launch.in_threads(work, range(0, count, step), steps=errors.size * self.size)
        return torch.from_numpy(errors)

    def errors_of_long_rows(self, part: slice, scales: Any) -> torch.Tensor:
        """Errors of candidates ``(C, r)`` on long rows, in float64."""
        errors = torch.empty(scales.scales.shape, dtype=torch.float64)
        for r in range(part.stop - part.start):
            columns = (np.ascontiguousarray(field[..., r : r + 1]) for field in scales)
            errors[:, r] = self._errors_of_long_row(part.start + r, self.kernel.Scales(*columns))
        return errors

    def _errors_of_long_row(self, number: int, scales: Any) -> torch.Tensor:
        """Errors of candidates ``(C,)`` on the row of this number."""
        values = _row_of(self.view, number)
        weights = None if self.weights is None else _row_of(self.weights, number)
        height, width = values.shape[2:]
        # Some lines of the row, or a part of one that is long by itself.
        lines = max(1, _PIECE // width)
        places = list(itertools.product(range(0, height, lines), range(0, width, _PIECE)))
        errors = np.empty((len(places), len(scales.scales), 1), np.float32)
        span = self.kernel.Span(0, 0, 1, is_whole=False)

        def work(place: tuple[int, int], sums: Any) -> None:
            n, g = place
            cut = (..., slice(n, n + lines), slice(g, g + _PIECE))
            piece = self._source(values[cut])
            piece_weights = self._source(None if weights is None else weights[cut])
            launch.run(self.kernel.sum_errors, piece, piece_weights, span, scales, self.measure, sums)

        launch.in_threads(work, places, errors, steps=self.size * len(scales.scales))
        total = errors.sum(0, dtype=np.float64)
        return torch.from_numpy(total[:, 0])

    def _source(self, view: torch.Tensor | None) -> Any:
        """A view ``(A, B, N, G)`` as the loop reads it; None: no values."""
        if view is None:
            return self.lanes.Source(np.empty(0, np.uint32), (0,) * 4, (0,) * 4)
        return self.lanes.Source(launch.memory(view), tuple(view.shape), view.stride())


def _row_of(view: torch.Tensor, number: int) -> torch.Tensor:
    """The row of this number of a view ``(A, B, N, G)``, as a view ``(1, 1, N, G)``."""
    a, b = divmod(number, view.shape[1])
    return view[a : a + 1, b : b + 1]


def _weights_of(rows: Rows) -> torch.Tensor | None:
    """The weight of each value, a view ``(A, B, N, G)`` in which rows have the numbers that they have in theirs."""
    if rows.importance is None:
        return None
    times = -(-rows.count // len(rows.importance))
    return rows.importance[None, :, None].expand(times, -1, rows.view.shape[2], -1)
