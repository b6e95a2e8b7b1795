"""The quantized forward of one module: its tensors quantized and dequantized, with gradients, and its output of them.

The parameters are those on the module. compressed-tensors swaps ``weight.data``. Here the quantized weight is another
tensor in autograd's graph, so it can be recomputed (activation checkpointing), gathered (FSDP2) and pruned meanwhile.
Start reading at :func:`linear_forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStatus
from torch import nn
from torch.nn import functional as F

from lightning_obs.errors import CalibrationError
from lightning_obs.forward.calls import replace_input
from lightning_obs.forward.recomputed_product import (
    LinearProduct,
    Product,
    Scratch,
    StaticQuantizer,
    WeightQuantizer,
    product_of,
    recomputed_product,
)
from lightning_obs.model.kinds import count_tokens, from_matrix, to_matrix
from lightning_obs.model.module_qparams import ROUNDED, args_of, move_qparams
from lightning_obs.model.packed_weight import PackedWeight
from lightning_obs.model.stored import bias_step, round_bias
from lightning_obs.model.weight import AddedAdapters, full_weight
from lightning_obs.numerics.fake_quantize import fake_quantize_dynamic, straight_through
from lightning_obs.numerics.qparams import ATTENTION

#: takes ``(value, base name)`` and gives the value that a module computes with; a weight keeps its own shape. When a
#: model is traced for a file, the writer of the format takes the place of fake quantization.
Writer: TypeAlias = Callable[[torch.Tensor, str], torch.Tensor]

#: The attribute of a module that holds its :class:`Quantization`. It is set and taken away together with ``forward``,
#: and like that it stays for good on the modules of a loaded checkpoint, whose copies run quantized, too. So it is no
#: part of the module's mark (:mod:`lightning_obs.model.mark`), which is never copied.
FORWARD_STATE = "quantized_forward"
#: The buffer of a module that is traced, with its rounded bias: a constant, where computing it would add operations.
ROUNDED_BIAS = "rounded_bias"
#: status of modules whose weight is on the format's grid already
_ON_THE_GRID = (QuantizationStatus.COMPRESSED, QuantizationStatus.DECOMPRESSED)


@dataclass
class Switch:
    """Which tensors the quantized forwards quantize at present; each quantized forward reads it.

    A fit has one for all modules of its model, and turns weights and activations on and off. Inside ``quantized()``
    both are on.
    """

    #: whether weights are quantized
    weights: bool = True
    #: whether inputs, outputs and attention states are quantized
    activations: bool = True
    #: quantizes and dequantizes instead of the functions of numerics; None: those functions
    writer: Writer | None = None
    #: memory for the quantized weight of one module after the other, in training
    scratch: Scratch = field(default_factory=Scratch)


@dataclass
class WeightCache:
    """Keeps the quantized weight of one module from its first forward on.

    ``weights_kept``, the rounding on quantized inputs and measured divergences give one to each module for a while;
    :func:`fake_quantize_for` fills and reads it.
    """

    #: the weight after quantize and dequantize; None before the first forward
    weight: torch.Tensor | None = None


@dataclass
class Quantization:
    """How a module runs quantized: made by :mod:`.quantized_forward`, when a module begins to run quantized.

    The module's quantized forward reads it at each call (:func:`quantization_of`).
    """

    #: which tensors are quantized at present
    switch: Switch = field(default_factory=Switch)
    #: the forward that the instance had itself (a wrapper of somebody else's); None: its class's
    original_forward: Callable[..., Any] | None = None
    #: True: a forward hook quantizes the output, and the forward leaves it as it is
    output_by_hook: bool = False
    #: True: the module computes ``F.linear`` and nothing else, so its weight ``(R, C)`` is a matrix already
    is_plain_linear: bool = False
    #: False: no LoRA layer was around the module when it began to run quantized, and none is looked for
    may_have_adapters: bool = True
    #: False: the weight is a checkpoint's, rounded already, and a step would leave its grid
    trainable: bool = True
    #: base name -> a function that gives the scale now, with a gradient; empty unless scales are learned
    learned_scales: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    #: where the quantized weight is kept; None: the weight is quantized at each forward
    weight_cache: WeightCache | None = None


#: of modules whose ``forward`` is not replaced
_DEFAULT = Quantization()


def quantization_of(module: nn.Module) -> Quantization:
    """Return a module's :class:`Quantization`; the default one for a module whose ``forward`` is not replaced.

    Every quantized forward reads it. Calibration and choices change fields of it for a while, only of modules whose
    ``forward`` is replaced: the default one is shared and stays as it is.
    """
    return getattr(module, FORWARD_STATE, _DEFAULT)


def weight_in_use(module: nn.Module) -> torch.Tensor | None:
    """Return the weight that a quantized forward quantizes: whole, with LoRA adapters merged; None without a weight.

    Quantized forwards call it. A weight of a loaded checkpoint is rounded already: a backward that computes a gradient
    for it raises a CalibrationError.
    """
    weight = full_weight(module)
    if weight is None or quantization_of(module).trainable:
        return weight
    weight = weight.view_as(weight)  # a hook on the parameter itself would not pickle
    if weight.requires_grad:
        weight.register_hook(_refuse_training)
    return weight


def adapters_in_use(module: nn.Module, parameter: torch.Tensor) -> AddedAdapters | None:
    """Return the function that makes the weight of a module's parameter; None: the parameter itself is the weight.

    The function adds the LoRA adapters, if there are any, and dequantizes a packed parameter; so there is one for every
    packed parameter. The quantized forward in training calls it for its product, and the backward calls it again.

    Args:
        module: a module that runs quantized.
        parameter: its weight, perhaps packed.
    """
    if quantization_of(module).may_have_adapters or isinstance(parameter, PackedWeight):
        return AddedAdapters.of(module)
    return None


def _refuse_training(gradient: torch.Tensor) -> None:
    """Raise a CalibrationError; :func:`weight_in_use` registers this as the gradient hook of a loaded weight."""
    raise CalibrationError(
        "weights from load_checkpoint are rounded and cannot be trained",
        remedy="fine-tune the original model with QuantizationAwareTraining, or freeze them (requires_grad_(False)).",
    )


def quantized_weight(module: nn.Module) -> torch.Tensor | None:
    """The weight after quantize and dequantize, in its own shape, with gradients; None without a weight.

    The quantized forward of every module but a plain Linear computes with it; sensitivities of schemes that are
    measured without data compare it with the weight (``choice/sensitivity.py``).
    """
    weight = weight_in_use(module)
    if weight is None:
        return None
    if quantization_of(module).switch.writer is not None:
        return fake_quantize_for(module, weight, "weight")
    matrix = to_matrix(module, weight)
    if matrix is None:
        return weight
    quantized = fake_quantize_for(module, matrix, "weight")
    if quantized is matrix:
        return weight
    return from_matrix(module, quantized, weight.shape).contiguous()


def bias_in_use(module: nn.Module) -> torch.Tensor | None:
    """The bias that a quantized forward adds, with gradients: rounded where engines add an integer (:func:`bias_step`).

    Called by every quantized forward.

    Returns:
        The rounded bias; the module's own bias where :func:`bias_step` is None (where the output is not quantized, for
        instance), or where quantization is switched off; None without a bias. While a model is traced, the rounded bias
        is the buffer :data:`ROUNDED_BIAS`: ``tracing.written_by`` registers it where :func:`bias_step` is not None.
    """
    bias = getattr(module, "bias", None)
    if bias is None:
        return None
    switch = quantization_of(module).switch
    if not (switch.weights and switch.activations and getattr(module, "quantization_enabled", True)):
        return bias
    if switch.writer is not None:
        return module._buffers.get(ROUNDED_BIAS, bias)
    if args_of(module, "output") is None:
        return bias  # engines that give floats add the bias in float; bias_step is None there, too
    step = bias_step(module)
    return bias if step is None else straight_through(bias, round_bias(bias, step))


def fake_quantize_for(module: nn.Module, value: torch.Tensor, base_name: str) -> torch.Tensor:
    """Quantize and dequantize a tensor as its module asks, to compressed-tensors' bits, with gradients.

    Every quantized forward calls this for the input, the weight, the output or an attention state.

    Args:
        module: has the scheme and its parameters, and perhaps a :class:`Quantization`.
        value: a weight ``(R, C)``, or in its own shape if a writer traces the module; an activation ``(..., C)`` or an
            attention state ``(B, H, S, D)``.
        base_name: ``"weight"``, ``"input"``, ``"output"``, ``"q"``, ``"k"`` or ``"v"``.

    Returns:
        A tensor like ``value``: for a weight that ``weight_cache`` has kept from an earlier call, the kept tensor, and
        nothing else is asked. ``value`` itself where it is not quantized now: the scheme does not quantize it, its
        range is not known yet, it is switched off, or it is a weight that is on the grid already. Else the quantized
        tensor, which is the writer's if a writer traces the module, and which ``weight_cache`` keeps unless the scheme
        is dynamic.
    """
    quantization = quantization_of(module)
    cache = quantization.weight_cache if base_name == "weight" else None
    if cache is not None and cache.weight is not None:
        return cache.weight
    args = args_of(module, base_name)
    if args is None or not _is_on(module, quantization.switch, base_name):
        return value
    if not has_range(module, base_name, args):
        return value
    if quantization.switch.writer is not None:
        return quantization.switch.writer(value, base_name)
    _follow_device(module, value, base_name, args)
    if args.dynamic:
        return fake_quantize_dynamic(value, args, global_scale=getattr(module, f"{base_name}_global_scale", None))
    scale = scale_in_use(module, base_name)
    observations = 1
    if scale.requires_grad and base_name != "weight":  # their number is a factor of the scale's gradient
        observations = count_tokens(module, value)
    quantized = _static_quantizer(module, base_name, args, observations)(value, scale)
    if scale.requires_grad and base_name == "output":
        quantized = quantized.clone()  # the gradient of the scale needs it, and a ReLU may change it in place
    if cache is not None:
        cache.weight = quantized
    return quantized


def weight_quantizer(module: nn.Module, weight: torch.Tensor) -> WeightQuantizer | None:
    """Return the function by which a forward in training quantizes a weight, and the backward quantizes it again.

    :func:`_recomputed` calls this at each forward in training.

    Returns:
        None if the weight has no matrix, if it is not quantized now (:func:`fake_quantize_for`), or if it is not
        quantized anew in each forward, since a cache keeps it or a writer writes it.
    """
    quantization = quantization_of(module)
    args = args_of(module, "weight")
    if args is None or args.dynamic or not _is_on(module, quantization.switch, "weight"):
        return None
    if not has_range(module, "weight", args):
        return None
    if quantization.switch.writer is not None or quantization.weight_cache is not None:
        return None
    if not quantization.is_plain_linear and to_matrix(module, weight) is None:
        return None
    _follow_device(module, weight, "weight", args)
    layout = None if quantization.is_plain_linear else module
    return WeightQuantizer(layout, _static_quantizer(module, "weight", args), quantization.switch.scratch)


def scale_in_use(module: nn.Module, base_name: str) -> torch.Tensor:
    """Return the calibrated scale of one of a module's tensors; a learned scale has a graph to its parameter.

    Quantized forwards call it before they quantize the tensor.
    """
    compute_scale = quantization_of(module).learned_scales.get(base_name)
    scale: torch.Tensor = getattr(module, f"{base_name}_scale") if compute_scale is None else compute_scale()
    return scale


def _static_quantizer(
    module: nn.Module, base_name: str, args: QuantizationArgs, observations: int = 1
) -> StaticQuantizer:
    """The quantizer of one of a module's tensors at a forward, from the module's parameters.

    Args:
        module: has the tensor's range (:func:`has_range`).
        base_name: the tensor: ``"weight"``, ``"input"``...
        args: number format and strategy.
        observations: as in :class:`.StaticQuantizer`.
    """
    return StaticQuantizer(
        args=args,
        zero_point=getattr(module, f"{base_name}_zero_point", None),
        global_scale=getattr(module, f"{base_name}_global_scale", None),
        codes=getattr(module, ROUNDED, None) if base_name == "weight" else None,
        is_scale_learned=base_name in quantization_of(module).learned_scales,
        observations=observations,
    )


def _follow_device(module: nn.Module, value: torch.Tensor, base_name: str, args: QuantizationArgs) -> None:
    """Move a module's quantization parameters to the module's device, if they are not on the device of ``value``.

    That is so when Lightning has moved the model since, as plain attributes stay where they are. Called before each
    tensor is quantized; fully dynamic ranges have no parameters to move.
    """
    if args.dynamic is True:
        return
    if getattr(module, _name_of_range(base_name, args)).device != value.device:
        move_qparams(module)


def _is_on(module: nn.Module, switch: Switch, base_name: str) -> bool:
    """Whether the switch, and compressed-tensors' own switch of the module, let one of its tensors be quantized.

    Asked before each tensor is quantized. A weight that is on the format's grid already is quantized only by a writer.
    """
    # While states are hooked, compressed-tensors' switch of attention is off, so that it does not quantize them itself.
    if base_name not in ATTENTION and not getattr(module, "quantization_enabled", True):
        return False
    if base_name != "weight":
        return switch.activations
    on_the_grid = getattr(module, "quantization_status", None) in _ON_THE_GRID
    return switch.weights and (switch.writer is not None or not on_the_grid)


def has_range(module: nn.Module, base_name: str, args: QuantizationArgs) -> bool:
    """Whether a module has the quantization parameters for a tensor; a fully dynamic range needs none.

    Asked at each quantized forward, since the range may not be calibrated yet, and by ``fine_tuning`` to learn whether
    data are needed first.

    Args:
        module: the module.
        base_name: the tensor: ``"weight"``, ``"input"``...
        args: how the scheme quantizes the tensor.
    """
    return args.dynamic is True or hasattr(module, _name_of_range(base_name, args))


def _name_of_range(base_name: str, args: QuantizationArgs) -> str:
    """The name of the attribute that a calibration writes: the global scale where scales are dynamic, else the scale.

    Asked only about ranges that are not fully dynamic. With ``args.dynamic == "local"`` scales are computed at each
    forward, below a calibrated global scale.
    """
    return f"{base_name}_global_scale" if args.dynamic else f"{base_name}_scale"


# ---------------------------------------------------------------------- the forward


def linear_forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # the name that nn.Linear has
    """The quantized forward of a Linear whose forward was not replaced: quantize input and weight, multiply, quantize.

    torch calls it in place of ``nn.Linear.forward``.
    """
    quantized_input = fake_quantize_for(self, input, "input")
    output = _quantized_product(self, quantized_input)
    if quantization_of(self).output_by_hook:
        return output
    return fake_quantize_for(self, output, "output")


def _quantized_product(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The product of an input with a Linear's quantized weight, plus the bias; :func:`linear_forward` calls it."""
    output = _recomputed(linear, LinearProduct(), input)
    if output is not None:
        return output
    weight = weight_in_use(linear)
    assert weight is not None
    return F.linear(input, fake_quantize_for(linear, weight, "weight"), bias_in_use(linear))


