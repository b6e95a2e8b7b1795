"""Observers that count every value and choose the range at the end, from all of the data.

Batches and ranks are combined by adding integers, so the range has the same bits for any batches, any order of them
and any ranks. How values are counted, and how exactly: :mod:`lightning_obs.numerics.histogram`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.candidates import candidate_ranges, shrink_factors
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.histogram import (
    Histogram,
    Support,
    candidate_divergences,
    count_nan,
    count_values,
    percentile_range,
    support,
)
from lightning_obs.numerics.search.definition import GridSearch
from lightning_obs.numerics.search.ranges import search_range
from lightning_obs.observers.observer import MinMaxTuple, Observer
from lightning_obs.observers.statistic import Statistic, equal_values

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


@Observer.register("percentile")
class PercentileObserver(CountingObserver):
    """The smallest value with ``percentile`` of all at or below it, and its mirror image at the lower end.

    Exact in any partition. Exact for bfloat16; float32 and float16 are rounded to bfloat16 first, except where no
    value is cut off: then it is the exact smallest and largest value.

    On language models this can be a catastrophe: a few inputs carry values thousands of times larger than the rest,
    and the model depends on them (docs/observers.md has the numbers).

    Observes ``(N, *Q, G)``: one scale per tensor or per attention head. Ranges are ``(*Q,)``.

    Keyword Args:
        percentile (float): in percent, in (50, 100]. 99.9 cuts one value in a thousand off each end.

    Raises:
        CalibrationError: ``percentile`` outside (50, 100], or a strategy other than tensor and attn_head.

    Reference:
        Wu et al., Integer Quantization for Deep Learning Inference, 2020, arXiv:2004.09602, section 3 (there of the
        magnitudes, which for a symmetric format and symmetric data is the same).
    """

    hyperparameters: ClassVar[dict[str, Any] | None] = {"percentile": 99.99}
    percentile: float

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        expected = "a value in percent, in (50, 100]; 99.99 cuts one value in ten thousand off each end"
        self._require("percentile", 50 < self.percentile <= 100, expected)

    @override
    def get_min_max(self) -> MinMaxTuple:
        self._require_statistics()
        scales = self.counts.flatten(0, -2), self.min_vals.flatten(), self.max_vals.flatten()
        ends = [torch.stack(percentile_range(*one, self.percentile)) for one in zip(*scales, strict=True)]
        low, high = torch.stack(ends, 1).reshape(2, *self.min_vals.shape)
        return low, high


@Observer.register("histogram")
class HistogramObserver(PercentileObserver):
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
        "maxshrink": 0.95,
        "patience": None,
        "grid": 100.0,
        "norm": 2.0,
    }
    criterion: str
    maxshrink: float
    patience: int | None
    grid: float
    norm: float

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        self._require("criterion", self.criterion in CRITERIA, f"one of {', '.join(CRITERIA)}")
        self._require("maxshrink", 0 <= self.maxshrink <= 1, "a value in [0, 1]")
        self._require("patience", self.patience is None or self.patience > 0, "a value above 0, or None")
        self._require("grid", self.grid > 0, "a value above 0")
        self._require("norm", self.norm > 0, "a value above 0")

    @override
    def get_min_max(self) -> MinMaxTuple:
        """The range that the criterion chooses; where the observed range is not finite, that range.

        Searched once for the same statistics and hyperparameters, also by fused observers: q, k and v read one tensor.
        """
        self._require_statistics()
        names = [name for cls in type(self).__mro__ for name in vars(cls).get("hyperparameters") or ()]
        asked = [self.counts, self.min_vals, self.max_vals, vars(self.args).copy(), [getattr(self, n) for n in names]]
        alike = [o for o in (self, *self._fused_observers) if type(o) is type(self) and o._chosen is not None]
        known = (o._chosen for o in alike if all(map(equal_values, o._chosen[0], asked)))
        self._chosen = next(known, None) or (asked, self._search())
        low, high = self._chosen[1]
        return low.clone(), high.clone()

    def _search(self) -> MinMaxTuple:
        if self.criterion == "percentile":
            return super().get_min_max()
        if not self.is_finite and self.nonfinite_statistics():
            return self.min_vals, self.max_vals
        lows, highs = self.min_vals.flatten(), self.max_vals.flatten()
        found = [support(*one) for one in zip(self.counts.flatten(0, -2), lows, highs, strict=True)]
        if self.criterion == "entropy":
            low, high = candidate_ranges(lows, highs, _ENTROPY_FACTORS)
            of_scales = zip(found, low.T, high.T, strict=True)
            losses = torch.stack([candidate_divergences(seen, a, b, self.args) for seen, a, b in of_scales], 1)
            best = losses.nan_to_num(torch.inf).argmin(0, keepdim=True)
            low, high = low.gather(0, best), high.gather(0, best)
        else:
            values, counts = (pad_sequence(list(each), batch_first=True) for each in zip(*found, strict=True))
            # The exact ends decide the candidates, and are counted in their bins already. The largest magnitude is
            # about 1, so that no power leaves float32.
            ends = torch.stack([lows, highs], 1).float()
            unit = torch.frexp(ends.abs().amax(1, keepdim=True))[1].clamp(-126, 126).float().exp2()
            values = (torch.cat([torch.where(counts > 0, values, ends[:, :1]), ends], 1) / unit).to(lows.dtype)
            factors = shrink_factors(self.maxshrink, self.grid)
            search = GridSearch(NumberGrid.of(self.args), factors, self.patience, self.norm)
            low, high, _ = search_range(values[None], search, importance=pad(counts.float(), (0, 2)))
            low, high = ((end * unit[:, 0]).to(lows.dtype) for end in (low, high))
        return low.reshape(self.min_vals.shape), high.reshape(self.min_vals.shape)
