"""How the inputs of a module differ once the modules before it are quantized: sums of ``(x - x~) x~^T``.

A rounding on quantized inputs makes up for a share of the difference (:func:`.corrected_target`).
"""

from __future__ import annotations

from typing import ClassVar

import torch

from lightning_obs.numerics.moments import cross_products
from lightning_obs.observers import Observer
from lightning_obs.observers.statistic import Statistic


class InputErrors(Observer):
    """Gathers how the inputs of a weight's module differ between two runs of the model.

    ``input_errors`` is the sum of ``(x - x~) x~^T`` over tokens, ``(C, C)`` in float32, x in full precision and x~ of
    the quantized model so far. It observes pairs ``(2, ..., C)``: x, then x~.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (Statistic("input_errors", "sum", of_inputs=True),)
    _inputs_by: ClassVar[tuple[str, ...]] = ()

    def measure_inputs(self, value: torch.Tensor) -> tuple[torch.Tensor]:
        """The sum of ``(x - x~) x~^T`` of a pair."""
        exact, quantized = value.float()
        return (cross_products(exact - quantized, quantized),)
