"""How much each layer loses.

Energy alone hides what hurts a language model: one token with an activation of 3,000 dominates any sum of squares while
every other token of the layer is rounded to zero. So the signal-to-quantization-noise ratio of inputs and outputs is
taken token by token, in dB, and then averaged. A token of a convolution is a pixel, with all its channels.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_obs.forward.calls import call_on, first_input
from lightning_obs.forward.extra_runs import left_as_it_was
from lightning_obs.forward.quantized_forward import quantize_forward
from lightning_obs.forward.shared_blocks import run_eagerly
from lightning_obs.model.additions import keep_hook_out
from lightning_obs.model.kinds import tokens_of
from lightning_obs.model.module_qparams import ROUNDED, args_of, calibrated_modules, quantized_states, read_qparams
from lightning_obs.model.weight import held, in_shards, reshard
from lightning_obs.numerics.histogram import Support, join_supports, support_of
from lightning_obs.numerics.quantization_error import counted_error, difference_error, grid_error, only_range
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.report.metrics import LayerSums, TensorError


@dataclass(frozen=True)
class LayerError:
    """The effect of quantizing one layer, alone, on unquantized inputs.

    Attributes:
        name: module name.
        weight, input, output: each tensor by itself, where it is known.
        feeds: the layers that are the first to read this layer's output; empty where no data were run.
    """

    name: str
    weight: TensorError | None = None
    input: TensorError | None = None
    output: TensorError | None = None
    feeds: tuple[str, ...] = ()

    @property
    def sqnr(self) -> float:
        """Mean over tokens of the output's signal-to-quantization-noise ratio [dB]; where no output was measured, the
        least of the weight's and the input's; NaN where none is known."""
        parts = (self.weight, self.input) if self.output is None else (self.output,)
        return min((part.sqnr for part in parts if part is not None and part.sqnr is not None), default=math.nan)

    @property
    def clipped(self) -> float | None:
        """Share of the input values outside the range of the input scale [%]; None for dynamic inputs."""
        return None if self.input is None else self.input.clipped


def measure_layer_errors(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any] | torch.Tensor],
    *,
    collectives: Collectives | None = None,
    counts: dict[str, Support] | None = None,
) -> list[LayerError]:
    """Compare every calibrated layer's output with and without quantization, worst first.

    Attention states are not compared: they are not a layer's output.

    The model runs unquantized, in evaluation mode, and is left as it was. Each layer is run a second time, quantized,
    on the input it got. So an error is the layer's own, not one that it inherited.

    Args:
        model: a calibrated model.
        batches: keyword arguments (or one tensor) for the model; a few hundred tokens are enough.
        collectives: how to talk to the other ranks, which all must call this, where weights are sharded.
        counts: filled with how often each input value was seen, ``{module name: (values, counts)}``.
    """
    layers = _layers(model)
    with ExitStack() as stack, torch.inference_mode(False), torch.no_grad(), run_eagerly(), left_as_it_was(model):
        inputs, outputs, feeds = LayerSums(list(layers)), LayerSums(list(layers)), stack.enter_context(_Feeds())
        for name, module in layers.items():
            hook = module.register_forward_hook(_probe(name, inputs, outputs, feeds, counts), with_kwargs=True)
            stack.callback(keep_hook_out(module, hook))
        for batch in batches if layers else ():
            call_on(model, batch)
    # Outputs are compared as they come out: they have no grid, and nothing of them is clipped here.
    written = {name: replace(error, clipped=None) for name, error in outputs.errors().items()}
    found = _joined(layers, _weight_errors(model, layers, collectives), inputs.errors(), written)
    return [replace(error, feeds=tuple(feeds.of[error.name])) for error in found if error.output is not None]


class _Feeds(TorchFunctionMode):
    """The layers that are the first to read a layer's output: ``of``, by its name.

    A tensor stems from the layers that the arguments of its function stem from, so it is followed through attention,
    norms and additions, but not through functions that are not torch's. The first readers are all that read one tensor:
    q, k and v.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of = defaultdict[str, list[str]](list)
        self._sources = WeakTensorKeyDictionary()
        self._first: dict[str, weakref.ref[torch.Tensor]] = {}

    def passed(self, name: str, value: torch.Tensor, output: torch.Tensor) -> None:
        """A layer has read a tensor and written another."""
        for source in self._sources.get(value, ()):
            if self._first.setdefault(source, weakref.ref(value))() is value:
                self.of[source].append(name)
        self._sources[output] = {name}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        read, written = ([x for x in tree_leaves(at) if isinstance(x, torch.Tensor)] for at in ((args, kwargs), found))
        sources = set().union(*(self._sources.get(tensor, ()) for tensor in read))
        for tensor in written if sources else ():
            self._sources[tensor] = sources
        return found


