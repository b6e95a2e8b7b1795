"""Bring any observed tensor into one shape, so that an observer needs no case for the strategy.

Every strategy ends as ``(num_observations, *qparam_shape, group_size)``: reducing the first and the last
dimension leaves exactly one number per scale. ``qparam_shape`` is the shape of the scale that compressed-tensors
registers for the strategy, so a range found on the flattened tensor fits without another reshape.
"""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.utils import maybe_pad_tensor_for_block_quant

from lightning_obs.errors import CalibrationError

WEIGHT = ("weight",)
ACTIVATIONS = ("input", "output")
ATTENTION = ("q", "k", "v")
BASE_NAMES = WEIGHT + ACTIVATIONS + ATTENTION


def flatten_for_calibration(
    value: torch.Tensor,
    base_name: str,
    args: QuantizationArgs,
    g_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reshape an observed tensor to ``(num_observations, *qparam_shape, group_size)``.

    ==============  ==============================  =====================================  =================
    base name       strategy                        result                                 qparam_shape
    ==============  ==============================  =====================================  =================
    weight (R, C)   tensor                          (1, 1, R*C)                            (1,)
    weight          channel                         (1, R, 1, C)                           (R, 1)
    weight          group, tensor_group             (1, R, C/g, g)                         (R, C/g)
    weight          block (h, w)                    (1, ceil(R/h), ceil(C/w), h*w)         (R/h, C/w) up
    input, output   tensor                          (N, 1, C)                              (1,)
    input, output   token                           (N, 1, C), the range of each token     (1,)
    input, output   group, tensor_group             (N, C/g, g)                            (C/g,)
    q, k, v         tensor                          (B*S, 1, H*D)                          (1,)
    q, k, v         attn_head                       (B*S, H, 1, 1, D)                      (H, 1, 1)
    ==============  ==============================  =====================================  =================

    Args:
        value: a weight ``(R, C)``, an activation ``(..., C)`` (a vector ``(C,)`` is one observation), or an
            attention state ``(B, H, S, D)``.
        base_name: one of weight, input, output, q, k, v.
        args: gives strategy, group size and block structure.
        g_idx: group of each column ``(C,)``, for group weights stored in activation order: columns are sorted by
            group first.

    Returns:
        A view where possible. Blocks that do not divide the weight are padded with zeros, which do not widen a
        range that must contain zero anyway.

    Raises:
        CalibrationError: an unknown base name, a strategy that the base name cannot have, or columns that the
            group size does not divide.
    """
    if base_name in WEIGHT:
        return _flatten_weight(value, args, g_idx)
    if base_name in ACTIVATIONS:
        return _flatten_activation(value, args, base_name)
    if base_name in ATTENTION:
        return _flatten_attention(value, args, base_name)
    raise CalibrationError(f"unknown base name {base_name!r}", expected=f"one of {', '.join(BASE_NAMES)}")


def tile_size(device: torch.device, on_cpu: int) -> int:
    """How many elements an operation takes at once: few on a CPU, for its cache; elsewhere each launch has to pay."""
    return on_cpu if device.type == "cpu" else 1 << 24


def _flatten_weight(value: torch.Tensor, args: QuantizationArgs, g_idx: torch.Tensor | None) -> torch.Tensor:
    if args.strategy == QuantizationStrategy.TENSOR:
        return value.reshape(1, 1, -1)
    if value.ndim != 2:
        raise CalibrationError(
            f"a weight of strategy {_name(args)} is observed as a matrix",
            got=f"shape {tuple(value.shape)}",
            expected="(rows, columns)",
        )
    if args.strategy == QuantizationStrategy.CHANNEL:
        return value.unsqueeze(-2).unsqueeze(0)
    if args.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP):
        if g_idx is not None:
            value = value.index_select(-1, torch.argsort(g_idx, stable=True))
        return _split_groups(value, args).unsqueeze(0)
    if args.strategy == QuantizationStrategy.BLOCK:
        assert args.block_structure is not None  # QuantizationArgs validated it
        height, width = args.block_structure
        value = maybe_pad_tensor_for_block_quant(value, (height, width))
        rows, columns = value.shape
        blocks = value.reshape(rows // height, height, columns // width, width)
        return blocks.transpose(1, 2).flatten(-2).unsqueeze(0)
    raise _impossible("weight", args)


def _flatten_activation(value: torch.Tensor, args: QuantizationArgs, base_name: str) -> torch.Tensor:
    if args.strategy in (QuantizationStrategy.TENSOR, QuantizationStrategy.TOKEN):
        columns = value.shape[-1] if value.ndim else 1
        return value.reshape(-1, 1, columns) if columns else value.reshape(0, 1, 0)
    if args.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP):
        groups = _split_groups(value, args)
        return groups.reshape(-1, *groups.shape[-2:])
    raise _impossible(base_name, args)


def _flatten_attention(value: torch.Tensor, args: QuantizationArgs, base_name: str) -> torch.Tensor:
    if value.ndim != 4:
        raise CalibrationError(
            f"an attention state {base_name} has four dimensions",
            got=f"shape {tuple(value.shape)}",
            expected="(batch, heads, sequence, head_dim)",
        )
    if args.strategy == QuantizationStrategy.TENSOR:
        return value.transpose(1, 2).flatten(0, 1).flatten(-2).unsqueeze(-2)
    if args.strategy == QuantizationStrategy.ATTN_HEAD:
        return value.transpose(1, 2).flatten(0, 1).unsqueeze(-2).unsqueeze(-2)
    raise _impossible(base_name, args)


def _split_groups(value: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    assert args.group_size is not None  # QuantizationArgs validated it
    if value.shape[-1] % args.group_size:
        raise CalibrationError(
            f"group size {args.group_size} does not divide the columns",
            got=f"{value.shape[-1]} columns",
            expected=f"a multiple of {args.group_size}",
            remedy="choose a group size that divides them, or list the module in `ignore`.",
        )
    return value.unflatten(-1, (-1, args.group_size))


def _name(args: QuantizationArgs) -> str:
    # A strategy that compressed-tensors inferred is an enum member, one that was given is a string.
    return str(QuantizationStrategy(args.strategy).value)


def _impossible(base_name: str, args: QuantizationArgs) -> CalibrationError:
    possible = {
        "weight": "tensor, channel, group, block, tensor_group",
        "input": "tensor, token, group, tensor_group",
        "output": "tensor, token, group, tensor_group",
    }.get(base_name, "tensor, attn_head")
    return CalibrationError(f"strategy {_name(args)} cannot be applied to {base_name}", expected=f"one of {possible}")
