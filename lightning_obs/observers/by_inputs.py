"""The base of observers that choose a weight's ranges by the inputs that its module sees.

While data run, hooks give such an observer the inputs (``observe_inputs``), which it reduces to sums. At the end it
observes the weight, and searches the ranges by these sums.
"""

from __future__ import annotations

from collections.abc import Iterable
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
from lightning_obs.observers.observer import Hyperparameters, MinMaxTuple, Observer
from lightning_obs.observers.search_options import divides_in_blocks, options_of
from lightning_obs.observers.statistic import Statistic, input_statistics, lacks_inputs, observing


class ByInputsObserver(Observer):
    """Searches a weight's ranges by the second moments of the module's inputs, or by a part of these moments.

    A subclass declares two statistics ``of_inputs``: a sum over tokens, and ``input_count``, the number of tokens. It
    writes ``measure_inputs`` and ``search_by_moments``. Batches and ranks are merged by addition. All columns count
    alike where no inputs were seen, or only zeros.

    Keyword Args:
        maxshrink (float): how much of the range may be given up, in [0, 1].
        patience (int): consecutive candidates without an improvement that end the search; 0: it visits all.
        grid (int): steps per unit of the factor on the range.
        norm (float): exponent of the error.
        expand (float): factor on the range before the search, at least 1.
        signed (bool): whether scales may be negative, for symmetric integer formats.
        strict (bool): whether a weight whose inputs were not seen is an error.
        weigh_tokens (bool): count each token by the squared length of the gradient at the module's output.

    Raises:
        CalibrationError: observed is not a weight; no inputs, or inputs of another width.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = MemorylessMSEObserver.statistics
    hyperparameters: ClassVar[Hyperparameters] = {
        **(MemorylessMSEObserver.hyperparameters or {}),
        "strict": True,
        "weigh_tokens": False,
    }

    #: whether all inputs that were seen were zero; None: not asked yet. :func:`settle_zero_inputs` asks for all
    #: observers at once, so that the host waits for its device once.
    inputs_are_zero: bool | None = None
    _settings = (*Observer._settings, "inputs_are_zero")

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
        """Observe a weight ``(R, C)`` after its module's inputs."""
        if not value.numel():
            return self
        with observing(self):
            moments = relative_moments(self)
            if moments is not None:
                moments = moments.to(value.device)
                self.combine(self.search_by_moments(moments, value, g_idx))
            elif divides_in_blocks(value, self.args):
                measured = self.measure(value)
                self.combine(measured)
            else:
                super().forward(value, g_idx)
        return self

    @override
    def measure(self, observed: torch.Tensor) -> MinMaxTuple:
        """The range of least error, all columns counting alike; :meth:`forward` uses it where no inputs were seen."""
        low, high = search_range(observed, self.search_of(observed))
        return low, high

    def search_of(self, observed: torch.Tensor) -> GridSearch:
        """The search for an observed weight: its candidates, and the error that is to be least."""
        options = options_of(self, to_the_end=True)
        return options.search_on(NumberGrid.of(self.args, self.signed))

    def search_by_moments(self, moments: torch.Tensor, value: torch.Tensor, g_idx: torch.Tensor | None) -> MinMaxTuple:
        """Search the ranges of a weight; :meth:`forward` calls this.

        Args:
            moments: of :func:`relative_moments`.
            value: the weight ``(R, C)``.
            g_idx: the group of each column; None: in their order.

        Returns:
            The smallest and the largest value of each range, ``(*Q,)``: the shape of the scales.
        """
        raise NotImplementedError


def require_fit(observer: Observer, channels: int, weight: torch.Tensor, fits: bool) -> None:
    """Raise a CalibrationError unless a weight is a matrix that fits the inputs that were seen.

    Args:
        observer: for the error.
        channels: of the inputs.
        weight: to be searched.
        fits: whether its columns fit the channels, as the observer has found.
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
    """The statistic of inputs that an observer sums over tokens: squares ``(C,)`` or products ``(..., C, C)``."""
    return getattr(observer, input_statistics(observer)[0])


def squares_in(moments: torch.Tensor) -> torch.Tensor:
    """The moment ``x ** 2`` of each channel: ``moments`` itself ``(C,)``, or the diagonal of products ``(C, C)``."""
    if moments.ndim == 1:
        return moments
    return moments.diagonal(dim1=-2, dim2=-1)


def relative_moments(observer: ByInputsObserver) -> torch.Tensor | None:
    """The second moments of the inputs, in float32, divided by the mean of ``E[x ** 2]`` over channels.

    None if no input was seen, or only zeros, which say nothing about the columns of the weight.

    Raises:
        CalibrationError: no input was seen, and ``strict`` is on.
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
    """Observe a weight whose module's inputs may be missing: then all columns count alike, even if ``strict`` is on.

    Called where the user allows it (``on_missing``), and where ranges of weights alone are computed.
    """
    with patch_attr(observer, "strict", False):
        observer(weight)


def settle_zero_inputs(observers: Iterable[Observer]) -> list[Observer]:
    """Set :attr:`ByInputsObserver.inputs_are_zero` of observers that saw inputs; called before weights are searched.

    The host waits once for each device, however many observers there are.

    Args:
        observers: of any class; the ones that saw no inputs are passed over.

    Returns:
        The observers whose inputs were all zero.
    """
    with_inputs = []
    for observer in observers:
        if isinstance(observer, ByInputsObserver) and hasattr(observer, "input_count"):
            with_inputs.append(observer)
    answers = all_zero([squares_in(input_sums(observer)) for observer in with_inputs])
    for observer, are_zero in zip(with_inputs, answers, strict=True):
        observer.inputs_are_zero = are_zero
    return [observer for observer in with_inputs if observer.inputs_are_zero]
