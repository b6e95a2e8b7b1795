"""The search operation by operation, as compressed-tensors quantizes: its definition, and what runs on a GPU.

A tile of rows meets all candidates before the next is read. bfloat16 and float16 are widened tile by tile: candidates
(range and scale) are rounded as they will be stored, and only the error is measured in float32. A row longer than a
tile is added up in pieces, in float64: more accurate than one float32 sum, and not bit for bit the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.range_search.rows import Rows

# Elements of a tile. On a CPU it should stay near the core, elsewhere a launch has to pay.
_TILE_CPU, _TILE_DEVICE = 1 << 17, 1 << 24
# Up to here torch runs an elementwise operation on one thread.
_SERIAL = (1 << 15) - 64


class Visited(NamedTuple):
    """Rows (R) after some candidates (C).

    ``best`` is the best candidate, ``low`` and ``high`` are the ends that it gives, ``(R,)`` in the dtype of the rows;
    ``improved`` says of each candidate whether some row was better by it than by all before, ``unsure`` where that is
    open, ``(C,)``.
    """

    low: torch.Tensor
    high: torch.Tensor
    best: torch.Tensor
    improved: torch.Tensor
    unsure: torch.Tensor


def shrink(end: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """One end of a range times a factor, rounded to its own dtype, as it will be stored."""
    wide = torch.promote_types(end.dtype, torch.float32)
    return (end.to(wide) * factor.to(wide)).to(end.dtype)


def visit(rows: Rows, factors: torch.Tensor, grid: NumberGrid, norm: float, expand: float, tile: int = 0) -> Visited:
    """Let every row meet all candidates; where none has a finite error, it keeps the expanded range.

    Args:
        rows: the values, and their importance.
        factors: candidates, ``(C,)``; the first wins a tie.
        grid: the number format.
        norm: exponent of the error.
        expand: factor on the observed range.
        tile: elements of a tile; 0 chooses for the device.
    """
    low, high = (end.mul_(expand) if expand != 1 else end for end in rows.observed_range())
    improved = torch.zeros(len(factors), dtype=torch.bool, device=rows.device)
    index = index_of(rows.count, len(factors), rows.device)
    step = max(1, (tile or _tile(rows)) // rows.size)
    for start in range(0, rows.count, step):
        part = slice(start, min(start + step, rows.count))
        lows, highs = shrink(low[part], factors.unsqueeze(-1)), shrink(high[part], factors.unsqueeze(-1))
        errors = measure(rows, part, lows, highs, grid, norm, tile)
        best = torch.full_like(errors[0], torch.finfo(torch.float32).max)
        for k, error in enumerate(errors):
            better = error < best
            improved[k] |= better.any()
            best = torch.where(better, error, best)
            low[part], high[part] = torch.where(better, lows[k], low[part]), torch.where(better, highs[k], high[part])
            index[part].masked_fill_(better, k)
    return Visited(low, high, index, improved, torch.zeros_like(improved))


def _tile(rows: Rows) -> int:
    return _TILE_CPU if rows.device.type == "cpu" else _TILE_DEVICE


def index_of(rows: int, candidates: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Room for the number of a candidate per row, all zero."""
    return torch.zeros(rows, dtype=torch.uint8 if candidates <= 256 else torch.int16, device=device)


def measure(
    rows: Rows, part: slice, lows: torch.Tensor, highs: torch.Tensor, grid: NumberGrid, norm: float, tile: int = 0
) -> torch.Tensor:
    """Errors of ranges ``(C, r)`` on consecutive rows, ``(C, r)``; never NaN."""
    tile = tile or _tile(rows)
    scale, zero_point = grid.qparams(lows, highs)
    total = torch.zeros(scale.shape, dtype=torch.float64 if rows.size > tile else torch.float32, device=scale.device)
    for values, importance in rows.pieces(part, tile):
        for some in torch.arange(len(scale)).split(max(1, tile // values.numel())):
            by = scale[some].unsqueeze(-1)
            # pow rounds otherwise in a scalar loop, which is where the last elements of a thread's share end up: two
            # candidates of one scale would no longer tie. So there are more elements behind the last, and one thread.
            count = len(some) * values.numel()
            padded = values.new_zeros(count + -count % 64)
            error = padded[:count].view(len(some), *values.shape)
            if zero_point is None:
                torch.mul(grid.round(values / by), by, out=error)
            else:
                shift = zero_point[some].unsqueeze(-1)
                torch.mul(grid.round((values / by).add_(shift)).sub_(shift), by, out=error)
            error.sub_(values).abs_()
            for some_values in padded.split(_SERIAL):
                some_values.pow_(norm)
            if importance is not None:
                error.mul_(importance)
            total[some] += error.sum(-1)
    most = torch.finfo(torch.float32).max
    return total.nan_to_num_(nan=most, posinf=most)
