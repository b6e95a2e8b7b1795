"""Choose the numbers of weights that are not the nearest ones, after their scales, by the Hessians of their inputs.

A weight is rounded on the rank that observed it, or rows on the ranks that hold them: columns take up each other's
errors, rows do not. So the rounding of a weight goes the way of its range (:class:`.weights.Weights`), as an observer
whose statistic is the rounded weight. Every rank ends with all of them, a byte for each element of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from typing_extensions import override

from lightning_obs.calibration.weights import Weights
from lightning_obs.errors import refuse
from lightning_obs.model.qparams import ROUNDED
from lightning_obs.numerics.rounding import round_by_hessian
from lightning_obs.observers import HessianObserver, Key, Observer
from lightning_obs.observers.rows import rows_per_scale
from lightning_obs.observers.statistic import Statistic


class WeightRounding(Observer):
    """Rounds one weight, or rows of it, with scales that are fixed.

    Args:
        args: of the weight.
        qparams: ``{"weight_scale": ...}`` of the whole weight, as they are stored.
        hessian: ``sum x x^T`` of the module's inputs, ``(C, C)``.
        options: ``act_order`` and ``damping`` of :func:`~lightning_obs.numerics.rounding.round_by_hessian`.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (Statistic("rounded", rows="apart"),)
    rounded: torch.Tensor

    def __init__(
        self,
        args: QuantizationArgs,
        qparams: Mapping[str, torch.Tensor],
        hessian: torch.Tensor,
        options: Mapping[str, Any],
        first: int = 0,
    ) -> None:
        super().__init__("weight", args)
        self._given, self._first = (args, qparams, hessian, options), first

    @override
    def forward(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        _, qparams, hessian, options = self._given
        height = rows_per_scale(self.args)
        if height is not None:
            last = -(-(self._first + len(value)) // height)
            qparams = {k: x if "global" in k else x[self._first // height : last] for k, x in qparams.items()}
        with self._observing():
            self.rounded = round_by_hessian(
                value,
                qparams["weight_scale"],
                qparams.get("weight_zero_point"),
                self.args,
                hessian,
                global_scale=qparams.get("weight_global_scale"),
                **options,
            )
        return self

    @override
    def for_rows(self, start: int) -> Observer | None:
        height = rows_per_scale(self.args)
        return None if height is None or start % height else WeightRounding(*self._given, first=start)

    @override
    def join(self, parts: Sequence[tuple[int, Any]]) -> None:
        self.rounded = torch.cat([part.rounded for _, part in sorted(parts, key=lambda part: part[0])])


def round_weights(
    held: Weights,
    qparams: Mapping[str, dict[str, torch.Tensor]],
    owners: Mapping[Key, int],
    options: Any,
) -> int:
    """Add to the qparams of each weight whose observer has a Hessian the weight as it is rounded.

    Args:
        held: the weights, observed.
        qparams: by module, as they are stored; gets ``weight_rounded``.
        owners: the rank that rounds each weight which is not cut by rows.
        options: ``CalibrationOptions.rounding``.

    Returns:
        how many collectives this took.

    Raises:
        CalibrationError: on every rank alike; a Hessian that cannot be inverted.
    """
    roundings = {
        key: WeightRounding(observer.args, qparams[key[0]], observer.input_hessian, options)
        for key, observer in held.observers.items()
        if key in held.modules and key[0] in qparams and isinstance(observer, HessianObserver) and not _lacks(observer)
    }
    modules = {key: held.modules[key] for key in roundings}
    again = Weights(modules, roundings, held.collectives)
    collectives = again.observe(list(roundings), owners, None, lambda key, rounding, rows: rounding(rows))
    for (name, _), rounding in roundings.items():
        qparams[name][ROUNDED] = rounding.rounded
    return collectives


def _lacks(observer: HessianObserver) -> bool:
    return not hasattr(observer, "input_hessian")


def check_rounding(observers: Mapping[Key, Observer]) -> None:
    """Refuse a rounding where a weight's observer does not gather the whole Hessian.

    Raises:
        CalibrationError: it names these weights.
    """
    others = [
        f"{name} ({type(observer).__name__})"
        for (name, base), observer in observers.items()
        if base == "weight" and not isinstance(observer, HessianObserver)
    ]
    refuse(
        others,
        "rounding='gptq' rounds by the whole Hessian of a module's inputs, which these observers do not gather",
        remedy="observers={'weight': 'hessian'}; on the command line weight_observer=hessian.",
    )
