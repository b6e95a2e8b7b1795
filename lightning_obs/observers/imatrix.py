"""Weight ranges that lose least where the inputs are large."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from typing_extensions import override

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.moments import channel_squares
from lightning_obs.numerics.reshape import flatten_for_calibration
from lightning_obs.observers.base import Observer
from lightning_obs.observers.mse import MemorylessMSEObserver
from lightning_obs.observers.statistic import Statistic


@Observer.register("imatrix_mse")
class IMatrixMSEObserver(MemorylessMSEObserver):
    """``memoryless_mse`` with each column's error weighted by the mean square of the input it is multiplied with.

    ``argmin over p of sum(E[x_j ** 2] * |fake_quantize(w_j, p * expand * range) - w_j| ** norm)`` per scale, j the
    input channels, p = 1, 1 - 1/grid, ..., down to ``1 - maxshrink`` (included). For weights of Linear layers; whoever
    attaches the observer gives it the layer's inputs.

    Observes ``(N, *Q, G)``. Ranges are ``(*Q,)`` in the units of the weight. ``input_squares`` is ``(C,)`` in float64,
    the sum over ``input_count`` tokens: batches and ranks are merged by addition.

    Keyword Args:
        maxshrink (float): how much of the range may be given up, in [0, 1].
        patience (int): consecutive p without an improvement of any scale that end the search; 0: it visits all.
        grid (int): steps per unit of p.
        norm (float): exponent of the error.
        expand (float): factor on the range before the search, at least 1.
        strict (bool): a weight whose inputs were not seen is an error. Off: it is searched with equal weights.

    Raises:
        CalibrationError: a value outside of these; observed is not a weight; no inputs, or inputs of another width.

    Reference:
        The importance matrix of llama.cpp (ggml-org/llama.cpp, pull request 4861); hyperparameters and candidates of
        llm-compressor's ``imatrix_mse``, except that there ``strict`` is off.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (
        *MemorylessMSEObserver.statistics,
        Statistic("input_squares", "sum", of_inputs=True),
        Statistic("input_count", "sum", of_inputs=True),
    )
    hyperparameters: ClassVar[dict[str, Any] | None] = {
        "maxshrink": 0.95,
        "patience": 5,
        "grid": 20.0,
        "norm": 3.0,
        "strict": True,
    }
    strict: bool
    input_squares: torch.Tensor
    input_count: torch.Tensor

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        if base_name != "weight":
            raise CalibrationError(
                f"{type(self).__name__} weighs a weight's columns by the module's inputs",
                got=f"base name {base_name!r}",
                expected="weight",
                remedy="observe activations with mse or histogram.",
            )

    # ------------------------------------------------------------------ inputs

    @override
    def measure_inputs(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return channel_squares(value)

    def _saw_inputs(self) -> bool:
        return hasattr(self, "input_squares")

    @property
    @override
    def lacks_inputs(self) -> bool:
        return self.strict and not self._saw_inputs()

    @override
    def observe_without_inputs(self, weight: torch.Tensor) -> None:
        """All columns count alike where no data reached the module, even if ``strict``."""
        strict, self.strict = self.strict, False
        try:
            self(weight)
        finally:
            self.strict = strict

    def importance(self) -> torch.Tensor | None:
        """``E[x ** 2]`` per input channel, ``(C,)`` in float32, divided by its mean; None if no input was seen.

        Raises:
            CalibrationError: no input was seen, and ``strict`` is on.
        """
        if self.lacks_inputs:
            raise CalibrationError(
                f"{type(self).__name__} saw no inputs of the module, so it has no importance to weigh its weight with",
                remedy="run data through the module first, or set strict=False for equal weights.",
            )
        if not self._saw_inputs():
            return None
        mean = (self.input_squares / self.input_count).float()
        return mean / (mean.mean() + torch.finfo(torch.float32).tiny)

    # ------------------------------------------------------------------ weight

    @override
    def forward(self, value: torch.Tensor, g_idx: torch.Tensor | None = None) -> Observer:
        if value.numel() == 0:
            return self
        with self._observing():
            importance = self.importance()
            if importance is not None:
                importance = self._like_observed(importance.to(value.device), value, g_idx)
            observed = flatten_for_calibration(value, self.base_name, self.args, g_idx)
            self.combine(self._search(observed, importance))
        return self

    @override
    def candidates(self) -> list[float]:
        steps = max(1, int(self.maxshrink * self.grid)) + 1
        return [1 - step / self.grid for step in range(steps)]

    @property
    @override
    def idle_limit(self) -> int | None:
        return self.patience or None

    def _like_observed(self, importance: torch.Tensor, value: torch.Tensor, g_idx: torch.Tensor | None) -> torch.Tensor:
        """Importance of the columns in the layout of the observed weight, broadcastable to ``(*Q, G)``."""
        if value.ndim != 2 or len(importance) != value.shape[1]:
            raise CalibrationError(
                f"{type(self).__name__}: inputs and weight do not fit",
                got=f"inputs of {len(importance)} channels, a weight of shape {tuple(value.shape)}",
                expected="a weight with one column per input channel (Linear)",
                remedy="observe this weight with memoryless_mse.",
            )
        rows = 1
        if self.args.strategy == QuantizationStrategy.TENSOR:
            rows = len(value)
        elif self.args.strategy == QuantizationStrategy.BLOCK:
            assert self.args.block_structure is not None  # QuantizationArgs validated it
            rows = self.args.block_structure[0]
        return flatten_for_calibration(importance.expand(rows, -1), "weight", self.args, g_idx)[0]


@Observer.register("nvfp4_expanded_imatrix")
class NVFP4ExpandedIMatrixObserver(IMatrixMSEObserver):
    """``imatrix_mse`` with the candidates of ``nvfp4_expanded_mse``: for weights in NVFP4."""

    hyperparameters: ClassVar[dict[str, Any] | None] = {
        "maxshrink": 1 - 0.8 / 1.8,
        "patience": 1000,
        "grid": 200.0,
        "norm": 2.4,
        "expand": 1.8,
    }
