"""The search operation by operation, as compressed-tensors quantizes: its definition, which runs on an accelerator
but for the errors, which a GPU adds up in one loop (:mod:`~lightning_obs.numerics.on_gpu`).

All candidates are measured on a tile of rows before the next is read. bfloat16 and float16 are widened tile by tile:
candidates (range and scale) are rounded as they will be stored, and only the error is measured in float32. A row longer
than a tile is added up in pieces, in float64: more accurate than one float32 sum, and not bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_obs.numerics import on_gpu
from lightning_obs.numerics.candidates import candidate_ranges, improves, on_device, shrink, visited
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.qparams import exact_products, tile_size
from lightning_obs.numerics.search.rows import Range, Rows

# Elements of a tile on a CPU, where it should stay near the core.
_TILE = 1 << 17
# Up to this size torch runs an elementwise operation on one thread.
_SERIAL = (1 << 15) - 64


class GridSearch(NamedTuple):
    """The candidates of a search, and the error that is to be least.

    Attributes:
        grid: number format and symmetry. A tensor_group is searched without rounding its scales unless the grid has the
            global scale, which is only known afterwards.
        factors: candidates, in the order of the search; the first wins a tie.
        patience: number of consecutive factors without an improvement, at least 1, that ends the search; None: it
            visits all.
        norm: exponent of the error.
        expand: factor on the observed range before the search; above 1 it tries ranges wider than the values.
    """

    grid: NumberGrid
    factors: Sequence[float]
    patience: int | None = 5
    norm: float = 2.4
    expand: float = 1.0

    @property
    def limit(self) -> int | None:
        """After how many factors without an improvement the search ends; None: it visits all."""
        return None if self.patience is None else max(1, self.patience)


class Found(NamedTuple):
    """Smallest and largest value of each chosen range, ``(R,)`` of rows, ``(*Q,)`` of a tensor, in their dtype.

    ``improved``, ``(C,)``, tells which factors improved any scale; it may hold factors after the end of the search.
    """

    low: torch.Tensor
    high: torch.Tensor
    improved: torch.Tensor


def visit(rows: Rows, search: GridSearch) -> Found:
    """Choose the best candidate of every row, among the candidates before the search ends.

    Where no candidate has a finite error, a row keeps the expanded range.
    """
    factors = on_device(tuple(search.factors), rows.device)
    ends = torch.stack(rows.observed_range()) * search.expand
    in_a_loop = rows.hessian is None and on_gpu.can_run(rows.view)
    of_row = 8 * len(factors) if in_a_loop else rows.size  # a loop keeps nothing of a row but its candidates' errors
    step = max(1, tile_size(rows.device, _TILE) // of_row)
    if rows.hessian is not None:
        step = max(1, step // len(rows.hessian)) * len(rows.hessian)
    chosen, better = [], []
    # All errors are kept where only all of them tell which candidates the search visits.
    ends_early = search.limit is not None and len(factors) > search.limit
    for start in range(0, rows.count, step):
        part = slice(start, min(start + step, rows.count))
        low, high = ends[:, part]
        if in_a_loop:
            each = rows.view, part, rows.importance, low, high, factors, search.grid, search.norm
            errors = _finite(on_gpu.errors_of_ranges(*each))
        else:
            errors = measure(rows, part, candidate_ranges(low, high, factors), search)
        better.append(improves(errors).any(1))
        chosen.append((errors,) if ends_early else _least(errors))
    improved = better[0] if len(better) == 1 else torch.stack(better).any(0)
    if ends_early:
        after = ~visited(improved, search.limit)[:, None]
        chosen = [_least(errors.masked_fill_(after, torch.inf)) for errors, *_ in chosen]
    best, known = chosen[0] if len(chosen) == 1 else map(torch.cat, zip(*chosen, strict=True))
    low, high = torch.where(known, shrink(ends, factors[best]), ends)
    return Found(low, high, improved)


def measure(rows: Rows, part: slice, ranges: Range, search: GridSearch) -> torch.Tensor:
    """Errors of ranges ``(C, r)`` on consecutive rows, ``(C, r)``; infinite where they are not finite in float32."""
    tile = max(tile_size(rows.device, _TILE), 0 if rows.hessian is None else rows.view.shape[3])
    scale, zero_point = search.grid.qparams(*ranges)
    total = torch.zeros(scale.shape, dtype=torch.float64 if rows.size > tile else torch.float32, device=scale.device)
    for values, importance in rows.pieces(part, tile):
        step = max(1, tile // values.numel())
        for first in range(0, len(scale), step):
            some = slice(first, first + step)
            padded, error = _room_for_power(values, len(scale[some]))
            shift = None if zero_point is None else zero_point[some].unsqueeze(-1)
            search.grid.error(values, scale[some].unsqueeze(-1), shift, out=error)
            if rows.hessian is not None:
                total[some].add_(quadratic_form(error, rows.hessian))
                continue
            error.abs_()
            for piece in padded.split(_SERIAL if padded.device.type == "cpu" else len(padded)):
                piece.pow_(search.norm)
            if importance is not None:
                error.mul_(importance)
            total[some].add_(error.sum(-1))  # += on a slice would copy it once more
    return _finite(total)


def _least(errors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The best candidate of each row, and whether its error is finite."""
    best = errors.argmin(0)
    return best, errors.gather(0, best[None])[0] < torch.inf


def _finite(total: torch.Tensor) -> torch.Tensor:
    return torch.where(total < torch.finfo(torch.float32).max, total, torch.inf)


@exact_products()
def quadratic_form(error: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """``sum of d^T H d`` over the parts of each row.

    Args:
        error: ``(C, r, N * G)``: candidates, rows, and G columns N times.
        hessian: ``(I, T, t, t)``, T * t = G; I divides r.

    Returns:
        ``(C, r)``.
    """
    repeats, parts, width, _ = hessian.shape
    candidates, rows, size = error.shape
    apart = error.view(candidates * rows // repeats, repeats, size // (parts * width), parts, width)
    apart = apart.permute(1, 3, 0, 2, 4).reshape(repeats * parts, -1, width)
    lost = torch.bmm(apart, hessian.view(-1, width, width)).mul_(apart).sum(-1)
    lost = lost.view(repeats, parts, candidates * rows // repeats, -1).sum((1, 3))
    return lost.T.reshape(candidates, rows)


def _room_for_power(values: torch.Tensor, candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for an error of each value and candidate: flat, and without its padding as ``(candidates, *values)``.

    On a CPU pow rounds differently in a scalar loop, which takes the last elements of a thread's share: two candidates
    of one scale would no longer tie. With padding behind the last element, and one thread, all go through one loop.
    """
    count = candidates * values.numel()
    padded = values.new_empty(count + -count % 64)
    return padded, padded[:count].view(candidates, *values.shape)
