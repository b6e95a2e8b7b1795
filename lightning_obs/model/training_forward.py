"""Run modules through fake quantization while they are trained.

A module's ``forward`` is replaced, on the instance, by one that quantizes and dequantizes input and weight with
gradients (``numerics.fake_quantize``) and then computes as before. Numbers are bit for bit those of
:func:`~lightning_obs.quantized` and of the exported checkpoint, so validation runs through the same forward.

What makes this differ from compressed-tensors' own forward:

* The quantized weight is a tensor of its own in autograd's graph; the parameter is never written to (compressed-tensors
  swaps ``weight.data``). So it can be recomputed (activation checkpointing), gathered (FSDP2) and pruned meanwhile.
* A tensor whose range is not known yet passes unquantized.
* The output is quantized by a forward hook, so that an observer's hook can see it before.
* Attention states are quantized where compressed-tensors' hooked modules read them, with gradients in its place.

Nothing is registered: ``state_dict``, ``parameters()`` and ``buffers()`` of the model stay what they are.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn
from torch.nn import functional as F

from lightning_obs.model.attention import hooked_attention, register_state_change
from lightning_obs.model.calls import replace_input
from lightning_obs.model.lora import adapters_of
from lightning_obs.model.qparams import get_scheme, read_qparams, scheme_args
from lightning_obs.model.weights import from_matrix, full_weight, to_matrix
from lightning_obs.numerics.fake_quantize import fake_quantize, fake_quantize_dynamic, learned_scale
from lightning_obs.numerics.reshape import ATTENTION

_STATE = "training_quantization"


@dataclass
class Switch:
    """What is quantized now; one for all modules of a model.

    Attributes:
        weights: weights.
        activations: inputs and outputs.
    """

    weights: bool = True
    activations: bool = True


@dataclass
class LearnedScale:
    """A scale that is trained: the one that was found, and the logarithm of what it is multiplied by."""

    calibrated: torch.Tensor
    log_factor: nn.Parameter

    def value(self) -> torch.Tensor:
        """The scale now, with a gradient to the factor."""
        return learned_scale(self.calibrated, self.log_factor)


@dataclass
class _TrainingQuantization:
    """Kept on the module as a plain attribute, so that it is copied with it."""

    switch: Switch
    #: base name -> scale; empty unless scales are learned
    learned: dict[str, LearnedScale] = field(default_factory=dict)
    #: an instance's own forward that was there before (a wrapper of somebody else's)
    before: Callable[..., Any] | None = None


def quantize_training_forward(module: nn.Module, switch: Switch, *, output: bool = False) -> Callable[[], None]:
    """Let a module run through fake quantization with gradients, and return what undoes it.

    Args:
        module: what of it has quantization parameters (``modules.write_qparams``) is quantized, now or later.
        switch: turns weights and activations on and off, at any time.
        output: the module's scheme quantizes its output too.
    """
    before = vars(module).get("forward")
    for name, value in read_qparams(module).items():
        setattr(module, name, value)  # on the module's device
    setattr(module, _STATE, _TrainingQuantization(switch, before=before))
    plain_linear = before is None and type(module).forward is nn.Linear.forward
    module.forward = types.MethodType(_linear_forward if plain_linear else _forward, module)
    adapters = adapters_of(module)
    if adapters is not None:
        # Hooks of the base layer see what they would see after merging: the adapters' sum is a part of its weight.
        adapters.layer.forward = types.MethodType(_adapted_forward, adapters.layer)
    output_hook = module.register_forward_hook(_quantize_output) if output else None

    def undo() -> None:
        if output_hook is not None:
            output_hook.remove()
        vars(module).pop("forward", None)
        vars(module).pop(_STATE, None)
        if adapters is not None:
            vars(adapters.layer).pop("forward", None)
        if before is not None:
            module.forward = before

    return undo


@contextmanager
def quantized_training_states(
    model: nn.Module, states: Mapping[nn.Module, Collection[str]], switch: Switch
) -> Iterator[None]:
    """Let attention read fake-quantized states, with gradients, inside the ``with`` block.

    Args:
        model: the transformers model that holds the attention modules.
        states: attention modules, and which of q, k, v is quantized, now or when its range is known.
        switch: turns activations, which states are, on and off.
    """
    with ExitStack() as stack:
        stack.enter_context(hooked_attention(model, states, quantize=False))
        for module, names in states.items():
            for name, value in read_qparams(module).items():
                setattr(module, name, value)  # on the module's device
            setattr(module, _STATE, _TrainingQuantization(switch))
            stack.callback(vars(module).pop, _STATE, None)
            for name in names:
                stack.callback(register_state_change(module, name, partial(_fake_quantize_state, module, name)).remove)
        yield


def set_learned_scale(module: nn.Module, base_name: str, learned: LearnedScale) -> None:
    """Take a scale that is trained in place of the module's own, until the training forward is undone."""
    getattr(module, _STATE).learned[base_name] = learned


