"""Quantize and dequantize one tensor of a module, with the parameters on the module and with gradients.

compressed-tensors swaps ``weight.data``. Here the quantized weight is another tensor in autograd's graph, so it can be
recomputed (activation checkpointing), gathered (FSDP2) and pruned meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStatus
from torch import nn

from lightning_obs.errors import CalibrationError
from lightning_obs.forward.recomputed_product import Scratch
from lightning_obs.model.kinds import count_tokens, from_matrix, to_matrix
from lightning_obs.model.module_qparams import ROUNDED, args_of, move_qparams
from lightning_obs.model.packed_weight import PackedWeight
from lightning_obs.model.stored import bias_step, round_bias
from lightning_obs.model.weight import AddedAdapters, full_weight
from lightning_obs.numerics.fake_quantize import (
    clip_gradient_,
    dequantize,
    fake_quantize,
    fake_quantize_dynamic,
    fake_quantize_without_graph,
    straight_through,
)
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
    quantized = StaticQuantizer.of(module, base_name, args, observations)(value, scale)
    if scale.requires_grad and base_name == "output":
        quantized = quantized.clone()  # the gradient of the scale needs it, and a ReLU may change it in place
    if cache is not None:
        cache.weight = quantized
    return quantized


def weight_quantizer(module: nn.Module, weight: torch.Tensor) -> WeightQuantizer | None:
    """Return the function by which a forward in training quantizes a weight, and the backward quantizes it again.

    ``quantized_forward._recomputed`` calls this at each forward in training.

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
    return WeightQuantizer(layout, StaticQuantizer.of(module, "weight", args), quantization.switch.scratch)


def scale_in_use(module: nn.Module, base_name: str) -> torch.Tensor:
    """Return the calibrated scale of one of a module's tensors; a learned scale has a graph to its parameter.

    Quantized forwards call it before they quantize the tensor.
    """
    compute_scale = quantization_of(module).learned_scales.get(base_name)
    scale: torch.Tensor = getattr(module, f"{base_name}_scale") if compute_scale is None else compute_scale()
    return scale


