"""What a file stores of a calibrated module: codes, scale, zero point. Each writer puts them into its own format.

A code is the stored number of one weight: an integer, or the bits of a small float. ``onnx/`` and the other writers
read them here; ``checkpoint/`` computes the same codes a block of rows at a time, as compressed-tensors packs them.

A *program* is a file of ``torch.export`` (``program/``). A *rounding* is the choice of a weight's codes by finalize
(GPTQ), or by fine-tuning for scales in float8. It is the module's attribute ``weight_rounded`` (``ROUNDED``): levels
``(R, C)``, integers in int8 or numbers of the format in float8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
from torch import nn

from lightning_obs.model.kinds import from_matrix
from lightning_obs.model.module_qparams import ROUNDED, args_of, read_qparams
from lightning_obs.model.weight import whole_matrix, whole_shape
from lightning_obs.numerics.fake_quantize import dequantize, quantize


class StoredRange(NamedTuple):
    """The quantization parameters of one tensor of a module, as they are stored.

    :func:`stored_range` makes it when a file is written; the writers of ONNX files, GGUF files and programs read it.
    """

    #: how the tensor is quantized
    args: QuantizationArgs
    #: the scale, in the weight's dtype and in compressed-tensors' shape: ``(1,)``, ``(R, 1)``, ``(R, C / group)``
    scale: torch.Tensor
    #: the zero point, in int8 and in the shape of the scale; 0 where the scheme is symmetric
    zero_point: torch.Tensor
    #: the global scale ``(1,)`` in float32, of a format with two levels of scales; None: the format has one level
    global_scale: torch.Tensor | None = None


class StoredWeight(NamedTuple):
    """A weight as the integers, or small floats, that stand for it.

    :func:`stored_weight` makes it when a file is written; the writer of GGUF files and :func:`stored_codes` read it.
    """

    #: the codes of the weight's matrix ``(R, C)``: integers in int8, floats in float8, the bits of four-bit floats in
    #: int8
    codes: torch.Tensor
    #: the quantization parameters under which the codes stand for the weight
    range: StoredRange


def stored_range(module: nn.Module, base_name: str) -> StoredRange | None:
    """The stored range of one tensor of a calibrated module: its weight, or a static activation.

    Called by the writers of ONNX files, programs and GGUF files.

    Args:
        module: a calibrated module.
        base_name: ``"weight"``, ``"input"`` or ``"output"``.

    Returns:
        None where the module's scheme does not quantize this tensor, or computes its range as the model runs.
    """
    args = args_of(module, base_name)
    qparams = read_qparams(module)
    scale = qparams.get(f"{base_name}_scale")
    if args is None or scale is None:
        return None
    zero_point = qparams.get(f"{base_name}_zero_point")
    if zero_point is None:
        zero_point = torch.zeros_like(scale)
    return StoredRange(args, scale, zero_point.to(torch.int8), qparams.get(f"{base_name}_global_scale"))


def stored_weight(module: nn.Module) -> StoredWeight | None:
    """The codes of a calibrated module's weight: those that a rounding chose, else the nearest.

    Called by the writer of GGUF files, and through :func:`stored_codes` by the writers of ONNX files and programs.

    Args:
        module: a calibrated module whose weight is whole on this rank. LoRA adapters beside the weight are a part of
            the weight: they are added to it here, and were added to it before a rounding.

    Returns:
        None where the module's scheme does not quantize the weight.
    """
    weight_range = stored_range(module, "weight")
    if weight_range is None:
        return None
    args, scale, zero_point, global_scale = weight_range
    levels = read_qparams(module).get(ROUNDED)
    matrix: torch.Tensor | None
    if levels is not None and args.type == QuantizationType.INT:  # the levels are the codes
        return StoredWeight(levels.to(torch.int8), weight_range)
    if levels is not None:  # of a small float the levels are its numbers, and the codes are their bits
        matrix = dequantize(levels, scale, zero_point, args, global_scale=global_scale)
    else:
        matrix = whole_matrix(module)
    assert matrix is not None  # a plan has no weight without a matrix
    return StoredWeight(quantize(matrix, scale, zero_point, args, global_scale=global_scale), weight_range)


def stored_codes(module: nn.Module) -> torch.Tensor:
    """The codes of a calibrated weight, in the shape of the module's own weight.

    The writers of ONNX files and programs, which trace a graph, call it when they put the codes into the graph.
    """
    stored = stored_weight(module)
    shape = whole_shape(module)
    assert stored is not None  # the scheme quantizes the weight
    assert shape is not None
    return from_matrix(module, stored.codes, shape).contiguous()


# ---------------------------------------------------------------------- biases


def bias_step(module: nn.Module) -> torch.Tensor | None:
    """The step of a module's bias where engines compute the module from integers to integers.

    The quantized forward and the writers of checkpoints, ONNX files and programs call it, and then :func:`round_bias`.
    Engines add the bias to sums of products of integers, as an int32, so it is rounded to a multiple of the sums' step,
    ``input_scale * weight_scale``. This step is about a hundredth of an output's step, but enough to take a few of a
    thousand outputs to the next level, which adds up over layers. Where a module gives floats, engines add the bias in
    float.

    Returns:
        ``(rows,)`` or ``(1,)`` in float32; None where the bias stays in float: the module has none, or its scheme does
        not quantize input, weight and output to int8 with calibrated ranges, or their ranges are not known yet.
    """
    bias = getattr(module, "bias", None)
    if not isinstance(bias, torch.Tensor) or not _is_from_integers_to_integers(module):
        return None
    input_scale = getattr(module, "input_scale", None)
    weight_scale = getattr(module, "weight_scale", None)
    if input_scale is None or weight_scale is None:
        return None
    step = weight_scale.detach().float().flatten() * input_scale.detach().float().flatten()
    return step if step.numel() in (1, bias.numel()) else None


def round_bias(bias: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """The nearest multiples of a step of :func:`bias_step`, in the bias's dtype and without a gradient.

    Called for the quantized forward and by the writers, so that both have the same bias.
    """
    step = step.to(bias.device)
    return (torch.round(bias.detach().float() / step) * step).to(bias.dtype)


def _is_from_integers_to_integers(module: nn.Module) -> bool:
    """Whether a module's scheme has 8-bit integers for weight, input and output, with calibrated ranges."""
    for base_name in ("weight", "input", "output"):
        args = args_of(module, base_name)
        if args is None or args.type != QuantizationType.INT or args.num_bits != 8 or args.dynamic is not False:
            return False
        is_per_channel = base_name == "weight" and args.strategy == QuantizationStrategy.CHANNEL
        if args.strategy != QuantizationStrategy.TENSOR and not is_per_channel:
            return False
    return True
