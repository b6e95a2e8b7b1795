"""Find the range that loses least when it is quantized.

The method: shrink the observed range by one factor after another, quantize and dequantize with each, and keep the
factor of least error ``sum(|q(x) - x| ** norm)`` per scale. The first of equal errors is kept, and the search ends when
``patience`` factors in a row improved no scale at all: a whole tensor visits the same factors. Factors, ties and early
stop are llm-compressor's, so in float32 the range found is the range found there.

The choice: a row (what one scale covers) meets all factors in one visit. From the notes which factor improved any row
follows where the search should have ended; if that is before the last factor, it runs again with fewer. So rows can be
searched by several ranks, or in any order: to be one search, they only need to join these notes.

There are two executions. :mod:`.definition` runs operation by operation, on any device. On a CPU compiled loops
(:mod:`.cpu`, :mod:`.cpu_kernel`) are many times as fast; what they cannot decide for certain, they leave to the
definition.
Many bfloat16 values of one scale are counted instead, and each distinct one is measured once (:mod:`..histogram`);
nothing is lost by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.numerics.candidates import visited
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.search import cpu, definition
from lightning_obs.numerics.search.definition import Visited
from lightning_obs.numerics.search.rows import Rows, rows_of_blocks, rows_of_counts, rows_of_observed

# Values of rows that are searched once more.
_AT_ONCE = 1 << 18


class Found(NamedTuple):
    """Smallest and largest value of each chosen range, ``(*Q,)``.

    ``improved`` tells which of the visited factors improved any scale, exactly if the search is one of a part.
    """

    low: torch.Tensor
    high: torch.Tensor
    improved: list[bool]


def search_range(
    observed: torch.Tensor,
    args: QuantizationArgs | NumberGrid,
    factors: Sequence[float],
    *,
    patience: int | None = 5,
    norm: float = 2.4,
    expand: float = 1.0,
    importance: torch.Tensor | None = None,
    part: bool = False,
    hessian: torch.Tensor | None = None,
) -> Found:
    """The range of least quantization error per scale.

    Args:
        observed: ``(N, *Q, G)``, not empty: N observations, Q the shape of the scales, G values per scale.
        args: number format and symmetry, or the grid that they are of. A tensor_group is searched without rounding its
            scales unless the grid has the global scale, which is only known afterwards.
        factors: candidates, in the order of the search; the first wins a tie.
        patience: number of consecutive factors without an improvement that ends the search; None: it visits all.
        norm: exponent of the error.
        expand: factor on the observed range before the search; above 1 it tries ranges wider than the values.
        importance: weight of each value's error, broadcastable to ``(*Q, G)``, not negative.
        part: other rows belong to the search too. So it visits all factors, and what they improve decides where the
            search of all rows ends (:func:`~lightning_obs.numerics.candidates.visited`).
        hessian: quadratic forms of the columns, which measure the error instead of norm and importance: ``(I, T, t,
            t)``, T * t = G, in the order of the scales; I divides their number.

    Returns:
        The range, ``(*Q,)`` each, in the dtype of ``observed``, and what each factor improved. Where no candidate has
        a finite error (a NaN, an error beyond float32), it is the expanded range.
    """
    if not observed.is_floating_point():
        observed = observed.float()
    rows = rows_of_counts(observed) if importance is None and hessian is None else None
    if rows is None:
        rows = rows_of_observed(observed, importance, hessian)
    return _search(rows, observed.shape[1:-1], _grid(args), factors, patience, norm, expand, part)


def search_block_range(
    weight: torch.Tensor,
    args: QuantizationArgs | NumberGrid,
    factors: Sequence[float],
    *,
    patience: int | None = 5,
    norm: float = 2.4,
    expand: float = 1.0,
    part: bool = False,
    hessian: torch.Tensor | None = None,
) -> Found:
    """The range of least quantization error per block of a weight ``(R, C)``, which is not copied.

    Args:
        weight: not empty; the height and width of a block divide it.
        args: as for :func:`search_range`; their ``block_structure`` is the size of a block.
        factors, patience, norm, expand, part, hessian: see :func:`search_range`.

    Returns:
        As :func:`search_range`; ``(R / height, C / width)`` each.
    """
    grid = _grid(args)
    assert grid.args.block_structure is not None  # QuantizationArgs validated it
    height, width = grid.args.block_structure
    rows = rows_of_blocks(weight, height, width, hessian)
    return _search(rows, rows.view.shape[:2], grid, factors, patience, norm, expand, part)


def _grid(args: QuantizationArgs | NumberGrid) -> NumberGrid:
    return args if isinstance(args, NumberGrid) else NumberGrid.of(args)


def _search(
    rows: Rows,
    shape: torch.Size,
    grid: NumberGrid,
    factors: Sequence[float],
    patience: int | None,
    norm: float,
    expand: float,
    part: bool,
) -> Found:
    def visit(rows: Rows, factors: Sequence[float], patience: int | None, by_loops: bool) -> Visited:
        if by_loops:
            return cpu.visit(rows, factors, grid, norm, expand, patience)
        candidates = torch.tensor(factors, dtype=torch.float64, device=rows.device)
        return definition.visit(rows, candidates, grid, norm, expand)

    if not factors:
        low, high = (end * expand for end in rows.observed_range())
        return Found(low.reshape(shape), high.reshape(shape), [])
    by_loops = cpu.can_search(rows, grid, norm)
    result = visit(rows, factors, None if part else patience, by_loops)
    stop = visited(result.improved.tolist(), patience)
    if result.unsure.any() and (part or visited((result.improved | result.unsure).tolist(), patience) != stop):
        result = visit(rows, factors, None, by_loops=False)
        stop = visited(result.improved.tolist(), patience)
    if part:
        stop = len(factors)
    late = (result.best >= stop).nonzero().squeeze(-1)  # their candidate comes after the end, which excludes it
    for some in late.split(max(1, _AT_ONCE // rows.size)) if len(late) else ():
        sooner = visit(rows.only(some), factors[:stop], None, by_loops)
        result.low[some], result.high[some] = sooner.low, sooner.high
    return Found(result.low.reshape(shape), result.high.reshape(shape), result.improved.tolist()[:stop])
