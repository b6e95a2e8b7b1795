"""Candidate ranges of a search: the observed range times one factor after another, and where the search ends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_obs.numerics.formats import NumberGrid


class Candidates(NamedTuple):
    """The candidate ranges of some rows: the range of each row times each factor.

    Attributes:
        low: smallest value of each row's range, ``(R,)`` in the dtype in which ranges are stored.
        high: largest value of each row's range, ``(R,)``.
        factors: by which the ranges are multiplied, ``(C,)`` in float64.
    """

    low: torch.Tensor
    high: torch.Tensor
    factors: torch.Tensor

    def of_rows(self, rows: slice) -> Candidates:
        """Those of some of the rows."""
        return Candidates(self.low[rows], self.high[rows], self.factors)

    def ranges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Smallest and largest value of each candidate and row, ``(C, R)`` both, as they would be stored."""
        return candidate_ranges(self.low, self.high, self.factors)

    def qparams(self, grid: NumberGrid) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scale and zero point of each candidate and row, ``(C, R)`` in float32; no zero point if symmetric."""
        lows, highs = self.ranges()
        return grid.qparams(lows, highs)


def half_of_range(grid: NumberGrid, dtype: torch.dtype) -> float | None:
    """The number of steps by which the magnitude of a range is divided; None: its scale takes more than that.

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
    """The factors to try, from 1 down to (not including) ``1 - maxshrink``, in steps of ``1 / grid``.

    >>> shrink_factors(maxshrink=0.2, grid=20)
    [1.0, 0.95, 0.9, 0.85]
    """
    return [1 - step / grid for step in range(int(maxshrink * grid))]


@functools.lru_cache(maxsize=64)
def on_device(factors: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """The factors in float64. A batch would wait for an upload, so they stay there; not to be written to."""
    return torch.tensor(factors, dtype=torch.float64, device=device)


def shrink(end: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """One end of a range times a factor, rounded to its own dtype, as it will be stored."""
    wide = torch.promote_types(end.dtype, torch.float32)
    wide_end = end.to(wide)
    wide_factor = factor.to(wide)
    product = wide_end * wide_factor
    return product.to(end.dtype)


def candidate_ranges(
    low: torch.Tensor, high: torch.Tensor, factors: Sequence[float] | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The range times each of C factors: both ends ``(C, *shape)``."""
    factors = torch.as_tensor(factors, dtype=torch.float64, device=low.device)
    factors = factors.view(-1, *[1] * low.ndim)
    ends = torch.stack([low, high]).unsqueeze(1)  # both are shrunk in one launch
    lows, highs = shrink(ends, factors)
    return lows, highs


def finite_or_infinite(errors: torch.Tensor) -> torch.Tensor:
    """Errors, infinite where they are NaN or leave float32."""
    return torch.where(errors < torch.finfo(torch.float32).max, errors, torch.inf)


class Improvements(NamedTuple):
    """What the candidates of a search bring to some rows, in the order of the search.

    Attributes:
        improved: whether a candidate has less error than all before it, ``(C, R)``; the first: whether its error is
            finite.
        least: the least error of all candidates, ``(R,)``; infinite where none has a finite one.
    """

    improved: torch.Tensor
    least: torch.Tensor


def improvements(errors: torch.Tensor, least: torch.Tensor | None = None) -> Improvements:
    """What candidates with these errors bring.

    Args:
        errors: ``(C, R)``, none of them NaN.
        least: the least errors of candidates before these, ``(R,)``; None: there are none.

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
    # On a CPU cummin, which finds places too, takes ten times as long as this loop.
    least_error = errors[0].clone() if least is None else torch.minimum(errors[0], least)
    for candidate in range(1, len(errors)):
        torch.lt(errors[candidate], least_error, out=improved[candidate])
        torch.minimum(errors[candidate], least_error, out=least_error)
    return Improvements(improved, least_error)


def visited(improved: torch.Tensor, patience: int | None) -> torch.Tensor:
    """Which candidates a search visits, ``(C,)``: all up to the one that ends it.

    Args:
        improved: of each candidate, whether it improved any scale, ``(C,)``.
        patience: the search ends after this many in a row that improved none, at least one; None: it visits all.

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
    """The best candidate of each row, the last visited one that improved it, counted from 1; 0: none, ``(R,)``.

    Args:
        improved: as :func:`improvements` gives, ``(C, R)``.
        is_visited: as :func:`visited` gives, ``(C,)``; None: all are.

    >>> improved = torch.tensor([[True, False], [True, False], [True, False]])
    >>> last_improvement(improved, torch.tensor([True, True, False])).tolist()
    [2, 0]
    """
    dtype = torch.uint8 if len(improved) < 256 else torch.int32  # few bytes: there is a number for each error
    numbers = torch.arange(1, len(improved) + 1, dtype=dtype, device=improved.device)
    if is_visited is not None:
        numbers = numbers * is_visited
    column = numbers.unsqueeze(1)
    improving_numbers = improved * column
    return improving_numbers.amax(0).int()
