"""Observers whose range is the smallest and the largest value: of the last tensor, of all of them, or averaged."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from typing_extensions import override

from lightning_obs.numerics.search.rows import observed_range
from lightning_obs.observers.base import MinMaxTuple, Observer
from lightning_obs.observers.moving_average import MovingAverageObserver
from lightning_obs.observers.statistic import Statistic


@Observer.register("memoryless_minmax")
class MemorylessMinMaxObserver(Observer):
    """The range of the last observed tensor. The default for weights, which are observed once.

    Observes ``(N, *Q, G)``: N observations, Q the shape of the scales, G values per scale. Ranges are ``(*Q,)``.

    Keyword Args:
        signed (bool): of weights in symmetric integer formats, the scale is negative where the range reaches farther
            above zero than below, which gives the lowest code, the one without a counterpart, to the larger end.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (
        Statistic("min_vals", "keep", rows="min"),
        Statistic("max_vals", "keep", rows="max"),
    )
    hyperparameters: ClassVar[dict[str, Any] | None] = {"signed": False}

    @override
    def measure(self, observed: torch.Tensor) -> MinMaxTuple:
        return observed_range(observed)


@Observer.register("static_minmax")
class StaticMinMaxObserver(MemorylessMinMaxObserver):
    """The range of everything observed: exact, whatever the batches, their order and the ranks."""

    statistics: ClassVar[tuple[Statistic, ...]] = (
        Statistic("min_vals", "min", rows="min"),
        Statistic("max_vals", "max", rows="max"),
    )
    keeps_extremes: ClassVar[bool] = True
    hyperparameters: ClassVar[dict[str, Any] | None] = {}


@Observer.register("minmax")
class MinMaxObserver(MovingAverageObserver, MemorylessMinMaxObserver):
    """A moving average of each tensor's smallest and largest value. The default for activations.

    Keyword Args:
        averaging_constant (float): c, the weight of the newest tensor, in (0, 1]. 1 keeps the newest only.

    Raises:
        CalibrationError: ``averaging_constant`` outside (0, 1].
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (
        Statistic("min_vals", "mean", rows="min"),
        Statistic("max_vals", "mean", rows="max"),
    )
    hyperparameters: ClassVar[dict[str, Any] | None] = {}
