"""How far quantized tensors are from the tensors themselves, for all layers at once.

A model has hundreds of layers, and sums for each by itself would make ranks talk hundreds of times. So the sums of all
layers are a few tensors whose first dimension is the layer, and ranks add theirs in three collectives.
:mod:`lightning_obs.numerics.quantization_error` defines them. Each number of a layer is a function of these sums, a row
of :data:`NUMBERS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from lightning_obs.numerics.many_tensors import to_host
from lightning_obs.numerics.quantization_error import CODES, SUMS, ErrorSums
from lightning_obs.ranks.collectives import Collectives

#: errors that are kept before they are added up, 2 KiB each
_PENDING = 4096


@dataclass(frozen=True)
class TensorError:
    """The effect of rounding on one tensor; None: unknown.

    :meth:`LayerSums.errors` makes one for each tensor that was measured. Rows of the page have each field as
    ``input_<field>``, ``weight_<field>`` and ``output_<field>``.

    Attributes:
        sqnr, mse, cosine, clipped, bits: the :data:`NUMBERS` of these names.
        low, high: the smallest and the largest value before rounding, of all batches and ranks.
    """

    sqnr: float | None = None
    mse: float | None = None
    cosine: float | None = None
    clipped: float | None = None
    low: float | None = None
    high: float | None = None
    bits: float | None = None


class LayerSums:
    """Sums of the errors of many layers, and the numbers that follow from them.

    Attributes:
        sums: ``(layers, 7)`` in float64, see :data:`~lightning_obs.numerics.quantization_error.SUMS`.
        codes: how often each code was taken, ``(layers, 256)`` in int64.
        low, high: extremes ``(layers,)`` in float64; infinite where nothing was seen.

    Examples:
        >>> from compressed_tensors.quantization import QuantizationArgs
        >>> from lightning_obs.numerics.quantization_error import grid_error
        >>> layers = LayerSums(["fc"])
        >>> layers.update("fc", grid_error(torch.tensor([[1.0, -2.0]]), torch.tensor([1.0]), None, QuantizationArgs(),
        ...                                "input"))
        >>> layers.compute()["cosine"], layers.compute()["bits"]
        (tensor([1.], dtype=torch.float64), tensor([1.]))
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._rows = {name: row for row, name in enumerate(names)}
        count = len(self._rows)
        self._pending: list[tuple[int, ErrorSums]] = []  # not added yet, so that one transfer brings them to the host
        self.sums = torch.zeros(count, len(SUMS), dtype=torch.float64)
        self.codes = torch.zeros(count, CODES, dtype=torch.int64)
        self.low = torch.full((count,), math.inf, dtype=torch.float64)
        self.high = -self.low

    def update(self, name: str, error: ErrorSums) -> None:
        """Add the error of a tensor of one layer."""
        self._pending.append((self._rows[name], error))
        if len(self._pending) >= _PENDING:
            self._add_up()

    def _add_up(self) -> None:
        """Add the pending errors to the sums."""
        tensors: list[torch.Tensor] = []
        for _, error in self._pending:
            tensors += error
        on_host = iter(to_host(tensors))
        for row, pending in self._pending:
            error = ErrorSums(*islice(on_host, len(pending)))
            self.sums[row] += error.sums
            self.low[row] = torch.fmin(self.low[row], error.low)
            self.high[row] = torch.fmax(self.high[row], error.high)
            self.codes[row] += error.codes
        self._pending.clear()

    def reduce_ranks(self, collectives: Collectives) -> None:
        """Add the other ranks' sums, in three collectives; every rank must call this. It writes in place."""
        self._add_up()
        for sums in (self.sums, self.codes):
            total = collectives.reduce(sums.flatten().to(collectives.device), "sum")
            sums.copy_(total.view_as(sums))
        ends = torch.cat([self.low, -self.high])
        least_ends = collectives.reduce(ends.to(collectives.device), "min")
        low, high = least_ends.chunk(2)
        self.low.copy_(low)
        self.high.copy_(-high)

    def of(self, name: str) -> torch.Tensor:
        """One of the sums, ``(layers,)``."""
        return self.sums[:, SUMS.index(name)]

    def compute(self) -> dict[str, torch.Tensor]:
        """Each of :data:`NUMBERS`, and ``low`` and ``high``, ``(layers,)``; NaN where it is not known."""
        self._add_up()
        numbers = {name: number(self) for name, number in NUMBERS.items()}
        numbers["low"] = self.low.where(self.low.isfinite(), torch.nan)
        numbers["high"] = self.high.where(self.high.isfinite(), torch.nan)
        return numbers

    def errors(self) -> dict[str, TensorError]:
        """The numbers of each layer that ran, by name."""
        columns = {key: values.tolist() for key, values in self.compute().items()}
        has_run = (self.low.isfinite() | (self.of("values") > 0)).tolist()
        errors: dict[str, TensorError] = {}
        for name, row in self._rows.items():
            if has_run[row]:
                numbers = {}
                for key, column in columns.items():
                    if not math.isnan(column[row]):
                        numbers[key] = column[row]
                errors[name] = TensorError(**numbers)
        return errors


def sqnr(layers: LayerSums) -> torch.Tensor:
    """Signal-to-quantization-noise ratio [dB], mean over tokens; a weight, and values that were counted, are one row.

    ``10 log10(sum x^2 / sum (q - x)^2)`` of each row. A bit is worth about 6 dB.
    """
    return layers.of("decibels") / layers.of("rows")


def mean_squared_error(layers: LayerSums) -> torch.Tensor:
    """Mean of the squared errors, in the units of the tensor squared."""
    return layers.of("noise") / layers.of("values")


def cosine(layers: LayerSums) -> torch.Tensor:
    """Cosine similarity of a tensor and its quantized form, as vectors of all their values.

    The quantized form is x + e, so its sums follow from the sums of x and e.
    """
    signal = layers.of("signal")
    cross = layers.of("cross")
    quantized_signal = signal + 2 * cross + layers.of("noise")
    return (signal + cross) / (signal * quantized_signal).sqrt()


def clipped_share(layers: LayerSums) -> torch.Tensor:
    """Share of the values that lie outside the range of their scale, by more than half a step [%]."""
    return 100 * layers.of("clipped") / layers.of("values")


def bits_in_use(layers: LayerSums) -> torch.Tensor:
    """Entropy of the codes [bit]: how many of the format's bits carry information. NaN where codes are not known.

    A tensor whose values spread evenly over the grid uses all bits; one with few values far out uses few.
    """
    share = layers.codes / layers.codes.sum(1, keepdim=True)
    return torch.special.entr(share).sum(1) / math.log(2)


NUMBERS: dict[str, Callable[[LayerSums], torch.Tensor]] = {
    "sqnr": sqnr,
    "mse": mean_squared_error,
    "cosine": cosine,
    "clipped": clipped_share,
    "bits": bits_in_use,
}
