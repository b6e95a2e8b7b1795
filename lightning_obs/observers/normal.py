"""The observer ``normal_observer``: a range from mean and standard deviation.

Calibration makes it if the scheme or the user's ``observers=`` names it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from typing_extensions import override

from lightning_obs.numerics.moments import Moments, mean_and_std, measure_moments
from lightning_obs.observers.observer import Hyperparameters, MinMaxTuple, Observer, require, require_statistics
from lightning_obs.observers.statistic import Statistic


@Observer.register("normal_observer")
class NormalObserver(Observer):
    """The range from ``mean - k * std`` to ``mean + k * std`` of all observed values.

    For values that are normally distributed. The activations of language models are not: see the observer
    ``percentile``. Batches and ranks are combined exactly, up to float64 addition.

    Observes ``(N, *Q, G)``, any strategy. Ranges are ``(*Q,)`` in float32. ``std`` is the sample standard deviation
    (n - 1), 0 for a single value. ``number``, ``sums`` and ``squares`` are the moments from which it is computed.

    Keyword Args:
        k (float): half of the range's width in standard deviations, above 0. Default: 2.

    Raises:
        CalibrationError: ``k`` not above 0.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = tuple(Statistic(name, "sum") for name in Moments._fields)
    hyperparameters: ClassVar[Hyperparameters] = {"k": 2.0}
    k: float

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        require(self, "k", self.k > 0, "a value above 0")

    @override
    def measure(self, observed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The moments of one flattened tensor; the base class calls it for each batch and adds them up."""
        return measure_moments(observed)

    @override
    def get_min_max(self) -> MinMaxTuple:
        """The range, ``(*Q,)`` each; the base class asks for it when qparams are computed."""
        require_statistics(self)
        moments = Moments(self.number, self.sums, self.squares)
        mean, std = mean_and_std(moments)
        reach = self.k * std
        return (mean - reach).float(), (mean + reach).float()