def _recomputed(module: nn.Module, product: Product, input: torch.Tensor) -> torch.Tensor | None:
    """The product with the quantized weight, plus the bias; the backward quantizes the weight once more.

    Each quantized forward of a Linear, a convolution or a Conv1D tries this first, to keep no quantized weight for the
    backward. None if autograd does not record, if a compiler decides what is kept for the backward, or if the weight is
    not quantized anew in each forward (:func:`weight_quantizer`).
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    quantizer = weight_quantizer(module, weight)
    if quantizer is None:
        return None
    merge = adapters_in_use(module, weight)
    parameters = [weight] if merge is None else [weight, *merge.parameters()]
    return recomputed_product(
        product,
        input,
        weight if merge is None else merge(weight),
        bias_in_use(module),
        scale_in_use(module, "weight"),
        quantizer,
        merge=merge,
        parameters=parameters,
    )


def module_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The quantized forward of a module that is no plain Linear: its own forward, on quantized tensors.

    torch calls it in place of the module's forward. The quantized input, weight and bias take the place of the
    module's own.
    """

    def quantize_input(value: torch.Tensor) -> torch.Tensor:
        return fake_quantize_for(self, value, "input")

    args, kwargs = replace_input(args, kwargs, quantize_input)
    quantization = quantization_of(self)
    output = _recomputed_output(self, args, kwargs) if quantization.original_forward is None else None
    if output is None:
        output = _output_with(_tensors_in_use(self), self, args, kwargs)
    return output if quantization.output_by_hook else quantize_output(self, output)