def known_layer_errors(
    model: nn.Module, counts: Mapping[str, Support], collectives: Collectives | None = None
) -> list[LayerError]:
    """The errors of every calibrated layer that are known without running the model, worst first.

    Args:
        model: a calibrated model.
        counts: of inputs that were counted (``session.input_counts``).
        collectives: how to talk to the other ranks, which all must call this. Each measures its share of the weights.
    """
    layers = _layers(model)
    with torch.inference_mode(False), torch.no_grad():
        inputs = LayerSums(list(layers))
        for name, (values, numbers) in counts.items():
            grid = _grid_of(layers[name], "input") if name in layers else None
            if grid is not None and grid[0].numel() == 1:
                at = grid[0].device
                inputs.update(name, counted_error(values.to(at), numbers.to(at), *grid))
    return _joined(layers, _weight_errors(model, layers, collectives), inputs.errors(), {})


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in calibrated_modules(model) if not quantized_states(module)}


def _weight_errors(
    model: nn.Module, layers: Mapping[str, nn.Module], collectives: Collectives | None
) -> dict[str, TensorError]:
    """The error of every quantized weight, by module name. Every rank must call this; each measures its share."""
    collectives = collectives or Collectives()
    reshard(model)
    with torch.inference_mode(False), torch.no_grad():
        sums = LayerSums(list(layers))
        for turn, (name, module) in enumerate(layers.items()):
            mine = turn % collectives.size == collectives.rank
            if not mine and not in_shards(module):
                continue
            with held(module) as matrix:
                grid = _grid_of(module, "weight")
                if mine and matrix is not None and grid is not None:
                    rounded = read_qparams(module).get(ROUNDED)
                    sums.update(name, grid_error(matrix, *grid, "weight", rounded=rounded))
        if layers and collectives.size > 1:
            sums.reduce_ranks(collectives)
    return sums.errors()


def _grid_of(module: nn.Module, base_name: str) -> tuple[torch.Tensor, torch.Tensor | None, QuantizationArgs] | None:
    """Scale (a global one divided out), zero point and arguments of a tensor with a static grid; else None."""
    args, qparams = args_of(module, base_name), read_qparams(module)
    scale, global_scale = (qparams.get(f"{base_name}_{name}") for name in ("scale", "global_scale"))
    if args is None or scale is None or args.dynamic is not False:
        return None
    scale = scale.float() if global_scale is None else scale.float() / global_scale.float()
    return scale, qparams.get(f"{base_name}_zero_point"), args


def _probe(
    name: str, inputs: LayerSums, outputs: LayerSums, feeds: _Feeds, counts: dict[str, Support] | None
) -> Callable[[nn.Module, Any, Any, Any], None]:
    """A forward hook that compares one layer with its quantized form."""

    def probe(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        value = first_input(args, kwargs)
        if value is None or not isinstance(output, torch.Tensor) or value.numel() == 0 or output.ndim == 0:
            return
        feeds.passed(name, value, output)
        with ExitStack() as stack:
            stack.callback(quantize_forward(module))
            quantized = module.forward(*args, **kwargs)  # not __call__: hooks saw this call already
        rounded, plain = (tokens_of(module, each) for each in (quantized, output))
        outputs.update(name, difference_error(rounded, plain))
        if not value.is_floating_point():
            return
        grid = _grid_of(module, "input")
        if grid is None:
            error = only_range(value)
        else:  # groups of compressed-tensors lie in the last dimension
            value = tokens_of(module, value) if grid[0].numel() == 1 else value
            error = grid_error(value, *grid, "input", by_token=True)
        inputs.update(name, error)
        if counts is not None:
            seen = support_of(value)
            counts[name] = join_supports(counts[name], seen) if name in counts else seen

    return probe


def _joined(layers: Iterable[str], *tensors: Mapping[str, TensorError]) -> list[LayerError]:
    """The errors of layers from the errors of weights, inputs and outputs, the worst first."""
    weights, inputs, outputs = tensors
    found = [LayerError(name, weights.get(name), inputs.get(name), outputs.get(name)) for name in layers]
    return sorted(found, key=lambda error: math.inf if math.isnan(error.sqnr) else error.sqnr)
