"""The loop of a CPU, which numba compiles: how it is called, and how its work is split over threads.

Rows are measured whole, some in each thread. The errors of a long row are those of its pieces, added up in float64. The
number of threads changes no sum.

Errors are in units of each row's range, so they are finite where an error in the unit of the values would leave
float32: there this loop finds the least one, and the others keep the observed range.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from lightning_obs.numerics.candidates import Candidates, Improvements, improvements
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.kernels import launch
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.rows import Rows

# Values of a piece of a long row.
_PIECE = 1 << 16
# Values that a thread measures at once.
_SHARE = 1 << 20

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


def measure(
    rows: Rows, part: slice, candidates: Candidates, search: GridSearch, least: torch.Tensor | None = None
) -> Improvements:
    """Which candidates improve consecutive rows; see :data:`.loops.Loop`."""
    loop = _Loop(rows, search)
    scales = loop.lane_scales.scales_of(candidates, search.grid)
    if rows.are_long:
        errors = loop.errors_of_long_rows(part, scales)
        return improvements(errors, least)
    return loop.improvements_of_rows(part, scales, least)


class _Loop:
    """The compiled loop, with what it is told of all rows.

    Args:
        rows: the rows.
        search: the format and the exponent.
    """

    def __init__(self, rows: Rows, search: GridSearch) -> None:
        # These import numba.
        from lightning_obs.numerics.search import arithmetic, lane_errors, lane_scales, lanes

        self.lane_scales: Any = lane_scales
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

    def improvements_of_rows(self, part: slice, scales: Any, least: torch.Tensor | None) -> Improvements:
        """What candidates bring to rows that are not long."""
        candidates = len(scales.factors)
        count = part.stop - part.start
        improved = torch.empty(candidates, count, dtype=torch.bool)
        least = torch.full((count,), torch.inf) if least is None else least.clone()
        outcome = self.kernel.Outcome(improved.numpy(), least.numpy())
        values = self._source(self.view)
        weights = self._source(self.weights)
        side = self.lanes.LANES // self.lanes.lanes_of(self.size)
        blocks = max(1, _SHARE // self.size // side)
        step = blocks * side

        def work(start: int) -> None:
            stop = min(start + step, count)
            span = self.kernel.Span(part.start, start, stop, is_whole=True)
            errors = np.empty((candidates, side), np.float32)
            launch.run(self.kernel.measure_rows, values, weights, span, scales, self.measure, errors, outcome)

        launch.in_threads(work, range(0, count, step), steps=candidates * count * self.size)
        return Improvements(improved, least)

    def errors_of_long_rows(self, part: slice, scales: Any) -> torch.Tensor:
        """Errors of candidates ``(C, r)`` on long rows, in float64."""
        count = part.stop - part.start
        errors = torch.empty(len(scales.factors), count, dtype=torch.float64)
        for r in range(count):
            row = slice(r, r + 1)
            stored = np.ascontiguousarray(scales.stored[:, row])
            zeros = np.ascontiguousarray(scales.zeros[:, row])
            row_scales = scales._replace(largest=scales.largest[row], stored=stored, zeros=zeros)
            errors[:, r] = self._errors_of_long_row(part.start + r, row_scales)
        return errors

    def _errors_of_long_row(self, number: int, scales: Any) -> torch.Tensor:
        """Errors of candidates ``(C,)`` on the row of this number."""
        values = _row_of(self.view, number)
        weights = None if self.weights is None else _row_of(self.weights, number)
        height, width = values.shape[2:]
        # Some lines of the row, or a part of one that is long by itself.
        lines = max(1, _PIECE // width)
        first_lines = range(0, height, lines)
        first_columns = range(0, width, _PIECE)
        places = list(itertools.product(first_lines, first_columns))
        candidates = len(scales.factors)
        errors = np.empty((len(places), candidates, 1), np.float32)
        span = self.kernel.Span(0, 0, 1, is_whole=False)
        no_flags = np.empty((0, 0), np.bool_)
        no_errors = np.empty(0, np.float32)
        nothing = self.kernel.Outcome(no_flags, no_errors)

        def work(place: tuple[int, int], piece_errors: Any) -> None:
            n, g = place
            line_slice = slice(n, n + lines)
            column_slice = slice(g, g + _PIECE)
            cut = (..., line_slice, column_slice)
            piece = self._source(values[cut])
            weight_view = None if weights is None else weights[cut]
            piece_weights = self._source(weight_view)
            launch.run(
                self.kernel.measure_rows, piece, piece_weights, span, scales, self.measure, piece_errors, nothing
            )

        launch.in_threads(work, places, errors, steps=self.size * candidates)
        total = errors.sum(0, dtype=np.float64)
        return torch.from_numpy(total[:, 0])

    def _source(self, view: torch.Tensor | None) -> Any:
        """A view ``(A, B, N, G)`` as the loop reads it; None: no values."""
        if view is None:
            nothing = np.empty(0, np.uint32)
            zeros = (0, 0, 0, 0)
            return self.lanes.Source(nothing, zeros, zeros)
        memory = launch.memory(view)
        return self.lanes.Source(memory, tuple(view.shape), view.stride())


def _row_of(view: torch.Tensor, number: int) -> torch.Tensor:
    """The row of this number of a view ``(A, B, N, G)``, as a view ``(1, 1, N, G)``."""
    a, b = divmod(number, view.shape[1])
    return view[a : a + 1, b : b + 1]


def _weights_of(rows: Rows) -> torch.Tensor | None:
    """The weight of each value, a view ``(A, B, N, G)`` in which rows have the numbers that they have in theirs."""
    if rows.importance is None:
        return None
    times = -(-rows.count // len(rows.importance))
    pieces = rows.view.shape[2]
    repeated = rows.importance[None, :, None]
    return repeated.expand(times, -1, pieces, -1)
