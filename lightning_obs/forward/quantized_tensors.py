"""Quantize and dequantize one tensor of a module, with the parameters on the module and with gradients.

compressed-tensors swaps ``weight.data``. Here the quantized weight is another tensor in autograd's graph, so it can be
recomputed (activation checkpointing), gathered (FSDP2) and pruned meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStatus
from torch import nn

from lightning_obs.errors import CalibrationError
from lightning_obs.model.kinds import count_tokens, from_matrix, to_matrix
from lightning_obs.model.module_qparams import ROUNDED, args_of, move_qparams
from lightning_obs.model.weight import full_weight
from lightning_obs.numerics.fake_quantize import dequantize, fake_quantize_dynamic, straight_through
from lightning_obs.numerics.fake_quantize import fake_quantize as fake_quantize_with
from lightning_obs.numerics.qparams import ATTENTION

#: ``(value, base name)`` to the value that a module computes with; a weight keeps its own shape
Writer: TypeAlias = Callable[[torch.Tensor, str], torch.Tensor]

#: the attribute of a module that holds its :class:`Quantization`
STATE = "quantized_forward"
#: status of modules whose weight is on the format's grid already
_ON_THE_GRID = (QuantizationStatus.COMPRESSED, QuantizationStatus.DECOMPRESSED)


@dataclass
class Switch:
    """The tensors that are quantized now; one switch for all modules of a model."""

    weights: bool = True
    activations: bool = True
    writer: Writer | None = None  # quantizes and dequantizes in numerics' place


@dataclass
class Quantization:
    """How a module runs quantized; a plain attribute of it."""

    switch: Switch = field(default_factory=Switch)
    before: Callable[..., Any] | None = None  # the instance's own earlier forward (a wrapper of somebody else's)
    output_by_hook: bool = False  # a forward hook quantizes the output
    trainable: bool = True  # off: the weight is a checkpoint's, rounded already, and a step would leave its grid
    #: base name -> the scale now, with a gradient; empty unless scales are learned
    learned: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    kept: list[torch.Tensor] | None = None  # the quantized weight, once it is known; None: quantized at each forward


DEFAULT = Quantization()


def weight_in_use(module: nn.Module) -> torch.Tensor | None:
    """The whole weight; one that is on a checkpoint's grid refuses a gradient."""
    weight = full_weight(module)
    if weight is None or getattr(module, STATE, DEFAULT).trainable:
        return weight
    weight = weight.view_as(weight)  # a hook on the parameter itself would not pickle
    if weight.requires_grad:
        weight.register_hook(_refuse_training)
    return weight


def _refuse_training(gradient: torch.Tensor) -> None:
    raise CalibrationError(
        "weights from load_checkpoint are rounded and cannot be trained",
        remedy="fine-tune the original model with QuantizationAwareTraining, or freeze them (requires_grad_(False)).",
    )


def quantized_weight(module: nn.Module) -> torch.Tensor | None:
    """The weight after quantize and dequantize, in its own shape, with gradients; None without a weight."""
    weight = weight_in_use(module)
    if weight is None:
        return None
    if getattr(module, STATE, DEFAULT).switch.writer is not None:
        return fake_quantize(module, weight, "weight")
    matrix = to_matrix(module, weight)
    if matrix is None:
        return weight
    quantized = fake_quantize(module, matrix, "weight")
    return weight if quantized is matrix else from_matrix(module, quantized, weight.shape).contiguous()


def fake_quantize(module: nn.Module, value: torch.Tensor, base_name: str) -> torch.Tensor:
    """Quantize and dequantize one tensor with the module's parameters, to compressed-tensors' bits, with gradients.

    ``value`` is a weight ``(R, C)``, an activation ``(..., C)`` or an attention state ``(B, H, S, D)``. It is returned
    itself where nothing of it is quantized now: the scheme has nothing for it, its range is not known yet, it is
    switched off, or it is a weight that is on the grid already.
    """
    quantization = getattr(module, STATE, DEFAULT)
    kept = quantization.kept if base_name == "weight" else None
    if kept:
        return kept[0]
    args = args_of(module, base_name)
    if args is None or not _is_on(module, quantization.switch, base_name) or not has_range(module, base_name, args):
        return value
    if quantization.switch.writer is not None:
        return quantization.switch.writer(value, base_name)
    if args.dynamic is not True and getattr(module, _name_of_range(base_name, args)).device != value.device:
        move_qparams(module)  # Lightning has moved the model, which leaves plain attributes where they were
    global_scale = getattr(module, f"{base_name}_global_scale", None)
    if args.dynamic:
        return fake_quantize_dynamic(value, args, global_scale=global_scale)
    learned = quantization.learned.get(base_name)
    scale = getattr(module, f"{base_name}_scale") if learned is None else learned()
    zero_point = getattr(module, f"{base_name}_zero_point", None)
    rounded = getattr(module, ROUNDED, None) if base_name == "weight" else None
    if rounded is not None:
        found = dequantize(rounded, scale, zero_point, args, global_scale=global_scale)
        return straight_through(value, found) if learned is None else found.to(value.dtype)
    tokens = 1 if base_name == "weight" else count_tokens(module, value)
    found = fake_quantize_with(value, scale, zero_point, args, global_scale=global_scale, observations=tokens)
    if kept is not None:
        kept.append(found)
    return found


def _is_on(module: nn.Module, switch: Switch, base_name: str) -> bool:
    # While states are hooked, compressed-tensors' own switch is off for attention.
    if base_name not in ATTENTION and not getattr(module, "quantization_enabled", True):
        return False
    if base_name != "weight":
        return switch.activations
    on_the_grid = getattr(module, "quantization_status", None) in _ON_THE_GRID
    return switch.weights and (switch.writer is not None or not on_the_grid)


def has_range(module: nn.Module, base_name: str, args: QuantizationArgs) -> bool:
    """Whether the parameters that ``args`` asks for are on the module; a dynamic range asks for none."""
    return args.dynamic is True or hasattr(module, _name_of_range(base_name, args))


def _name_of_range(base_name: str, args: QuantizationArgs) -> str:
    return f"{base_name}_{'global_scale' if args.dynamic else 'scale'}"
