"""Search the range of each scale for the least quantization error.

The observers that search ranges call :func:`search_range` when they measure a tensor or compute qparams.

The method: shrink the observed range by one factor after another, quantize and dequantize with each, and keep for each
scale the factor with the least error ``sum(|q(x) - x| ** norm)``. The first of equal errors is kept. The search ends
when ``patience`` factors in a row improved no scale of the tensor, so all scales of a tensor visit the same factors.
Factors, ties and early stop are llm-compressor's, so in float32 the result is llm-compressor's range, except for near
ties: two candidates whose errors differ by less than a relative 1e-5 are equally good.

The choice: all factors are measured in one visit of a row (the values of one scale), by one of three loops
(:mod:`.loops`). From which factors improved which rows then follow the end of the search and the factor of each row.
The trade-off: factors behind the end are measured in vain. Only on a CPU, where reading a result makes nobody wait,
very long rows are visited a few factors at a time: a tensor has few of them, so the search often ends early.

Where a scale has many bfloat16 values, they are counted, and each distinct value is measured once
(:mod:`..histogram`), which gives the same error.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lightning_obs.numerics.candidates import (
    Candidates,
    Improvements,
    last_improvement,
    on_device,
    shrink,
    visited,
)
from lightning_obs.numerics.qparams import split_blocks
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.loops import Loop, loop_for
from lightning_obs.numerics.search.rows import Range, Rows, rows_of_counts, rows_of_observed

# Pairs of a candidate and a row that are measured at once; each takes a byte in the result. On a CPU they give every
# core work, on an accelerator they take few launches.
_PAIRS_ON_CPU = 1 << 22
_PAIRS = 1 << 25


def search_range(
    observed: torch.Tensor,
    search: GridSearch,
    *,
    importance: torch.Tensor | None = None,
    hessian: torch.Tensor | None = None,
) -> Range:
    """The range with the least quantization error for each scale.

    Called by the observers that search ranges: for each tensor that they measure, or, if they weigh errors by inputs
    or counted values, when qparams are computed.

    Args:
        observed: ``(N, *Q, G)``, not empty: N observations, Q the shape of the scales, at least one dimension (``(1,)``
            for one scale), G values per scale. Or, known by its two dimensions, a weight
            ``(R, C)`` that the blocks of ``search.grid.args`` divide: Q is then ``(R / height, C / width)``, and the
            weight is not copied.
        search: candidates and error.
        importance: weight of each value's error, not negative, ``(I, G)`` in float32: the scale with the flat index q
            has the weights ``q % I``. Not allowed for a weight ``(R, C)``. None: all weights are 1.
        hessian: matrices H for which ``d^T H d`` is the error, with d the differences of the columns, in place of norm
            and importance: ``(I, T, t, t)`` with T * t = G. The scale with the flat index q has the matrices ``q % I``;
            I divides the number of scales.

    Returns:
        The smallest and the largest value of each range, ``(*Q,)`` each, in the dtype of ``observed``. Where no
        candidate has a finite error (a NaN among the values, an error beyond float32), it is the observed range times
        ``search.expand``.
    """
    observed = observed if observed.is_floating_point() else observed.float()
    if observed.ndim == 2:
        rows = Rows(split_blocks(observed, search.grid.args), hessian=hessian)
        shape = rows.view.shape[:2]
    else:
        rows = _rows_of(observed, importance, hessian)
        shape = observed.shape[1:-1]
    low, high = range_of_rows(rows, search)
    return low.reshape(shape), high.reshape(shape)


def _rows_of(observed: torch.Tensor, importance: torch.Tensor | None, hessian: torch.Tensor | None) -> Rows:
    """``(N, *Q, G)`` as rows: of all values, or of the distinct values weighed by their counts, if that is faster."""
    if importance is None and hessian is None:
        counted = rows_of_counts(observed)
        if counted is not None:
            return counted
    return rows_of_observed(observed, importance, hessian)


def range_of_rows(rows: Rows, search: GridSearch, loop: Loop | None = None) -> Range:
    """The range with the least error for each row, both ends ``(R,)``; for :func:`search_range`.

    ``loop`` is the loop that measures the candidates; None: the fastest loop. Only tests give one.
    """
    low, high = rows.observed_range()
    ends = torch.stack([low, high]) * search.expand
    if not search.factors:
        return ends[0], ends[1]
    if loop is None:
        loop = loop_for(rows, search)
    visit = _Visit(rows, ends, search, loop)
    # A row that no candidate improved has the number 0 and the factor 1: it keeps the observed range times `expand`.
    factors = on_device((1.0, *search.factors), rows.device)
    low, high = shrink(ends, factors[visit.best()])
    return low, high


class _Visit:
    """One search: measures the candidates on all rows, part by part. Made by :func:`range_of_rows`.

    Args:
        rows: the rows.
        ends: the ranges that the factors multiply: the observed ranges times ``search.expand``, ``(2, R)``.
        search: candidates and error.
        loop: the loop that measures the candidates.
    """

    def __init__(self, rows: Rows, ends: torch.Tensor, search: GridSearch, loop: Loop) -> None:
        self.rows = rows
        self.ends = ends
        self.search = search
        self.loop = loop
        self.factors = on_device(tuple(search.factors), rows.device)

    def best(self) -> torch.Tensor:
        """The best candidate of each row, ``(R,)``, counted from 1; 0: no candidate has a finite error."""
        limit = self.search.limit
        if limit is None:
            return torch.cat([last_improvement(improved) for improved in self._improved_parts()])
        if self.rows.are_long:
            improved = self._improved_until_the_end(limit)
        else:
            improved = torch.cat(list(self._improved_parts()), 1)
        # As bytes, because torch reduces bools one by one.
        improves_any = improved.view(torch.uint8).amax(1)
        is_visited = visited(improves_any, limit)
        return last_improvement(improved, is_visited)

    def _improved_parts(self) -> Iterator[torch.Tensor]:
        """Measure all candidates on one part of r rows after the other; yields which improve these rows, ``(C, r)``."""
        at_once = _PAIRS_ON_CPU if self.rows.device.type == "cpu" else _PAIRS
        candidates = len(self.factors)
        length = at_once // candidates
        for part in self.rows.parts(slice(0, self.rows.count), length):
            yield self._measure(part, self.factors, None).improved

    def _improved_until_the_end(self, limit: int) -> torch.Tensor:
        """Measure a few candidates at a time, for long rows on a CPU, until the search ends.

        ``limit`` is the number of candidates in a row without an improvement that ends the search. Returns which
        candidates, up to the last one measured, improve which rows.
        """
        everything = slice(0, self.rows.count)
        improved = torch.empty(0, self.rows.count, dtype=torch.bool)
        least = None
        idle = 0
        while idle < limit and len(improved) < len(self.factors):
            start = len(improved)
            stop = start + limit - idle
            factors = self.factors[start:stop]
            further, least = self._measure(everything, factors, least)
            improved = torch.cat([improved, further])
            latest = last_improvement(improved).max().item()
            idle = len(improved) - int(latest)
        return improved

    def _measure(self, part: slice, factors: torch.Tensor, least: torch.Tensor | None) -> Improvements:
        """Call the loop: which candidates improve consecutive rows, given the least errors of earlier candidates."""
        candidates = Candidates(self.ends[0, part], self.ends[1, part], factors)
        return self.loop(self.rows, part, candidates, self.search, least)
