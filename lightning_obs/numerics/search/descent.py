"""Ranges by a row's whole quadratic form, ``d H d^T`` with ``H = E[x x^T]``: the squared error of its output.

Method. Coordinate descent: the candidates of one scale are judged given the errors that the row's other scales leave,
``d^T H_gg d + 2 d^T (D H)_g``, one column of groups after the other, in some sweeps. The first visits the candidates of
the search. Each later one visits as many around the chosen range, in steps of the search's, then of half of them, a
quarter...: a range that differs by a percent rounds other integers, whose errors may cancel. Every integer is the
nearest; only ranges are chosen. Rows do not depend on each other, except rows that share a scale.

All candidates of a few rows are measured at once: the product with ``H_gg`` is most of the time.
"""

from __future__ import annotations

import torch

from lightning_obs.numerics.candidates import on_device, shrink
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.qparams import exact_products, tile_size
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.rows import Range

# Values of the errors of all candidates of one column of groups at once, and of the errors of all columns.
_TILE, _ROWS = 1 << 18, 1 << 22


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
    blocks = weight.unflatten(0, (-1, height)).unflatten(2, (-1, width))
    low, high = (end * search.expand for end in (blocks.amin((1, 3)), blocks.amax((1, 3))))
    candidates = on_device(tuple(search.factors), weight.device)[:, None, None]
    around = torch.arange(-(len(candidates) // 2), len(candidates) // 2 + 1, device=weight.device)[:, None, None]
    around = around * (candidates[:2].max() - candidates[:2].min())
    # The values of a row of scales, or their candidates.
    of_row = weight.shape[1] * max(height, -(-len(candidates) // width))
    step = max(1, tile_size(weight.device, _ROWS) // of_row)
    for part in (slice(start, start + step) for start in range(0, len(low), step)):
        values = weight[part.start * height : part.stop * height].float()
        factors = torch.ones(low[part].shape, dtype=torch.float64, device=weight.device)
        error = torch.zeros_like(values)
        for sweep in range(sweeps):
            tried = factors * (around / 2 ** (sweep - 1) + 1) if sweep else candidates.expand(-1, *factors.shape)
            scale, zero_point = search.grid.qparams(shrink(low[part], tried), shrink(high[part], tried))
            for k in range(low.shape[1]):
                columns = slice(k * width, (k + 1) * width)
                before = slice(0, None if sweep else k * width)  # where errors are known
                error[:, columns] = 0
                others = error[:, before] @ hessian[before, columns]
                candidate = scale[..., k], None if zero_point is None else zero_point[..., k]
                best, error[:, columns] = _choose(
                    values[:, columns], others * 2, hessian[columns, columns], candidate, search.grid
                )
                chosen = tried[..., k].gather(0, best.clamp(min=0)[None])[0]
                factors[:, k] = torch.where(best < 0, factors[:, k], chosen)
        low[part], high[part] = shrink(low[part], factors), shrink(high[part], factors)
    return low, high


def _choose(
    values: torch.Tensor,
    others: torch.Tensor,
    hessian: torch.Tensor,
    candidates: tuple[torch.Tensor, torch.Tensor | None],
    grid: NumberGrid,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of the scales and zero points ``(K, r / height)`` for values ``(r, width)``, -1 where none has a finite
    error; and the error that it leaves."""
    shape, (scale, zero_point) = values.shape, candidates
    lost = torch.empty_like(scale)
    scale, zero_point = scale[..., None, None], None if zero_point is None else zero_point[..., None, None]
    values, others = (each.contiguous().view(scale.shape[1], -1, shape[1]) for each in (values, others))
    step = max(1, tile_size(values.device, _TILE) // values.numel())
    for first in range(0, len(scale), step):
        some = slice(first, first + step)
        error = grid.error(values, scale[some], None if zero_point is None else zero_point[some])
        lost[some] = (error @ hessian).add_(others).mul_(error).sum((-1, -2))
    lost.masked_fill_(~lost.isfinite(), torch.inf)
    best = lost.argmin(0)
    at = best[None, :, None, None]
    error = grid.error(values, scale.gather(0, at)[0], None if zero_point is None else zero_point.gather(0, at)[0])
    return torch.where(lost.amin(0).isfinite(), best, -1), error.view(shape)
