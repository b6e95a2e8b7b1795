"""Observers that count every value and choose the range at the end, from the counts: ``histogram``, ``percentile``.

Batches and ranks are combined by adding integers, so the range has the same bits for any batches, in any order, on any
ranks. :mod:`lightning_obs.numerics.histogram` counts the values, and says how exact the counts are. Calibration makes
these observers for activations and attention states, if the scheme or the user's ``observers=`` names them.
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

#: criteria of the observer ``histogram``
CRITERIA = ("mse", "percentile", "entropy")
#: strategies with so few scales that each can have a histogram
_STRATEGIES = (QuantizationStrategy.TENSOR, QuantizationStrategy.ATTN_HEAD)
#: factors on the range that ``entropy`` tries: from 1 to 1/16 in steps of 2.2 %. Migacz tries the first 128 of 2,048
#: bins (1/16 of the range) up to all bins.
_ENTROPY_FACTORS = [2 ** (-step / 32) for step in range(129)]


class CountingObserver(Observer):
    """Counts every value by its bfloat16 bit pattern, and keeps the exact smallest and largest value as well.

    Observes ``(N, *Q, G)``, where Q is ``(1,)`` for one scale per tensor, or ``(H, 1, 1)`` for one per attention head.
    ``counts`` is ``(*Q, 65536)`` in int64, 512 KiB per scale; ``min_vals`` and ``max_vals`` are ``(*Q,)``. A subclass
    writes ``get_min_max``.

    Raises:
        CalibrationError: another strategy than tensor and attn_head; it would need too many histograms.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (
        Statistic("counts", "sum"),
        Statistic("min_vals", "min"),
        Statistic("max_vals", "max"),
    )
    keeps_extremes = True  # finalize reads the observed extremes from this observer: inputs need no helper for them

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
        """Count the values of one observed tensor; the base class calls it for each batch and adds up the counts."""
        scales = observed.shape[1:-1]
        counts, low, high = count_values(observed.flatten(1, -2))
        counts = counts.unflatten(0, scales)
        return Histogram(counts, low.reshape(scales), high.reshape(scales))

    @override
    def nonfinite_statistics(self) -> str | None:
        """A text with the numbers of NaN and infinite values, for an error; None if there are none.

        Called before ranks reduce statistics, and before qparams are computed. The base class checks the range, whose
        NaN a reduction over ranks may lose. The counts are integers, so the number of NaN is read from the bins of NaN.
        """
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
        """The observed values and how often each occurred, for the report's histograms of inputs.

        Read by ``Observation.input_counts`` after calibration. None if nothing was observed, or if there is a histogram
        for each attention head.

        >>> observer = Observer.load_from_registry("percentile", base_name="input", args=QuantizationArgs())
        >>> observer(torch.tensor([1.0, 2.0, 2.0])).counted_values().counts
        tensor([1, 2])
        """
        if not self.has_statistics or self.min_vals.numel() != 1:  # a histogram for each head
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
    """The range that cuts off the same number of values at either end, chosen by a percentile of all observed values.

    The upper end is the smallest value with at least ``percentile`` percent of all values at or below it; the lower end
    is the largest value with as many at or above it.

    The result does not depend on how the data are divided into batches and ranks. It is exact for bfloat16 values;
    float32 and float16 values are rounded to bfloat16 first, unless no value is cut off: then the range is from the
    exact smallest to the exact largest value.

    On language models this can be a catastrophe: a few inputs carry values thousands of times larger than the rest,
    and the model depends on them (docs/evidence/int8.md has the numbers).

    Observes ``(N, *Q, G)``: one scale per tensor or per attention head. Ranges are ``(*Q,)``.

    Keyword Args:
        percentile (float): in percent, in (50, 100]. 99.9 cuts one value in a thousand off each end. Default: 99.99.

    Raises:
        CalibrationError: ``percentile`` outside (50, 100], or a strategy other than tensor and attn_head.

    Reference:
        Wu et al., Integer Quantization for Deep Learning Inference, 2020, arXiv:2004.09602, section 3 (it takes the
        percentile of magnitudes, which is the same for a symmetric format and symmetric data).
    """

    hyperparameters: ClassVar[Hyperparameters] = {"percentile": 99.99}
    percentile: float

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        expected = "a value in percent, in (50, 100]; 99.99 cuts one value in ten thousand off each end"
        require(self, "percentile", 50 < self.percentile <= 100, expected)

    @override
    def get_min_max(self) -> MinMaxTuple:
        """The range, ``(*Q,)`` each; the base class asks for it when qparams are computed."""
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
    """For each scale: its counts ``(65536,)``, and its smallest and largest value, scalars."""
    counts = observer.counts.flatten(0, -2)
    smallest_values = observer.min_vals.flatten()
    largest_values = observer.max_vals.flatten()
    return zip(counts, smallest_values, largest_values, strict=True)


