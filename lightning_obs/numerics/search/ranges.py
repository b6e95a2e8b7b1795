"""Find the range that loses least when it is quantized.

The method: shrink the observed range by one factor after another, quantize and dequantize with each, and keep the
factor of least error ``sum(|q(x) - x| ** norm)`` per scale. The first of equal errors is kept, and the search ends when
``patience`` factors in a row improved no scale at all: a whole tensor visits the same factors. Factors, ties and early
stop are llm-compressor's, so in float32 the range found is the range found there.

The choice: all factors are measured in one visit of a row (the values of one scale). The factors that improved a row
tells where the search should have ended; if that is before the last factor, it runs again with fewer.

There are two executions. :mod:`.definition` runs operation by operation, on any device. On a CPU compiled loops
(:mod:`.cpu`, :mod:`.cpu_kernel`) are many times as fast, and leave to the definition rows that they cannot decide for
certain. Many bfloat16 values of one scale are counted instead, and each distinct one is measured once
(:mod:`..histogram`); nothing is lost by that.
"""

from __future__ import annotations

import torch

from lightning_obs.numerics.qparams import split_blocks
from lightning_obs.numerics.search import cpu, definition
from lightning_obs.numerics.search.definition import Found, GridSearch
from lightning_obs.numerics.search.rows import Rows, rows_of_counts, rows_of_observed


def search_range(
    observed: torch.Tensor,
    search: GridSearch,
    *,
    importance: torch.Tensor | None = None,
    hessian: torch.Tensor | None = None,
) -> Found:
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
        The range, ``(*Q,)`` each, in the dtype of ``observed``, and which factors improved. Where no candidate has
        a finite error (a NaN, an error beyond float32), it is the expanded range.
    """
    observed = observed if observed.is_floating_point() else observed.float()
    rows = None
    if observed.ndim == 2:
        rows = Rows(split_blocks(observed, search.grid.args), hessian=hessian)
    elif importance is None and hessian is None:
        rows = rows_of_counts(observed)
    rows = rows_of_observed(observed, importance, hessian) if rows is None else rows
    shape = rows.view.shape[:2] if observed.ndim == 2 else observed.shape[1:-1]
    if search.factors:
        visit = cpu.visit if cpu.can_search(rows, search) else definition.visit
        low, high, improved = visit(rows, search)
    else:
        low, high = (end * search.expand for end in rows.observed_range())
        improved = torch.zeros(0, dtype=torch.bool)
    return Found(low.reshape(shape), high.reshape(shape), improved)
