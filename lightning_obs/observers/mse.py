"""Observers whose range loses least when it is quantized: of the last tensor, or averaged over tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from typing_extensions import override

from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.search.ranges import search_range
from lightning_obs.observers.min_max import MovingAverageObserver
from lightning_obs.observers.observer import Hyperparameters, MinMaxTuple, Observer
from lightning_obs.observers.search_options import check_options, divides_in_blocks, options_of
from lightning_obs.observers.statistic import Statistic, observing


@Observer.register("memoryless_mse")
class MemorylessMSEObserver(Observer):
    """The range of the last observed tensor, shrunk to where its quantization error is least.

    ``argmin over p of sum(|fake_quantize(x, p * expand * range) - x| ** norm)`` per scale, p = 1, 1 - 1/grid, ...,
    down to ``1 - maxshrink`` (excluded). For weights, which are observed once.

    Observes ``(N, *Q, G)``: N observations, Q the shape of the scales, G values per scale. Ranges are ``(*Q,)`` in the
    units of the observed tensor.

    Keyword Args:
        maxshrink (float): how much of the range may be given up, in [0, 1].
        patience (int): consecutive p without an improvement of any scale that end the search.
        grid (int): steps per unit of p.
        norm (float): exponent of the error; 2 is the squared error, and a larger one penalizes large errors more.
        expand (float): factor on the range before the search, at least 1.
        signed (bool): whether the scale is negative where the range reaches farther above zero than below, for weights
            in symmetric integer formats. Candidates begin where candidates of positive scales do, at
            ``2 ** bits / (2 ** bits - 1)`` times the range.

    Raises:
        CalibrationError: a value outside of these.

    Reference:
        The grid search of llm-compressor's ``memoryless_mse``; its norm of 2.4 is from GPTQ's reference code
        (Frantar et al., 2022, arXiv:2210.17323).
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (Statistic("min_vals"), Statistic("max_vals"))
    hyperparameters: ClassVar[Hyperparameters] = {
        "maxshrink": 0.20,
        "patience": 5,
        "grid": 100.0,
        "norm": 2.4,
        "expand": 1.0,
        "signed": False,
    }

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        check_options(self)

    @override
    def forward(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        """Observe one tensor; a weight in blocks is read block by block and not copied."""
        if self.base_name != "weight" or not divides_in_blocks(value, self.args):
            return super().forward(value, g_idx)
        with observing(self):
            ranges = self.search(value)
            self.combine(ranges)
        return self

    @override
    def measure(self, observed: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.search(observed)

    def search(self, observed: torch.Tensor) -> MinMaxTuple:
        """The range of least error of each scale, ``(*Q,)``, from values ``(N, *Q, G)`` or a weight in blocks."""
        numbers = NumberGrid.of(self.args, self.signed)
        low, high = search_range(observed, options_of(self).search_on(numbers))
        return low, high


@Observer.register("mse")
class MovingAverageMSEObserver(MovingAverageObserver, MemorylessMSEObserver):
    """A moving average of the range that loses least of each tensor.

    Keyword Args:
        averaging_constant (float): the weight of the newest tensor, in (0, 1]. 1 keeps the newest only.
        maxshrink, patience, grid, norm, expand, signed: the search of each tensor, with the meanings and defaults of
            ``memoryless_mse``.
    """

    statistics = (Statistic("min_vals", "mean"), Statistic("max_vals", "mean"))
    hyperparameters: ClassVar[Hyperparameters] = {}


@Observer.register("nvfp4_expanded_mse")
class NVFP4ExpandedMSEObserver(MemorylessMSEObserver):
    """``memoryless_mse`` from 1.8 down to 0.8 times the range, in steps of 1.8/200: for weights in NVFP4.

    Between 4 and 6, FP4 has no number. A range wider than the values moves the largest of them to 4, and the others to
    where the numbers are dense.
    """

    hyperparameters: ClassVar[Hyperparameters] = {
        "maxshrink": 1 - 0.8 / 1.8,
        "patience": 1000,
        "grid": 200.0,
        "expand": 1.8,
    }
