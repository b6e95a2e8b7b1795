"""Round weights by the Hessians of their modules' inputs (``rounding="gptq"``), once the scales are chosen.

``finalize`` makes a :class:`WeightRounding` for each weight that is to be rounded. It is an observer whose statistic is
the rounded weight, so that roundings are shared out over ranks as the searches of ranges are: the rank that observed a
weight rounds it. Afterwards every rank has all rounded weights, one byte for each element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from typing_extensions import override

from lightning_obs.calibration.base_names import GRADIENTS, HESSIAN, INPUT_ERRORS
from lightning_obs.errors import name_list, warn
from lightning_obs.numerics.rounding import corrected_target, round_by_hessian
from lightning_obs.numerics.rounding_options import RoundingOptions
from lightning_obs.observers import Key, Observer
from lightning_obs.observers.statistic import Statistic, observing


@dataclass(frozen=True)
class GatheredProducts:
    """The sums of products that were gathered for one module with a weight ``(R, C)``, and by which it is rounded.

    :func:`make_roundings` makes it from the statistics of observers, and :class:`WeightRounding` reads it.

    Attributes:
        hessian: ``sum x x^T`` over the module's inputs x, ``(C, C)``.
        output_hessian: ``sum |x|^2 g g^T`` over the gradients g at its outputs, ``(R, R)``; None: it was not gathered,
            and the rows of the weight are rounded independently.
        input_errors: ``sum (x - x~) x~^T``, ``(C, C)``, with x in full precision and x~ from the quantized modules
            before, which also gave ``hessian``; None: it was not gathered, and errors of inputs are not corrected.
    """

    hessian: torch.Tensor
    output_hessian: torch.Tensor | None = None
    input_errors: torch.Tensor | None = None


class WeightRounding(Observer):
    """Rounds one weight with its stored scales; made by :func:`make_roundings`.

    Args:
        args: of the weight: its number format, and the options of the rounding.
        qparams: of the module as they are stored, ``{"weight_scale": tensor, ...}``.
        products: of the module.

    Attributes:
        rounded: the integers, ``(R, C)``, after the weight was observed. ``finalize`` reads them on every rank, and
            puts them among the module's qparams; :func:`.judge_fit` dequantizes them.
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
        """Round the weight ``value``, ``(R, C)``, and keep the result in ``rounded``.

        Where other observers choose a range, this one rounds. ``finalize`` calls it on the rank that owns the weight,
        and :func:`.judge_fit` for its second fit. ``g_idx`` is not used. As in every observer, the statistic is set
        inside :func:`.observing`: outside inference mode, without gradients, and ``is_finite`` becomes False, so that
        ``rounded`` is checked for NaN before it is shared over ranks.
        """
        qparams: Any = self._qparams
        options = self.rounding or RoundingOptions()  # ``rounding``: the options that the base class read from ``args``
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
        """The matrix to round: the weight, or with a correction one that makes up for a share of its inputs' errors."""
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
    """Make a rounding for each weight that is to be rounded; a warning names those without a Hessian.

    ``finalize`` calls this once all scales were computed and checked, and :func:`.judge_fit` for its second fit of one
    weight.

    Args:
        observers: of the weights. An observer that gathers a Hessian of inputs itself provides it.
        data_observers: among them the helpers, which provide the other sums of products.
        qparams: ``{"layer": {"weight_scale": tensor}}``, as they are stored.

    Returns:
        The roundings by module name and base name.
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
        products = GatheredProducts(hessian=hessian, output_hessian=output_hessian, input_errors=input_errors)
        roundings[key] = WeightRounding(observer.args, qparams[name], products)
    if without_inputs:
        warn(
            "GPTQ needs inputs, and these modules got none; their weights are rounded to nearest: "
            f"{name_list(without_inputs)}"
        )
    return roundings
