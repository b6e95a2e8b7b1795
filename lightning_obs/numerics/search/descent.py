"""Ranges by a row's whole quadratic form, ``d H d^T`` with ``H = E[x x^T]``: the squared error of its output.

Method. Coordinate descent: the candidates of one scale are judged given the errors that the row's other scales leave,
``d^T H_gg d + 2 d^T (D H)_g``, one column of groups after the other, in some sweeps. The first visits the candidates of
the search. Each later one visits as many around the chosen range, in steps of the search's, then of half of them, a
quarter...: a range that differs by a percent rounds other integers, whose errors may cancel. Every integer is the
nearest; only ranges are chosen. Rows do not depend on each other, except rows that share a scale.

The choice: all candidates of a few rows are measured at once, because the product with ``H_gg`` is most of the time.
The trade-off: the errors of these rows' candidates are in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lightning_obs.numerics.candidates import on_device, shrink
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.qparams import exact_products, tile_size
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.rows import Range

# Values of the errors of all candidates of one column of groups at once, and of the errors of all columns.
_TILE = 1 << 18
_ROWS = 1 << 22


class _Factors(NamedTuple):
    """The factors that sweeps try.

    Attributes:
        first: those of the first sweep, ``(K, 1, 1)`` in float64.
        around: distances of as many from the chosen factor, in the second sweep, relative to it.
    """

    first: torch.Tensor
    around: torch.Tensor

    @classmethod
    def of(cls, search: GridSearch, device: torch.device) -> _Factors:
        """Those of the candidates of a search."""
        first = on_device(tuple(search.factors), device)[:, None, None]
        half = len(first) // 2
        number = torch.arange(-half, half + 1, device=device)[:, None, None]
        step = first[:2].max() - first[:2].min()
        around = number * step
        return cls(first, around)

    def of_sweep(self, sweep: int, chosen: torch.Tensor) -> torch.Tensor:
        """The factors that a sweep tries, ``(K, S, T)``, by those that the one before has chosen, ``(S, T)``."""
        if sweep == 0:
            return self.first.expand(-1, *chosen.shape)
        return chosen * (self.around / 2 ** (sweep - 1) + 1)


class _Scales(NamedTuple):
    """Scale and zero point (None: symmetric) of each candidate and scale, of any shape."""

    scale: torch.Tensor
    zero_point: torch.Tensor | None

    def at(self, index: Any) -> _Scales:
        """Those of an index."""
        zero_point = None if self.zero_point is None else self.zero_point[index]
        return _Scales(self.scale[index], zero_point)

    def best(self, candidate: torch.Tensor) -> _Scales:
        """Those of the best candidate of each scale: ``(K, S, 1, 1)`` and ``(S,)`` give ``(S, 1, 1)``."""
        index = candidate[None, :, None, None]
        zero_point = None if self.zero_point is None else self.zero_point.gather(0, index)[0]
        return _Scales(self.scale.gather(0, index)[0], zero_point)


@exact_products()
def descend(
    weight: torch.Tensor, hessian: torch.Tensor, search: GridSearch, block: tuple[int, int], sweeps: int = 4
) -> Range:
    """The ranges of a weight's scales after some sweeps.

    Args:
        weight: ``(R, C)``.
        hessian: ``(C, C)`` in float32.
        search: the number format and the candidates of the first sweep, all of which are visited.
        block: height and width of the block of one scale; they divide the weight.
        sweeps: how often each scale is chosen.

    Returns:
        Smallest and largest value, ``(R / height, C / width)`` each, in the dtype of the weight. Where no candidate has
        a finite error, the expanded range.
    """
    height, width = block
    lines = weight.unflatten(0, (-1, height))
    blocks = lines.unflatten(2, (-1, width))
    low = blocks.amin((1, 3)) * search.expand
    high = blocks.amax((1, 3)) * search.expand
    tried = _Factors.of(search, weight.device)
    # The values of a row of scales, or their candidates.
    candidate_rows = -(-len(search.factors) // width)
    size = weight.shape[1] * max(height, candidate_rows)
    step = max(1, tile_size(weight.device, _ROWS) // size)
    for start in range(0, len(low), step):
        part = slice(start, min(start + step, len(low)))
        lines_of_part = slice(part.start * height, part.stop * height)
        values = weight[lines_of_part].float()
        factors = _descend_rows(values, (low[part], high[part]), hessian, search.grid, tried, sweeps)
        low[part] = shrink(low[part], factors)
        high[part] = shrink(high[part], factors)
    return low, high


def _descend_rows(
    values: torch.Tensor, ends: Range, hessian: torch.Tensor, grid: NumberGrid, tried: _Factors, sweeps: int
) -> torch.Tensor:
    """The factors on the ranges of some rows of scales after some sweeps, ``(S, T)`` in float64.

    Args:
        values: the rows, ``(S * height, C)`` in float32.
        ends: their expanded ranges, ``(S, T)`` each, T columns of groups.
        hessian: ``(C, C)``.
        grid: the number format.
        tried: the candidates of each sweep.
        sweeps: how often each scale is chosen.
    """
    low, high = ends
    width = values.shape[1] // low.shape[1]
    factors = torch.ones(low.shape, dtype=torch.float64, device=values.device)
    error = torch.zeros_like(values)
    for sweep in range(sweeps):
        candidates = tried.of_sweep(sweep, factors)
        lows = shrink(low, candidates)
        highs = shrink(high, candidates)
        qparams = _Scales(*grid.qparams(lows, highs))
        for k in range(low.shape[1]):
            columns = slice(k * width, (k + 1) * width)
            stop = k * width if sweep == 0 else None
            before = slice(0, stop)  # where errors are known
            error[:, columns] = 0
            others = error[:, before] @ hessian[before, columns]
            group_hessian = hessian[columns, columns]
            scales = qparams.at((..., k))
            best, error[:, columns] = _choose(values[:, columns], others * 2, group_hessian, scales, grid)
            index = best.clamp(min=0).unsqueeze(0)
            chosen = candidates[..., k].gather(0, index)[0]
            factors[:, k] = torch.where(best < 0, factors[:, k], chosen)
    return factors


def _choose(
    values: torch.Tensor, others: torch.Tensor, hessian: torch.Tensor, candidates: _Scales, grid: NumberGrid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the scales of one column of groups.

    Args:
        values: ``(S * height, width)``.
        others: twice the errors of the other columns times their part of the Hessian, as ``values``.
        hessian: that of the column, ``(width, width)``.
        candidates: of each scale, ``(K, S)``.
        grid: the number format.

    Returns:
        The best candidate of each scale, ``(S,)``, -1 where none has a finite error, and the error that it leaves.
    """
    shape = values.shape
    lost = torch.empty_like(candidates.scale)
    spread = candidates.at((..., None, None))
    count, scales = lost.shape
    values = values.contiguous().view(scales, -1, shape[1])
    others = others.contiguous().view(scales, -1, shape[1])
    step = max(1, tile_size(values.device, _TILE) // values.numel())
    for first in range(0, count, step):
        stop = first + step
        some = slice(first, stop)
        error = grid.error(values, *spread.at(some))
        gradient = error @ hessian
        gradient.add_(others)
        lost[some] = gradient.mul_(error).sum((-1, -2))
    lost.masked_fill_(~lost.isfinite(), torch.inf)
    best = lost.argmin(0)
    error = grid.error(values, *spread.best(best))
    least = lost.amin(0)
    has_finite = least.isfinite()
    return torch.where(has_finite, best, -1), error.view(shape)