def _linear_forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # the name that nn.Linear has
    weight = full_weight(self)
    assert weight is not None
    weight = _fake_quantize(self, weight, "weight")
    return F.linear(_fake_quantize(self, input, "input"), weight, self.bias)


def _adapted_forward(self: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return self.base_layer(x, *args, **kwargs)  # type: ignore[operator]


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    before = getattr(self, _STATE).before
    args, kwargs = replace_input(args, kwargs, lambda value: _fake_quantize(self, value, "input"))
    weight = full_weight(self)
    quantized = None if weight is None else _fake_quantized_weight(self, weight)
    if quantized is None or quantized is self.weight:
        return type(self).forward(self, *args, **kwargs) if before is None else before(*args, **kwargs)
    # An entry of the instance's dict is found before its parameter. Pruning keeps the masked weight there already.
    attributes = vars(self)
    own = attributes.get("weight")
    attributes["weight"] = quantized
    try:
        return type(self).forward(self, *args, **kwargs) if before is None else before(*args, **kwargs)
    finally:
        if own is None:
            del attributes["weight"]
        else:
            attributes["weight"] = own


def _quantize_output(module: nn.Module, args: Any, output: Any) -> Any:
    return _fake_quantize(module, output, "output") if isinstance(output, torch.Tensor) else None


def _fake_quantize_state(module: nn.Module, base_name: str, state: torch.Tensor) -> torch.Tensor:
    return _fake_quantize(module, state, base_name)


def _fake_quantized_weight(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    matrix = to_matrix(module, weight)
    if matrix is None:
        return weight
    quantized = _fake_quantize(module, matrix, "weight")
    return weight if quantized is matrix else from_matrix(module, quantized, weight.shape).contiguous()


def _fake_quantize(module: nn.Module, value: torch.Tensor, base_name: str) -> torch.Tensor:
    """``value`` itself where nothing of it is quantized now."""
    state = getattr(module, _STATE)
    wanted = state.switch.weights if base_name == "weight" else state.switch.activations
    args = _args(module, base_name) if wanted else None
    if args is None or not has_range(module, base_name, args):
        return value
    global_scale = getattr(module, f"{base_name}_global_scale", None)
    if args.dynamic:
        return fake_quantize_dynamic(value, args, global_scale=global_scale)
    learned = state.learned.get(base_name)
    scale = getattr(module, f"{base_name}_scale") if learned is None else learned.value()
    zero_point = getattr(module, f"{base_name}_zero_point", None)
    tokens = 1 if base_name == "weight" else max(1, value.numel() // max(1, value.shape[-1]))
    return fake_quantize(value, scale, zero_point, args, global_scale=global_scale, observations=tokens)


def _args(module: nn.Module, base_name: str) -> QuantizationArgs | None:
    scheme = get_scheme(module)
    if scheme is None or base_name in ATTENTION:
        return None if scheme is None else scheme.input_activations
    return dict(scheme_args(scheme)).get(base_name)


def has_range(module: nn.Module, base_name: str, args: QuantizationArgs) -> bool:
    """Whether the parameters that ``args`` asks for are on the module; a dynamic range asks for none."""
    if args.dynamic is True:
        return True
    return hasattr(module, f"{base_name}_{'global_scale' if args.dynamic else 'scale'}")
