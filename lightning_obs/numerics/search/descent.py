"""Ranges by a row's whole quadratic form, ``d H d^T`` with ``H = E[x x^T]``: what its output loses.

Method. Coordinate descent: the candidates of one scale are judged given the errors that the row's other scales leave,
``d^T H_gg d + 2 d^T (D H)_g``, one column of groups after the other, in some sweeps. Every integer is the nearest;
only ranges are chosen. Rows do not depend on each other, but for those that share a scale.

All candidates of a few rows are measured at once: the product with ``H_gg`` is most of the time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_obs.numerics.candidates import candidate_ranges
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.qparams import tile_size
from lightning_obs.numerics.search.rows import Range

# Values of the errors of all candidates of one column of groups at once, and of the errors of all columns.
_TILE, _ROWS = 1 << 18, 1 << 22


def descend(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    grid: NumberGrid,
    factors: Sequence[float],
    block: tuple[int, int],
    *,
    sweeps: int = 3,
    expand: float = 1.0,
) -> Range:
    """The ranges of a weight's scales after some sweeps.

    Args:
        weight: ``(R, C)``.
        hessian: ``(C, C)`` in float32.
        grid: the number format.
        factors: candidates; the first of two equals wins.
        block: height and width of what one scale covers; they divide the weight.
        sweeps: how often each scale is chosen.
        expand: factor on the observed range before the search.

    Returns:
        Smallest and largest value, ``(R / height, C / width)`` each, in the dtype of the weight. Where no candidate has
        a finite error, the expanded range.
    """
    height, width = block
    high_blocks = weight.unflatten(0, (-1, height)).unflatten(2, (-1, width))
    low, high = (end * expand for end in (high_blocks.amin((1, 3)), high_blocks.amax((1, 3))))
    candidates = torch.tensor(factors, dtype=torch.float64, device=weight.device)
    step = max(1, _ROWS // (height * weight.shape[1]))
    for start in range(0, len(low), step):
        part = slice(start, start + step)
        values = weight[start * height : (start + step) * height].float()
        observed = low[part].clone(), high[part].clone()
        error = torch.zeros_like(values)
        for sweep in range(sweeps):
            for k in range(low.shape[1]):
                columns = slice(k * width, (k + 1) * width)
                before = slice(0, None if sweep else k * width)  # where errors are known
                error[:, columns] = 0
                others = error[:, before] @ hessian[before, columns]
                lows, highs = candidate_ranges(observed[0][:, k], observed[1][:, k], candidates)
                best, error[:, columns] = _choose(
                    values[:, columns], others * 2, hessian[columns, columns], grid.qparams(lows, highs), grid
                )
                for end, ends in ((low, lows), (high, highs)):
                    chosen = ends.gather(0, best.clamp(min=0)[None])[0]
                    end[part, k] = torch.where(best < 0, end[part, k], chosen)
    return low, high


def _choose(
    values: torch.Tensor,
    others: torch.Tensor,
    hessian: torch.Tensor,
    qparams: tuple[torch.Tensor, torch.Tensor | None],
    grid: NumberGrid,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of the candidates ``(K, r / height)`` for values ``(r, width)``, -1 where none has a finite error; and
    the error that it leaves."""
    scale, zero_point = qparams
    rows, width = values.shape
    height = rows // scale.shape[1]
    values, others = (each.contiguous().view(-1, height, width) for each in (values, others))

    def errors_of(scale: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
        by = scale[..., None, None]
        if zero_point is None:
            return grid.round(values / by).mul_(by).sub_(values)
        shift = zero_point[..., None, None]
        return grid.round((values / by).add_(shift)).sub_(shift).mul_(by).sub_(values)

    lost = torch.empty_like(scale)
    step = max(1, tile_size(values.device, _TILE) // values.numel())
    for first in range(0, len(scale), step):
        some = slice(first, first + step)
        error = errors_of(scale[some], None if zero_point is None else zero_point[some])
        lost[some] = (error @ hessian).add_(others).mul_(error).sum((-1, -2))
    lost.masked_fill_(~lost.isfinite(), torch.inf)
    best = lost.argmin(0)
    chosen = [None if each is None else each.gather(0, best[None])[0] for each in (scale, zero_point)]
    assert chosen[0] is not None
    error = errors_of(chosen[0], chosen[1]).view(rows, width)
    return torch.where(lost.amin(0).isfinite(), best, -1), error
