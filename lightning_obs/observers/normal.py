"""A range from mean and standard deviation."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import distributed as dist
from typing_extensions import override

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.moments import Moments, mean_and_std, measure_moments, merge_moments
from lightning_obs.observers.base import MinMaxTuple, Observer


@Observer.register("normal_observer")
class NormalObserver(Observer):
    """``mean - k * std`` to ``mean + k * std`` of everything observed.

    For values that are normally distributed. Language models' activations are not: see the warning of ``percentile``.
    Batches and ranks are merged exactly, up to float64 addition.

    Observes ``(N, *Q, G)``, any strategy. Ranges are ``(*Q,)`` in float32. ``std`` is the sample's, with n - 1; a
    single value has none and is its own range.

    Keyword Args:
        k (float): half of the range's width in standard deviations, above 0.

    Raises:
        CalibrationError: ``k`` not above 0.
    """

    _act_sync_dict: ClassVar[dict[str, Any]] = dict.fromkeys(("number", "sums", "squares"), dist.ReduceOp.SUM)
    measures_fast: ClassVar[bool] = True
    hyperparameters: ClassVar[dict[str, Any] | None] = {"k": 2.0}
    k: float
    number: torch.Tensor
    sums: torch.Tensor
    squares: torch.Tensor

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        if not self.k > 0:
            raise CalibrationError("k", got=self.k, expected="a value above 0")

    @property
    @override
    def measure_key(self) -> Hashable | None:
        return "moments"

    @override
    def measure(self, observed: torch.Tensor) -> Moments:
        return measure_moments(observed)

    @override
    def merge(self, measured: Moments) -> None:
        if self.has_statistics:
            measured = merge_moments(Moments(self.number, self.sums, self.squares), measured)
        else:  # other observers may hold the same measurement, and a sum over ranks is made in place
            measured = Moments(*(part.clone() for part in measured))
        self.number, self.sums, self.squares = measured

    @property
    @override
    def has_statistics(self) -> bool:
        return hasattr(self, "sums")

    @override
    def get_min_max(self) -> MinMaxTuple:
        self._require_statistics()
        mean, std = mean_and_std(Moments(self.number, self.sums, self.squares))
        return (mean - self.k * std).float(), (mean + self.k * std).float()
