"""How much each layer loses.

Energy alone hides what hurts a language model: one token with an activation of 3,000 dominates any sum of squares while
every other token of the layer is rounded to zero. So the signal-to-quantization-noise ratio of inputs and outputs is
taken token by token, in dB, and then averaged. A token of a convolution is a pixel, with all its channels.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_obs.forward.calls import call_on, first_input
from lightning_obs.forward.eager import run_eagerly, unfused
from lightning_obs.forward.extra_runs import left_as_it_was
from lightning_obs.forward.quantized_forward import quantize_forward
from lightning_obs.model.kinds import tokens_of
from lightning_obs.model.mark import keep_hook_out
from lightning_obs.model.module_qparams import ROUNDED, args_of, calibrated_modules, quantized_states, read_qparams
from lightning_obs.model.weight import held, in_shards, reshard
from lightning_obs.numerics.histogram import Support, join_supports, support_of
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.report.metrics import (
    ErrorSums,
    LayerSums,
    TensorError,
    counted_error,
    difference_error,
    grid_error,
    only_range,
)

#: the functions that set negative values to zero, by all their names
_RECTIFIERS = {F.relu, F.relu_, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_}


@dataclass(frozen=True)
class LayerError:
    """The effect of quantizing one layer, alone, on unquantized inputs.

    :func:`measure_layer_errors` and :func:`known_layer_errors` make it; reports, loggers and causes read it.

    Attributes:
        name: module name.
        weight, input, output: the error of each tensor by itself; None where it is not known.
        feeds: the layers that are the first to read this layer's output; empty where no data were run.
    """

    name: str
    weight: TensorError | None = None
    input: TensorError | None = None
    output: TensorError | None = None
    feeds: tuple[str, ...] = ()

    @property
    def sqnr(self) -> float:
        """Signal-to-quantization-noise ratio of the output [dB], the mean over tokens.

        Where no output was measured, the smaller of the weight's and the input's ratio; NaN where neither is known.
        Layers are sorted by it, and poor layers are those with the smallest values.
        """
        tensors = (self.weight, self.input) if self.output is None else (self.output,)
        ratios = [tensor.sqnr for tensor in tensors if tensor is not None and tensor.sqnr is not None]
        return min(ratios, default=math.nan)

    @property
    def clipped(self) -> float | None:
        """Share of the input values outside the range of the input scale [%], for tables and logs.

        None for dynamic inputs.
        """
        if self.input is None:
            return None
        return self.input.clipped


def measure_layer_errors(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any] | torch.Tensor],
    *,
    collectives: Collectives | None = None,
    counts: dict[str, Support] | None = None,
) -> list[LayerError]:
    """Compare every calibrated layer's output with and without quantization, worst first.

    ``Results.layer_errors`` of a callback calls it if it was given batches; without batches it calls
    :func:`known_layer_errors`.

    The model runs unquantized, in evaluation mode, and is left as it was. Each layer runs a second time, quantized, on
    the same input, so the error of one layer does not add to the next one's. Attention states are not compared: they
    are not a layer's output. A layer without a measured output is left out of the result: no batch reached it, or its
    output is no tensor. A quantized output that only ReLUs read is compared behind them: its range may begin at zero
    (:mod:`lightning_obs.calibration.output_readers`). Errors of inputs and outputs are of this rank's batches alone;
    those of weights are of all ranks.

    Args:
        model: a calibrated model.
        batches: keyword arguments (or one tensor) for the model; a few hundred tokens are enough.
        collectives: how to talk to the other ranks, which all must call this, where weights are sharded.
        counts: filled with how often each input value was seen, ``{module name: (values, counts)}``.
    """
    layers = _layers(model)
    inputs = LayerSums(list(layers))
    outputs = LayerSums(list(layers))
    feeds = _Feeds()
    rectified = _Rectified([name for name, module in layers.items() if "output_scale" in read_qparams(module)])
    with ExitStack() as stack, torch.inference_mode(False), torch.no_grad(), run_eagerly(), left_as_it_was(model):
        stack.enter_context(unfused(model))  # torch's encoder layers call their Linears, so that hooks run
        stack.enter_context(feeds)
        if rectified.names:
            stack.enter_context(rectified)
        for name, module in layers.items():
            probe = _Probe(name, inputs, outputs, feeds, rectified, counts)
            handle = module.register_forward_hook(probe, with_kwargs=True)
            remove_hook = keep_hook_out(module, handle)  # copies of the module do not have the hook
            stack.callback(remove_hook)
        if layers:
            for batch in batches:
                output = call_on(model, batch)
                rectified.read_by(None, output)
    output_errors: dict[str, TensorError] = {}
    for name, error in {**outputs.errors(), **rectified.errors()}.items():
        output_errors[name] = replace(error, clipped=None)  # outputs have no grid that could clip them
    weight_errors = _weight_errors(model, layers, collectives)
    errors: list[LayerError] = []
    for layer in _worst_first(layers, weight_errors, inputs.errors(), output_errors):
        if layer.output is not None:
            readers = tuple(feeds.readers[layer.name])
            errors.append(replace(layer, feeds=readers))
    return errors


class _Feeds(TorchFunctionMode):
    """Find the layers that are the first to read each layer's output: ``readers``, by the name of the source.

    While it is entered, every torch function passes the sources of its arguments on to its results. So an output is
    followed through attention, norms and additions, but not through functions outside torch. Several layers are first
    readers if they read the same tensor, as q, k and v do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.readers = defaultdict[str, list[str]](list)
        self._sources = WeakTensorKeyDictionary()  # by tensor, the names of the layers that it stems from
        self._first_read: dict[str, weakref.ref[torch.Tensor]] = {}  # by source, the first tensor that a layer read

    def passed(self, name: str, value: torch.Tensor, output: torch.Tensor) -> None:
        """Note that a layer has read ``value`` and written ``output``; called by the layer's hook."""
        for source in self._sources.get(value, ()):
            first_read = self._first_read.setdefault(source, weakref.ref(value))
            if first_read() is value:
                self.readers[source].append(name)
        self._sources[output] = {name}

    # torch calls this in place of every function that runs while the mode is entered.
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sources: set[str] = set()
        for tensor in _tensors_in((args, kwargs)):
            sources |= self._sources.get(tensor, set())
        if sources:
            for tensor in _tensors_in(result):
                self._sources[tensor] = sources
        return result


