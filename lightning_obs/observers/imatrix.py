"""Weight ranges by importance-weighted error: the error of each column counts with the mean square of its input.

Calibration makes these observers for weights, if the scheme, a recipe or the user's ``observers=`` names them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from typing_extensions import override

from lightning_obs.numerics.moments import channel_squares
from lightning_obs.numerics.qparams import covered_by_scale, flatten_for_calibration
from lightning_obs.numerics.search.ranges import search_range
from lightning_obs.observers.by_inputs import ByInputsObserver, require_fit
from lightning_obs.observers.mse import NVFP4ExpandedMSEObserver
from lightning_obs.observers.observer import Hyperparameters, MinMaxTuple, Observer
from lightning_obs.observers.search_options import check_options
from lightning_obs.observers.statistic import Statistic


@Observer.register("imatrix_mse")
class IMatrixMSEObserver(ByInputsObserver):
    """``memoryless_mse`` with the error of each column weighted by the mean square of the input that it multiplies.

    ``argmin over p of sum(E[x_j ** 2] * |fake_quantize(w_j, p * expand * range) - w_j| ** norm)`` per scale, j the
    input channels, p = 1, 1 - 1/grid, ..., down to the last step that is not below ``1 - maxshrink``. For weights of
    Linear layers. Hooks pass the layer's inputs to the observer while data run; finalize passes the weight at the end.

    Observes ``(N, *Q, G)``. Ranges are ``(*Q,)`` in the units of the weight. ``input_squares`` is ``(C,)`` in float64,
    the sum over ``input_count`` tokens; batches and ranks are combined by addition.

    Keyword Args:
        maxshrink (float): how much of the range may be given up, in [0, 1]. Default: 0.95.
        patience (int): the search ends after this many p in a row without an improvement of any scale; 0: it visits
            all. Default: 5.
        grid (float): number of candidates per unit of p. Default: 20.
        norm (float): exponent of the error. Default: 3.
        expand (float): factor on the range before the search, at least 1. Default: 1.
        signed (bool): whether the scale is negative where the range reaches farther above zero than below, for
            symmetric integer formats. Default: False.
        strict (bool): whether it is an error if no inputs of the module were observed. False: all columns then have
            the same weight. Default: True.
        weigh_tokens (bool): weigh each token by the squared norm of the predictions' gradient at the module's output,
            so that a token counts as much as the model's predictions depend on the module there
            (:mod:`lightning_obs.calibration.token_weights`). Each call of the model is run forward and backward once
            more. A rounding by the Hessian then weighs tokens, too, and gathers the products of the gradients (4 bytes
            for each pair of outputs). Default: False.

    Raises:
        CalibrationError: a hyperparameter outside its limits; the observed tensor is not a weight; no inputs were
            observed and ``strict`` is True; inputs and weight do not fit.

    Reference:
        The importance matrix of llama.cpp (ggml-org/llama.cpp, pull request 4861); hyperparameters and candidates of
        llm-compressor's ``imatrix_mse``, except that there ``strict`` is off.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (
        *ByInputsObserver.statistics,
        Statistic("input_squares", "sum", of_inputs=True),
        Statistic("input_count", "sum", of_inputs=True),
    )
    hyperparameters: ClassVar[Hyperparameters] = {
        "maxshrink": 0.95,
        "patience": 5,
        "grid": 20.0,
        "norm": 3.0,
    }
    _inputs_by = ()  # measure_inputs depends on no field of `args`, so observers of all formats share its result

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        check_options(self)

    def measure_inputs(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For an input ``(..., C)``: the sum of the squares of each channel, ``(C,)``, and the number of tokens.

        ``observe_inputs_shared`` calls it for each batch of inputs; the observer adds up the results.
        """
        return channel_squares(value)

    @override
    def search_by_moments(self, moments: torch.Tensor, value: torch.Tensor, g_idx: torch.Tensor | None) -> MinMaxTuple:
        """Search the ranges with the columns weighed by ``moments``, the relative mean squares of the inputs, ``(C,)``.

        The base class calls it when finalize passes the weight ``value``, ``(R, C)``, to the observer. ``g_idx``: the
        group of each column, ``(C,)``, for a weight in activation order; else None.
        """
        channels = len(moments)
        require_fit(self, channels, value, fits=value.shape[-1] == channels)
        # ``(I, G)``: the weights of the I scales that follow each other in a row of scales, laid out as the weight is.
        # A scale that covers several rows has the moments once for each of them.
        rows, _ = covered_by_scale(self.args, value.shape)
        importance = flatten_for_calibration(moments.expand(rows, -1), "weight", self.args, g_idx)
        importance = importance.flatten(0, -2)
        observed = flatten_for_calibration(value, "weight", self.args, g_idx)
        low, high = search_range(observed, self.search_of(observed), importance=importance)
        return low, high


@Observer.register("nvfp4_expanded_imatrix")
class NVFP4ExpandedIMatrixObserver(IMatrixMSEObserver):
    """``imatrix_mse`` with the candidates of ``nvfp4_expanded_mse`` and exponent 2.4, for weights in NVFP4.

    The candidates are from 1.8 down to 0.8 times the range, in steps of 1.8/200: FP4 has no number between 4 and 6, so
    a wider range may lose less.
    """

    hyperparameters: ClassVar[Hyperparameters] = {**(NVFP4ExpandedMSEObserver.hyperparameters or {}), "norm": 2.4}