@Observer.register("histogram")
class HistogramObserver(PercentileObserver):
    """The range that is best by a criterion for all observed values.

    - ``mse``: of the ranges ``(1 - i / grid) * range``, i below ``maxshrink * grid``, the one with the least
      ``sum |quantized(x) - x| ** norm``; of equal errors, the first. By default it tries all of them down to about a
      twentieth of the range, because a few far outliers otherwise end the search too early; on counts that is cheap.
    - ``percentile``: the range of the observer ``percentile``.
    - ``entropy``: of the ranges ``2 ** (-i / 32) * range``, down to a sixteenth, the one with the least
      Kullback-Leibler divergence of the quantized distribution from the observed one.

    Observes ``(N, *Q, G)``: one scale per tensor or per attention head. Ranges are ``(*Q,)``.

    Keyword Args:
        criterion (str): mse, percentile or entropy. Default: mse.
        percentile (float): for ``percentile``: in percent, in (50, 100]. Default: 99.99.
        maxshrink (float): for ``mse``: the largest share by which the range may shrink, in [0, 1]. Default: 0.95.
        patience (int | None): for ``mse``: the search ends after this many candidates in a row without an improvement.
            Default: None, all candidates are visited.
        grid (float): for ``mse``: number of candidates per unit of the factor on the range. Default: 100.
        norm (float): for ``mse``: exponent of the error. Default: 2.

    Raises:
        CalibrationError: a hyperparameter outside its limits, or a strategy other than tensor and attn_head.

    Reference:
        Migacz, 8-bit Inference with TensorRT, GTC 2017 (entropy).
    """

    # Declared again, because this class overrides combine: otherwise Statistics.__init_subclass__ takes the inherited
    # declarations for incomplete.
    statistics: ClassVar[tuple[Statistic, ...]] = PercentileObserver.statistics
    keeps_extremes = True
    hyperparameters: ClassVar[Hyperparameters] = {
        "criterion": "mse",
        "maxshrink": 0.95,
        "patience": None,
        "grid": 100.0,
        "norm": 2.0,
    }
    criterion: str
    #: the result of the last search, with all that it depends on; None: no search since the statistics changed
    _searched: SearchedRange | None = None
    #: names of attributes that are no statistics
    _settings = (*PercentileObserver._settings, "_searched")

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        require(self, "criterion", self.criterion in CRITERIA, f"one of {', '.join(CRITERIA)}")
        require(self, "maxshrink", 0 <= self.maxshrink <= 1, "a value in [0, 1]")
        has_patience = isinstance(self.patience, int) and self.patience > 0
        require(self, "patience", self.patience is None or has_patience, "a whole number above 0, or None")
        require(self, "grid", self.grid > 0, "a value above 0")
        require(self, "norm", self.norm > 0, "a value above 0")

    @override
    def combine(self, measured: Sequence[torch.Tensor]) -> None:
        """Add a batch's counts, and forget the last search; the base class calls it for each batch."""
        self._searched = None  # it would keep the earlier counts in memory
        super().combine(measured)

    @override
    def reset(self, keep: Collection[str] = ()) -> None:
        """Delete the statistics, as the base class does, and the last search.

        Calibration calls it when an observation starts over.
        """
        super().reset(keep)
        self._searched = None

    @override
    def get_min_max(self) -> MinMaxTuple:
        """The range that is best by the criterion, ``(*Q,)`` each.

        If observed values are not finite, ``mse`` and ``entropy`` search nothing, and the range is the observed one.
        The base class asks for it when qparams are computed, finalize for the report, and members of a fused set for a
        common scale. A search runs once for the same statistics and hyperparameters: observers of a fused set (q, k and
        v read one tensor) share its result.
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
        """What the range depends on (statistics, format, hyperparameters), to compare with an earlier search."""
        hyperparameters = [getattr(self, name) for name in declared_hyperparameters(type(self))]
        number_format = vars(self.args).copy()
        return [self.counts, self.min_vals, self.max_vals, number_format, hyperparameters]

    def _search(self) -> MinMaxTuple:
        """Search the range that is best by the criterion, ``(*Q,)`` each."""
        if self.criterion == "percentile":
            return super().get_min_max()
        # After the check over ranks (is_finite), the statistics need not be checked again.
        are_finite = self.is_finite or not self.nonfinite_statistics()
        if not are_finite:
            return self.min_vals, self.max_vals
        shape = self.min_vals.shape
        search = least_divergence if self.criterion == "entropy" else least_error
        low, high = search(self)
        return low.reshape(shape), high.reshape(shape)


class SearchedRange(NamedTuple):
    """The result of a search, ``low`` and ``high`` ``(*Q,)``, and the values of everything that it depends on.

    :class:`HistogramObserver` keeps one, so that no search runs twice.
    """

    depends_on: list[Any]
    low: torch.Tensor
    high: torch.Tensor


def least_divergence(observer: CountingObserver) -> MinMaxTuple:
    """The ranges by the criterion ``entropy``: for each of S scales, that with the least divergence, ``(1, S)`` each.

    The divergence is that of the distribution of quantized values from the observed distribution.
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
    """The ranges by the criterion ``mse``: for each of S scales, that with the least sum of errors, ``(S,)`` each.

    The distinct values of a scale are searched as a row, each weighed by its count. The exact ends of the range are
    added to the row, because the candidates are multiples of them; their weight is zero, because their bins are counted
    already. Values are divided by a power of two that makes the largest magnitude about 1, so that no power of an error
    exceeds float32.
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
