"""Observers whose range loses least when it is quantized: of the last tensor, or averaged over tensors."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from typing_extensions import override

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.patience import visited
from lightning_obs.numerics.range_search.compiled import Compile
from lightning_obs.numerics.range_search.search import Beyond, search_block_range, search_range, shrink_factors
from lightning_obs.observers.base import MinMaxTuple, Observer
from lightning_obs.observers.moving_average import MovingAverageObserver


@Observer.register("memoryless_mse")
class MemorylessMSEObserver(Observer, by_rows=True):
    """The range of the last observed tensor, shrunk to where its quantization error is least.

    ``argmin over p of sum(|fake_quantize(x, p * expand * range) - x| ** norm)`` per scale, p = 1, 1 - 1/grid, ...,
    down to ``1 - maxshrink`` (excluded). For weights, which are observed once.

    Observes ``(N, *Q, G)``: N observations, Q the shape of the scales, G values per scale. Ranges are ``(*Q,)`` in the
    units of the observed tensor.

    Args:
        maxshrink: how much of the range may be given up, in [0, 1].
        patience: the search ends after so many p in a row that improved no scale of the tensor.
        grid: steps per unit of p.
        norm: exponent of the error; 2 is the mean squared error, more fears large errors more.
        expand: factor on the range before the search, at least 1.
        compile: whether to compile the inner loop: True, False, or "auto": where there is a compiler and so much work
            that it pays. The range is the same.

    Raises:
        CalibrationError: a value outside of these; ``compile`` is True and there is no compiler, or it failed.

    Reference:
        The grid search of llm-compressor's ``memoryless_mse``; its norm of 2.4 is that of GPTQ's reference code
        (Frantar et al., 2022, arXiv:2210.17323).
    """

    hyperparameters: ClassVar[dict[str, Any] | None] = {
        "maxshrink": 0.20,
        "patience": 5,
        "grid": 100.0,
        "norm": 2.4,
        "expand": 1.0,
        "compile": "auto",
    }
    maxshrink: float
    patience: int
    grid: float
    norm: float
    expand: float
    compile: Compile
    #: whether to keep apart what candidates after the early stop improve: for a search that sees some rows of a tensor
    looks_beyond: bool = False
    improved: torch.Tensor  # (candidates,), bool
    later: torch.Tensor  # (2, K): number of a candidate after the end, ascending; scale that it improved
    later_range: torch.Tensor  # (2, K): smallest and largest value there

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
            if not isinstance(value, (int, float)) or not least <= value <= most:
                raise CalibrationError(name, got=repr(value), expected=expected)
        if self.compile not in (True, False, "auto"):
            raise CalibrationError("compile", got=repr(self.compile), expected="'auto', True or False")
        self.compile = "auto" if self.compile == "auto" else bool(self.compile)

    @override
    def forward(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        """Observe one tensor; a weight in blocks is read block by block, where others copy it to flatten it."""
        if self.base_name != "weight" or not _in_whole_blocks(value, self.args):
            return super().forward(value, g_idx)
        with torch.inference_mode(False), torch.no_grad():
            self._remember_initial_state()
            self.merge(self._search(value, in_blocks=True))
        return self

    @property
    @override
    def measure_key(self) -> Hashable | None:
        search = (self.maxshrink, self.patience, self.grid, self.norm, self.expand)
        return "mse", *search, self.args.num_bits, self.args.type, self.args.symmetric, self.args.scale_dtype

    @override
    def measure(self, observed: torch.Tensor) -> MinMaxTuple:
        return self._search(observed)

    def candidates(self) -> list[float]:
        """The factors to try, in their order."""
        return shrink_factors(self.maxshrink, self.grid)

    @property
    def may_stop_early(self) -> bool:
        """Whether there are more candidates than the search has patience for."""
        return self.idle_limit is not None and len(self.candidates()) > max(1, self.idle_limit)

    @property
    def idle_limit(self) -> int | None:
        """The search ends after so many candidates in a row that improved nothing; None: it visits all."""
        return self.patience

    def _search(
        self, observed: torch.Tensor, importance: torch.Tensor | None = None, in_blocks: bool = False
    ) -> MinMaxTuple:
        factors, beyond = self.candidates(), Beyond() if self.looks_beyond else None
        options: dict[str, Any] = {name: getattr(self, name) for name in ("norm", "expand", "compile")}
        options |= {"patience": self.idle_limit, "beyond": beyond}
        if in_blocks:
            chosen = search_block_range(observed, self.args, factors, **options)
        else:
            chosen = search_range(observed, self.args, factors, importance=importance, **options)
        if beyond is not None:
            self.improved = torch.tensor(beyond.improved)
            self.later = torch.stack([beyond.numbers, beyond.rows])
            self.later_range = torch.stack([beyond.low, beyond.high])
        return chosen

    def extend_search(self, stop: int) -> None:
        """Go on to the first ``stop`` candidates with a search that :attr:`looks_beyond`."""
        low, high = self.min_vals.flatten().clone(), self.max_vals.flatten().clone()
        numbers, scales = self.later
        for number in numbers[numbers < stop].unique():  # ascending: the last that improved a scale is the best
            which = numbers == number
            low[scales[which]], high[scales[which]] = self.later_range[:, which]
        self.load_statistics({"min_vals": low.view_as(self.min_vals), "max_vals": high.view_as(self.max_vals)})

    @override
    def for_rows(self, start: int) -> Observer | None:
        part = super().for_rows(start)
        if isinstance(part, MemorylessMSEObserver):
            part.looks_beyond = part.may_stop_early
        return part

    @override
    def join(self, parts: Sequence[tuple[int, MemorylessMSEObserver]]) -> None:
        """End the parts' searches where one search of the whole weight would have ended, then join their ranges."""
        searches = [part for _, part in parts]
        if searches[0].looks_beyond:
            improved = torch.stack([search.improved.cpu() for search in searches]).any(0)
            stop = visited(improved.tolist(), self.idle_limit)
            for search in searches:
                search.extend_search(stop)
        super().join(parts)

    @override
    def merge(self, measured: MinMaxTuple) -> None:
        self.min_vals, self.max_vals = measured


@Observer.register("mse")
class MovingAverageMSEObserver(MovingAverageObserver, MemorylessMSEObserver, by_rows=True):
    """A moving average of the range that loses least of each tensor.

    Args:
        averaging_constant: the weight of the newest tensor, in (0, 1]. 1 keeps the newest only.
        maxshrink, patience, grid, norm, expand, compile: see :class:`MemorylessMSEObserver`.
    """

    hyperparameters: ClassVar[dict[str, Any] | None] = {}


@Observer.register("nvfp4_expanded_mse")
class NVFP4ExpandedMSEObserver(MemorylessMSEObserver, by_rows=True):
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
    assert args.block_structure is not None  # QuantizationArgs validated it
    height, width = args.block_structure
    return value.numel() > 0 and value.is_contiguous() and not (value.shape[0] % height or value.shape[1] % width)
