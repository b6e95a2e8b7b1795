"""Search the ranges of a weight for the least squared error of the module's output, with the whole Hessian.

The observer ``hessian`` calls :func:`descend`. With d the error of a weight's row and ``H = E[x x^T]`` over the inputs,
the expected squared error of the row's output is ``d H d^T``. It depends on all scales of the row together.

Method. Coordinate descent: the candidates of one scale are compared while the row's other scales stay as they are. With
d the error of the scale's group g and D the error of the rest of the row, a candidate's error is
``d H_gg d^T + 2 (D H)_g d^T``. Scales are chosen one column of groups after the other, in several sweeps over the row.
The first sweep tries the candidates of the search. Each later sweep tries about as many candidates around the chosen
range, at first in the search's steps, then in halves of them, then in quarters: a range that differs by a percent
rounds some values to other integers, whose errors may cancel. Every value is rounded to nearest; only ranges are
chosen. Rows do not depend on each other, except rows that share a scale.

The choice: all candidates of a few rows are measured at once, because the product with ``H_gg`` takes most of the time.
The trade-off: the errors of these rows' candidates take memory.

In shapes, K is the number of candidates, S the number of rows of scales, T the number of columns of groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lightning_obs.numerics.candidates import on_device, shrink
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.qparams import exact_products, tile_size
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.rows import Range

# Most numbers in memory, on a CPU: errors of the candidates of one column of groups that are measured at once (_TILE),
# and values of the rows that are searched together, or their candidates (_ROWS).
_TILE = 1 << 18
_ROWS = 1 << 22


class _Factors(NamedTuple):
    """The factors on the observed range that the sweeps try.

    Attributes:
        first: the factors of the first sweep, ``(K, 1, 1)`` in float64.
        around: for the second sweep, the distances of the factors to try from the chosen factor, relative to it: 0 and
            K // 2 steps to either side, so K or K + 1 distances. A search with a single factor has only the distance 0.
    """

    first: torch.Tensor
    around: torch.Tensor

    @classmethod
    def of(cls, search: GridSearch, device: torch.device) -> _Factors:
        """The factors for the candidates of a search."""
        first = on_device(tuple(search.factors), device)[:, None, None]
        half = len(first) // 2
        number = torch.arange(-half, half + 1, device=device)[:, None, None]
        first_two = first[:2]
        step = first_two.max() - first_two.min()
        around = number * step
        return cls(first, around)

    def of_sweep(self, sweep: int, chosen: torch.Tensor) -> torch.Tensor:
        """The factors that a sweep tries, around the factors ``(S, T)`` that the sweep before chose.

        The result is ``(K, S, T)`` for the first sweep (0), and as long as ``around`` for the others.
        """
        if sweep == 0:
            return self.first.expand(-1, *chosen.shape)
        distances = self.around / 2 ** (sweep - 1)
        return chosen * (distances + 1)


class _Scales(NamedTuple):
    """Scale and zero point (None: symmetric) of candidates, in tensors of any one shape."""

    scale: torch.Tensor
    zero_point: torch.Tensor | None

    def at(self, index: Any) -> _Scales:
        """Scale and zero point at an index, the same index for both tensors."""
        zero_point = None if self.zero_point is None else self.zero_point[index]
        return _Scales(self.scale[index], zero_point)

    def best(self, candidate: torch.Tensor) -> _Scales:
        """Pick one candidate for each scale: from ``(K, S, 1, 1)`` by indices ``(S,)``, to ``(S, 1, 1)``."""
        index = candidate[None, :, None, None]
        scale = self.scale.gather(0, index)[0]
        zero_point = None if self.zero_point is None else self.zero_point.gather(0, index)[0]
        return _Scales(scale, zero_point)


@exact_products()
def descend(
    weight: torch.Tensor, hessian: torch.Tensor, search: GridSearch, block: tuple[int, int], sweeps: int = 4
) -> Range:
    """Choose the ranges of a weight's scales by coordinate descent. The observer ``hessian`` calls it for each weight.

    Args:
        weight: ``(R, C)``.
        hessian: ``(C, C)`` in float32.
        search: the number format and the candidates of the first sweep; all of them are visited.
        block: height and width of the block of one scale; they divide the weight.
        sweeps: the number of sweeps, in each of which every scale is chosen once.

    Returns:
        The smallest and the largest value of each range, ``(R / height, C / width)`` each, in the dtype of the weight.
        Where no candidate has a finite error, it is the observed range times ``search.expand``.
    """
    height, width = block
    lines = weight.unflatten(0, (-1, height))
    blocks = lines.unflatten(2, (-1, width))
    low = blocks.amin((1, 3)) * search.expand
    high = blocks.amax((1, 3)) * search.expand
    tried = _Factors.of(search, weight.device)
    # Numbers in memory for one row of scales: its values, or the scales of its candidates, if these are more.
    candidate_rows = -(-len(search.factors) // width)
    size = weight.shape[1] * max(height, candidate_rows)
    step = max(1, tile_size(weight.device, _ROWS) // size)
    for start in range(0, len(low), step):
        stop = min(start + step, len(low))
        part = slice(start, stop)
        values = weight[start * height : stop * height].float()
        ends = low[part], high[part]
        factors = _descend_rows(values, ends, hessian, search.grid, tried, sweeps)
        low[part] = shrink(low[part], factors)
        high[part] = shrink(high[part], factors)
    return low, high


def _descend_rows(
    values: torch.Tensor, ends: Range, hessian: torch.Tensor, grid: NumberGrid, tried: _Factors, sweeps: int
) -> torch.Tensor:
    """The chosen factors on the ranges of S rows of scales, ``(S, T)`` in float64.

    Args:
        values: the rows of the weight, ``(S * height, C)`` in float32.
        ends: lower and upper ends of the ranges before the search, ``(S, T)`` each.
        hessian: ``(C, C)``.
        grid: the number format.
        tried: the factors that each sweep tries.
        sweeps: the number of sweeps.
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
            start = k * width
            columns = slice(start, start + width)
            stop = start if sweep == 0 else None
            before = slice(0, stop)  # in the first sweep, only earlier columns have errors
            error[:, columns] = 0
            others = error[:, before] @ hessian[before, columns]
            group_hessian = hessian[columns, columns]
            scales = qparams.at((..., k))
            best, error[:, columns] = _choose(values[:, columns], others * 2, group_hessian, scales, grid)
            index = best.clamp(min=0).unsqueeze(0)
            column_candidates = candidates[..., k]
            chosen = column_candidates.gather(0, index)[0]
            factors[:, k] = torch.where(best < 0, factors[:, k], chosen)
    return factors


def _choose(
    values: torch.Tensor, others: torch.Tensor, hessian: torch.Tensor, candidates: _Scales, grid: NumberGrid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the scales of one column of groups, given the errors of all other columns.

    Args:
        values: the weights of the column, ``(S * height, width)``.
        others: ``2 (D H)_g``: twice the errors of the other columns times their part of the Hessian, as ``values``.
        hessian: ``H_gg``, the column's part of the Hessian, ``(width, width)``.
        candidates: scales and zero points of the candidates, ``(K, S)``.
        grid: the number format.

    Returns:
        The index of the best candidate of each scale, ``(S,)``, and the error of each weight of the column with this
        candidate, as ``values``. Where no candidate has a finite error, the index is -1, and the errors are those with
        the first candidate. If these are not finite, no other scale of the row finds a finite error, and the row keeps
        its observed ranges.
    """
    shape = values.shape
    lost = torch.empty_like(candidates.scale)
    spread = candidates.at((..., None, None))
    count, scales = lost.shape
    values = values.contiguous().view(scales, -1, shape[1])
    others = others.contiguous().view(scales, -1, shape[1])
    step = max(1, tile_size(values.device, _TILE) // values.numel())
    for first in range(0, count, step):
        some = slice(first, first + step)
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
