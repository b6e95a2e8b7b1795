"""The helper observer that measures how a module's inputs change once the modules before it are quantized.

For each input x of the full-precision model and the same input x~ of the quantized model so far, it sums
``(x - x~) x~^T``. With this sum, a rounding on quantized inputs makes up for a share of the difference
(:func:`.corrected_target`).
"""

from __future__ import annotations

from typing import ClassVar

import torch

from lightning_obs.numerics.moments import cross_products
from lightning_obs.observers import Observer
from lightning_obs.observers.statistic import Statistic


class InputErrors(Observer):
    """Gathers the errors of the inputs of a weight's module, from pairs of inputs.

    ``Observation.of_model`` makes one for each weight whose rounding has a correction, under the base name
    ``INPUT_ERRORS``. :class:`.PairedInputs` gives it the pairs, and ``make_roundings`` reads ``input_errors``: the sum
    of ``(x - x~) x~^T`` over tokens, ``(C, C)`` in float32.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (Statistic("input_errors", "sum", of_inputs=True),)
    #: the fields of ``args`` that measure_inputs depends on: none, so all such observers share what they measure
    _inputs_by: ClassVar[tuple[str, ...]] = ()

    def measure_inputs(self, value: torch.Tensor) -> tuple[torch.Tensor]:
        """The sum of ``(x - x~) x~^T`` over the tokens of one pair.

        ``observe_inputs_shared`` (``observers/observer.py``) calls this for each call of the module in the quantized
        run, and adds the result to the sum so far.

        Args:
            value: ``(2, ..., C)``: x, then x~.
        """
        exact, quantized = value.float()
        return (cross_products(exact - quantized, quantized),)
