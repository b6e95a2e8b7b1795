"""Find the range that loses least when it is quantized.

The method: shrink the observed range by one factor after another, quantize and dequantize with each, and keep the
factor of least error ``sum(|q(x) - x| ** norm)`` per scale. The first of equal errors is kept, and the search ends when
``patience`` factors in a row improved no scale at all: a whole tensor visits the same factors. Factors, ties and early
stop are llm-compressor's, so in float32 the range found is the range found there, but for ties: two candidates whose
errors differ by less than 1e-5 are equally good.

The choice: all factors are measured in one visit of a row (the values of one scale), by one of three loops
(:mod:`.loops`); which factors improved a row then tells where the search ends, and which factor each row has. The
trade-off: factors after the end are measured in vain. Only a CPU, which need not wait for the answer, visits very long
rows a few factors at a time: there are few of them, so the search often ends early.

Many bfloat16 values of one scale are counted instead, and each distinct one is measured once (:mod:`..histogram`);
nothing is lost by that.
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

# Pairs of a candidate and a row that are measured at once, a byte each: on a CPU enough for a thread on each core, else
# as many as few launches make.
_PAIRS_ON_CPU = 1 << 22
_PAIRS = 1 << 25


def search_range(
    observed: torch.Tensor,
    search: GridSearch,
    *,
    importance: torch.Tensor | None = None,
    hessian: torch.Tensor | None = None,
) -> Range:
    """The range of least quantization error per scale.

    Args:
        observed: ``(N, *Q, G)``, not empty: N observations, Q the shape of the scales, G values per scale. Or a weight
            ``(R, C)`` that the blocks of ``search.grid.args`` divide: Q is ``(R / height, C / width)``, and it is not
            copied.
        search: candidates and error.
        importance: weight of each value's error, not negative, ``(I, G)`` in float32: scale q of all, in their order,
            has the weights of q modulo I. Not for a weight.
        hessian: quadratic forms of the columns, which measure the error instead of norm and importance: ``(I, T, t,
            t)``, T * t = G, in the order of the scales; I divides their number.

    Returns:
        Smallest and largest value of each range, ``(*Q,)`` both, in the dtype of ``observed``. Where no candidate has a
        finite error (a NaN among the values, an error beyond float32), it is the expanded range.
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
    """``(N, *Q, G)`` as rows: the values, or how often each occurs."""
    if importance is None and hessian is None:
        counted = rows_of_counts(observed)
        if counted is not None:
            return counted
    return rows_of_observed(observed, importance, hessian)


def range_of_rows(rows: Rows, search: GridSearch, loop: Loop | None = None) -> Range:
    """The range of least error of each row, ``(R,)`` both ends, by the fastest loop unless another is given."""
    low, high = rows.observed_range()
    ends = torch.stack([low, high]) * search.expand
    if not search.factors:
        return ends[0], ends[1]
    if loop is None:
        loop = loop_for(rows, search)
    visit = _Visit(rows, ends, search, loop)
    # A row that no candidate improved has the number 0, and keeps the expanded range: its factor is 1.
    factors = on_device((1.0, *search.factors), rows.device)
    low, high = shrink(ends, factors[visit.best()])
    return low, high


class _Visit:
    """The visit of all candidates of a search to some rows.

    Args:
        rows: the rows.
        ends: their expanded ranges, ``(2, R)``.
        search: candidates and error.
        loop: that measures the candidates.
    """

    def __init__(self, rows: Rows, ends: torch.Tensor, search: GridSearch, loop: Loop) -> None:
        self.rows = rows
        self.ends = ends
        self.search = search
        self.loop = loop
        self.factors = on_device(tuple(search.factors), rows.device)

    def best(self) -> torch.Tensor:
        """The best candidate of each row as :func:`last_improvement` numbers them, ``(R,)``."""
        limit = self.search.limit
        if limit is None:
            return torch.cat([last_improvement(improved) for improved in self._improved_parts()])
        if self.rows.are_long:
            improved = self._improved_until_the_end(limit)
        else:
            improved = torch.cat(list(self._improved_parts()), 1)
        # As bytes: torch reads flags one by one.
        improves_any = improved.view(torch.uint8).amax(1)
        is_visited = visited(improves_any, limit)
        return last_improvement(improved, is_visited)

    def _improved_parts(self) -> Iterator[torch.Tensor]:
        """Which candidates improve the rows of each part, ``(C, r)``."""
        at_once = _PAIRS_ON_CPU if self.rows.device.type == "cpu" else _PAIRS
        candidates = len(self.factors)
        length = at_once // candidates
        for part in self.rows.parts(slice(0, self.rows.count), length):
            yield self._measure(part, self.factors, None).improved

    def _improved_until_the_end(self, limit: int) -> torch.Tensor:
        """Which candidates improve all rows, ``(C, R)``, up to the one that ends the search."""
        everything = slice(0, self.rows.count)
        improved = torch.empty(0, self.rows.count, dtype=torch.bool)
        least = None
        idle = 0
        while idle < limit and len(improved) < len(self.factors):
            wanted = slice(len(improved), len(improved) + limit - idle)
            further, least = self._measure(everything, self.factors[wanted], least)
            improved = torch.cat([improved, further])
            latest = last_improvement(improved).max().item()
            idle = len(improved) - int(latest)
        return improved

    def _measure(self, part: slice, factors: torch.Tensor, least: torch.Tensor | None) -> Improvements:
        """What candidates bring to consecutive rows, given the least errors of earlier candidates."""
        candidates = Candidates(self.ends[0, part], self.ends[1, part], factors)
        return self.loop(self.rows, part, candidates, self.search, least)
