"""The search loop of any device, in torch's operations, which quantizes step by step as compressed-tensors does.

``loops.py`` chooses it where no compiled loop can run, and for errors that Hessians measure. It defines the search:
tests compare the other loops with it. It measures errors in the unit of the values, as llm-compressor does.

bfloat16 and float16 values are widened tile by tile: candidates are rounded as they will be stored, and only the error
is measured in float32. The errors of a row longer than a tile are added up in pieces, in float64, which is more
accurate than a float32 sum and not bit for bit the same.
"""

from __future__ import annotations

import torch

from lightning_obs.numerics.candidates import Candidates, Improvements, finite_or_infinite, improvements
from lightning_obs.numerics.qparams import exact_products, tile_size
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.rows import Rows

# Elements of a tile on a CPU; its errors should stay in the cache.
_TILE = 1 << 17
# Errors of pairs of a candidate and a row that are in memory at once.
_ERRORS = 1 << 21
# Elements of one step of torch's vectorised loops: four vectors of AVX-512, and a multiple of the steps of other CPUs.
_STEP = 64
# Below 32,768 elements torch runs an elementwise operation on one thread; the largest number of whole steps below it.
_SERIAL = (1 << 15) - _STEP


def measure(
    rows: Rows, part: slice, candidates: Candidates, search: GridSearch, least: torch.Tensor | None = None
) -> Improvements:
    """Which candidates improve consecutive rows: the loop of any device.

    ``ranges.py`` calls it for one part of the rows after the other, if ``loops.loop_for`` has chosen it.

    Args:
        rows: all rows of the search.
        part: the r consecutive rows that are measured.
        candidates: the candidates of these r rows.
        search: format and exponent.
        least: the least errors of earlier candidates, ``(r,)`` as this loop returned them; None: there are no earlier
            candidates.

    Returns:
        ``improved``, ``(C, r)``: whether a candidate's error is below those of all candidates before it, earlier ones
        included; and ``least``, ``(r,)``: the least errors so far, of earlier candidates and these.
    """
    count = len(candidates.factors)
    length = _ERRORS // count
    flags = []
    least_errors = []
    for few in rows.parts(part, length):
        columns = _counted_from(part.start, few)
        errors = errors_of(rows, few, candidates.of_rows(columns), search)
        earlier = None if least is None else least[columns]
        improved, least_error = improvements(errors, earlier)
        flags.append(improved)
        least_errors.append(least_error)
    if len(flags) == 1:
        return Improvements(flags[0], least_errors[0])
    return Improvements(torch.cat(flags, 1), torch.cat(least_errors))


def errors_of(rows: Rows, part: slice, candidates: Candidates, search: GridSearch) -> torch.Tensor:
    """The errors of candidates on consecutive rows, ``(C, r)``; infinity where an error is not finite.

    For :func:`measure`, which passes rows and their candidates, and the format and the exponent in ``search``. The rows
    are cut into tiles of at most :data:`_TILE` values. A row longer than that is a tile by itself: ``length`` is then
    0, and ``rows.parts`` takes one row at a time (with I Hessians, I rows).
    """
    length = tile_size(rows.device, _TILE) // rows.size
    errors = []
    for tile in rows.parts(part, length):
        columns = _counted_from(part.start, tile)
        tile_candidates = candidates.of_rows(columns)
        errors.append(_errors_of_tile(rows, tile, tile_candidates, search))
    return errors[0] if len(errors) == 1 else torch.cat(errors, 1)


def _counted_from(first: int, part: slice) -> slice:
    """The rows of ``part``, counted from the row ``first``: their place in results of the rows from there on."""
    return slice(part.start - first, part.stop - first)


def _errors_of_tile(rows: Rows, part: slice, candidates: Candidates, search: GridSearch) -> torch.Tensor:
    """The errors of candidates on a few rows, or on one long row in pieces, ``(C, r)``; for :func:`errors_of`.

    ``importance`` multiplies the error of each value; None: all values count alike. With I Hessians, ``rows.parts`` has
    cut the rows at multiples of I, so the first row of the tile has the first Hessian.
    """
    length = tile_size(rows.device, _TILE)
    if rows.hessian is not None:
        columns = rows.view.shape[3]
        length = max(length, columns)  # a piece holds whole observations: a quadratic form takes all columns
    scale, zero_point = candidates.qparams(search.grid)
    dtype = torch.float64 if rows.size > length else torch.float32
    total = torch.zeros(scale.shape, dtype=dtype, device=scale.device)
    for values, importance in rows.pieces(part, length):
        step = max(1, length // values.numel())
        for first in range(0, len(scale), step):
            some = slice(first, first + step)
            scales = scale[some].unsqueeze(-1)
            zeros = None if zero_point is None else zero_point[some].unsqueeze(-1)
            padded, error = _room_for_power(values, len(scales))
            search.grid.error(values, scales, zeros, out=error)
            if rows.hessian is not None:
                lost = quadratic_form(error, rows.hessian)
            else:
                _raise_to(padded, search.norm)
                lost = error.sum(-1) if importance is None else error.mul_(importance).sum(-1)
            total[some].add_(lost)  # += on a slice would copy it once more
    return finite_or_infinite(total)


def _room_for_power(values: torch.Tensor, candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """New memory for the error of each value and candidate: flat with padding, and as ``(candidates, *values)``.

    On a CPU, torch computes the last elements of a thread's share by a scalar loop, in which pow rounds differently. So
    two candidates with the same scale could get different errors. With padding behind the last element, and one thread
    (:func:`_raise_to`), the vectorised loop computes all errors.
    """
    count = candidates * values.numel()
    padding = -count % _STEP
    padded = values.new_empty(count + padding)
    return padded, padded[:count].view(candidates, *values.shape)


def _raise_to(padded: torch.Tensor, norm: float) -> None:
    """Replace errors by ``|error| ** norm``, in place; on a CPU in pieces so small that one thread computes each."""
    padded.abs_()
    length = _SERIAL if padded.device.type == "cpu" else len(padded)
    for piece in padded.split(length):
        piece.pow_(norm)


@exact_products()
def quadratic_form(error: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """The sum of ``d^T H d`` over the parts and observations of each row, for each candidate.

    For :func:`measure`, where Hessians measure errors.

    Args:
        error: ``(C, r, N * G)``: candidates, rows, and N observations of G columns.
        hessian: ``(I, T, t, t)``, T * t = G; row r has the matrices ``r % I``; I divides the number of rows.

    Returns:
        ``(C, r)``.
    """
    repeats, parts, width, _ = hessian.shape
    candidates, rows, size = error.shape
    times = candidates * rows // repeats
    observations = size // (parts * width)
    apart = error.view(times, repeats, observations, parts, width)
    vectors = apart.permute(1, 3, 0, 2, 4).reshape(repeats * parts, -1, width)
    products = torch.bmm(vectors, hessian.view(-1, width, width))
    lost = products.mul_(vectors).sum(-1)
    lost = lost.view(repeats, parts, times, -1).sum((1, 3))
    return lost.T.reshape(candidates, rows)
