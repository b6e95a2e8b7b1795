"""Round weights by the Hessians of their inputs, after their scales are chosen: not always to the nearest number.

A weight is rounded on the rank that observed it: roundings are shared out over ranks as ranges are. Each is an observer
whose statistic is the rounded weight. Every rank ends with all of them, a byte for each element of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from typing_extensions import override

from lightning_obs.calibration.hooks import GRADIENTS, HESSIAN
from lightning_obs.errors import name_list, warn
from lightning_obs.numerics.rounding import round_by_hessian
from lightning_obs.observers import Key, Observer
from lightning_obs.observers.statistic import Statistic, observing


class WeightRounding(Observer):
    """Rounds one weight, with its scales as they are stored.

    ``hessian`` is ``sum x x^T`` of the module's inputs, ``(C, C)``, ``outputs`` that of the gradients at its outputs,
    ``(R, R)``, if it is known; ``args`` say how to round.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (Statistic("rounded"),)
    rounded: torch.Tensor

    def __init__(
        self,
        args: QuantizationArgs,
        qparams: Mapping[str, torch.Tensor],
        hessian: torch.Tensor,
        outputs: torch.Tensor | None = None,
    ) -> None:
        super().__init__("weight", args)
        self._qparams = {name.removeprefix("weight_"): value for name, value in qparams.items()}
        self._hessian = hessian
        self._outputs = outputs

    @override
    def forward(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        qparams: Any = self._qparams
        options = self.rounding or {}
        with observing(self):
            self.rounded = round_by_hessian(value, qparams, self.args, self._hessian, self._outputs, **options)
        return self


def make_roundings(
    observers: Mapping[Key, Observer],
    fed: Mapping[Key, Observer],
    qparams: Mapping[str, dict[str, torch.Tensor]],
) -> dict[Key, WeightRounding]:
    """A rounding for each weight of ``observers`` that is to be rounded, by its Hessian or the one in ``fed``.

    A warning names the weights that keep the nearest numbers.
    """
    rounded = {key: observer for key, observer in observers.items() if observer.rounding is not None}
    hessians = {k: getattr(fed.get((k[0], HESSIAN), o), "input_hessian", None) for k, o in rounded.items()}
    gradients = {k: getattr(fed.get((k[0], GRADIENTS)), "input_hessian", None) for k in rounded}
    if without := [name for (name, _), hessian in hessians.items() if hessian is None]:
        warn(f"no inputs were observed to round these weights by; they keep the nearest numbers: {name_list(without)}")
    return {
        key: WeightRounding(observers[key].args, qparams[key[0]], hessian, gradients.get(key))
        for key, hessian in hessians.items()
        if hessian is not None
    }
