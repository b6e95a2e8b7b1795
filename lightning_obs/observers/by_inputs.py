"""The base of observers that choose a weight's ranges by the inputs of its module: ``imatrix_mse``, the Hessians.

While data run, hooks pass the module's inputs to such an observer (``observe_inputs``), which adds up their squares or
products over all tokens. At the end, finalize passes it the weight (``forward``), and it searches the ranges with these
sums. *Second moments* are the sums divided by the number of tokens: ``E[x_j ** 2]`` for each input channel j, or the
matrix ``E[x x^T]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.utils.helpers import patch_attr
from typing_extensions import override

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.many_tensors import all_zero
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.ranges import search_range
from lightning_obs.observers.mse import MemorylessMSEObserver
from lightning_obs.observers.observer import Hyperparameters, Key, MinMaxTuple, Observer
from lightning_obs.observers.search_options import divides_in_blocks, options_of
from lightning_obs.observers.statistic import Statistic, input_statistics, lacks_inputs, observing


class ByInputsObserver(Observer):
    """Searches a weight's ranges by the second moments of the module's inputs, or by a part of these moments.

    A subclass declares two statistics ``of_inputs``: a sum over tokens, and ``input_count``, the number of tokens. It
    writes ``measure_inputs`` and ``search_by_moments``. Batches and ranks are combined by addition. If no inputs were
    observed, or all of them were zero, all columns have the same weight.

    Keyword Args:
        maxshrink (float): how much of the range may be given up, in [0, 1]. Default: 0.2.
        patience (int): the search ends after this many candidates in a row without an improvement; 0: it visits all
            candidates. Default: 5.
        grid (float): number of candidates per unit of the factor on the range. Default: 100.
        norm (float): exponent of the error. Default: 2.4.
        expand (float): factor on the range before the search, at least 1. Default: 1.
        signed (bool): whether scales may be negative, for symmetric integer formats. Default: False.
        strict (bool): whether it is an error if no inputs of the module were observed. Default: True.
        weigh_tokens (bool): weigh each token by the squared norm of the predictions' gradient at the module's output
            (:mod:`lightning_obs.calibration.token_weights`). Default: False.

    Raises:
        CalibrationError: the observed tensor is not a weight; no inputs were observed and ``strict`` is True; inputs
            and weight do not fit.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = MemorylessMSEObserver.statistics
    hyperparameters: ClassVar[Hyperparameters] = {
        **(MemorylessMSEObserver.hyperparameters or {}),
        "strict": True,
        "weigh_tokens": False,
    }

    #: whether all inputs observed so far were zero; None: not checked yet, :func:`relative_moments` then checks it.
    #: :func:`settle_zero_inputs` sets the answers of all observers at once, so that the host waits for an accelerator
    #: once. Later inputs and ``reset`` leave an answer as it is; so finalize sets the answers anew before each search.
    inputs_are_zero: bool | None = None
    _settings = (*Observer._settings, "inputs_are_zero")  # attributes that ``reset`` keeps and that are no statistics

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        if base_name != "weight":
            raise CalibrationError(
                f"{type(self).__name__} weighs a weight's columns by the module's inputs",
                got=f"base name {base_name!r}",
                expected="weight",
                remedy="observe activations with mse or histogram.",
            )

    @override
    def forward(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        """Search the ranges of a weight ``(R, C)`` and keep them as statistics. Finalize calls it after all inputs.

        The search weighs columns by the moments of the inputs; without moments all columns have the same weight.

        Args:
            value: the weight; an empty one changes nothing.
            g_idx: the group of each column, ``(C,)``; None: groups are in the order of the columns.
        """
        if not value.numel():
            return self
        with observing(self):  # without gradients, outside inference mode; new statistics count as not checked for NaN
            moments = relative_moments(self)
            if moments is not None:
                moments = moments.to(value.device)
                self.combine(self.search_by_moments(moments, value, g_idx))
            elif divides_in_blocks(value, self.args):
                # The base class would copy the weight to cut it into blocks; the search reads the blocks in place.
                measured = self.measure(value)
                self.combine(measured)
            else:
                super().forward(value, g_idx)
        return self

    @override
    def measure(self, observed: torch.Tensor) -> MinMaxTuple:
        """The range with the least error, all columns with the same weight; for :meth:`forward` without inputs."""
        low, high = search_range(observed, self.search_of(observed))
        return low, high

    def search_of(self, observed: torch.Tensor) -> GridSearch:
        """The options of the search for an observed weight: its candidates, and the error to minimize.

        ``to_the_end`` adds a last candidate, the last step that is not below the factor ``1 - maxshrink``, and lets a
        ``patience`` of 0 visit all candidates, as in llm-compressor's ``imatrix_mse``. Any other ``patience`` may still
        end the search before the last candidate.

        Called by :meth:`measure` and by the subclasses' ``search_by_moments``.
        """
        options = options_of(self, to_the_end=True)
        return options.search_on(NumberGrid.of(self.args, self.signed))

    def search_by_moments(self, moments: torch.Tensor, value: torch.Tensor, g_idx: torch.Tensor | None) -> MinMaxTuple:
        """Search the ranges of a weight with the moments of the inputs. A subclass writes it; :meth:`forward` calls it.

        Args:
            moments: the result of :func:`relative_moments`; it may be changed in place.
            value: the weight ``(R, C)``.
            g_idx: the group of each column, ``(C,)``; None: groups are in the order of the columns.

        Returns:
            The smallest and the largest value of each range, ``(*Q,)``: the shape of the scales.
        """
        raise NotImplementedError


def require_fit(observer: Observer, channels: int, weight: torch.Tensor, fits: bool) -> None:
    """Raise a CalibrationError unless a weight is a matrix that fits the observed inputs; for ``search_by_moments``.

    Args:
        observer: named in the error.
        channels: number of channels of the inputs, for the error.
        weight: the weight to search.
        fits: whether the caller has found that the weight's columns fit the channels.
    """
    if weight.ndim != 2 or not fits:
        shape = tuple(weight.shape)
        raise CalibrationError(
            f"{type(observer).__name__}: inputs and weight do not fit",
            got=f"inputs of {channels} channels, a weight of shape {shape}",
            expected="a weight with one column per input channel (Linear)",
            remedy="observe this weight with memoryless_mse.",
        )


def input_sums(observer: ByInputsObserver) -> torch.Tensor:
    """The sum over tokens that an observer keeps of the inputs: squares ``(C,)`` or products ``(..., C, C)``.

    For :func:`relative_moments` and :func:`settle_zero_inputs`.
    """
    return getattr(observer, input_statistics(observer)[0])


def squares_in(moments: torch.Tensor) -> torch.Tensor:
    """The squares in sums or means of squares ``(C,)`` (all of them) or of products ``(..., C, C)`` (the diagonal).

    For :func:`relative_moments` and :func:`settle_zero_inputs`.
    """
    if moments.ndim == 1:
        return moments
    return moments.diagonal(dim1=-2, dim2=-1)


def relative_moments(observer: ByInputsObserver) -> torch.Tensor | None:
    """The second moments of the inputs, in float32, divided by their mean ``E[x_j ** 2]`` over the channels j.

    Called by :meth:`ByInputsObserver.forward` before the search. The result has the shape of the observer's sum. It is
    None if no inputs were observed, or if all inputs were zero: zeros say nothing about the columns of the weight.

    Raises:
        CalibrationError: no inputs were observed, and ``strict`` is True.
    """
    if lacks_inputs(observer):
        raise CalibrationError(
            f"{type(observer).__name__} saw no inputs of the module, so it cannot weigh the columns of the weight",
            remedy="run data through the module first, or set strict=False for equal weights.",
        )
    if not hasattr(observer, "input_count"):
        return None
    sums = input_sums(observer)
    are_zero = observer.inputs_are_zero
    if are_zero is None:
        are_zero = all_zero([squares_in(sums)])[0]
    if are_zero:
        return None
    moments = (sums / observer.input_count).float()
    mean_square = squares_in(moments).mean()
    return moments / (mean_square + torch.finfo(torch.float32).tiny)


def observe_without_inputs(observer: Observer, weight: torch.Tensor) -> None:
    """Pass a weight to its observer although inputs may be missing: then all columns have the same weight.

    It overrides ``strict``. Called by finalize where the user's ``on_missing`` allows missing inputs, and where only
    weights are finalized.
    """
    with patch_attr(observer, "strict", False):
        observer(weight)


def settle_zero_inputs(observers: Mapping[Key, Observer]) -> list[str]:
    """Set :attr:`ByInputsObserver.inputs_are_zero` of all observers that have observed inputs.

    Finalize calls it before weights are searched. The host waits once for each device, however many observers there
    are.

    Args:
        observers: of weights, by module name and base name; those that have observed no inputs are ignored.

    Returns:
        The names of the modules whose inputs were all zero.
    """
    with_inputs: dict[str, ByInputsObserver] = {}
    for (name, _), observer in observers.items():
        if isinstance(observer, ByInputsObserver) and hasattr(observer, "input_count"):
            with_inputs[name] = observer
    answers = all_zero([squares_in(input_sums(observer)) for observer in with_inputs.values()])
    names = []
    for (name, observer), are_zero in zip(with_inputs.items(), answers, strict=True):
        observer.inputs_are_zero = are_zero
        if are_zero:
            names.append(name)
    return names
