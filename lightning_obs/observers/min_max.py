"""Observers whose range is the smallest and the largest value: of the last tensor, of all of them, or averaged."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import distributed as dist
from typing_extensions import override

from lightning_obs.errors import CalibrationError
from lightning_obs.observers.base import MinMaxTuple, Observer


@Observer.register("memoryless_minmax")
class MemorylessMinMaxObserver(Observer):
    """The range of the last observed tensor. The default for weights, which are observed once.

    Observes ``(N, *Q, G)``: N observations, Q the shape of the scales, G values per scale. Ranges are ``(*Q,)``.
    """

    hyperparameters: ClassVar[dict[str, Any] | None] = {}

    @property
    @override
    def measure_key(self) -> Hashable | None:
        return "minmax"

    @override
    def measure(self, observed: torch.Tensor) -> MinMaxTuple:
        if observed.ndim == 3 and observed.shape[1] == 1:
            low, high = torch.aminmax(observed)  # one scale: a single pass, at the speed of memory
            return low.reshape(1), high.reshape(1)
        # With dimensions, aminmax is ten times slower than the two reductions.
        return torch.amin(observed, dim=(0, -1)), torch.amax(observed, dim=(0, -1))

    @override
    def merge(self, measured: MinMaxTuple) -> None:
        self.min_vals, self.max_vals = measured


@Observer.register("static_minmax")
class StaticMinMaxObserver(MemorylessMinMaxObserver):
    """The range of everything observed: exact, whatever the batches, their order and the ranks."""

    _act_sync_dict: ClassVar[dict[str, Any]] = {"min_vals": dist.ReduceOp.MIN, "max_vals": dist.ReduceOp.MAX}
    hyperparameters: ClassVar[dict[str, Any] | None] = {}

    @override
    def merge(self, measured: MinMaxTuple) -> None:
        low, high = measured
        if self.has_statistics:
            low, high = torch.minimum(low, self.min_vals), torch.maximum(high, self.max_vals)
        self.min_vals, self.max_vals = low, high


@Observer.register("minmax")
class MinMaxObserver(MemorylessMinMaxObserver):
    """An exponential moving average of each tensor's range. The default for activations.

    ``range <- (1 - c) * range + c * range_of_this_tensor``, starting at the first tensor's range. By definition it
    depends on the order of the batches and on how they are cut; ``static_minmax`` does not.

    Args:
        averaging_constant: c, the weight of the newest tensor, in (0, 1]. 1 keeps the newest only.

    Raises:
        CalibrationError: ``averaging_constant`` outside (0, 1].

    Reference:
        Jacob et al., Quantization and Training of Neural Networks, 2018, arXiv:1712.05877, section 3.1.
    """

    _act_sync_dict: ClassVar[dict[str, Any]] = {"min_vals": dist.ReduceOp.AVG, "max_vals": dist.ReduceOp.AVG}
    hyperparameters: ClassVar[dict[str, Any] | None] = {"averaging_constant": 0.01}
    averaging_constant: float

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        if not 0 < self.averaging_constant <= 1:
            raise CalibrationError("averaging_constant", got=self.averaging_constant, expected="a value in (0, 1]")

    @override
    def merge(self, measured: MinMaxTuple) -> None:
        low, high = measured
        if self.has_statistics and self.averaging_constant != 1:
            c = self.averaging_constant
            low = self.min_vals * (1 - c) + low * c
            high = self.max_vals * (1 - c) + high * c
        self.min_vals, self.max_vals = low, high
