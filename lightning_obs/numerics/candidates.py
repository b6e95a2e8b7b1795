"""Candidate ranges of a search: the observed range times one factor after another, and where the search ends.

The range searches (``search/``) use all of it; the histogram observer uses :func:`candidate_ranges`. A *row* holds the
values of one scale. R is the number of rows, C the number of candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_obs.numerics.formats import NumberGrid


class Candidates(NamedTuple):
    """The candidate ranges of some rows: the range of each row times each factor.

    ``search/ranges.py`` makes one for each call of a loop that measures candidates.

    Attributes:
        low: smallest value of each row's range, ``(R,)`` in the dtype in which ranges are stored.
        high: largest value of each row's range, ``(R,)``.
        factors: the numbers by which each range is multiplied, ``(C,)`` in float64.
    """

    low: torch.Tensor
    high: torch.Tensor
    factors: torch.Tensor

    def of_rows(self, rows: slice) -> Candidates:
        """The same candidates for a part of the rows. The loop of torch's operations calls it for each tile."""
        return Candidates(self.low[rows], self.high[rows], self.factors)

    def ranges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The smallest and the largest value of each candidate range, ``(C, R)`` each, rounded to the stored dtype.

        Called by :meth:`qparams`.
        """
        return candidate_ranges(self.low, self.high, self.factors)

    def qparams(self, grid: NumberGrid) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scale and zero point of each candidate and row, ``(C, R)`` in float32; the zero point is None if symmetric.

        The loops that measure candidates call it, unless they compute the scales themselves.
        """
        lows, highs = self.ranges()
        return grid.qparams(lows, highs)


def half_of_range(grid: NumberGrid, dtype: torch.dtype) -> float | None:
    """Half the number of steps across a symmetric grid, in ``dtype``: a scale is a range's magnitude over this number.

    The compiled loops call it to learn whether they can compute scales themselves. None where a scale takes more than
    this division: where there is a zero point, a negative scale, a scale dtype or a global scale.

    >>> from compressed_tensors.quantization import QuantizationArgs
    >>> half_of_range(NumberGrid.of(QuantizationArgs(num_bits=4)), torch.float32)
    7.5
    """
    has_scale_dtype = grid.scale_dtype is not None
    has_global_scale = grid.global_scale is not None
    is_rounded = has_scale_dtype or has_global_scale
    if not grid.args.symmetric or grid.signed or is_rounded:
        return None
    steps = torch.tensor(grid.high - grid.low).to(dtype)
    return (steps / 2).item()


def shrink_factors(maxshrink: float, grid: float) -> list[float]:
    """The factors that a search tries, from 1 down to (not including) ``1 - maxshrink``, in steps of ``1 / grid``.

    The observers' search options call it when a search is set up.

    >>> shrink_factors(maxshrink=0.2, grid=20)
    [1.0, 0.95, 0.9, 0.85]
    """
    return [1 - step / grid for step in range(int(maxshrink * grid))]


