"""The base of observers that choose a weight's ranges by the inputs that its module sees."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.utils.helpers import patch_attr
from typing_extensions import override

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.many_tensors import all_zero
from lightning_obs.observers.mse import MemorylessMSEObserver
from lightning_obs.observers.observer import Observer


class ByInputsObserver(MemorylessMSEObserver):
    """A search of a weight's ranges that knows the second moments of the module's inputs, or a part of them.

    A subclass declares a sum over tokens and ``input_count``, how many they were, and writes ``measure_inputs`` and
    ``_search_by``. Batches and ranks are merged by addition.

    Keyword Args:
        strict, weigh_tokens: as of ``imatrix_mse``.

    Raises:
        CalibrationError: observed is not a weight; no inputs, or inputs of another width.
    """

    hyperparameters: ClassVar[dict[str, Any] | None] = {"strict": True, "weigh_tokens": False}
    strict: bool
    weigh_tokens: bool
    input_count: torch.Tensor

    #: whether all inputs that were seen were zero; None: the observer asks by itself, and waits for its device.
    #: :func:`settle_zero_inputs` asks for all observers at once.
    inputs_are_zero: bool | None = None
    _settings = (*MemorylessMSEObserver._settings, "inputs_are_zero")

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        if base_name != "weight":
            raise CalibrationError(
                f"{type(self).__name__} weighs a weight's columns by the module's inputs",
                got=f"base name {base_name!r}",
                expected="weight",
                remedy="observe activations with mse or histogram.",
            )

    @property
    @override
    def _kind_of_inputs(self) -> Hashable:
        return super()._kind_of_inputs, self.weigh_tokens

    @property
    @override
    def lacks_inputs(self) -> bool:
        return self.strict and not hasattr(self, "input_count")

    @override
    def observe_without_inputs(self, weight: torch.Tensor) -> None:
        """All columns count alike where no data reached the module, even if ``strict``."""
        with patch_attr(self, "strict", False):
            self(weight)

    def column_squares(self) -> torch.Tensor:
        """The sums of the squares of the inputs that were seen, a value for each column of the weight, in any shape."""
        sums: torch.Tensor = getattr(self, self.input_statistics[0])
        return sums if sums.ndim == 1 else sums.diagonal(dim1=-2, dim2=-1)

    def _moments(self) -> torch.Tensor | None:
        """The mean of the statistic over tokens, in float32 and relative to the mean of ``E[x ** 2]``.

        None if no input was seen, or only zeros, which say nothing about the columns of the weight.

        Raises:
            CalibrationError: no input was seen, and ``strict`` is on.
        """
        if self.lacks_inputs:
            raise CalibrationError(
                f"{type(self).__name__} saw no inputs of the module, so it cannot weigh the columns of the weight",
                remedy="run data through the module first, or set strict=False for equal weights.",
            )
        if not hasattr(self, "input_count"):
            return None
        are_zero = self.inputs_are_zero
        if are_zero is None:
            are_zero = all_zero([self.column_squares()])[0]
        if are_zero:
            return None
        mean = (getattr(self, self.input_statistics[0]) / self.input_count).float()
        squares = mean if mean.ndim == 1 else mean.diagonal(dim1=-2, dim2=-1)
        return mean / (squares.mean() + torch.finfo(torch.float32).tiny)

    @override
    def forward(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        if value.numel():
            with self._observing():
                moments = self._moments()
                if moments is None:
                    return super().forward(value, g_idx)
                self.combine(self._search_by(moments.to(value.device), value, g_idx))
        return self

    def _search_by(
        self, moments: torch.Tensor, value: torch.Tensor, g_idx: torch.Tensor | None
    ) -> Sequence[torch.Tensor]:
        """The statistics of a weight ``(R, C)``, chosen by the moments of its inputs."""
        raise NotImplementedError

    def _require_fit(self, channels: int, value: torch.Tensor, fits: bool = True) -> None:
        if value.ndim != 2 or not fits:
            raise CalibrationError(
                f"{type(self).__name__}: inputs and weight do not fit",
                got=f"inputs of {channels} channels, a weight of shape {tuple(value.shape)}",
                expected="a weight with one column per input channel (Linear)",
                remedy="observe this weight with memoryless_mse.",
            )

    @override
    def candidates(self) -> list[float]:
        steps = max(1, int(self.maxshrink * self.grid)) + 1
        return [1 - step / self.grid for step in range(steps)]

    @property
    @override
    def idle_limit(self) -> int | None:
        return self.patience or None


def settle_zero_inputs(observers: Iterable[Observer]) -> list[Observer]:
    """Set :attr:`ByInputsObserver.inputs_are_zero` of observers that saw inputs; called before weights are searched.

    Returns the observers whose inputs were all zero. The host waits once for each device, however many observers.
    """
    by_inputs = []
    for observer in observers:
        if isinstance(observer, ByInputsObserver) and hasattr(observer, "input_count"):
            by_inputs.append(observer)
    answers = all_zero([observer.column_squares() for observer in by_inputs])
    for observer, are_zero in zip(by_inputs, answers, strict=True):
        observer.inputs_are_zero = are_zero
    return [observer for observer in by_inputs if observer.inputs_are_zero]
