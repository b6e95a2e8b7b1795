"""Observers that count every value and choose the range at the end, from all of the data.

Two batches or two ranks are merged by adding integers, so the range has the same bits whatever the batches, their order
and the ranks. How values are counted, and what that loses: :mod:`lightning_obs.numerics.histogram`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from typing_extensions import override

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.candidates import candidate_ranges
from lightning_obs.numerics.histogram import (
    Histogram,
    Support,
    candidate_divergences,
    candidate_errors,
    count_nan,
    count_values,
    percentile_range,
    select_candidate,
    support,
)
from lightning_obs.observers.base import MinMaxTuple, Observer
from lightning_obs.observers.statistic import Statistic

CRITERIA = ("mse", "percentile", "entropy")
_STRATEGIES = (QuantizationStrategy.TENSOR, QuantizationStrategy.ATTN_HEAD)
#: 4 powers of two below the largest magnitude in steps of 2.2 %: Migacz's 128 of 2,048 bins up to all of them.
_ENTROPY_FACTORS = [2 ** (-i / 32) for i in range(4 * 32 + 1)]


class CountingObserver(Observer):
    """Counts every value by its bfloat16 pattern, and keeps the exact range beside the counts.

    Observes ``(N, *Q, G)``, Q of one scale per tensor ``(1,)`` or per attention head ``(H, 1, 1)``. ``counts`` is
    ``(*Q, 65536)`` in int64, 512 KiB per scale; ``min_vals`` and ``max_vals`` are ``(*Q,)``. A subclass writes
    ``get_min_max``.

    Raises:
        CalibrationError: a strategy of many scales, which would need a histogram for each.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (
        Statistic("counts", "sum"),
        Statistic("min_vals", "min"),
        Statistic("max_vals", "max"),
    )
    keeps_extremes: ClassVar[bool] = True
    counts: torch.Tensor
    min_vals: torch.Tensor
    max_vals: torch.Tensor

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        if args.strategy not in _STRATEGIES:
            raise CalibrationError(
                f"{type(self).__name__} ({base_name}) holds one histogram of 512 KiB per scale",
                got=f"strategy {QuantizationStrategy(args.strategy).value}",
                expected="strategy tensor or attn_head",
                remedy="observe this with mse, static_minmax or memoryless_minmax.",
            )

    @override
    def measure(self, observed: torch.Tensor) -> Histogram:
        scales = observed.shape[1:-1]
        counted = count_values(observed.flatten(1, -2))
        return Histogram(counted.counts.unflatten(0, scales), counted.low.reshape(scales), counted.high.reshape(scales))

    @property
    @override
    def counted(self) -> Support | None:
        if not self.has_statistics or self.min_vals.numel() != 1:
            return None
        low, high = self.min_vals.flatten()[0], self.max_vals.flatten()[0]
        found = support(self.counts.flatten(), low, high)
        if len(found.values) > 1:  # the outermost bins stand for the exact ends
            found.values[0], found.values[-1] = low, high
        return found

    @override
    def nonfinite_statistics(self) -> str | None:
        nan = count_nan(self.counts) if self.has_statistics else 0
        problems = [super().nonfinite_statistics(), f"{nan} of {int(self.counts.sum())} values NaN" if nan else None]
        return ", ".join(filter(None, problems)) or None


class _Choice(NamedTuple):
    """A range, and what it was chosen from."""

    statistics: tuple[torch.Tensor, ...]
    state: Hashable
    range: MinMaxTuple


