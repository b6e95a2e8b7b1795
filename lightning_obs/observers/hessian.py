"""Weight ranges by the Hessian of a layer's output: the observers ``local_hessian`` and ``hessian``.

If d is the error of a row of a Linear's weight, the squared error of its output is ``E[(d x) ** 2] = d H d^T``, with
the Hessian ``H = E[x x^T]`` over the inputs x. ``imatrix_mse`` uses the diagonal of H alone. The other entries tell
which inputs vary together: errors of two columns that cancel in the output then count little. ``local_hessian`` uses
the blocks of H on its diagonal, one for each group of columns; ``hessian`` uses the whole H. Only ranges are chosen
here: every value is rounded to nearest.

Calibration makes them for weights, if the scheme or the user's ``observers=`` names them. A rounding (GPTQ) makes a
``hessian`` observer to gather H for a weight whose own observer does not.
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
#: a rounding that weighs tokens gathers the products of the gradients of up to this many outputs, which take 1 GiB. A
#: language model's head has more outputs (its vocabulary); their products would be larger than the model.
#: ``calibration/observation.py`` reads it when it makes the observers of these gradients.
MOST_OUTPUTS = 1 << 14
# Added to the diagonal, whose mean is 1: columns whose inputs are all zero are then searched for the least squared
# error of the weight.
_LEAST_MOMENT = 1e-6


@Observer.register("local_hessian")
class LocalHessianObserver(ByInputsObserver):
    """The range with the least error ``d H d^T``, where H is the part of the Hessian for the columns of one scale.

    ``argmin over p of d H d^T, d = fake_quantize(w, p * expand * range) - w`` per scale, p = 1, 1 - 1/grid, ..., down
    to the last step that is not below ``1 - maxshrink``. For weights of Linear layers, in any strategy. For a scale
    that covers more than 128 columns, H is cut into equal blocks of at most 128 columns, and entries of H between
    blocks are ignored.

    Ranges are ``(*Q,)`` in the units of the weight. ``input_hessian`` is the sum of ``x x^T`` over ``input_count``
    tokens, ``(T, t, t)`` in float32: T blocks of t columns, with zeros for columns that the weight does not have.

    Keyword Args:
        maxshrink (float): how much of the range may be given up, in [0, 1]. Default: 0.64.
        patience (int): the search ends after this many p in a row without an improvement of any scale; 0: it visits
            all. Default: 5.
        grid (float): number of candidates per unit of p. Default: 36.
        expand (float | None): factor on the range before the search, at least 1. Default: None, which is 1.84 in FP4
            and 1 in other formats.
        norm (float): must be 2, the exponent of a quadratic form.
        signed (bool): whether the scale is negative where the range reaches farther above zero than below, for
            symmetric integer formats. Default: False.
        strict (bool): whether it is an error if no inputs of the module were observed. False: all columns then have
            the same weight. Default: True.
        weigh_tokens (bool): weigh each token by the squared norm of the predictions' gradient at the module's output
            (:mod:`lightning_obs.calibration.token_weights`). Default: False.

    Raises:
        CalibrationError: a hyperparameter outside its limits; the observed tensor is not a weight; no inputs were
            observed and ``strict`` is True; inputs and weight do not fit.

    By default, 24 ranges are tried for each scale: in FP4 from 1.84 to 0.66 of the observed range, in steps of 0.05,
    else from 1 to 0.36. FP4 has no number between 4 and 6: with a range of 1.5 times the observed one the largest value
    becomes 4, and no value lies in this gap.

    Reference:
        The local Hessian of NVIDIA's Model-Optimizer (2026).
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (
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
    #: the fused set's global scale is rounded down to a power of two (``Observer.get_global_scale``), as
    #: :meth:`search_of` takes it for granted
    _rounds_global_scale = True
    # The fields of `args` on which measure_inputs depends; observers with equal fields share its result.
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
        """The options of the search, with a global scale, so that scales of a tensor_group are rounded as when stored.

        Called by :meth:`search_by_moments` and, without inputs, by the base class's ``measure``. The final global scale
        is known only after the search. But it is rounded to a power of two (``_rounds_global_scale``). A group scale is
        multiplied by it and then rounded to float8; a factor that is a power of two changes only the exponent. So group
        scales are rounded alike for any such factor, and the global scale of the widest candidate (``options.widest``
        times the observed range) is used.
        """
        options = options_of(self, to_the_end=True)  # the last step of the factors is tried, too
        magnitude = observed.abs().amax().float().reshape(1)
        widest = magnitude * options.widest(self.args.num_bits)
        global_scale = compute_global_scale([(-widest, widest)], self.args)
        if global_scale is not None:
            global_scale = power_of_two(global_scale)
        return options.search_on(NumberGrid.of(self.args, self.signed, global_scale))

    def measure_inputs(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For an input ``(..., C)``: the sum of ``x x^T`` in blocks, ``(T, t, t)``, and the number of tokens.

        ``observe_inputs_shared`` calls it for each batch of inputs; the observer adds up the results.
        """
        return channel_products(value, block_width(self.args, value.shape[-1]))

    @override
    def search_by_moments(self, moments: torch.Tensor, value: torch.Tensor, g_idx: torch.Tensor | None) -> MinMaxTuple:
        """Search each scale's range by its blocks of the Hessian, ``moments`` ``(T, t, t)``; ``g_idx`` must be None.

        The base class calls it when finalize passes the weight ``value`` to the observer. ``moments`` is changed in
        place. Blocks of the Hessian are of neighbouring columns, so groups that scatter their columns (``g_idx``) are
        refused. ``observed`` becomes the weight as it is, in whole blocks; or ``(N, *Q, G)``: N observations for each
        scale, Q the shape of the scales.
        """
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
            # The last block of H may be wider than the rest of the weight. Copies of the last column fill the rows up:
            # they widen no range. On the diagonal they have _LEAST_MOMENT, too little to decide between ranges.
            last_column = value[:, -1:]
            filling = last_column.expand(-1, channels - columns_of_scale)
            filled = torch.cat([value, filling], 1)
            is_one_scale = self.args.strategy == QuantizationStrategy.TENSOR
            # One scale: N = R, Q = (1,). A scale for each row: N = 1, Q = (R, 1). In both, G = T * t.
            observed = filled.unsqueeze(1) if is_one_scale else filled[None, :, None]
            columns_of_scale = channels
        hessian = moments.view(-1, columns_of_scale // width, width, width)
        low, high = search_range(observed, self.search_of(observed), hessian=hessian)
        return low, high


def block_width(args: QuantizationArgs, channels: int) -> int:
    """The number of columns of a block of the Hessian, for each batch of inputs that ``local_hessian`` measures.

    It divides the columns of a scale, except for a scale that covers all columns.

    Args:
        args: format and strategy of the weight.
        channels: number of channels of the inputs, which are the columns of the weight.

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
    """The ranges of all scales of a row that together have the least error ``d H d^T``, with the whole Hessian H.

    The search chooses one scale after the other while the row's other scales stay as they are, in several sweeps over
    the row (:mod:`lightning_obs.numerics.search.descent`). Its candidates are those of ``local_hessian``. Ranges are
    ``(*Q,)``. ``input_hessian`` is ``(C, C)`` in float32, 4 bytes for each pair of input channels.

    Keyword Args:
        sweeps (int): number of sweeps, at least 1; later sweeps try ranges closer to the chosen one. Default: 4.
        damping (float): share of the mean of H's diagonal that is added to the diagonal, at least 0. Default: 0.1.
        maxshrink (float): how much of the range may be given up, in [0, 1]. Default: 0.64.
        grid (float): number of candidates per unit of the factor on the range. Default: 36.
        patience (int): must be 0: all candidates are visited.
        expand (float | None): factor on the range before the search, at least 1. Default: None, which is 1.84 in FP4
            and 1 in other formats.
        norm (float): must be 2, the exponent of a quadratic form.
        signed (bool): whether the scale is negative where the range reaches farther above zero than below, for
            symmetric integer formats. Default: False.
        strict (bool): whether it is an error if no inputs of the module were observed. False: all columns then have
            the same weight. Default: True.
        weigh_tokens (bool): weigh each token by the squared norm of the predictions' gradient at the module's output
            (:mod:`lightning_obs.calibration.token_weights`). Default: False.

    Raises:
        CalibrationError: a hyperparameter outside its limits; the observed tensor is not a weight; no inputs were
            observed and ``strict`` is True; inputs and weight do not fit.
    """

    # Declared again, because this class overrides measure_inputs: see Statistics.__init_subclass__.
    statistics: ClassVar[tuple[Statistic, ...]] = LocalHessianObserver.statistics
    hyperparameters: ClassVar[Hyperparameters] = {"patience": 0, "sweeps": 4, "damping": 0.1}
    _inputs_by = ()  # measure_inputs depends on no field of `args`

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        require(self, "patience", self.patience == 0, "0, all candidates are visited")
        require(self, "sweeps", isinstance(self.sweeps, int) and self.sweeps >= 1, "a whole number, at least 1")
        require(self, "damping", 0 <= self.damping < float("inf"), "a finite number, at least 0")

    @override
    def measure_inputs(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For an input ``(..., C)``: the sum of ``x x^T``, ``(C, C)``, and the number of tokens.

        ``observe_inputs_shared`` calls it for each batch of inputs; the observer adds up the results.
        """
        products, number = channel_products(value, value.shape[-1])
        return products[0], number

    @override
    def search_by_moments(self, moments: torch.Tensor, value: torch.Tensor, g_idx: torch.Tensor | None) -> MinMaxTuple:
        """Search the ranges of each row together by the Hessian ``moments`` ``(C, C)``; ``g_idx`` must be None.

        The base class calls it when finalize passes the weight ``value`` to the observer.
        """
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
