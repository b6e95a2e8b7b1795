"""Observers that search the range with the least quantization error: of the last tensor, or averaged over tensors.

Calibration makes them by name, as the scheme or the user's ``observers=`` says. The search itself is
:mod:`lightning_obs.numerics.search`.
"""

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
    """The range of the last observed tensor, shrunk to the candidate with the least quantization error.

    ``argmin over p of sum(|fake_quantize(x, p * expand * range) - x| ** norm)`` per scale, p = 1, 1 - 1/grid, ...,
    down to ``1 - maxshrink`` (excluded). For weights, which are observed once.

    Observes ``(N, *Q, G)``: N observations, Q the shape of the scales, G values per scale. Ranges are ``(*Q,)`` in the
    units of the observed tensor.

    Keyword Args:
        maxshrink (float): how much of the range may be given up, in [0, 1]. Default: 0.2.
        patience (int): the search ends after this many p in a row without an improvement of any scale. Default: 5.
        grid (float): number of candidates per unit of p. Default: 100.
        norm (float): exponent of the error; 2 is the squared error, a larger one penalizes large errors more. Default:
            2.4.
        expand (float): factor on the range before the search, at least 1. Default: 1.
        signed (bool): whether the scale is negative where the range reaches farther above zero than below, for weights
            in symmetric integer formats. A signed scale of the same range is smaller. So the candidates are then
            ``2 ** bits / (2 ** bits - 1)`` times as wide, and the widest has a scale of the same magnitude as without
            ``signed``. Default: False.

    Raises:
        CalibrationError: a hyperparameter outside its limits.

    Reference:
        The grid search of llm-compressor's ``memoryless_mse``; its norm of 2.4 is from GPTQ's reference code
        (Frantar et al., 2022, arXiv:2210.17323).
    """

    #: "keep": the newest tensor's range; a range that several ranks have is taken from the lowest of them
    statistics: ClassVar[tuple[Statistic, ...]] = (Statistic("min_vals", "keep"), Statistic("max_vals", "keep"))
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
        """Search the range of one tensor and keep it as statistics; calibration calls it through ``observer(value)``.

        A weight that divides into blocks is read block by block and not copied.

        Args:
            value: the tensor.
            g_idx: for a weight in activation order, the group of each column, ``(C,)``; None: the columns are in the
                order of the groups. A weight in blocks has no groups, so it is not read there.
        """
        if self.base_name != "weight" or not divides_in_blocks(value, self.args):
            return super().forward(value, g_idx)
        with observing(self):  # without gradients and inference mode, as the base class observes
            ranges = self.search(value)
            self.combine(ranges)
        return self

    @override
    def measure(self, observed: torch.Tensor) -> Sequence[torch.Tensor]:
        """The searched range of a flattened tensor; the base class calls it for each tensor."""
        return self.search(observed)

    def search(self, observed: torch.Tensor) -> MinMaxTuple:
        """The range with the least error for each scale, ``(*Q,)``, of values ``(N, *Q, G)`` or of a weight in blocks.

        Called by :meth:`measure` and :meth:`forward`, and by the observer ``lattice`` for scales without a grid.
        """
        numbers = NumberGrid.of(self.args, self.signed)
        low, high = search_range(observed, options_of(self).search_on(numbers))
        return low, high


@Observer.register("mse")
class MovingAverageMSEObserver(MovingAverageObserver, MemorylessMSEObserver):
    """Searches the range of each observed tensor for the least error, and keeps a moving average of these ranges.

    For activations, of which each batch brings a new tensor: ``range <- (1 - c) * range + c * searched range``,
    starting with the first tensor's range. Ranges are ``(*Q,)``; ranks see different tensors, and their averages are
    reduced to the mean.

    Keyword Args:
        averaging_constant (float): c, the weight of the newest tensor, in (0, 1]. 1 keeps the newest range only.
            Default: 0.01.
        maxshrink, patience, grid, norm, expand, signed: the search of each tensor, with the meanings and defaults of
            ``memoryless_mse``.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (Statistic("min_vals", "mean"), Statistic("max_vals", "mean"))
    hyperparameters: ClassVar[Hyperparameters] = {}


@Observer.register("nvfp4_expanded_mse")
class NVFP4ExpandedMSEObserver(MemorylessMSEObserver):
    """``memoryless_mse`` with candidates from 1.8 down to 0.8 times the range, in steps of 1.8/200: for NVFP4 weights.

    FP4 has no number between 4 and 6. With a range wider than the values, the largest value is at 4 in place of 6, and
    the other values are where the numbers of FP4 are dense. The candidates are those of llm-compressor's observer of
    this name; a patience of 1000 is more than their number, so that all of them are tried.
    """

    hyperparameters: ClassVar[Hyperparameters] = {
        "maxshrink": 1 - 0.8 / 1.8,
        "patience": 1000,
        "grid": 200.0,
        "expand": 1.8,
    }
