"""How far quantized tensors are from the tensors themselves: torchmetrics over all layers at once.

A model has hundreds of layers, and a metric for each would make ranks talk hundreds of times. So one metric holds the
sums of all layers in a few tensors whose first dimension is the layer, and ranks are merged in as many collectives as
there are such tensors. What is summed: :mod:`lightning_obs.numerics.quantization_error`.

Metrics of one collection share their states (torchmetrics' compute groups), so each tensor is looked at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_obs.numerics.quantization_error import CODES, SUMS, ErrorSums
from lightning_obs.ranks.collectives import Collectives


class LayerMetric(Metric):
    """A number for each of many layers, from sums that :meth:`update` adds to.

    Args:
        names: of the layers.

    States: ``sums`` ``(layers, 7)`` in float64 and ``codes`` ``(layers, 256)`` in int64 are added over ranks, ``low``
    and ``high`` ``(layers,)`` are extremes. ``compute()`` gives ``(layers,)``; NaN where nothing was seen.
    """

    full_state_update = False
    sums: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    codes: torch.Tensor
    unit: str = ""

    def __init__(self, names: Sequence[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.names = list(names)
        self._at = {name: at for at, name in enumerate(self.names)}
        many = len(self.names)
        self.add_state("sums", torch.zeros(many, len(SUMS), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("low", torch.full((many,), math.inf, dtype=torch.float64), dist_reduce_fx="min")
        self.add_state("high", torch.full((many,), -math.inf, dtype=torch.float64), dist_reduce_fx="max")
        self.add_state("codes", torch.zeros(many, CODES, dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, name: str, error: ErrorSums) -> None:
        """Add what a tensor of one layer lost.

        Args:
            name: of the layer.
            error: from ``grid_error``, ``counted_error`` or ``difference_error``.
        """
        at = self._at[name]
        self.sums[at] += error.sums.to(self.sums.device)
        self.codes[at] += error.codes.to(self.codes.device)
        self.low[at] = min(float(self.low[at]), error.low)
        self.high[at] = max(float(self.high[at]), error.high)

    def merge_ranks(self, collectives: Collectives) -> None:
        """Add the other ranks' sums, in three collectives; every rank must call this. It writes in place."""
        for state in (self.sums, self.codes):
            state.copy_(collectives.reduce(state.flatten().to(collectives.device), "sum").view_as(state))
        ends = torch.cat([self.low, -self.high]).to(collectives.device)
        low, high = collectives.reduce(ends, "min").chunk(2)
        self.low.copy_(low)
        self.high.copy_(-high)
        self._update_count = 1  # torchmetrics warns of a rank that had none of the layers

    @property
    def seen(self) -> torch.Tensor:
        """Of which layers there was anything, ``(layers,)``."""
        return self.low.isfinite() | (self._sum("values") > 0)

    def _sum(self, name: str) -> torch.Tensor:
        """One of the sums, ``(layers,)``."""
        return self.sums[:, SUMS.index(name)]

    @override
    def plot(self, val: torch.Tensor | None = None, ax: Any = None) -> tuple[Any, Any]:
        """All layers in their order, by matplotlib: ``(figure, axis)``."""
        from matplotlib.figure import Figure

        values = self.compute() if val is None else val
        if ax is None:
            ax = Figure(figsize=(8, 3), layout="constrained").subplots()
        ax.plot(values.reshape(len(self.names), -1).cpu().numpy(), ".", markersize=4)
        ax.set(xlabel="layer", ylabel=f"{type(self).__name__} {f'[{self.unit}]' if self.unit else ''}".strip())
        ax.grid(alpha=0.3)
        return ax.figure, ax


class SQNR(LayerMetric):
    """Signal-to-quantization-noise ratio [dB], mean over tokens; a weight, and values that were counted, are one row.

    ``10 log10(sum x^2 / sum (q - x)^2)`` of each row. Six dB are a bit.
    """

    higher_is_better = True
    unit = "dB"

    @override
    def compute(self) -> torch.Tensor:
        """``(layers,)``."""
        return self._sum("decibels") / self._sum("rows")


class QuantizationMSE(LayerMetric):
    """Mean of the squared errors, in the units of the tensor squared."""

    higher_is_better = False

    @override
    def compute(self) -> torch.Tensor:
        """``(layers,)``."""
        return self._sum("noise") / self._sum("values")


class QuantizationCosine(LayerMetric):
    """Cosine similarity of a tensor and its quantized form, as vectors of all their values."""

    higher_is_better = True

    @override
    def compute(self) -> torch.Tensor:
        """``(layers,)``; the quantized form is x + e, so its sums follow from those of x and e."""
        signal, noise, cross = (self._sum(name) for name in ("signal", "noise", "cross"))
        return (signal + cross) / (signal * (signal + 2 * cross + noise)).sqrt()


class ClippedShare(LayerMetric):
    """Share of the values that lie outside of what their scale can represent, by more than half a step [%]."""

    higher_is_better = False
    unit = "%"

    @override
    def compute(self) -> torch.Tensor:
        """``(layers,)``."""
        return 100 * self._sum("clipped") / self._sum("values")


class ValueRange(LayerMetric):
    """Smallest and largest value."""

    @override
    def compute(self) -> torch.Tensor:
        """``(layers, 2)``."""
        ends = torch.stack([self.low, self.high], dim=1)
        return ends.where(ends.isfinite(), torch.nan)


class GridUse(LayerMetric):
    """Entropy of the codes [bit]: how many of the format's bits carry information. NaN where codes are not known.

    A tensor whose values spread evenly over the grid uses all bits; one with few values far out uses few.
    """

    higher_is_better = True
    unit = "bit"

    @override
    def compute(self) -> torch.Tensor:
        """``(layers,)``."""
        share = self.codes / self.codes.sum(1, keepdim=True)
        return torch.special.entr(share).sum(1) / math.log(2)


def layer_metrics(names: Sequence[str], **kwargs: Any) -> MetricCollection:
    """All of them, over shared states: ``update(name, error)``, ``compute() -> {"sqnr": (layers,), ...}``.

    Args:
        names: of the layers.
        **kwargs: of ``torchmetrics.Metric``, such as ``sync_on_compute``.

    Examples:
        >>> from compressed_tensors.quantization import QuantizationArgs
        >>> from lightning_obs.numerics.quantization_error import grid_error
        >>> metrics = layer_metrics(["fc"])
        >>> metrics.update("fc", grid_error(torch.tensor([[1.0, -2.0]]), torch.tensor([1.0]), None, QuantizationArgs(),
        ...                                 "input"))
        >>> metrics.compute()["cosine"], metrics.compute()["bits"]
        (tensor(1., dtype=torch.float64), tensor(1.))
    """
    kinds = {
        "sqnr": SQNR,
        "mse": QuantizationMSE,
        "cosine": QuantizationCosine,
        "clipped": ClippedShare,
        "range": ValueRange,
        "bits": GridUse,
    }
    every = {name: kind(names, **kwargs) for name, kind in kinds.items()}
    # Said, not found out: the same update, the same states.
    return MetricCollection(every, compute_groups=[list(every)])


def leader(metrics: MetricCollection) -> LayerMetric:
    """A metric that holds the states that all of :func:`layer_metrics` share, not copies of them."""
    first = next(iter(metrics.values(copy_state=False)))
    assert isinstance(first, LayerMetric)
    return first
