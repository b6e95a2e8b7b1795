"""Weight ranges by the Hessian of a layer's output: the second moments of its inputs, of groups or of whole rows.

An error d in a row of a Linear's weight costs its output ``E[(d x) ** 2] = d H d^T``, with ``H = E[x x^T]``.
``imatrix_mse`` uses the diagonal of H alone. The off-diagonal moments tell which inputs vary together, so that errors
of two columns that cancel in the output cost nothing. Only ranges are chosen here: every integer is the nearest.
"""

from __future__ import annotations

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
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.ranges import search_range
from lightning_obs.observers.by_inputs import ByInputsObserver, require_fit
from lightning_obs.observers.observer import Hyperparameters, MinMaxTuple, Observer, require
from lightning_obs.observers.search_options import check_options, options_of
from lightning_obs.observers.statistic import Statistic

# Columns of the largest block of a Hessian that ``local_hessian`` gathers.
_WIDEST_BLOCK = 128
#: the most outputs whose products of gradients are gathered: 1 GiB, where a vocabulary would take more than the model
MOST_OUTPUTS = 1 << 14
# Added to the diagonal, whose mean is 1, so that a group of columns that no input reached loses least by itself.
_LEAST_MOMENT = 1e-6


@Observer.register("local_hessian")
class LocalHessianObserver(ByInputsObserver):
    """The range of least error ``d H d^T``, where H is the block of the inputs' second moments that a scale covers.

    ``argmin over p of d H d^T, d = fake_quantize(w, p * expand * range) - w`` per scale, p = 1, 1 - 1/grid, ..., down
    to the last whole step before ``1 - maxshrink``. For weights of Linear layers, in any strategy. For a scale that
    covers more than 128 columns, H is cut into equal blocks of at most 128 columns, and moments between blocks are left
    out.

    Ranges are ``(*Q,)`` in the units of the weight. ``input_hessian`` is the sum of ``x x^T`` over ``input_count``
    tokens, ``(T, t, t)`` in float32: T blocks of t columns, zeros after the last column.

    Keyword Args:
        maxshrink (float): how much of the range may be given up, in [0, 1].
        patience (int): consecutive p without an improvement of any scale that end the search; 0: it visits all.
        grid (int): steps per unit of p.
        expand (float | None): factor on the range before the search, at least 1. None: 1.84 in FP4, which has no number
            between 4 and 6, else 1.
        norm (float): 2, the exponent of a quadratic form.
        signed (bool): whether the scale is negative where the range reaches farther above zero than below, for
            symmetric integer formats.
        strict (bool): a weight whose inputs were not seen is an error. Off: all its columns count alike.
        weigh_tokens (bool): count each token by the squared length of the gradient at the module's output.

    Raises:
        CalibrationError: a value outside of these; observed is not a weight; no inputs, or inputs of another width.

    Reference:
        The local Hessian of NVIDIA's Model-Optimizer (2026).
    """

    statistics = (
        *ByInputsObserver.statistics,
        Statistic("input_hessian", "sum", of_inputs=True),
        Statistic("input_count", "sum", of_inputs=True),
    )
    hyperparameters: ClassVar[Hyperparameters] = {
        "maxshrink": 0.64,
        "patience": 5,
        "grid": 36.0,
        "norm": 2.0,
        "expand": None,
    }
    expand: float
    _rounds_global_scale = True
    _inputs_by: ClassVar[tuple[str, ...]] = ("strategy", "group_size", "block_structure")

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        if self.expand is None:  # the default
            number = format_of(self.args)
            self.expand = 1.84 if number is not None and number.bits == 4 else 1.0
        check_options(self)
        require(self, "norm", self.norm == 2, "2, the exponent of a quadratic form")

    @override
    def search_of(self, observed: torch.Tensor) -> GridSearch:
        """The search, with scales of a tensor_group rounded as they will be stored.

        The global scale depends on the ranges that are still to be found. But it is rounded to a power of two, and
        group scales round alike for any power of two, so one from the widest candidates serves.
        """
        options = options_of(self, to_the_end=True)
        magnitude = observed.abs().amax().float().reshape(1)
        widest = magnitude * options.widest(self.args.num_bits)
        global_scale = compute_global_scale([(-widest, widest)], self.args)
        if global_scale is not None:
            global_scale = power_of_two(global_scale)
        return options.search_on(NumberGrid.of(self.args, self.signed, global_scale))

    def measure_inputs(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of ``x x^T`` in blocks ``(T, t, t)`` and the number of tokens of an input ``(..., C)``."""
        return channel_products(value, block_width(self.args, value.shape[-1]))

    @override
    def search_by_moments(self, moments: torch.Tensor, value: torch.Tensor, g_idx: torch.Tensor | None) -> MinMaxTuple:
        blocks, width, _ = moments.shape
        channels = blocks * width
        columns = value.shape[-1]
        fits = channels - width < columns <= channels
        require_fit(self, channels, value, fits and g_idx is None)
        moments.diagonal(dim1=-2, dim2=-1).add_(_LEAST_MOMENT)
        columns_of_scale = covered_by_scale(self.args, value.shape)[1]
        if self.args.strategy == QuantizationStrategy.BLOCK:
            observed = _in_whole_blocks(value, self.args)
            padding = observed.shape[1] // width - blocks
            moments = pad(moments, (0, 0, 0, 0, 0, padding))
        elif columns_of_scale < columns:
            observed = flatten_for_calibration(value, "weight", self.args)
        else:
            # The blocks of H may end after the last column. Copies of it fill the rows; their moments are zero.
            last_column = value[:, -1:]
            filling = last_column.expand(-1, channels - columns_of_scale)
            filled = torch.cat([value, filling], 1)
            is_one_scale = self.args.strategy == QuantizationStrategy.TENSOR
            observed = filled.unsqueeze(1) if is_one_scale else filled[None, :, None]
            columns_of_scale = channels
        hessian = moments.view(-1, columns_of_scale // width, width, width)
        low, high = search_range(observed, self.search_of(observed), hessian=hessian)
        return low, high


def block_width(args: QuantizationArgs, channels: int) -> int:
    """The number of columns of a block of the Hessian; a scale covers whole blocks, unless it covers all columns.

    Args:
        args: of the weight.
        channels: of the inputs, the columns of the weight.

    >>> block_width(QuantizationArgs(num_bits=4, group_size=160), channels=320)
    80
    """
    if args.strategy in (QuantizationStrategy.TENSOR, QuantizationStrategy.CHANNEL):
        return min(channels, _WIDEST_BLOCK)
    columns_of_scale = covered_by_scale(args, (1, channels))[1]
    width = min(columns_of_scale, _WIDEST_BLOCK)
    while columns_of_scale % width:
        width -= 1
    return width


@Observer.register("hessian")
class HessianObserver(LocalHessianObserver):
    """The ranges of a row of scales that together have the least error ``d H d^T``, H all second moments of the inputs.

    The search chooses one scale after the other, given the errors that the row's other scales leave, in some sweeps
    over all of them (:mod:`lightning_obs.numerics.search.descent`). Its candidates are those of ``local_hessian``.
    Ranges are ``(*Q,)``. ``input_hessian`` is ``(C, C)`` in float32, 4 bytes for each pair of input channels.

    Keyword Args:
        sweeps (int): how often each scale is chosen, at least 1; later sweeps try ranges closer to the present one.
        damping (float): share of the mean of H's diagonal that is added to it, at least 0.
        maxshrink (float): how much of the range may be given up, in [0, 1].
        grid (int): steps per unit of the factor on the range.
        patience (int): 0, all candidates are visited.
        expand (float | None): factor on the range before the search, at least 1. None: 1.84 in FP4, which has no number
            between 4 and 6, else 1.
        norm (float): 2, the exponent of a quadratic form.
        signed (bool): whether the scale is negative where the range reaches farther above zero than below, for
            symmetric integer formats.
        strict (bool): a weight whose inputs were not seen is an error. Off: all its columns count alike.
        weigh_tokens (bool): count each token by the squared length of the gradient at the module's output.

    Raises:
        CalibrationError: a value outside of these; observed is not a weight; no inputs, or inputs of another width.
    """

    statistics = LocalHessianObserver.statistics
    hyperparameters: ClassVar[Hyperparameters] = {"patience": 0, "sweeps": 4, "damping": 0.1}
    _inputs_by = ()

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        require(self, "patience", self.patience == 0, "0, all candidates are visited")
        require(self, "sweeps", isinstance(self.sweeps, int) and self.sweeps >= 1, "a whole number, at least 1")
        require(self, "damping", 0 <= self.damping < float("inf"), "a finite number, at least 0")

    @override
    def measure_inputs(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of ``x x^T``, ``(C, C)``, and the number of tokens of an input ``(..., C)``."""
        products, number = channel_products(value, value.shape[-1])
        return products[0], number

    @override
    def search_by_moments(self, moments: torch.Tensor, value: torch.Tensor, g_idx: torch.Tensor | None) -> MinMaxTuple:
        channels = len(moments)
        fits = value.shape[-1] == channels
        require_fit(self, channels, value, fits and g_idx is None)
        block = covered_by_scale(self.args, value.shape)
        if self.args.strategy == QuantizationStrategy.BLOCK:
            value = _in_whole_blocks(value, self.args)
        padded_channels = value.shape[1]
        padding = padded_channels - channels
        hessian = pad(moments, (0, padding, 0, padding))
        hessian.diagonal().add_(self.damping)  # the mean of the diagonal is 1
        search = self.search_of(value)
        low, high = descend(value, hessian, search, block, self.sweeps)
        if self.args.strategy == QuantizationStrategy.TENSOR:
            return low.reshape(1), high.reshape(1)
        return low, high


def _in_whole_blocks(weight: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """The weight, padded with zeros where blocks do not divide it."""
    return maybe_pad_tensor_for_block_quant(weight, tuple(args.block_structure or ())).contiguous()
