"""Observers whose range loses least when it is quantized: of the last tensor, or averaged over tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from typing_extensions import override

from lightning_obs.numerics.candidates import shrink_factors
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.qparams import covered_by_scale
from lightning_obs.numerics.search.definition import GridSearch
from lightning_obs.numerics.search.ranges import search_range
from lightning_obs.observers.min_max import MovingAverageObserver
from lightning_obs.observers.observer import Observer
from lightning_obs.observers.statistic import Statistic


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
        signed (bool): as of ``memoryless_minmax``. Candidates begin where candidates of positive scales do, at
            ``2 ** bits / (2 ** bits - 1)`` times the range.

    Raises:
        CalibrationError: a value outside of these.

    Reference:
        The grid search of llm-compressor's ``memoryless_mse``; its norm of 2.4 is that of GPTQ's reference code
        (Frantar et al., 2022, arXiv:2210.17323).
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (
        Statistic("min_vals", "keep"),
        Statistic("max_vals", "keep"),
    )
    hyperparameters: ClassVar[dict[str, Any] | None] = {
        "maxshrink": 0.20,
        "patience": 5,
        "grid": 100.0,
        "norm": 2.4,
        "expand": 1.0,
        "signed": False,
    }
    maxshrink: float
    patience: int
    grid: float
    norm: float
    expand: float

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        for name, least, most, expected in (
            ("maxshrink", 0.0, 1.0, "a value in [0, 1]"),
            ("patience", 0, sys.maxsize, "at least 0"),
            ("grid", sys.float_info.min, sys.float_info.max, "a positive number"),
            ("norm", sys.float_info.min, sys.float_info.max, "a positive number"),
            ("expand", 1.0, sys.float_info.max, "at least 1"),
        ):
            value = getattr(self, name)
            self._require(name, isinstance(value, (int, float)) and least <= value <= most, expected)

    @override
    def forward(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        """Observe one tensor; a weight in blocks is read block by block, where others copy it to flatten it."""
        if self.base_name != "weight" or not _in_whole_blocks(value, self.args):
            return super().forward(value, g_idx)
        with self._observing():
            self.combine(self._search(value))
        return self

    @override
    def measure(self, observed: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._search(observed)

    def candidates(self) -> list[float]:
        """The factors to try, in their order."""
        return shrink_factors(self.maxshrink, self.grid)

    @property
    def idle_limit(self) -> int | None:
        """Number of consecutive candidates without an improvement that ends the search; None: it visits all."""
        return self.patience

    @property
    def widest(self) -> float:
        """The widest candidate over the observed range."""
        codes = 2**self.args.num_bits
        return self.expand * codes / (codes - 1) if self.signed else self.expand

    def _grid(self, observed: torch.Tensor) -> NumberGrid:
        return NumberGrid.of(self.args, self.signed)

    def _grid_search(self, observed: torch.Tensor) -> GridSearch:
        """The candidates to try on an observed tensor, and the error that is to be least."""
        return GridSearch(self._grid(observed), self.candidates(), self.idle_limit, self.norm, self.widest)

    def _search(self, observed: torch.Tensor, **of_inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        ranges = search_range(observed, self._grid_search(observed), **of_inputs)
        return ranges.low, ranges.high


@Observer.register("mse")
class MovingAverageMSEObserver(MovingAverageObserver, MemorylessMSEObserver):
    """A moving average of the range that loses least of each tensor.

    Keyword Args:
        averaging_constant (float): the weight of the newest tensor, in (0, 1]. 1 keeps the newest only.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (
        Statistic("min_vals", "mean"),
        Statistic("max_vals", "mean"),
    )
    hyperparameters: ClassVar[dict[str, Any] | None] = {}


@Observer.register("nvfp4_expanded_mse")
class NVFP4ExpandedMSEObserver(MemorylessMSEObserver):
    """``memoryless_mse`` from 1.8 down to 0.8 times the range, in steps of 1/200 of that: for weights in NVFP4.

    Between 4 and 6, FP4 has no number. A range wider than the values moves the largest of them to 4, and the others to
    where the numbers are dense.
    """

    hyperparameters: ClassVar[dict[str, Any] | None] = {
        "maxshrink": 1 - 0.8 / 1.8,
        "patience": 1000,
        "grid": 200.0,
        "expand": 1.8,
    }


def _in_whole_blocks(value: torch.Tensor, args: QuantizationArgs) -> bool:
    """Whether a weight is searched by blocks, and no block is cut by its edge."""
    if args.strategy != QuantizationStrategy.BLOCK or value.ndim != 2 or not value.is_floating_point():
        return False
    height, width = covered_by_scale(args, value.shape)
    return value.numel() > 0 and value.is_contiguous() and not (value.shape[0] % height or value.shape[1] % width)