@dataclass  # not frozen: torch 2.11 and older do not trace how a frozen one is made
class StaticQuantizer:
    """Quantizes and dequantizes a tensor by the quantization parameters that calibration wrote to a module.

    Made anew for each tensor at each forward (:meth:`of`), so it has the parameters of that moment.

    Attributes:
        args: number format and strategy.
        zero_point: the module's zero point for the tensor; None: the format has none.
        global_scale: the module's global scale, which all scales of the tensor share; None: the format has none.
        codes: the integers of a weight that a rounding chose instead of the nearest ones; None: the nearest are taken.
        is_scale_learned: whether the scale is learned. Then gradients go through ``codes`` to the scale, else past
            them to the weight.
        observations: how many observations (tokens) an activation stacks, a factor of a learned scale's gradient.
    """

    args: QuantizationArgs
    zero_point: torch.Tensor | None
    global_scale: torch.Tensor | None
    codes: torch.Tensor | None
    is_scale_learned: bool
    observations: int = 1

    @classmethod
    def of(cls, module: nn.Module, base_name: str, args: QuantizationArgs, observations: int = 1) -> StaticQuantizer:
        """Make the quantizer of one of a module's tensors at a forward, from the module's parameters.

        Args:
            module: has the tensor's range (:func:`has_range`).
            base_name: the tensor: ``"weight"``, ``"input"``...
            args: number format and strategy.
            observations: see the class.
        """
        return cls(
            args=args,
            zero_point=getattr(module, f"{base_name}_zero_point", None),
            global_scale=getattr(module, f"{base_name}_global_scale", None),
            codes=getattr(module, ROUNDED, None) if base_name == "weight" else None,
            is_scale_learned=base_name in quantization_of(module).learned_scales,
            observations=observations,
        )

    def __call__(self, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The tensor after quantize and dequantize, in its dtype, with gradients to it and to the scale."""
        if self.codes is not None:
            rounded = dequantize(self.codes, scale, self.zero_point, self.args, global_scale=self.global_scale)
            return rounded.to(value.dtype) if self.is_scale_learned else straight_through(value, rounded)
        return fake_quantize(
            value,
            scale,
            self.zero_point,
            self.args,
            global_scale=self.global_scale,
            observations=self.observations,
        )

    def without_graph(self, value: torch.Tensor, scale: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
        """The tensor after quantize and dequantize, without gradients; called by :class:`WeightQuantizer`.

        It may lie in ``memory``, of the tensor's shape, whose values are overwritten; None: memory is allocated.
        """
        if self.codes is not None:
            return self(value, scale)
        return fake_quantize_without_graph(
            value, scale, self.zero_point, self.args, global_scale=self.global_scale, memory=memory
        )

    def value_gradient(
        self, gradient: torch.Tensor, value: torch.Tensor, scale: torch.Tensor, memory: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the gradient of the tensor, from the gradient of the quantized tensor; called in the backward.

        It is zero where the tensor was clipped. Integers that a rounding chose pass the whole gradient.

        Args:
            gradient: the gradient of the quantized tensor; it may be overwritten.
            value: the tensor.
            scale: the scale of the tensor.
            memory: overwritten, in the shape of ``value``; None: memory is allocated.
        """
        if self.codes is not None:
            return gradient
        return clip_gradient_(
            gradient, value, scale, self.zero_point, self.args, global_scale=self.global_scale, memory=memory
        )


@dataclass(frozen=True)
class WeightQuantizer:
    """Quantizes and dequantizes a module's weight, in its own shape, in the backward as in the forward.

    :func:`weight_quantizer` makes it at each forward in training; ``recomputed_product`` calls it in that forward and
    its backward. It is a ``Quantizer`` of ``recomputed_product.py``.

    Attributes:
        layout: the module whose class says how the weight is laid out as a matrix; None: the weight is a matrix.
        quantizer: the quantizer of that matrix.
        scratch: the lender of memory for the quantized weight and for gradients.
    """

    layout: nn.Module | None
    quantizer: StaticQuantizer
    scratch: Scratch

    def __call__(self, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The quantized weight in the dtype of the weight ``value``, with gradients to the weight and the ``scale``.

        The backward calls it where a scale is learned, or for second gradients.
        """
        return self._from_matrix(self.quantizer(self._to_matrix(value), scale), value.shape)

    @contextmanager
    def borrowed(self, value: torch.Tensor, scale: torch.Tensor) -> Iterator[torch.Tensor]:
        """The quantized weight for a ``with`` block, without gradients, in memory that is overwritten afterwards.

        Each forward enters it for the product, and the backward once more.
        """
        with self.scratch.lend(value) as memory:
            matrix = self.quantizer.without_graph(self._to_matrix(value), scale, self._memory(memory))
            yield self._from_matrix(matrix, value.shape)

    def value_gradient(self, gradient: torch.Tensor, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weight, from the gradient of the quantized weight, which may be overwritten.

        The backward calls it where no scale is learned.
        """
        with self.scratch.lend(value) as memory:
            matrix = self._to_matrix(value)
            gradient_matrix = self.quantizer.value_gradient(
                self._to_matrix(gradient), matrix, scale, self._memory(memory)
            )
            return self._from_matrix(gradient_matrix, value.shape)

    def _memory(self, memory: torch.Tensor | None) -> torch.Tensor | None:
        """Lent ``memory`` of the weight's shape as the matrix ``(R, C)``; None: no memory was lent."""
        return None if memory is None else self._to_matrix(memory)

    def _to_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """A tensor in the weight's shape as the matrix ``(R, C)``."""
        if self.layout is None:
            return weight
        matrix = to_matrix(self.layout, weight)
        assert matrix is not None  # weight_quantizer has asked
        return matrix

    def _from_matrix(self, matrix: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """A matrix ``(R, C)`` in the weight's shape."""
        weight = matrix if self.layout is None else from_matrix(self.layout, matrix, shape)
        return weight.contiguous()


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
