"""Observers whose range is the smallest and the largest value: of the last tensor, of all tensors, or averaged.

Calibration makes them by name, for weights and activations: as defaults, or as the scheme or the user's ``observers=``
says. The moving average here also serves ``mse``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from typing_extensions import override

from lightning_obs.numerics.qparams import observed_range
from lightning_obs.observers.observer import Hyperparameters, Observer, require
from lightning_obs.observers.statistic import Statistic


@Observer.register("memoryless_minmax")
class MemorylessMinMaxObserver(Observer):
    """The smallest and the largest value of the last observed tensor. The default for weights, which are observed once.

    Observes ``(N, *Q, G)``: N observations, Q the shape of the scales, G values per scale. Ranges are ``(*Q,)``.

    Keyword Args:
        signed (bool): whether the scale is negative where the range reaches farther above zero than below, for weights
            in symmetric integer formats. The end of larger magnitude then gets the lowest code, which has no positive
            counterpart. Default: False.
    """

    #: "keep": the newest tensor's range; a range that several ranks have is taken from the lowest of them
    statistics: ClassVar[tuple[Statistic, ...]] = (
        Statistic("min_vals", "keep"),
        Statistic("max_vals", "keep"),
    )
    hyperparameters: ClassVar[Hyperparameters] = {"signed": False}

    @override
    def measure(self, observed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The smallest and the largest value of a flattened tensor; the base class calls it for each tensor."""
        return observed_range(observed)

    def measure_segments(self, observed: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The ranges of several tensors whose observations are concatenated, ``(tensors, *Q)`` each.

        ``observe_segments`` calls it for the experts of a layer (:mod:`.segments`).

        Args:
            observed: the concatenated observations, ``(N, *Q, G)``.
            lengths: the number of observations of each tensor, with the sum N; on the device of ``observed``.
        """
        row_lows, row_highs = torch.aminmax(observed, dim=-1)
        # unsafe=False would make the host wait for the lengths, to check their sum.
        low = torch.segment_reduce(row_lows, "min", lengths=lengths, unsafe=True)
        high = torch.segment_reduce(row_highs, "max", lengths=lengths, unsafe=True)
        return low, high


@Observer.register("static_minmax")
class StaticMinMaxObserver(MemorylessMinMaxObserver):
    """The smallest and the largest of all observed values: the same for any batches, in any order, on any ranks.

    Observes ``(N, *Q, G)``; ranges are ``(*Q,)``. It has the hyperparameters of ``memoryless_minmax``.
    """

    #: the least of all lows and the largest of all highs, over batches and ranks
    statistics: ClassVar[tuple[Statistic, ...]] = (
        Statistic("min_vals", "min"),
        Statistic("max_vals", "max"),
    )
    #: ``min_vals`` and ``max_vals`` are the extremes of all observed values; finalize reads this and reports them
    keeps_extremes = True
    hyperparameters: ClassVar[Hyperparameters] = {}


class MovingAverageObserver(Observer):
    """An exponential moving average of each tensor's range. A subclass writes ``measure``: the range of one tensor.

    ``range <- (1 - c) * range + c * range_of_this_tensor``, starting at the first tensor's range. By definition it
    depends on the order of the batches and on how they are cut; ``static_minmax`` does not.

    Keyword Args:
        averaging_constant (float): c, the weight of the newest tensor, in (0, 1]. 1 keeps the newest range only.
            Default: 0.01.

    Raises:
        CalibrationError: ``averaging_constant`` outside (0, 1].

    Reference:
        Jacob et al., Quantization and Training of Neural Networks, 2018, arXiv:1712.05877, section 3.1.

    Examples:
        >>> class Spread(MovingAverageObserver):
        ...     def measure(self, observed):
        ...         return -observed.std().reshape(1), observed.std().reshape(1)
        >>> observer = Spread("input", QuantizationArgs(), averaging_constant=0.5)
        >>> observer(torch.tensor([[0.0, 2.0]]))(torch.tensor([[0.0, 4.0]])).get_min_max()
        (tensor([-2.1213]), tensor([2.1213]))
    """

    # Ranks see different tensors; their averages are reduced to the mean.
    statistics: ClassVar[tuple[Statistic, ...]] = (Statistic("min_vals", "mean"), Statistic("max_vals", "mean"))
    hyperparameters: ClassVar[Hyperparameters] = {"averaging_constant": 0.01}
    averaging_constant: float

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        require(self, "averaging_constant", 0 < self.averaging_constant <= 1, "a value in (0, 1]")

    @override
    def combine(self, measured: Sequence[torch.Tensor]) -> None:
        """Average a tensor's range with the range so far; the base class calls it for each tensor."""
        low, high, *further = measured  # further: statistics that a subclass declares after the range; not averaged
        if self.has_statistics and self.averaging_constant != 1:
            c = self.averaging_constant
            low = self.min_vals * (1 - c) + low * c
            high = self.max_vals * (1 - c) + high * c
        super().combine((low, high, *further))


@Observer.register("minmax")
class MinMaxObserver(MovingAverageObserver, MemorylessMinMaxObserver):
    """A moving average of each tensor's smallest and largest value. The default for activations.

    Keyword Args:
        averaging_constant (float): the weight of the newest tensor, in (0, 1]. 1 keeps the newest range only. Default:
            0.01.
        signed (bool): whether scales of weights may be negative, as in ``memoryless_minmax``. Default: False.

    Raises:
        CalibrationError: ``averaging_constant`` outside (0, 1].
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (
        Statistic("min_vals", "mean"),
        Statistic("max_vals", "mean"),
    )
    hyperparameters: ClassVar[Hyperparameters] = {}
