"""The loop of any device, operation by operation as compressed-tensors quantizes, and the one for Hessians.

It is the search's definition: tests hold the other loops to it. It measures errors in the unit of the values, as the
peer does.

bfloat16 and float16 are widened tile by tile: candidates are rounded as they will be stored, and only the error is
measured in float32. A row longer than a tile is added up in pieces, in float64: more accurate than one float32 sum, and
not bit for bit the same.
"""

from __future__ import annotations

import torch

from lightning_obs.numerics.candidates import Candidates, Improvements, finite_or_infinite, improvements
from lightning_obs.numerics.qparams import exact_products, tile_size
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.rows import Rows

# Elements of a tile on a CPU, where it should stay near the core.
_TILE = 1 << 17
# Errors of candidates that are kept at once.
_ERRORS = 1 << 21
# Up to this size torch runs an elementwise operation on one thread.
_SERIAL = (1 << 15) - 64


def measure(
    rows: Rows, part: slice, candidates: Candidates, search: GridSearch, least: torch.Tensor | None = None
) -> Improvements:
    """Which candidates improve consecutive rows; see :data:`.loops.Loop`."""
    length = _ERRORS // len(candidates.factors)
    flags = []
    least_errors = []
    for few in rows.parts(part, length):
        columns = slice(few.start - part.start, few.stop - part.start)
        errors = errors_of(rows, few, candidates.of_rows(columns), search)
        improved, least_error = improvements(errors, None if least is None else least[columns])
        flags.append(improved)
        least_errors.append(least_error)
    if len(flags) == 1:
        return Improvements(flags[0], least_errors[0])
    return Improvements(torch.cat(flags, 1), torch.cat(least_errors))


def errors_of(rows: Rows, part: slice, candidates: Candidates, search: GridSearch) -> torch.Tensor:
    """Errors of candidates on consecutive rows, ``(C, r)``; infinite where one is not finite."""
    length = tile_size(rows.device, _TILE) // rows.size
    errors = []
    for tile in rows.parts(part, length):
        columns = slice(tile.start - part.start, tile.stop - part.start)
        errors.append(_errors_of_tile(rows, tile, candidates.of_rows(columns), search))
    return errors[0] if len(errors) == 1 else torch.cat(errors, 1)


def _errors_of_tile(rows: Rows, part: slice, candidates: Candidates, search: GridSearch) -> torch.Tensor:
    """As :func:`errors_of`, of few rows or of a long one in pieces."""
    length = tile_size(rows.device, _TILE)
    if rows.hessian is not None:
        length = max(length, rows.view.shape[3])  # a quadratic form takes all columns
    scale, zero_point = candidates.qparams(search.grid)
    dtype = torch.float64 if rows.size > length else torch.float32
    total = torch.zeros(scale.shape, dtype=dtype, device=scale.device)
    for values, importance in rows.pieces(part, length):
        step = max(1, length // values.numel())
        for first in range(0, len(scale), step):
            some = slice(first, first + step)
            zeros = None if zero_point is None else zero_point[some].unsqueeze(-1)
            padded, error = _room_for_power(values, len(scale[some]))
            search.grid.error(values, scale[some].unsqueeze(-1), zeros, out=error)
            if rows.hessian is not None:
                lost = quadratic_form(error, rows.hessian)
            else:
                _raise_to(padded, search.norm)
                lost = error.sum(-1) if importance is None else error.mul_(importance).sum(-1)
            total[some].add_(lost)  # += on a slice would copy it once more
    return finite_or_infinite(total)


def _room_for_power(values: torch.Tensor, candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for an error of each value and candidate: flat, and without its padding as ``(candidates, *values)``.

    On a CPU pow rounds differently in a scalar loop, which takes the last elements of a thread's share: two candidates
    of one scale would no longer tie. With padding behind the last element, and one thread, all go through one loop.
    """
    count = candidates * values.numel()
    padded = values.new_empty(count + -count % 64)
    return padded, padded[:count].view(candidates, *values.shape)


def _raise_to(padded: torch.Tensor, norm: float) -> None:
    """Replace errors by the power of their magnitudes."""
    padded.abs_()
    length = _SERIAL if padded.device.type == "cpu" else len(padded)
    for piece in padded.split(length):
        piece.pow_(norm)


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
    times = candidates * rows // repeats
    apart = error.view(times, repeats, size // (parts * width), parts, width)
    vectors = apart.permute(1, 3, 0, 2, 4).reshape(repeats * parts, -1, width)
    products = torch.bmm(vectors, hessian.view(-1, width, width))
    lost = products.mul_(vectors).sum(-1)
    lost = lost.view(repeats, parts, times, -1).sum((1, 3))
    return lost.T.reshape(candidates, rows)