@Observer.register("histogram")
class HistogramObserver(CountingObserver):
    """The range that a criterion finds best on everything that was observed.

    - ``mse``: the range times ``1 - i / grid``, i up to ``maxshrink * grid``, with the least
      ``sum |quantized(x) - x| ** norm``; the first of equals. A search of counts is cheap, so it looks at all of them
      down to a twentieth of the range: a few values far out, found in any batch, hide the least error otherwise.
    - ``percentile``: as the observer ``percentile``.
    - ``entropy``: the range times ``2 ** (-i / 32)``, down to a sixteenth, with the least Kullback-Leibler divergence
      of the quantized distribution from the observed one.

    Keyword Args:
        criterion (str): mse, percentile or entropy.
        percentile (float): for ``percentile``: in percent, in (50, 100].
        maxshrink (float): for ``mse``: the largest share by which the range may shrink, in [0, 1].
        patience (int | None): for ``mse``: candidates in a row without improvement that end the search; None: nothing
            ends it.
        grid (int): for ``mse``: steps per whole range.
        norm (float): for ``mse``: exponent of the error.

    Raises:
        CalibrationError: a hyperparameter outside these, or a strategy other than tensor and attn_head.

    Reference:
        Migacz, 8-bit Inference with TensorRT, GTC 2017 (entropy).
    """

    hyperparameters: ClassVar[dict[str, Any] | None] = {
        "criterion": "mse",
        "percentile": 99.99,
        "maxshrink": 0.95,
        "patience": None,
        "grid": 100.0,
        "norm": 2.0,
    }
    statistics: ClassVar[tuple[Statistic, ...]] = CountingObserver.statistics
    keeps_extremes: ClassVar[bool] = True
    criterion: str
    percentile: float
    maxshrink: float
    patience: int | None
    grid: float
    norm: float

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        self._choice: _Choice | None = None
        if self.criterion not in CRITERIA:
            raise CalibrationError("criterion", got=repr(self.criterion), expected=f"one of {', '.join(CRITERIA)}")
        require_percentile(self.percentile)
        if not 0 <= self.maxshrink <= 1:
            raise CalibrationError("maxshrink", got=self.maxshrink, expected="a value in [0, 1]")
        for name in ("patience", "grid", "norm"):
            value = getattr(self, name)
            if not (value is None and name == "patience") and not value > 0:
                raise CalibrationError(name, got=value, expected="a value above 0")

    @override
    def get_min_max(self) -> MinMaxTuple:
        """The range that the criterion chooses; where the observed range is not finite, that range.

        Searched once for the same statistics and hyperparameters.
        """
        self._require_statistics()
        statistics, state = (self.counts, self.min_vals, self.max_vals), self._state()
        chosen = self._choice
        if (
            chosen is None
            or chosen.state != state
            or any(a is not b for a, b in zip(chosen.statistics, statistics, strict=True))
        ):
            chosen = _Choice(statistics, state, self._search())
            self._choice = None if state is None else chosen
        low, high = chosen.range
        return low.clone(), high.clone()

    @override
    def combine(self, measured: Sequence[torch.Tensor]) -> None:
        self._choice = None  # it would keep the old counts
        super().combine(measured)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_choice": None}  # a copy's tensors count their changes anew

    def _state(self) -> Hashable:
        """Changes when a statistic is written to in place, or a hyperparameter changes. None: cannot be told."""
        statistics = (self.counts, self.min_vals, self.max_vals)
        if any(statistic.is_inference() for statistic in statistics):
            return None
        # An all_reduce does not raise the version of what it writes to; but it changes the sum, or the ends.
        values = (int(self.counts.sum()), *self.min_vals.flatten().tolist(), *self.max_vals.flatten().tolist())
        chosen = (self.criterion, self.percentile, self.maxshrink, self.patience, self.grid, self.norm)
        number_format = (self.args.num_bits, self.args.type, self.args.symmetric)
        return tuple(statistic._version for statistic in statistics), values, chosen, number_format

    def _search(self) -> MinMaxTuple:
        if self.criterion == "percentile":
            return percentile_of_each(self.counts, self.min_vals, self.max_vals, self.percentile)
        if self.nonfinite_statistics():
            return self.min_vals, self.max_vals
        entropy = self.criterion == "entropy"
        steps = max(1, int(self.maxshrink * self.grid))
        factors = _ENTROPY_FACTORS if entropy else [1 - i / self.grid for i in range(steps)]
        lows, highs = candidate_ranges(self.min_vals.flatten(), self.max_vals.flatten(), factors)
        costs = torch.stack([self._costs(q, lows[:, q], highs[:, q]) for q in range(lows.shape[1])], dim=1)
        chosen = select_candidate(costs, patience=None if entropy else self.patience)
        low, high = (ends.gather(0, chosen[None])[0].reshape(self.min_vals.shape) for ends in (lows, highs))
        return low, high

    def _costs(self, q: int, lows: torch.Tensor, highs: torch.Tensor) -> torch.Tensor:
        counted = self._support(q)
        if self.criterion == "entropy":
            return candidate_divergences(counted, lows, highs, self.args)
        return candidate_errors(counted, lows, highs, self.args, self.norm)

    def _support(self, q: int) -> Support:
        counts = self.counts.flatten(0, -2)[q]
        return support(counts, self.min_vals.flatten()[q], self.max_vals.flatten()[q])


def require_percentile(percentile: float) -> None:
    """Raise a CalibrationError unless the percentile lies in (50, 100]."""
    if not 50 < percentile <= 100:
        raise CalibrationError(
            "percentile",
            got=percentile,
            expected="a value in percent, in (50, 100]",
            remedy="99.99 cuts one value in ten thousand off each end.",
        )


def percentile_of_each(
    counts: torch.Tensor, min_vals: torch.Tensor, max_vals: torch.Tensor, percentile: float
) -> MinMaxTuple:
    """:func:`~lightning_obs.numerics.histogram.percentile_range` of each scale, ``(*Q,)``."""
    each = zip(counts.flatten(0, -2), min_vals.flatten(), max_vals.flatten(), strict=True)
    lows, highs = zip(*(percentile_range(*one, percentile) for one in each), strict=True)
    return torch.stack(lows).reshape(min_vals.shape), torch.stack(highs).reshape(max_vals.shape)
