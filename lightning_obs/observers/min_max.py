"""Observers whose range is the smallest and the largest value: of the last tensor, of all of them, or averaged."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch
from torch import distributed as dist
from typing_extensions import override

from lightning_obs.numerics.search.ranges import observed_range
from lightning_obs.observers.base import MinMaxTuple, Observer
from lightning_obs.observers.moving_average import MovingAverageObserver


@Observer.register("memoryless_minmax")
class MemorylessMinMaxObserver(Observer, by_rows=True):
    """The range of the last observed tensor. The default for weights, which are observed once.

    Observes ``(N, *Q, G)``: N observations, Q the shape of the scales, G values per scale. Ranges are ``(*Q,)``.
    """

    measures_fast: ClassVar[bool] = True
    hyperparameters: ClassVar[dict[str, Any] | None] = {}

    @property
    @override
    def measure_key(self) -> Hashable | None:
        return "minmax"

    @override
    def measure(self, observed: torch.Tensor) -> MinMaxTuple:
        return observed_range(observed)

    @override
    def merge(self, measured: MinMaxTuple) -> None:
        self.min_vals, self.max_vals = measured

    @override
    def _may_start_at(self, row: int) -> bool:
        return True  # the wider of two ranges of one scale is the range of both


@Observer.register("static_minmax")
class StaticMinMaxObserver(MemorylessMinMaxObserver, by_rows=True, keeps_extremes=True):
    """The range of everything observed: exact, whatever the batches, their order and the ranks."""

    _act_sync_dict: ClassVar[dict[str, Any]] = {"min_vals": dist.ReduceOp.MIN, "max_vals": dist.ReduceOp.MAX}
    hyperparameters: ClassVar[dict[str, Any] | None] = {}

    @override
    def merge(self, measured: MinMaxTuple) -> None:
        low, high = measured
        if self.has_statistics:
            low, high = torch.minimum(low, self.min_vals), torch.maximum(high, self.max_vals)
        else:  # other observers may hold the same measurement, and ranks may be reduced in place
            low, high = low.clone(), high.clone()
        self.min_vals, self.max_vals = low, high


@Observer.register("minmax")
class MinMaxObserver(MovingAverageObserver, MemorylessMinMaxObserver, by_rows=True):
    """A moving average of each tensor's smallest and largest value. The default for activations.

    Keyword Args:
        averaging_constant (float): c, the weight of the newest tensor, in (0, 1]. 1 keeps the newest only.

    Raises:
        CalibrationError: ``averaging_constant`` outside (0, 1].
    """

    hyperparameters: ClassVar[dict[str, Any] | None] = {}
