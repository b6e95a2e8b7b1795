"""Call the search loop that numba compiles for a CPU, and split its work over threads.

``loops.py`` chooses :func:`measure` where :func:`can_run` is True. Each thread measures some whole rows (a row holds
the values of one scale). A long row is cut into pieces, whose errors are added up in float64. The number of threads
does not change a sum.

Errors are measured in a unit near the magnitude of each row, so they stay finite where an error in the unit of the
values would exceed float32. For such rows this loop finds the best candidate, while the other loops keep the observed
range.
"""

from __future__ import annotations

import itertools
import math
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
# Values that one call of the loop in a thread measures.
_SHARE = 1 << 20

#: counts the values that torch's operations measured although the compiled loop could have; torch's operations take
#: about ten seconds for the limit
slow_steps = launch.SlowSteps(limit=1 << 30)


def can_run(rows: Rows, search: GridSearch) -> bool:
    """Whether the loop can measure these values with this format, and numba is installed to compile it.

    Called by ``loops.loop_for`` for each search. If only numba is missing, the search's steps are counted in
    ``slow_steps``, which warns once they are many.
    """
    if rows.hessian is not None or not launch.knows(rows.view) or not _knows(search.grid):
        return False
    if launch.numba_fault() is not None:
        slow_steps.add(rows.count * rows.size * len(search.factors))
        return False
    return True


def _knows(grid: NumberGrid) -> bool:
    """Whether the loop can use a format: symmetric, or integers with integer zero points."""
    is_symmetric = bool(grid.args.symmetric)
    is_integer = grid.number is None
    has_integer_zeros = grid.args.zp_dtype in (None, torch.int8)
    return is_symmetric or (is_integer and has_integer_zeros)


def measure(
    rows: Rows, part: slice, candidates: Candidates, search: GridSearch, least: torch.Tensor | None = None
) -> Improvements:
    """Which candidates improve consecutive rows: the loop of a CPU.

    ``ranges.py`` calls it for one part of the rows after the other, if ``loops.loop_for`` has chosen it.

    Args:
        rows: all rows of the search.
        part: the r consecutive rows that are measured.
        candidates: the candidates of these r rows.
        search: format and exponent.
        least: the least errors of earlier candidates, ``(r,)`` as this loop returned them; None: there are no earlier
            candidates.
    """
    loop = _Loop(rows, search)
    scales = loop.lane_scales.scales_of(candidates, search.grid)
    if rows.are_long:
        errors = loop.errors_of_long_rows(part, scales)
        return improvements(errors, least)
    return loop.improvements_of_rows(part, scales, least)


class _Loop:
    """The compiled loop, with the arguments that are the same for all rows. Made for each call of :func:`measure`.

    Args:
        rows: the rows.
        search: format and exponent.
    """

    def __init__(self, rows: Rows, search: GridSearch) -> None:
        # Imported here, because these modules import numba.
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
        """Which candidates improve which rows, for rows that are not long; ``scales`` is ``lane_scales.Scales``.

        The compiled loop reads ``side`` rows at a time: a block of ``LANES`` lanes, of which each row has
        ``lanes_of(size)`` (``lanes.py``). A call in a thread measures whole blocks, of about ``_SHARE`` values in all.
        """
        candidates = len(scales.factors)
        count = part.stop - part.start
        improved = torch.empty(candidates, count, dtype=torch.bool)
        least = torch.full((count,), torch.inf) if least is None else least.clone()
        outcome = self.kernel.Outcome(improved.numpy(), least.numpy())
        values = self._source(self.view)
        weights = self._source(self.weights)
        side = self.lanes.LANES // self.lanes.lanes_of(self.size)
        rows = _SHARE // self.size
        blocks = max(1, rows // side)
        step = blocks * side

        def work(start: int) -> None:
            stop = min(start + step, count)
            # is_whole: no other call has values of these rows, so the loop may give up a candidate that is too bad.
            span = self.kernel.Span(part.start, start, stop, is_whole=True)
            errors = np.empty((candidates, side), np.float32)
            launch.run(self.kernel.measure_rows, values, weights, span, scales, self.measure, errors, outcome)

        launch.in_threads(work, range(0, count, step), steps=candidates * count * self.size)
        return Improvements(improved, least)

    def errors_of_long_rows(self, part: slice, scales: Any) -> torch.Tensor:
        """The errors of candidates on long rows, ``(C, r)`` in float64, one row after the other."""
        count = part.stop - part.start
        errors = torch.empty(len(scales.factors), count, dtype=torch.float64)
        for r in range(count):
            row = slice(r, r + 1)
            stored = np.ascontiguousarray(scales.stored[:, row])
            zeros = np.ascontiguousarray(scales.zeros[:, row])
            row_scales = scales._replace(
                largest=scales.largest[row],
                lows=scales.lows[row],
                highs=scales.highs[row],
                stored=stored,
                zeros=zeros,
            )
            errors[:, r] = self._errors_of_long_row(part.start + r, row_scales)
        return errors

    def _errors_of_long_row(self, number: int, scales: Any) -> torch.Tensor:
        """The errors ``(C,)`` of candidates on the row with this index: the sums over its pieces."""
        values = _row_of(self.view, number)
        weights = None if self.weights is None else _row_of(self.weights, number)
        height, width = values.shape[2:]
        # A piece is some lines of the row's (N, G) values, or a part of a single long line.
        lines = max(1, _PIECE // width)
        first_lines = range(0, height, lines)
        first_columns = range(0, width, _PIECE)
        places = list(itertools.product(first_lines, first_columns))
        candidates = len(scales.factors)
        errors = np.empty((len(places), candidates, 1), np.float32)
        # Not whole: a piece's errors are needed for the sum, so the loop gives up no candidate. It compares nothing
        # either, because the Outcome has no rows; the errors are left in ``piece_errors``.
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
        """A view ``(A, B, N, G)`` as the loop reads it, ``lanes.Source``; for None, one that holds no values."""
        if view is None:
            nothing = np.empty(0, np.uint32)
            zeros = (0, 0, 0, 0)
            return self.lanes.Source(nothing, zeros, zeros)
        memory = launch.memory(view)
        return self.lanes.Source(memory, tuple(view.shape), view.stride())


def _row_of(view: torch.Tensor, number: int) -> torch.Tensor:
    """The row with this index of a view ``(A, B, N, G)``, as a view ``(1, 1, N, G)``."""
    a, b = divmod(number, view.shape[1])
    return view[a : a + 1, b : b + 1]


def _weights_of(rows: Rows) -> torch.Tensor | None:
    """The weights of the values' errors as a view ``(times, I, N, G)``; None: all weights are 1.

    ``rows.importance`` is ``(I, G)``, and row r of the values has its weights ``r % I``. The view repeats them often
    enough for all rows, and for the N lines of each row. Its first two dimensions number the rows, so row r of the view
    has the weights of row r of the values.
    """
    if rows.importance is None:
        return None
    times = math.ceil(rows.count / len(rows.importance))
    lines = rows.view.shape[2]
    weights = rows.importance[None, :, None]
    return weights.expand(times, -1, lines, -1)
