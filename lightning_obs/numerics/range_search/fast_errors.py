"""The inner loop of a range search: errors of a few candidate scales on one tile of values, and how sure they are.

One function, two executions. As it stands, torch runs it operation by operation, each of them a pass over the tile.
Compiled (:mod:`.compiled`), it is one loop that reads a value once for five candidates, and several times as fast.

Fast, not exact: the error is measured in units of the scale, and the power is approximated, by ``exp2(n * log2(u))``
or, where it is compiled, by a polynomial (:mod:`.power_fit`). How far off that can be is known, so with the errors come
the comparisons that the exact arithmetic might decide otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lightning_obs.numerics.formats import NumberGrid, round_to_grid
from lightning_obs.numerics.range_search.power_fit import evaluate_power, fit_power, halves_of

#: Candidates in one compiled loop. More of them are little faster, and take longer to compile.
AT_ONCE = 5
# Outside of these, float32 has lost bits of some term (or of the sum) in one of the two arithmetics.
_SMALLEST, _LARGEST = 1e-30, 1e36
# Below this mean error, in units of the scale, what is measured is the rounding of the measurement.
_NOISE = 0.05
# Errors that the approximated power covers, in units of what most values lose.
_REACH = 32.0


class Measured(NamedTuple):
    """Candidates (C) on rows (R), compared with the best so far in their order."""

    improved: torch.Tensor  # (C, R): whether the candidate was better than all before
    close: torch.Tensor  # (C, R): whether the exact arithmetic may say otherwise
    best: torch.Tensor  # (R,): least error so far
    last: torch.Tensor  # (R,): which of the candidates was the last that improved, or -1; as float32
    unsure: torch.Tensor  # (R,): whether another candidate may be the best
    finished: torch.Tensor  # (R,): no narrower range can improve


class Numbers(NamedTuple):
    """The numbers of a format and a search: floats, or tensors where the loop is compiled for all of them."""

    low: Any
    high: Any
    normal: Any
    magic: Any
    steps: Any
    norm: Any
    expand: Any
    spread: Any  # power of the widest over the narrowest range of the search
    noise: Any  # mean error, to the power, below which what is measured is the rounding of the measurement
    tolerance: Any  # how far fast and exact errors may differ, relative to them
    most: Any
    usual: Any
    error: Any
    coefficients: Sequence[Any]

    @classmethod
    def of(cls, grid: NumberGrid, norm: float, factors: list[float], expand: float, averaged: int) -> Numbers:
        """For a search over these factors.

        Args:
            grid: the format.
            norm: exponent of the error.
            factors: what the range is multiplied by.
            expand: what it was multiplied by before.
            averaged: over how many values rounding averages out.
        """
        # The narrowest range decides how much of a value may be cut off; scales and zero points are rounded.
        narrowest, most = min(factors) * expand, grid.largest_error
        if 0 < narrowest < 1:
            span = grid.high if grid.symmetric else grid.high - grid.low
            rounded = 0.5 if grid.number is None else 0.0
            most = max(most, (span + rounded) * 1.01 / narrowest - span + (0.0 if grid.symmetric else 0.5))
        fit = fit_power(norm, min(most, _REACH * grid.usual_error), grid.usual_error)
        spread = max(factors) / min(factors) if min(factors) > 0 else math.inf
        return cls(
            grid.low,
            grid.high,
            *((0.0, 0.0) if grid.number is None else grid.number.rounding),
            steps=grid.steps,
            norm=norm,
            expand=expand,
            spread=spread**norm,
            noise=_NOISE**norm,
            # exp2 and log2, and float32's rounding of x / scale
            tolerance=2e-5 + grid.steps * 2.0**-20 / averaged**0.5,
            most=fit.most,
            usual=fit.usual,
            error=fit.error,
            coefficients=fit.coefficients,
        )

    def to_tensor(self, device: torch.device) -> torch.Tensor:
        """All of them, in one tensor."""
        return torch.tensor([*self[:-1], *self.coefficients], dtype=torch.float32, device=device)

    @classmethod
    def from_tensor(cls, numbers: torch.Tensor) -> Numbers:
        """What :meth:`to_tensor` put into one tensor, as one tensor each."""
        each = numbers.unbind()
        count = len(cls._fields) - 1
        return cls._make([*each[:count], each[count:]])


@dataclass(frozen=True)
class FastErrors:
    """What one inner loop is for, apart from its numbers. Equal ones share their compiled code."""

    integers: bool
    whole: int | None  # the norm, where it is a multiplication or two
    halves: int  # of the fitted power
    weighted: bool

    @classmethod
    def of(cls, grid: NumberGrid, norm: float, weighted: bool) -> FastErrors:
        """For a format and a norm."""
        return cls(grid.number is None, int(norm) if norm in (1, 2, 3) else None, halves_of(norm), weighted)

    def measure(
        self,
        values: torch.Tensor,
        importance: torch.Tensor | None,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        low: torch.Tensor,
        high: torch.Tensor,
        best: torch.Tensor,
        valid: torch.Tensor | None,
        numbers: Numbers,
    ) -> Measured:
        """Measure candidates on rows that are read as a whole.

        Args:
            values: ``(R, G)``, any floating dtype.
            importance: ``(R, G)`` or None.
            scale: ``(C, R)``.
            zero_point: ``(C, R)`` or None.
            low, high: the observed range times ``expand``, ``(R,)``.
            best: least error before, ``(R,)``.
            valid: ``(C, 1)``, which of the candidates there are; None: all.
            numbers: of format and search.
        """
        weight = importance.sum(-1) if importance is not None else values.shape[-1]
        total = self.sums(values, importance, scale.reciprocal(), zero_point, numbers)
        power = scale**numbers.norm
        return self.judge(total, weight, scale, power, zero_point, low, high, best, valid, numbers)

    def sums(
        self,
        values: torch.Tensor,
        importance: torch.Tensor | None,
        inverse: torch.Tensor,
        zero_point: torch.Tensor | None,
        numbers: Numbers,
    ) -> torch.Tensor:
        """``sum |u - round(u)| ** norm``, ``u = values / scale + zero_point``: (C, R), in units of each scale."""
        values = values.float()
        if not _compiling():
            return self._sums_in_place(values, importance, inverse, zero_point, numbers)
        totals = []
        for number in range(AT_ONCE):
            scaled = values * inverse[number].unsqueeze(-1)
            if zero_point is not None:
                scaled = scaled.add_(zero_point[number].unsqueeze(-1))
            near = self._round(scaled, numbers)
            error = self._power(scaled.sub_(near).abs_(), numbers)
            if importance is not None:
                error = error.mul_(importance)
            totals.append(error.sum(-1))
        return torch.stack(totals)

    def _sums_in_place(
        self,
        values: torch.Tensor,
        importance: torch.Tensor | None,
        inverse: torch.Tensor,
        zero_point: torch.Tensor | None,
        numbers: Numbers,
    ) -> torch.Tensor:
        """:meth:`sums`, one operation after another, without fresh memory for each: that costs a third of the time."""
        total = torch.empty_like(inverse)
        scaled, near, scratch = torch.empty((3, *values.shape), device=values.device)
        for number in range(len(inverse)):
            torch.mul(values, inverse[number].unsqueeze(-1), out=scaled)
            if zero_point is not None:
                scaled.add_(zero_point[number].unsqueeze(-1))
            near = self._round(scaled, numbers, near, scratch)
            error = self._power(scaled.sub_(near).abs_(), numbers)
            if importance is not None:
                error.mul_(importance)
            torch.sum(error, -1, out=total[number])
        return total

    def _round(
        self,
        scaled: torch.Tensor,
        numbers: Numbers,
        out: torch.Tensor | None = None,
        scratch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rounding = () if self.integers else (numbers.normal, numbers.magic)
        return round_to_grid(scaled, numbers.low, numbers.high, *rounding, out=out, scratch=scratch)

    def _power(self, error: torch.Tensor, numbers: Numbers) -> torch.Tensor:
        if self.whole is not None:
            return error.pow_(self.whole)
        if _compiling():
            return evaluate_power(error, self.halves, numbers.coefficients)
        return error.log2_().mul_(numbers.norm).exp2_()

    def _at_least(self, error: torch.Tensor, numbers: Numbers) -> torch.Tensor:
        """No more than the power of an error."""
        if self.whole is not None or not _compiling():
            return error**numbers.norm
        # One by one, a power takes as long as all else that is done to a row.
        found = evaluate_power(torch.minimum(error, numbers.most), self.halves, numbers.coefficients)
        return (found - 2 * numbers.error * (found + numbers.usual)).clamp(min=0)

    def judge(
        self,
        total: torch.Tensor,
        weight: torch.Tensor | int,
        scale: torch.Tensor,
        power: torch.Tensor,
        zero_point: torch.Tensor | None,
        low: torch.Tensor,
        high: torch.Tensor,
        best: torch.Tensor,
        valid: torch.Tensor | None,
        numbers: Numbers,
    ) -> Measured:
        """Compare :meth:`sums` with the best so far.

        Args:
            total: ``(C, R)``.
            weight: sum of the importance of a row, ``(R,)``, or the number of its values.
            power: of the scale, ``(C, R)``.
            scale, zero_point, low, high, best, valid, numbers: see :meth:`measure`.
        """
        errors = total * power
        # What the largest and the smallest value lose beyond the last number of the format, in units of the scale.
        low, high = low.float() / numbers.expand, high.float() / numbers.expand
        shift = 0.0 if zero_point is None else zero_point
        above = (high / scale + (shift - numbers.high)).clamp(min=0)
        below = ((numbers.low - shift) - low / scale).clamp(min=0)
        clipped = torch.maximum(above, below)
        # It is the least that a candidate loses, except for rounding: of x / scale, and of an expanded range.
        slack = numbers.steps * (2.0**-20 + (numbers.expand - 1) * 2.0**-5)
        least = self._at_least((clipped - slack).clamp(min=0), numbers) * power
        if self.weighted:
            least = least * 0.0

        tolerance = numbers.tolerance
        sure = total > weight * numbers.noise
        margin: torch.Tensor | float = 0.0
        if _compiling() and self.whole is None:
            sure = sure & (clipped <= numbers.most)
            tolerance = tolerance + numbers.error
            # The best so far may have been measured with the widest scale.
            widest = power[0] * numbers.spread
            margin = numbers.error * (errors + 2 * numbers.usual * weight * widest)

        running = [best]
        for number in range(AT_ONCE if _compiling() else len(errors)):
            running.append(torch.minimum(running[-1], errors[number]))
        before, after = torch.stack(running[:-1]), running[-1]
        hopeless = (least > before * (1 + 1e-4)) & (least > _SMALLEST) & (least < _LARGEST)
        if valid is not None:
            hopeless = hopeless | ~valid
        improved = (errors < before) & ~hopeless
        # Written so that NaN counts as unsure.
        doubt = before * tolerance + margin
        sure = sure & ((errors - before).abs() > doubt) & (errors > _SMALLEST) & (errors < _LARGEST)
        close = ~(sure | hopeless)
        contends = close & ~(torch.minimum(errors, before) > after + 2 * doubt)
        unsure, last = contends[0], torch.where(improved[0], 0.0, -1.0)
        for number in range(1, AT_ONCE if _compiling() else len(errors)):
            unsure = unsure | contends[number]
            last = torch.where(improved[number], float(number), last)
        finished = (least[-1] > after * (1 + 1e-4)) & (least[-1] > _SMALLEST) & (least[-1] < _LARGEST)
        return Measured(improved, close, after, last, unsure, finished)


def _compiling() -> bool:
    return torch.compiler.is_compiling()