@functools.lru_cache(maxsize=64)
def on_device(factors: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """The factors as a float64 tensor on a device, kept for the next search; the caller must not write to it.

    Searches call it for each observed tensor. Uploading the factors each time would make the host wait.
    """
    return torch.tensor(factors, dtype=torch.float64, device=device)


def shrink(end: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """One end of each range times a factor, computed in float32 or wider and rounded to the dtype of ``end``.

    Candidate ranges and the ranges that a search returns are made by it, so they agree bit for bit.
    """
    wide = torch.promote_types(end.dtype, torch.float32)
    wide_end = end.to(wide)
    wide_factor = factor.to(wide)
    product = wide_end * wide_factor
    return product.to(end.dtype)


def candidate_ranges(
    low: torch.Tensor, high: torch.Tensor, factors: Sequence[float] | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ranges ``(low, high)`` times each of C factors: both ends, ``(C, *shape)`` each, ``shape`` that of ``low``.

    Called by :meth:`Candidates.ranges`, and by the histogram observer for its ``entropy`` criterion.
    """
    factors = torch.as_tensor(factors, dtype=torch.float64, device=low.device)
    factors = factors.view(-1, *[1] * low.ndim)
    ends = torch.stack([low, high]).unsqueeze(1)  # both are shrunk in one launch
    lows, highs = shrink(ends, factors)
    return lows, highs


def finite_or_infinite(errors: torch.Tensor) -> torch.Tensor:
    """The errors, with infinity in place of NaN and of numbers beyond float32: such a candidate is never the best.

    Loops that add up errors call it before :func:`improvements`.
    """
    return torch.where(errors < torch.finfo(torch.float32).max, errors, torch.inf)


class Improvements(NamedTuple):
    """Which candidates of a search improve which rows, in the order of the search. Every loop of a search returns one.

    Attributes:
        improved: whether a candidate's error is below that of all candidates before it, ``(C, R)``. The first candidate
            of a search improves a row if its error is finite.
        least: the least error of all candidates, ``(R,)``; infinite where no candidate has a finite error.
    """

    improved: torch.Tensor
    least: torch.Tensor


def improvements(errors: torch.Tensor, least: torch.Tensor | None = None) -> Improvements:
    """Compare the errors of candidates: which candidate improves which row, and the least error of each row.

    Loops that keep the errors of candidates call it; the other loops compare as they measure.

    Args:
        errors: ``(C, R)``, without NaN.
        least: the least errors of earlier candidates, ``(R,)``; None: there are no earlier candidates.

    >>> improvements(torch.tensor([[3.0], [3.0], [2.0], [torch.inf]])).improved.flatten().tolist()
    [True, False, True, False]
    """
    improved = torch.empty(errors.shape, dtype=torch.bool, device=errors.device)
    before_first = torch.inf if least is None else least
    torch.lt(errors[0], before_first, out=improved[0])
    if errors.device.type != "cpu":  # few launches for all candidates
        least_so_far = errors.cummin(0).values
        if least is not None:
            least_so_far = torch.minimum(least_so_far, least)
        torch.lt(errors[1:], least_so_far[:-1], out=improved[1:])
        return Improvements(improved, least_so_far[-1])
    # On a CPU, cummin takes ten times as long as this loop, because it returns indices as well.
    least_error = errors[0].clone() if least is None else torch.minimum(errors[0], least)
    for candidate in range(1, len(errors)):
        torch.lt(errors[candidate], least_error, out=improved[candidate])
        torch.minimum(errors[candidate], least_error, out=least_error)
    return Improvements(improved, least_error)


def visited(improved: torch.Tensor, patience: int | None) -> torch.Tensor:
    """Which candidates a search visits, ``(C,)``: all up to and including the candidate that ends it.

    Called by a range search after all candidates were measured, to leave out those behind the end.

    Args:
        improved: whether a candidate improved any scale, ``(C,)``.
        patience: the search ends after this many candidates in a row without an improvement; less than 1 counts as 1.
            None: the search visits all candidates.

    >>> visited(torch.tensor([True, False, True, False, False, True]), patience=2).tolist()
    [True, True, True, True, True, False]
    """
    number = torch.arange(1, len(improved) + 1, device=improved.device)
    latest = (number * improved).cummax(0).values
    idle = number - latest
    limit = len(improved) + 1 if patience is None else max(1, patience)
    ended = idle >= limit
    return ended.cumsum(0) <= ended


def last_improvement(improved: torch.Tensor, is_visited: torch.Tensor | None = None) -> torch.Tensor:
    """The best candidate of each row, ``(R,)``: the last visited candidate that improved the row.

    Candidates are counted from 1; 0 says that no candidate improved the row. Called by a range search at its end.

    Args:
        improved: whether each candidate improved each row (:class:`Improvements`), ``(C, R)``.
        is_visited: whether the search visits each candidate (:func:`visited`), ``(C,)``; None: all candidates are
            visited.

    >>> improved = torch.tensor([[True, False], [True, False], [True, False]])
    >>> last_improvement(improved, torch.tensor([True, True, False])).tolist()
    [2, 0]
    """
    dtype = torch.uint8 if len(improved) < 256 else torch.int32  # the product below has as many numbers as `improved`
    numbers = torch.arange(1, len(improved) + 1, dtype=dtype, device=improved.device)
    if is_visited is not None:
        numbers = numbers * is_visited
    column = numbers.unsqueeze(1)
    improving_numbers = improved * column
    return improving_numbers.amax(0).int()