def _recomputed_output(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The output of a convolution or of transformers' Conv1D in training, by :func:`_recomputed`.

    None where that function gives None, for a module of another class, and for a call with other arguments than one
    tensor.
    """
    inputs = [*args, *kwargs.values()]
    product = product_of(module)
    if product is None or len(inputs) != 1 or not isinstance(inputs[0], torch.Tensor):
        return None
    return _recomputed(module, product, inputs[0])


def _output_with(
    tensors: dict[str, torch.Tensor], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The output of a module's own forward, which computes with other tensors in place of the module's own.

    Args:
        tensors: the other tensors, by the names of the module's attributes that they replace during the call.
        module: runs quantized.
        args, kwargs: the arguments of the call.
    """
    # An entry of the instance's dict is found before its parameter. Pruning keeps the masked weight there already.
    attributes = vars(module)
    masked_tensors = {name: attributes[name] for name in tensors if name in attributes}
    attributes.update(tensors)
    original_forward = quantization_of(module).original_forward
    try:
        if original_forward is None:
            return type(module).forward(module, *args, **kwargs)
        return original_forward(*args, **kwargs)
    finally:
        for name in tensors:
            attributes.pop(name, None)
        attributes.update(masked_tensors)


def _tensors_in_use(module: nn.Module) -> dict[str, torch.Tensor]:
    """The quantized weight and the rounded bias that a module computes with, by the names of its attributes.

    A weight that the module does not have, and a bias that is not rounded, are left out.
    """
    tensors = {}
    weight = quantized_weight(module)
    if weight is not None:
        tensors["weight"] = weight
    bias = bias_in_use(module)
    if bias is not None and bias is not getattr(module, "bias", None):
        tensors["bias"] = bias
    return tensors


def quantize_output(module: nn.Module, output: Any) -> Any:
    """Quantize an output that is a tensor; another output is returned unchanged.

    Called by :func:`module_forward`, or by a forward hook where ``output_by_hook`` says so.
    """
    return fake_quantize_for(module, output, "output") if isinstance(output, torch.Tensor) else output


def fake_quantize_state(module: nn.Module, name: str, quantization: Quantization, state: torch.Tensor) -> torch.Tensor:
    """Quantize an attention state at a forward; the hook that :func:`.fake_quantized_states` registers.

    Args:
        module: the attention module.
        name: ``"q"``, ``"k"`` or ``"v"``.
        quantization: that of the block which registered the hook. Blocks nest: only the innermost one's hook quantizes.
        state: ``(batch, heads, tokens, head_dim)``.
    """
    if quantization_of(module) is not quantization:
        return state
    return fake_quantize_for(module, state, name)