class _Rectified(TorchFunctionMode):
    """Measure the quantized outputs that only ReLUs read as the ReLUs leave them.

    Engines fold such a ReLU into the layer, so INT8_ONNX and INT8_TENSORRT have no levels for what it cuts off. The
    mode is entered while the model runs, to see which functions read an output. The errors of all outputs are added up
    meanwhile, because their readers come later.

    Args:
        names: of the layers whose output is quantized.
    """

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self._sums = LayerSums(names)
        self._other_readers: set[str] = set()  # layers whose output something else than a ReLU has read
        self._outputs = WeakTensorKeyDictionary()  # by tensor, the name of the layer that returned it
        self._is_measuring = False

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """For a ``with`` block whose functions are no readers: those of a hook that measures a layer."""
        was_measuring = self._is_measuring
        self._is_measuring = True
        try:
            yield
        finally:
            self._is_measuring = was_measuring

    def passed(self, name: str, module: nn.Module, quantized: torch.Tensor, output: torch.Tensor) -> None:
        """Add the error of a layer's output, cut off at zero, and watch who reads it; the layer's hook calls this."""
        if name in self.names:
            error = difference_error(tokens_of(module, quantized.clamp(min=0)), tokens_of(module, output.clamp(min=0)))
            self._sums.update(name, error)
            self._outputs[output] = name

    def read_by(self, function: Any, values: Any) -> None:
        """Note the function (None: the model's caller) that reads the tensors among ``values``."""
        for tensor in _tensors_in(values):
            name = self._outputs.get(tensor)
            if name is not None and function not in _RECTIFIERS:
                self._other_readers.add(name)

    def errors(self) -> dict[str, TensorError]:
        """The errors of the outputs that only ReLUs have read, by layer name, once the model has run."""
        errors = self._sums.errors()
        return {name: error for name, error in errors.items() if name not in self._other_readers}

    # torch calls this in place of every function that runs while the mode is entered.
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        results = _tensors_in(result)
        if results and not self._is_measuring:  # a function without tensors in its result asks for a shape or a dtype
            self.read_by(function, (args, kwargs))
            for tensor in results:
                self._outputs.pop(tensor, None)  # a ReLU in place: what the layer returned is gone
        return result


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in arguments or results of a function: in lists, tuples and dicts of any depth."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def known_layer_errors(
    model: nn.Module, counts: Mapping[str, Support], collectives: Collectives | None = None
) -> list[LayerError]:
    """The errors of every calibrated layer that are known without running the model, worst first.

    ``Results.layer_errors`` of a callback calls it where it has no batches: at the end of a calibration, for loggers
    and the printed table, and for a report without data.

    Args:
        model: a calibrated model.
        counts: the values of each input whose observer counted them, and how often each occurred
            (``session.observation.input_counts``).
        collectives: how to talk to the other ranks, which all must call this. Each measures its share of the weights.
    """
    layers = _layers(model)
    with torch.inference_mode(False), torch.no_grad():
        inputs = LayerSums(list(layers))
        for name, (values, numbers) in counts.items():
            grid = _grid_of(layers[name], "input") if name in layers else None
            if grid is not None and grid.scale.numel() == 1:
                device = grid.scale.device
                error = counted_error(values.to(device), numbers.to(device), *grid)
                inputs.update(name, error)
    return _worst_first(layers, _weight_errors(model, layers, collectives), inputs.errors(), {})


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The calibrated modules by name, without attention, whose states are no layer's output."""
    return {name: module for name, module in calibrated_modules(model) if not quantized_states(module)}


