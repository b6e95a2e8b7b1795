"""Observers that count every value and choose the range at the end, from all of the data.

Batches and ranks are combined by adding integers, so the range has the same bits for any batches, any order of them
and any ranks. How values are counted, and how exactly: :mod:`lightning_obs.numerics.histogram`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.candidates import candidate_ranges
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
from lightning_obs.numerics.search.ranges import search_range
from lightning_obs.observers.observer import (
    Hyperparameters,
    MinMaxTuple,
    Observer,
    declared_hyperparameters,
    require,
    require_statistics,
)
from lightning_obs.observers.search_options import options_of
from lightning_obs.observers.statistic import Statistic, equal_values

CRITERIA = ("mse", "percentile", "entropy")
_STRATEGIES = (QuantizationStrategy.TENSOR, QuantizationStrategy.ATTN_HEAD)
#: 4 powers of two below the largest magnitude in steps of 2.2 %: Migacz's 128 of 2,048 bins up to all of them.
_ENTROPY_FACTORS = [2 ** (-step / 32) for step in range(129)]


class CountingObserver(Observer):
    """Counts every value by its bfloat16 pattern, and keeps the exact range beside the counts.

    Observes ``(N, *Q, G)``, Q of one scale per tensor ``(1,)`` or per attention head ``(H, 1, 1)``. ``counts`` is
    ``(*Q, 65536)`` in int64, 512 KiB per scale; ``min_vals`` and ``max_vals`` are ``(*Q,)``. A subclass writes
    ``get_min_max``.

    Raises:
        CalibrationError: a strategy of many scales, which would need a histogram for each.
    """

    statistics = (
        Statistic("counts", "sum"),
        Statistic("min_vals", "min"),
        Statistic("max_vals", "max"),
    )
    keeps_extremes = True

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
        counts, low, high = count_values(observed.flatten(1, -2))
        counts = counts.unflatten(0, scales)
        return Histogram(counts, low.reshape(scales), high.reshape(scales))

    @override
    def nonfinite_statistics(self) -> str | None:
        """The numbers of NaN and infinite values. The counts are integers: their bins of NaN are asked here."""
        problems = []
        of_ranges = super().nonfinite_statistics()
        if of_ranges:
            problems.append(of_ranges)
        number_of_nan = count_nan(self.counts) if self.has_statistics else 0
        if number_of_nan:
            number = int(self.counts.sum())
            problems.append(f"{number_of_nan} of {number} values NaN")
        return ", ".join(problems) or None

    def counted_values(self) -> Support | None:
        """The values that were observed and how often each was: an observation asks for them, for the report.

        None unless one histogram holds everything: not with a histogram for each head.

        >>> observer = Observer.load_from_registry("percentile", base_name="input", args=QuantizationArgs())
        >>> observer(torch.tensor([1.0, 2.0, 2.0])).counted_values().counts
        tensor([1, 2])
        """
        if not self.has_statistics or self.min_vals.numel() != 1:  # a histogram for each scale
            return None
        low = self.min_vals.flatten()[0]
        high = self.max_vals.flatten()[0]
        counted = support(self.counts.flatten(), low, high)
        if len(counted.values) > 1:  # the outermost bins stand for the exact ends
            counted.values[0] = low
            counted.values[-1] = high
        return counted


@Observer.register("percentile")
class PercentileObserver(CountingObserver):
    """The range between the upper percentile of everything observed and the matching lower one.

    The upper end is the smallest value that has ``percentile`` percent of all values at or below it; the lower end is
    defined alike from the other side.

    Exact in any partition. Exact for bfloat16; float32 and float16 are rounded to bfloat16 first, except where no
    value is cut off: then it is the exact smallest and largest value.

    On language models this can be a catastrophe: a few inputs carry values thousands of times larger than the rest,
    and the model depends on them (docs/evidence/int8.md has the numbers).

    Observes ``(N, *Q, G)``: one scale per tensor or per attention head. Ranges are ``(*Q,)``.

    Keyword Args:
        percentile (float): in percent, in (50, 100]. 99.9 cuts one value in a thousand off each end.

    Raises:
        CalibrationError: ``percentile`` outside (50, 100], or a strategy other than tensor and attn_head.

    Reference:
        Wu et al., Integer Quantization for Deep Learning Inference, 2020, arXiv:2004.09602, section 3 (there of the
        magnitudes, which for a symmetric format and symmetric data is the same).
    """

    hyperparameters: ClassVar[Hyperparameters] = {"percentile": 99.99}
    percentile: float

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        expected = "a value in percent, in (50, 100]; 99.99 cuts one value in ten thousand off each end"
        require(self, "percentile", 50 < self.percentile <= 100, expected)

    @override
    def get_min_max(self) -> MinMaxTuple:
        require_statistics(self)
        lows = []
        highs = []
        for counts, smallest, largest in _scales_of(self):
            low, high = percentile_range(counts, smallest, largest, self.percentile)
            lows.append(low)
            highs.append(high)
        low = torch.stack(lows).reshape(self.min_vals.shape)
        high = torch.stack(highs).reshape(self.min_vals.shape)
        return low, high


def _scales_of(observer: CountingObserver) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each scale its counts ``(65536,)``, smallest and largest value."""
    counts = observer.counts.flatten(0, -2)
    smallest_values = observer.min_vals.flatten()
    largest_values = observer.max_vals.flatten()
    return zip(counts, smallest_values, largest_values, strict=True)


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

    statistics = PercentileObserver.statistics
    keeps_extremes = True
    hyperparameters: ClassVar[Hyperparameters] = {
        "criterion": "mse",
        "maxshrink": 0.95,
        "patience": None,
        "grid": 100.0,
        "norm": 2.0,
    }
    criterion: str
    #: the range that was searched last, and what it depends on; None: the statistics have changed since
    _searched: SearchedRange | None = None
    _settings = (*PercentileObserver._settings, "_searched")

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        require(self, "criterion", self.criterion in CRITERIA, f"one of {', '.join(CRITERIA)}")
        require(self, "maxshrink", 0 <= self.maxshrink <= 1, "a value in [0, 1]")
        require(self, "patience", self.patience is None or self.patience > 0, "a value above 0, or None")
        require(self, "grid", self.grid > 0, "a value above 0")
        require(self, "norm", self.norm > 0, "a value above 0")

    @override
    def combine(self, measured: Sequence[torch.Tensor]) -> None:
        self._searched = None  # it holds the counts
        super().combine(measured)

    @override
    def reset(self, keep: Collection[str] = ()) -> None:
        super().reset(keep)
        self._searched = None

    @override
    def get_min_max(self) -> MinMaxTuple:
        """The range that the criterion chooses, ``(*Q,)`` each; where the observed range is not finite, that range.

        It is searched once for the same statistics and hyperparameters, and fused observers share the result, since
        q, k and v read one tensor.
        """
        require_statistics(self)
        depends_on = self._depends_on()
        searched = None
        for observer in [self, *self._fused_observers]:
            if type(observer) is not type(self) or observer._searched is None:
                continue
            if all(map(equal_values, observer._searched.depends_on, depends_on)):
                searched = observer._searched
                break
        if searched is None:
            low, high = self._search()
            searched = SearchedRange(depends_on, low, high)
        self._searched = searched
        return searched.low.clone(), searched.high.clone()

    def _depends_on(self) -> list[Any]:
        """All that the range depends on, to compare with an earlier search: statistics, format and hyperparameters."""
        hyperparameters = [getattr(self, name) for name in declared_hyperparameters(type(self))]
        number_format = vars(self.args).copy()
        return [self.counts, self.min_vals, self.max_vals, number_format, hyperparameters]

    def _search(self) -> MinMaxTuple:
        """Search the range by the criterion, ``(*Q,)`` each."""
        if self.criterion == "percentile":
            return super().get_min_max()
        if not self.is_finite and self.nonfinite_statistics():
            return self.min_vals, self.max_vals
        shape = self.min_vals.shape
        search = least_divergence if self.criterion == "entropy" else least_error
        low, high = search(self)
        return low.reshape(shape), high.reshape(shape)


