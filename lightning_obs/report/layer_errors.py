"""How much each layer loses, on torchmetrics.

Energy alone hides what hurts a language model: one token with an activation of 3,000 dominates any sum of squares while
every other token of the layer is rounded to zero. So the signal-to-quantization-noise ratio is taken token by token, in
dB, and then averaged (torchmetrics' ``SignalNoiseRatio`` over the last dimension).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchmetrics import MeanMetric
from torchmetrics.audio import SignalNoiseRatio

from lightning_obs.model.calls import first_input
from lightning_obs.model.compile_stance import run_eagerly
from lightning_obs.model.qparams import calibrated_modules, get_scheme, quantized_states, read_qparams
from lightning_obs.model.quantized_forward import fake_quantize, quantize_forward
from lightning_obs.numerics.formats import Levels


@dataclass(frozen=True)
class LayerError:
    """What quantization does to one layer, alone, on unquantized inputs.

    Attributes:
        name: module name.
        sqnr: mean over tokens of the output's signal-to-quantization-noise ratio [dB].
        clipped: share of the input values outside what the input scale can represent [%]; None for dynamic inputs.
        low, high: smallest and largest input value seen here.
    """

    name: str
    sqnr: float
    clipped: float | None
    low: float
    high: float


def measure_layer_errors(model: nn.Module, batches: Iterable[Mapping[str, Any] | torch.Tensor]) -> list[LayerError]:
    """Compare every calibrated layer's output with and without quantization, worst first.

    Attention states are not compared: they are not a layer's output.

    The model runs unquantized; each layer is run a second time, quantized, on the input it got. So an error is the
    layer's own, not one that it inherited.

    Args:
        model: a calibrated model.
        batches: keyword arguments (or one tensor) for the model; a few hundred tokens are enough.
    """
    probes = [_Probe(name, module) for name, module in calibrated_modules(model) if not quantized_states(module)]
    if not probes:
        return []
    with ExitStack() as stack, torch.no_grad(), run_eagerly():
        for probe in probes:
            stack.callback(probe.module.register_forward_hook(probe, with_kwargs=True).remove)
        for batch in batches:
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                model(batch)
    return sorted((probe.result() for probe in probes if probe.calls), key=lambda error: error.sqnr)


class _Probe:
    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module, self.calls = name, module, 0
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self.sqnr = SignalNoiseRatio().to(device)
        self.clipped = MeanMetric().to(device)
        self.low, self.high = float("inf"), float("-inf")
        scheme = get_scheme(module)
        args = scheme.input_activations if scheme is not None else None
        self.static = args is not None and args.dynamic is False
        self.last_step = Levels.of(args).last_step if args is not None else 1.0

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        value = first_input(args, kwargs)
        if value is None or not isinstance(output, torch.Tensor) or value.numel() == 0 or output.ndim == 0:
            return
        self.calls += 1
        self.sqnr.update(_run_quantized(module, args, kwargs).float(), output.float())
        if value.is_floating_point():
            low, high = torch.aminmax(value)
            self.low, self.high = min(self.low, float(low)), max(self.high, float(high))
        if self.static:
            # Outside by more than half a step of the outermost code: rounding alone would not move it that far.
            error = (fake_quantize(module, value, "input") - value).abs()
            step = read_qparams(module)["input_scale"].max() * self.last_step
            self.clipped.update(100.0 * (error > 0.5 * step * (1 + 1e-3)).float().mean())

    def result(self) -> LayerError:
        return LayerError(
            self.name,
            float(self.sqnr.compute()),
            float(self.clipped.compute()) if self.static else None,
            self.low,
            self.high,
        )


def _run_quantized(module: nn.Module, args: Any, kwargs: Any) -> torch.Tensor:
    undo = quantize_forward(module)
    try:
        result = module.forward(*args, **kwargs)  # not __call__: hooks saw this call already
        assert isinstance(result, torch.Tensor)
        return result
    finally:
        undo()
