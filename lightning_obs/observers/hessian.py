"""Weight ranges by the Hessian of a layer's output: the second moments of its inputs, of groups or of whole rows.

The output of a Linear loses ``E[(d x) ** 2] = d H d^T`` by an error d of a row of its weight, ``H = E[x x^T]``.
``imatrix_mse`` knows the diagonal of H. Here inputs that go together count together: errors that would cancel are not
errors. Every integer is still the nearest; only ranges are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.utils import maybe_pad_tensor_for_block_quant
from torch.nn.functional import pad
from typing_extensions import override

from lightning_obs.numerics.formats import NumberGrid, format_of
from lightning_obs.numerics.moments import channel_products
from lightning_obs.numerics.qparams import (
    compute_global_scale,
    covered_by_scale,
    flatten_for_calibration,
    power_of_two,
)
from lightning_obs.numerics.search.descent import descend
from lightning_obs.observers.by_inputs import ByInputsObserver
from lightning_obs.observers.observer import Observer
from lightning_obs.observers.statistic import Statistic

# Columns of the largest part of a Hessian that ``local_hessian`` gathers.
_WIDEST = 128
# Weight of a column that no input reached, relative to the mean: groups of such columns lose least by themselves.
_LEAST = 1e-6


@Observer.register("local_hessian")
class LocalHessianObserver(ByInputsObserver):
    """The range whose error, ``d H d^T`` with the group's own block H of the inputs' second moments, is least.

    ``argmin over p of d H d^T, d = fake_quantize(w, p * expand * range) - w`` per scale, p = 1, 1 - 1/grid, ..., down
    to ``1 - maxshrink`` (included). For weights of Linear layers, in any strategy. A scale that covers more than 128
    columns, or a whole row, is measured in equal parts of at most 128.

    Ranges are ``(*Q,)`` in the units of the weight. ``input_hessian`` is the sum of ``x x^T`` over ``input_count``
    tokens, ``(T, t, t)`` in float32: T parts of t columns, zeros after the last column.

    Keyword Args:
        maxshrink, patience, grid, strict, weigh_tokens: as of ``imatrix_mse``.
        expand (float | None): factor on the range before the search, at least 1. None: 1.84 in FP4, which has no number
            between 4 and 6, else 1.
        signed (bool): as of ``memoryless_mse``.
        norm (float): 2, the exponent of a quadratic form.

    Raises:
        CalibrationError: a value outside of these; observed is not a weight; no inputs, or inputs of another width.

    Reference:
        The local Hessian of NVIDIA's Model-Optimizer (2026).
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (
        *ByInputsObserver.statistics,
        Statistic("input_hessian", "sum", of_inputs=True),
        Statistic("input_count", "sum", of_inputs=True),
    )
    hyperparameters: ClassVar[dict[str, Any] | None] = {
        "maxshrink": 0.64,
        "patience": 5,
        "grid": 36.0,
        "norm": 2.0,
        "expand": None,
    }
    _rounds_global_scale: ClassVar[bool] = True
    _inputs_by: ClassVar[tuple[str, ...]] = ("strategy", "group_size", "block_structure")
    input_hessian: torch.Tensor

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        self._require("norm", self.norm == 2, "2, the exponent of a quadratic form")

    @override
    def _set_hyperparameters(self, given: dict[str, Any]) -> None:
        super()._set_hyperparameters(given)
        if self.expand is None:
            number = format_of(self.args)
            self.expand = 1.84 if number is not None and number.bits == 4 else 1.0

    @override
    def _grid(self, observed: torch.Tensor) -> NumberGrid:
        """With scales of a tensor_group rounded as they will be stored, for a global scale of any power of two."""
        widest = observed.abs().amax().float().reshape(1) * self.widest
        global_scale = compute_global_scale([(-widest, widest)], self.args)
        return NumberGrid.of(self.args, self.signed, None if global_scale is None else power_of_two(global_scale))

    @override
    def measure_inputs(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return channel_products(value, self._width(value.shape[-1]))

    def _width(self, channels: int) -> int:
        """Columns of a part: they divide the columns of a scale, unless a scale covers all columns."""
        if self.args.strategy in (QuantizationStrategy.TENSOR, QuantizationStrategy.CHANNEL):
            return min(channels, _WIDEST)
        width = covered_by_scale(self.args, (1, channels))[1]
        return max(part for part in range(1, min(width, _WIDEST) + 1) if width % part == 0)

    @override
    def _search_by(
        self, moments: torch.Tensor, value: torch.Tensor, g_idx: torch.Tensor | None
    ) -> Sequence[torch.Tensor]:
        parts, part, _ = moments.shape
        channels = parts * part
        self._require_fit(channels, value, channels - part < value.shape[-1] <= channels and g_idx is None)
        moments.diagonal(dim1=-2, dim2=-1).add_(_LEAST)
        width = covered_by_scale(self.args, value.shape)[1]
        if self.args.strategy == QuantizationStrategy.BLOCK:
            value = _in_whole_blocks(value, self.args)
            moments = pad(moments, (0, 0, 0, 0, 0, value.shape[1] // part - parts))
        elif width < value.shape[1]:
            value = flatten_for_calibration(value, "weight", self.args)
        else:  # the last part ends in columns without inputs, in which nothing is lost
            value = torch.cat([value, value[:, -1:].expand(-1, channels - width)], 1)
            value = value.unsqueeze(1) if self.args.strategy == QuantizationStrategy.TENSOR else value[None, :, None]
            width = channels
        return self._search(value, hessian=moments.view(-1, width // part, part, part))


@Observer.register("hessian")
class HessianObserver(LocalHessianObserver):
    """The ranges whose errors, ``d H d^T`` with the inputs' whole second moments H, are least for a row together.

    The candidates of ``local_hessian``, judged one scale after the other given the errors of the row's other scales, in
    some sweeps over all of them (:mod:`lightning_obs.numerics.search.descent`). Ranges are ``(*Q,)``. ``input_hessian``
    is ``(C, C)`` in float32, 4 bytes for each pair of input channels.

    Keyword Args:
        sweeps (int): how often each scale is chosen, at least 1; the later, the closer to the range chosen before.
        damping (float): share of the mean of H's diagonal that is added to it, at least 0.
        maxshrink, grid, expand, strict, weigh_tokens, signed, norm: as of ``local_hessian``.
        patience (int): 0, all candidates are visited.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = LocalHessianObserver.statistics
    hyperparameters: ClassVar[dict[str, Any] | None] = {"patience": 0, "sweeps": 4, "damping": 0.01}
    _inputs_by: ClassVar[tuple[str, ...]] = ()
    sweeps: int
    damping: float

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        self._require("patience", self.patience == 0, "0, all candidates are visited")
        self._require("sweeps", isinstance(self.sweeps, int) and self.sweeps >= 1, "a whole number, at least 1")
        self._require("damping", 0 <= self.damping < float("inf"), "a finite number, at least 0")

    @override
    def measure_inputs(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        products, number = channel_products(value, value.shape[-1])
        return products[0], number

    @override
    def _search_by(
        self, moments: torch.Tensor, value: torch.Tensor, g_idx: torch.Tensor | None
    ) -> Sequence[torch.Tensor]:
        self._require_fit(len(moments), value, value.shape[-1] == len(moments) and g_idx is None)
        block = covered_by_scale(self.args, value.shape)
        if self.args.strategy == QuantizationStrategy.BLOCK:
            value = _in_whole_blocks(value, self.args)
        hessian = pad(moments, (0, value.shape[1] - len(moments)) * 2)
        hessian.diagonal().add_(self.damping)  # the mean of the diagonal is 1
        low, high = descend(value, hessian, self._grid_search(value), block, self.sweeps)
        scales = (1,) if self.args.strategy == QuantizationStrategy.TENSOR else low.shape
        return low.reshape(scales), high.reshape(scales)


def _in_whole_blocks(weight: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    return maybe_pad_tensor_for_block_quant(weight, tuple(args.block_structure or ())).contiguous()
