"""How much each layer loses.

Energy alone hides what hurts a language model: one token with an activation of 3,000 dominates any sum of squares while
every other token of the layer is rounded to zero. So the signal-to-quantization-noise ratio of inputs and outputs is
taken token by token, in dB, and then averaged. A token of a convolution is a pixel, with all its channels.

The weights need no data, nor do inputs that a histogram observer counted: :func:`known_layer_errors`. What a layer does
to its output needs a pass: :func:`measure_layer_errors`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_obs.forward.calls import call_on, first_input
from lightning_obs.forward.compile_stance import run_eagerly
from lightning_obs.forward.quantized_forward import quantize_forward
from lightning_obs.model.additions import keep_hook_out
from lightning_obs.model.kinds import tokens_of
from lightning_obs.model.qparams import calibrated_modules, get_scheme, quantized_states, read_qparams, scheme_args
from lightning_obs.model.sharding import in_shards, reshard
from lightning_obs.model.weight import held
from lightning_obs.numerics.histogram import Support, join_supports, support_of
from lightning_obs.numerics.quantization_error import (
    counted_error,
    difference_error,
    grid_error,
    only_range,
)
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.report.metrics import LayerSums


@dataclass(frozen=True)
class TensorError:
    """What rounding does to one tensor; see :mod:`lightning_obs.report.metrics` for each number. None: not known.

    Attributes:
        sqnr: signal-to-quantization-noise ratio [dB].
        mse: mean squared error.
        cosine: cosine similarity.
        clipped: share of the values outside of what the scale can represent [%].
        low, high: smallest and largest value.
        bits: entropy of the codes [bit].
    """

    sqnr: float | None
    mse: float | None
    cosine: float | None
    clipped: float | None
    low: float | None
    high: float | None
    bits: float | None


@dataclass(frozen=True)
class LayerError:
    """What quantization does to one layer, alone, on unquantized inputs.

    Attributes:
        name: module name.
        sqnr: mean over tokens of the output's signal-to-quantization-noise ratio [dB]; where no output was measured,
            the least of the weight's and the input's.
        clipped: share of the input values outside what the input scale can represent [%]; None for dynamic inputs.
        low, high: smallest and largest input value seen here; NaN if none was seen.
        weight, input, output: each tensor by itself, where it is known.
    """

    name: str
    sqnr: float
    clipped: float | None
    low: float
    high: float
    weight: TensorError | None = None
    input: TensorError | None = None
    output: TensorError | None = None


def measure_layer_errors(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any] | torch.Tensor],
    *,
    collectives: Collectives | None = None,
    counts: dict[str, Support] | None = None,
) -> list[LayerError]:
    """Compare every calibrated layer's output with and without quantization, worst first.

    Attention states are not compared: they are not a layer's output.

    The model runs unquantized; each layer is run a second time, quantized, on the input it got. So an error is the
    layer's own, not one that it inherited.

    Args:
        model: a calibrated model.
        batches: keyword arguments (or one tensor) for the model; a few hundred tokens are enough.
        collectives: how to talk to the other ranks, which all must call this, where weights are sharded.
        counts: filled with how often each input value was seen, ``{module name: (values, counts)}``.
    """
    layers = _layers(model)
    names = list(layers)
    if not names:
        return []
    with ExitStack() as stack, torch.inference_mode(False), torch.no_grad(), run_eagerly():
        inputs, outputs = LayerSums(names), LayerSums(names)
        for name, module in layers.items():
            probe = _Probe(name, inputs, outputs, counts)
            stack.callback(keep_hook_out(module, module.register_forward_hook(probe, with_kwargs=True)))
        for batch in batches:
            call_on(model, batch)
    # Outputs are compared as they come out: they have no grid, and nothing of them is clipped here.
    written = {name: replace(error, clipped=None) for name, error in _errors(outputs, names).items()}
    found = _joined(layers, measure_weights(model, collectives), _errors(inputs, names), written)
    return [error for error in found if error.output is not None]


def known_layer_errors(
    model: nn.Module, counts: Mapping[str, Support], collectives: Collectives | None = None
) -> list[LayerError]:
    """What is known of every calibrated layer without running the model, worst first.

    Args:
        model: a calibrated model.
        counts: of inputs that were counted (``session.input_counts``).
        collectives: how to talk to the other ranks, which all must call this. Each measures its share of the weights.
    """
    layers = _layers(model)
    names = list(layers)
    with torch.inference_mode(False), torch.no_grad():
        inputs = LayerSums(names)
        for name, (values, numbers) in counts.items():
            grid = _grid_of(layers[name], "input") if name in layers else None
            if grid is not None and grid[0].numel() == 1:
                at = grid[0].device
                inputs.update(name, counted_error(values.to(at), numbers.to(at), *grid))
    return _joined(layers, measure_weights(model, collectives), _errors(inputs, names), {})


def measure_weights(model: nn.Module, collectives: Collectives | None = None) -> dict[str, TensorError]:
    """The error of every quantized weight, by module name. Every rank must call this; each measures its share."""
    collectives = collectives or Collectives()
    layers = {name: module for name, module in _layers(model).items() if _grid_of(module, "weight") is not None}
    reshard(model)
    with torch.inference_mode(False), torch.no_grad():
        weights = LayerSums(list(layers))
        for turn, (name, module) in enumerate(layers.items()):
            mine = turn % collectives.size == collectives.rank
            if not mine and not in_shards(module):
                continue
            with held(module) as matrix:
                grid = _grid_of(module, "weight")
                if mine and matrix is not None and grid is not None:
                    weights.update(name, grid_error(matrix, *grid, "weight"))
        if layers and collectives.size > 1:
            weights.reduce_ranks(collectives)
    return _errors(weights, list(layers))


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in calibrated_modules(model) if not quantized_states(module)}


def _grid_of(module: nn.Module, base_name: str) -> tuple[torch.Tensor, torch.Tensor | None, Any] | None:
    """Scale (a global one divided out), zero point and arguments of a tensor with a static grid; else None."""
    scheme = get_scheme(module)
    args = dict(scheme_args(scheme)).get(base_name) if scheme is not None else None
    qparams = read_qparams(module)
    scale = qparams.get(f"{base_name}_scale")
    if args is None or scale is None or args.dynamic is not False:
        return None
    global_scale = qparams.get(f"{base_name}_global_scale")
    scale = scale.float() if global_scale is None else scale.float() / global_scale.float()
    return scale, qparams.get(f"{base_name}_zero_point"), args


class _Probe:
    """A forward hook that compares one layer with its quantized form."""

    def __init__(self, name: str, inputs: LayerSums, outputs: LayerSums, counts: dict[str, Support] | None) -> None:
        self.name, self.inputs, self.outputs, self.counts = name, inputs, outputs, counts

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        value = first_input(args, kwargs)
        if value is None or not isinstance(output, torch.Tensor) or value.numel() == 0 or output.ndim == 0:
            return
        rounded, plain = (tokens_of(module, value) for value in (_run_quantized(module, args, kwargs), output))
        self.outputs.update(self.name, difference_error(rounded, plain))
        if not value.is_floating_point():
            return
        grid = _grid_of(module, "input")
        if grid is None:
            error = only_range(value)
        else:  # of groups, the last dimension is what compressed-tensors groups
            value = tokens_of(module, value) if grid[0].numel() == 1 else value
            error = grid_error(value, *grid, "input", by_token=True)
        self.inputs.update(self.name, error)
        if self.counts is not None:
            seen = support_of(value)
            self.counts[self.name] = join_supports(self.counts[self.name], seen) if self.name in self.counts else seen


def _run_quantized(module: nn.Module, args: Any, kwargs: Any) -> torch.Tensor:
    undo = quantize_forward(module)
    try:
        result = module.forward(*args, **kwargs)  # not __call__: hooks saw this call already
        assert isinstance(result, torch.Tensor)
        return result
    finally:
        undo()


def _errors(layers: LayerSums, names: list[str]) -> dict[str, TensorError]:
    """The numbers of each layer of which anything was seen."""
    if not names:
        return {}
    seen = layers.seen.tolist()
    if not any(seen):
        return {}
    computed = {key: value.reshape(len(names), -1).tolist() for key, value in layers.compute().items()}
    found = {}
    for at, name in enumerate(names):
        if seen[at]:
            numbers = {key: [None if math.isnan(v) else v for v in values[at]] for key, values in computed.items()}
            low, high = numbers.pop("range")
            found[name] = TensorError(low=low, high=high, **{key: value for key, (value,) in numbers.items()})
    return found


def _joined(
    layers: Iterable[str],
    weights: Mapping[str, TensorError],
    inputs: Mapping[str, TensorError],
    outputs: Mapping[str, TensorError],
) -> list[LayerError]:
    found = []
    for name in layers:
        weight, read, written = weights.get(name), inputs.get(name), outputs.get(name)
        own = [e.sqnr for e in ([written] if written is not None else [weight, read]) if e is not None]
        low, high = (math.nan, math.nan) if read is None else (read.low, read.high)
        found.append(
            LayerError(
                name,
                min((sqnr for sqnr in own if sqnr is not None), default=math.nan),
                None if read is None or read.sqnr is None else read.clipped,
                math.nan if low is None else low,
                math.nan if high is None else high,
                weight,
                read,
                written,
            )
        )
    return sorted(found, key=lambda error: math.inf if math.isnan(error.sqnr) else error.sqnr)
