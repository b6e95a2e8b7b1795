"""Round weights by the Hessians of their inputs, after their scales are chosen: not always to the nearest number.

A weight is rounded on the rank that observed it, or its rows on the ranks that hold them: columns compensate each
other's errors, rows are independent. So roundings are shared out over ranks as ranges are: each is an observer whose
statistic is the rounded weight. Every rank ends with all of them, a byte for each element of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from typing_extensions import override

from lightning_obs.calibration.hooks import GRADIENTS, HESSIAN
from lightning_obs.errors import name_list, warn
from lightning_obs.numerics.qparams import rows_per_scale
from lightning_obs.numerics.rounding import round_by_hessian
from lightning_obs.observers import Key, Observer
from lightning_obs.observers.statistic import Statistic


class WeightRounding(Observer):
    """Rounds one weight, or rows of it from row ``first`` on, with the scales of the whole weight as they are stored.

    ``hessian`` is ``sum x x^T`` of the module's inputs, ``(C, C)``, ``outputs`` that of the gradients at its outputs,
    ``(R, R)``, if it is known; ``args`` say how to round.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (Statistic("rounded", rows="apart"),)
    rounded: torch.Tensor

    def __init__(
        self,
        args: QuantizationArgs,
        qparams: Mapping[str, torch.Tensor],
        hessian: torch.Tensor,
        outputs: torch.Tensor | None = None,
        first: int = 0,
    ) -> None:
        super().__init__("weight", args)
        self._given, self._first = (args, qparams, hessian, outputs), first

    @override
    def forward(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        _, qparams, hessian, outputs = self._given
        height = rows_per_scale(self.args)
        if height is not None:
            last = -(-(self._first + len(value)) // height)
            qparams = {k: x if "global" in k else x[self._first // height : last] for k, x in qparams.items()}
        with self._observing():
            found: Any = {name.removeprefix("weight_"): x for name, x in qparams.items()}
            self.rounded = round_by_hessian(value, found, self.args, hessian, outputs, **(self.rounding or {}))
        return self

    @override
    def for_rows(self, start: int) -> Observer | None:
        height = rows_per_scale(self.args)
        apart = height is not None and start % height == 0 and self._given[-1] is None
        return WeightRounding(*self._given, first=start) if apart else None

    @override
    def join(self, parts: Sequence[tuple[int, Any]]) -> None:
        self.rounded = torch.cat([part.rounded for _, part in sorted(parts, key=lambda part: part[0])])


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
