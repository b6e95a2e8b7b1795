"""The observer ``lattice``, for weights that were quantized before: it finds the grid on which they already lie.

Calibration makes it for weights, if the scheme or the user's ``observers=`` names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationType
from typing_extensions import override

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.lattice import find_lattice
from lightning_obs.numerics.qparams import QParamsDict, can_be_signed
from lightning_obs.observers.mse import MemorylessMSEObserver
from lightning_obs.observers.observer import Hyperparameters, Observer
from lightning_obs.observers.statistic import Statistic

#: two shares of a weight's scales, in [0, 1]: those whose values all lie on a grid, and those whose values are stored
#: bit for bit
GridShares: TypeAlias = tuple[float, float]


def grid_text(shares: Mapping[str, GridShares]) -> str:
    """The line of a run's closing summary about grids. ``CalibrationResult.facts`` calls it for a run with ``lattice``.

    Args:
        shares: for each weight, by the name of its module, the observer's ``grid_shares``.

    >>> grid_text({"a": (1.0, 1.0), "b": (1.0, 1.0), "c": (0.25, 0.25)})
    '2 of 3 weights lie on a grid, stored exactly; of the other, 25 % of the scales'
    """
    whole = [exact for on_grid, exact in shares.values() if on_grid == 1]
    others = [on_grid for on_grid, _ in shares.values() if on_grid < 1]
    text = f"{len(whole)} of {len(shares)} weights lie on a grid"
    exact_weights = whole.count(1)
    if whole and exact_weights == len(whole):
        text += ", stored exactly"
    elif whole:
        text += f", {exact_weights} of them stored exactly and the rest up to the rounding of their dtype"
    if others:
        mean = sum(others) / len(others)
        text += f"; of the other{'s' if len(others) > 1 else ''}, {100 * mean:.3g} % of the scales"
    return text


@Observer.register("lattice")
class LatticeObserver(MemorylessMSEObserver):
    """For each scale the grid on which the weight's values lie; if they lie on no grid, ``memoryless_mse``'s range.

    For weights of quantization-aware training (Gemma's Q4_0) and for dequantized weights. Each of their values is
    ``scale * integer``, rounded to the dtype of the checkpoint, so it can be stored without a second rounding. The zero
    point of an asymmetric format is an integer, so 0 must be on the grid. Values with a minimum that was stored
    separately (GGUF's Q4_1) lie on such a grid only if the minimum is a multiple of the step.

    Observes ``(N, *Q, G)``. Ranges are ``(*Q,)`` in the units of the weight. ``steps`` are the steps of the grids,
    ``(*Q,)`` in the same units, 0 where there is no grid. ``exact`` is ``(*Q,)``: whether all values are stored bit for
    bit.

    Keyword Args:
        signed (bool): whether scales may be negative, in symmetric formats. A grid with the integers ``-7 ... 8`` needs
            a negative scale, as Q4_0 has where the largest value is positive. Default: True where the format allows it.
        maxshrink (float): where there is no grid, how much of the range may be given up, in [0, 1]. Default: 0.2.
        patience (int): where there is no grid, the search ends after this many candidates in a row without an
            improvement of any scale. Default: 5.
        grid (float): where there is no grid, number of candidates per unit of the factor on the range. Default: 100.
        norm (float): where there is no grid, exponent of the error. Default: 2.4.
        expand (float): where there is no grid, factor on the range before the search, at least 1. Default: 1.

    Raises:
        CalibrationError: the observed tensor is not a weight, or the format is not an integer format.

    Reference:
        The estimate of a Q4_0 grid from the weights of ggml-org/llama.cpp, pull request 24603.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (
        *MemorylessMSEObserver.statistics,
        Statistic("steps"),
        Statistic("exact"),
    )
    hyperparameters: ClassVar[Hyperparameters] = {"signed": True}
    steps: torch.Tensor
    exact: torch.Tensor

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        if base_name != "weight" or args.type != QuantizationType.INT:
            raise CalibrationError(
                "lattice finds the grid of weights in integers",
                got=f"{base_name}, {args.type}",
                remedy="observe this tensor with memoryless_mse.",
            )
        if not can_be_signed(base_name, args):
            # The class's default is True. A value of the user's is kept: the base class refuses True.
            # ``args.observer_kwargs`` is a dict: compressed-tensors refuses args with None there.
            observer_kwargs = {"signed": False, **args.observer_kwargs, **observer_kwargs}
        super().__init__(base_name, args, **observer_kwargs)

    @override
    def forward(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        """Flatten a weight, also one in blocks, and measure it by :meth:`measure`; finalize passes the weight."""
        return Observer.forward(self, value, g_idx)

    @override
    def measure(self, observed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The statistics of a flattened weight, for :meth:`forward`: both ends of the ranges, ``steps``, ``exact``."""
        step, lowest, exact = find_lattice(observed, self.args, self.signed)
        has_grid = step != 0
        low = lowest * step
        high = (lowest + 2**self.args.num_bits - 1) * step
        if not self.signed and self.args.symmetric:  # a positive scale comes from a range with ends of equal magnitude
            high = (high - low) / 2
            low = -high
        range_low = torch.minimum(low, high)
        range_high = torch.maximum(low, high)
        if not bool(has_grid.all()):
            searched_low, searched_high = self.search(observed)
            range_low = torch.where(has_grid, range_low, searched_low)
            range_high = torch.where(has_grid, range_high, searched_high)
        return range_low, range_high, step, exact

    @property
    def grid_shares(self) -> GridShares:
        """The share of the weight's scales whose values lie on a grid, and the share stored exactly.

        Values that are all zero lie on a grid. Finalize reads it for the closing summary.
        """
        on_grid = self.exact | (self.steps != 0)
        return float(on_grid.float().mean()), float(self.exact.float().mean())

    @override
    def get_qparams(self) -> QParamsDict:
        """The qparams of the range, with the grid's step as the scale, which the range gives only up to rounding.

        If the members of a fused set share one range, the scale is that of the range. Finalize calls it at the end.
        """
        qparams = super().get_qparams()
        if self._joins_ranges:
            return qparams
        scale = qparams["scale"]
        steps = self.steps.to(scale.dtype).view(scale.shape)
        return {**qparams, "scale": torch.where(steps == 0, scale, steps)}
