"""Candidate ranges of a search: the observed range times one factor after another, and where the search ends."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch


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
    return (end.to(wide) * factor.to(wide)).to(end.dtype)


def candidate_ranges(
    low: torch.Tensor, high: torch.Tensor, factors: Sequence[float] | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The range times each of C factors: both ends ``(C, *shape)``."""
    each = torch.as_tensor(factors, dtype=torch.float64, device=low.device).view(-1, *[1] * low.ndim)
    lows, highs = shrink(torch.stack([low, high])[:, None], each)  # of both ends at once
    return lows, highs


def improves(errors: torch.Tensor) -> torch.Tensor:
    """Which candidates have less error than all before them, ``(C, R)``; the first: whether its error is finite.

    >>> improves(torch.tensor([[3.0], [3.0], [2.0], [torch.inf]])).flatten().tolist()
    [True, False, True, False]
    """
    before = errors.cummin(0).values.roll(1, 0)
    before[0].fill_(torch.inf)  # assigned, it would be a tensor first
    return errors < before


def visited(improved: torch.Tensor, patience: int | None) -> torch.Tensor:
    """Which candidates a search visits, ``(C,)``: all up to the one that ends it.

    Args:
        improved: of each candidate, whether it improved any scale, ``(C,)``.
        patience: the search ends after this many in a row that improved none, at least one; None: it visits all.

    >>> visited(torch.tensor([True, False, True, False, False, True]), patience=2).tolist()
    [True, True, True, True, True, False]
    """
    number = torch.arange(1, len(improved) + 1, device=improved.device)
    idle = number - (number * improved).cummax(0).values
    ended = idle >= (len(improved) + 1 if patience is None else max(1, patience))
    return ended.cumsum(0) <= ended