class SearchedRange(NamedTuple):
    """A range, ``(*Q,)`` each, and the values of everything that it depends on; kept so that no search runs twice."""

    depends_on: list[Any]
    low: torch.Tensor
    high: torch.Tensor


def least_divergence(observer: CountingObserver) -> MinMaxTuple:
    """The ranges of the criterion ``entropy``: for each of S scales, the one that diverges least, ``(1, S)`` each.

    The divergence is that of the distribution of quantized values from the observed one.
    """
    smallest_values = observer.min_vals.flatten()
    largest_values = observer.max_vals.flatten()
    lows, highs = candidate_ranges(smallest_values, largest_values, _ENTROPY_FACTORS)  # (candidates, S) each
    divergences = []
    for index, (counts, smallest, largest) in enumerate(_scales_of(observer)):
        observed = support(counts, smallest, largest)
        scale_lows = lows[:, index]
        scale_highs = highs[:, index]
        divergences.append(candidate_divergences(observed, scale_lows, scale_highs, observer.args))
    comparable = torch.stack(divergences, 1).nan_to_num(torch.inf)
    best = comparable.argmin(0, keepdim=True)
    return lows.gather(0, best), highs.gather(0, best)


def least_error(observer: HistogramObserver) -> MinMaxTuple:
    """The ranges of the criterion ``mse``: for each of S scales, the one with the least sum of errors, ``(S,)`` each.

    The distinct values of a scale are searched as a row, each weighted by its count. The exact ends decide the
    candidates; they are added with the weight zero, because their bins are counted already. Values are divided by a
    power of two that makes the largest magnitude about 1, so that no power of an error leaves float32.
    """
    all_values = []
    all_counts = []
    for counts, smallest, largest in _scales_of(observer):
        observed = support(counts, smallest, largest)
        all_values.append(observed.values)
        all_counts.append(observed.counts)
    values = pad_sequence(all_values, batch_first=True)
    counts = pad_sequence(all_counts, batch_first=True)
    lows = observer.min_vals.flatten()
    highs = observer.max_vals.flatten()
    dtype = lows.dtype
    ends = torch.stack([lows, highs], 1).float()
    exponents = torch.frexp(ends.abs().amax(1, keepdim=True))[1]
    unit = exponents.clamp(-126, 126).float().exp2()
    smallest_values = ends[:, :1]
    values = torch.where(counts > 0, values, smallest_values)  # in place of padding
    rows = (torch.cat([values, ends], 1) / unit).to(dtype)
    importance = pad(counts.float(), (0, 2))
    search = options_of(observer).search_on(NumberGrid.of(observer.args))
    low, high = search_range(rows[None], search, importance=importance)
    unit = unit[:, 0]
    return (low * unit).to(dtype), (high * unit).to(dtype)
