"""Check quantization parameters from a file against the scheme of their module.

Names, shapes and values must be those that calibration would have written. Anything else would broadcast where it
should not, or give NaN at the first forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.utils import calculate_range

from lightning_obs.model.qparams import ROUNDED
from lightning_obs.model.weight import matrix_shape, whole_shape
from lightning_obs.numerics.qparams import ATTENTION, can_be_signed, flatten_for_calibration
from lightning_obs.schemes.attention_states import count_heads
from lightning_obs.schemes.planned_modules import PlannedModule

_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)


def expected_shapes(target: PlannedModule, base_name: str) -> dict[str, tuple[int, ...] | None]:
    """The parameters that quantizing a tensor takes: ``{"weight_scale": shape}``; None: the shape is not known."""
    args, shapes = target.args[base_name], dict[str, tuple[int, ...] | None]()
    if args.strategy == QuantizationStrategy.TENSOR_GROUP:
        shapes["global_scale"] = (1,)
    if args.dynamic is False:
        shapes["scale"] = scale_shape(target, base_name, args)
        if not args.symmetric:
            shapes["zero_point"] = shapes["scale"]
    return {f"{base_name}_{suffix}": shape for suffix, shape in shapes.items() if args.dynamic is not True}


def find_misfits(
    target: PlannedModule, qparams: Mapping[str, Any], bases: Collection[str] | None = None
) -> Iterator[str]:
    """A message for each of ``qparams`` (``{"weight_scale": tensor}``) that is missing, unexpected or wrong.

    ``bases`` are the tensors (base names) whose parameters must be there, and no others; default: all that the scheme
    quantizes.
    """
    expected = {
        name: (shape, args)
        for base, args in target.args.items()
        if bases is None or base in bases
        for name, shape in expected_shapes(target, base).items()
    }
    if "weight" in target.args and ROUNDED in qparams:
        expected[ROUNDED] = matrix_shape(target.module), target.args["weight"]
    prefix = f"{target.name}." if target.name else ""
    for name in sorted(expected.keys() | qparams.keys()):
        if name not in expected:
            yield f"{prefix}{name} belongs to nothing that is quantized"
        elif (wrong := _misfit(name, qparams.get(name), *expected[name])) is not None:
            yield f"{prefix}{name} {wrong}"


def _misfit(name: str, value: Any, shape: tuple[int, ...] | None, args: QuantizationArgs) -> str | None:
    if not isinstance(value, torch.Tensor):
        return "is missing" if value is None else f"is no tensor but {type(value).__name__}"
    if shape is not None and value.shape != shape:
        return f"has shape {tuple(value.shape)} instead of {tuple(shape)}"
    if name.endswith("scale"):
        if not value.is_floating_point():
            return f"is {value.dtype}"
        wide = value.float()  # torch asks nothing of float8
        signed = can_be_signed(name.removesuffix("_scale"), args)
        positive = bool((torch.isfinite(wide) & ((wide.abs() if signed else wide) > 0)).all())
        return None if positive else f"is not finite and {'other than zero' if signed else 'positive'}"
    low, high = calculate_range(args, value.device)
    inside = bool(((value.float() >= low) & (value.float() <= high)).all())
    return None if inside else f"is not from {low:g} to {high:g}"


def scale_shape(target: PlannedModule, base_name: str, args: QuantizationArgs) -> tuple[int, ...] | None:
    """The shape of a scale as it is stored; None where it depends on the data's shape."""
    if base_name in ATTENTION:
        per_head = args.strategy == QuantizationStrategy.ATTN_HEAD
        return (count_heads(target.module)[base_name], 1, 1) if per_head else (1,)
    matrix = matrix_shape(target.module)
    if base_name == "weight" and matrix is not None:
        return tuple(flatten_for_calibration(torch.empty(matrix, device="meta"), "weight", args).shape[1:-1])
    if args.strategy not in _GROUPED:
        return (1,)
    if matrix is None or len(whole_shape(target.module) or ()) != 2:
        return None
    return (matrix[1 if base_name == "input" else 0] // int(args.group_size or 1),)