def _weight_errors(
    model: nn.Module, layers: Mapping[str, nn.Module], collectives: Collectives | None
) -> dict[str, TensorError]:
    """The error of every quantized weight, by module name. Every rank must call this; each measures its share.

    Called by :func:`measure_layer_errors` and :func:`known_layer_errors`.
    """
    collectives = collectives or Collectives()
    reshard(model)  # after a forward FSDP2 may keep whole weights; ``held`` gathers shards
    with torch.inference_mode(False), torch.no_grad():
        sums = LayerSums(list(layers))
        for number, (name, module) in enumerate(layers.items()):
            measures = number % collectives.size == collectives.rank
            if not measures and not in_shards(module):
                continue
            with held(module) as matrix:  # all ranks gather a weight in shards
                grid = _grid_of(module, "weight")
                if measures and matrix is not None and grid is not None:
                    rounded = read_qparams(module).get(ROUNDED)
                    error = grid_error(matrix, *grid, "weight", rounded=rounded)
                    sums.update(name, error)
        if layers and collectives.size > 1:
            sums.reduce_ranks(collectives)
    return sums.errors()


class _Grid(NamedTuple):
    """The numbers that a quantized tensor can take; a global scale is divided out of the scale."""

    scale: torch.Tensor
    zero_point: torch.Tensor | None
    args: QuantizationArgs


def _grid_of(module: nn.Module, base_name: str) -> _Grid | None:
    """The static grid of a module's weight or input; None where it has none."""
    args = args_of(module, base_name)
    qparams = read_qparams(module)
    scale = qparams.get(f"{base_name}_scale")
    if args is None or scale is None or args.dynamic is not False:
        return None
    scale = scale.float()
    global_scale = qparams.get(f"{base_name}_global_scale")
    if global_scale is not None:
        scale = scale / global_scale.float()
    return _Grid(scale, qparams.get(f"{base_name}_zero_point"), args)


@dataclass(frozen=True, eq=False)
class _Probe:
    """A forward hook that compares one layer with its quantized form.

    :func:`measure_layer_errors` puts one on each layer while it runs the model.

    Attributes:
        name: the name of the layer.
        inputs: gets the error of a floating point input, or its range where it has no static scale.
        outputs: gets the error of the output.
        feeds: is told which tensors the layer has read and written.
        rectified: is told what the layer has written.
        counts: by layer, how often each value of an input was seen; None: values are not counted.
    """

    name: str
    inputs: LayerSums
    outputs: LayerSums
    feeds: _Feeds
    rectified: _Rectified
    counts: dict[str, Support] | None

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Measure one call of the layer; torch calls it after each."""
        with self.rectified.measuring():  # what is asked of a tensor here is no reader of it
            self._measure(module, args, kwargs, output)

    def _measure(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Add the errors of one call, unless the layer got no values or returned no tensor."""
        value = first_input(args, kwargs)
        if value is None or not isinstance(output, torch.Tensor) or value.numel() == 0 or output.ndim == 0:
            return
        self.feeds.passed(self.name, value, output)
        quantized = _run_quantized(module, args, kwargs)
        output_error = difference_error(tokens_of(module, quantized), tokens_of(module, output))
        self.outputs.update(self.name, output_error)
        self.rectified.passed(self.name, module, quantized, output)
        if value.is_floating_point():
            self.inputs.update(self.name, _input_error(module, value))
            self._count(value)

    def _count(self, value: torch.Tensor) -> None:
        """Add the values of an input to ``counts``."""
        if self.counts is None:
            return
        support = support_of(value)
        if self.name in self.counts:
            earlier = self.counts[self.name]
            support = join_supports(earlier, support)
        self.counts[self.name] = support


def _run_quantized(module: nn.Module, args: Any, kwargs: Any) -> torch.Tensor:
    """The output of a layer that runs quantized; its hooks do not run, as they saw this call already."""
    with ExitStack() as stack:
        stack.callback(quantize_forward(module))
        output: torch.Tensor = module.forward(*args, **kwargs)
    return output


def _input_error(module: nn.Module, value: torch.Tensor) -> ErrorSums:
    """The error of a layer's input on the grid of its scale, or its range alone where it has no static scale."""
    grid = _grid_of(module, "input")
    if grid is None:
        return only_range(value)
    if grid.scale.numel() == 1:  # else the last dimension has to stay last: it holds the groups
        value = tokens_of(module, value)
    return grid_error(value, *grid, "input", by_token=True)


def _worst_first(
    layers: Iterable[str],
    weights: Mapping[str, TensorError],
    inputs: Mapping[str, TensorError],
    outputs: Mapping[str, TensorError],
) -> list[LayerError]:
    """The errors of layers from the errors of their tensors; layers of which nothing is known come last."""
    errors = []
    for name in layers:
        error = LayerError(name, weights.get(name), inputs.get(name), outputs.get(name))
        errors.append(error)
    return sorted(errors, key=lambda error: math.inf if math.isnan(error.sqnr) else error.sqnr)
