"""Round weights by the Hessians of their inputs, after their scales are chosen: not always to the nearest number.

A weight is rounded on the rank that observed it: roundings are shared out over ranks as ranges are. Each is an observer
whose statistic is the rounded weight. Every rank ends with all of them, a byte for each element of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from typing_extensions import override

from lightning_obs.calibration.observation import GRADIENTS, HESSIAN, INPUT_ERRORS
from lightning_obs.errors import name_list, warn
from lightning_obs.numerics.rounding import corrected_target, round_by_hessian
from lightning_obs.numerics.rounding_options import RoundingOptions
from lightning_obs.observers import Key, Observer
from lightning_obs.observers.statistic import Statistic, observing


@dataclass(frozen=True)
class GatheredProducts:
    """What data has told of a module, by which its weight is rounded.

    Attributes:
        hessian: ``sum x x^T`` of the module's inputs, ``(C, C)``.
        output_hessian: ``sum |x|^2 g g^T`` of the gradients at its outputs, ``(R, R)``; None: it was not gathered, and
            rows are rounded one by one.
        input_errors: ``sum (x - x~) x~^T`` of inputs x in full precision and quantized inputs x~, by which ``hessian``
            was gathered, ``(C, C)``; None: the weight itself is rounded, not a corrected one.
    """

    hessian: torch.Tensor
    output_hessian: torch.Tensor | None = None
    input_errors: torch.Tensor | None = None


class WeightRounding(Observer):
    """Rounds one weight, with its scales as they are stored.

    Args:
        args: say how the weight is quantized, and how to round it.
        qparams: ``{"weight_scale": tensor, ...}``.
        products: of the module.

    Attributes:
        rounded: the integers, ``(R, C)``, after the weight was observed.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (Statistic("rounded"),)
    rounded: torch.Tensor

    def __init__(
        self,
        args: QuantizationArgs,
        qparams: Mapping[str, torch.Tensor],
        products: GatheredProducts,
    ) -> None:
        super().__init__("weight", args)
        self._qparams = {name.removeprefix("weight_"): value for name, value in qparams.items()}
        self._products = products

    @override
    def forward(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        qparams: Any = self._qparams
        options = self.rounding or RoundingOptions()
        with observing(self):
            self.rounded = round_by_hessian(
                self._target(value, options),
                qparams,
                self.args,
                self._products.hessian,
                self._products.output_hessian,
                act_order=options.act_order,
                damping=options.damping,
            )
        return self

    def _target(self, weight: torch.Tensor, options: RoundingOptions) -> torch.Tensor:
        """The matrix that is rounded: the weight, or one that makes up for a share of the errors of its inputs."""
        products = self._products
        if products.input_errors is None or not options.correction:
            return weight
        return corrected_target(
            weight, products.hessian, products.input_errors, damping=options.damping, share=options.correction
        )


def make_roundings(
    observers: Mapping[Key, Observer],
    data_observers: Mapping[Key, Observer],
    qparams: Mapping[str, dict[str, torch.Tensor]],
) -> dict[Key, WeightRounding]:
    """A rounding for each weight that is to be rounded; a warning names the weights that have no Hessian.

    Args:
        observers: of weights; one that keeps a Hessian of inputs gives it.
        data_observers: among them the helpers that gather Hessians for the other weights.
        qparams: ``{"layer": {"weight_scale": tensor}}``, as they are stored.
    """
    roundings: dict[Key, WeightRounding] = {}
    without_inputs = []
    for key, observer in observers.items():
        if observer.rounding is None:
            continue
        name, _ = key
        hessian_observer = data_observers.get((name, HESSIAN), observer)
        hessian = getattr(hessian_observer, "input_hessian", None)
        if hessian is None:
            without_inputs.append(name)
            continue
        output_hessian = getattr(data_observers.get((name, GRADIENTS)), "input_hessian", None)
        input_errors = getattr(data_observers.get((name, INPUT_ERRORS)), "input_errors", None)
        products = GatheredProducts(hessian, output_hessian, input_errors)
        roundings[key] = WeightRounding(observer.args, qparams[name], products)
    if without_inputs:
        warn(
            "GPTQ needs inputs, and these modules got none; their weights are rounded to nearest: "
            f"{name_list(without_inputs)}"
        )
    return roundings
