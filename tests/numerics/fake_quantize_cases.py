"""Number formats, ways of sharing a scale, and the parameters of a value under them."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

from lightning_obs.numerics import compute_global_scale, compute_qparams, flatten_for_calibration

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8, FP6, FP4 = ({"num_bits": bits, "type": "float"} for bits in (8, 6, 4))


def preset(name: str, field: str = "weights") -> QuantizationArgs:
    return getattr(preset_name_to_scheme(name, ["Linear"]), field)


def named(**formats) -> list:
    return [pytest.param(args, id=name) for name, args in formats.items()]


#: every way of sharing a scale, with a shape that its groups and blocks cut
LAYOUTS = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    "group": {"strategy": "group", "group_size": 8},
    "block": {"strategy": "block", "block_structure": [4, 8]},
    "blocks that do not divide": {"strategy": "block", "block_structure": [5, 7]},
}
LEARNABLE = {
    f"{grid} {layout}": QuantizationArgs(**kinds, **options)
    for layout, options in LAYOUTS.items()
    for grid, kinds in {
        **{f"int{bits}": {"num_bits": bits} for bits in range(2, 9)},
        **{f"int{bits} asymmetric": {"num_bits": bits, "symmetric": False} for bits in range(2, 9)},
        "fp8": FP8,
        "fp4": FP4,
    }.items()
}
ROUNDED = {name: preset(name) for name in ("NVFP4", "MXFP4", "MXFP8")}
WEIGHTS = named(**LEARNABLE, **ROUNDED)

DYNAMIC = {
    "token int8": preset("W8A8", "input_activations"),
    "token int4": preset("W4A4", "input_activations"),
    "token fp8": preset("FP8_DYNAMIC", "input_activations"),
    "token int8 asymmetric": QuantizationArgs(strategy="token", dynamic=True, symmetric=False),
    "tensor int8": QuantizationArgs(strategy="tensor", dynamic=True),
    "group fp8": preset("FP8_BLOCK", "input_activations"),
    "MXFP4": preset("MXFP4", "input_activations"),
    "MXFP8": preset("MXFP8", "input_activations"),
}
LOCAL = preset("NVFP4", "input_activations")
STATIC = {
    "tensor int8": QuantizationArgs(strategy="tensor"),
    "tensor int8 asymmetric": QuantizationArgs(strategy="tensor", symmetric=False),
    "tensor fp8": QuantizationArgs(strategy="tensor", **FP8),
}
HEADS = {
    "head int8": QuantizationArgs(strategy="attn_head"),
    "head fp8": QuantizationArgs(strategy="attn_head", **FP8),
}


def qparams_of(
    value: torch.Tensor, args: QuantizationArgs, base_name: str = "weight", shrink: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Scale, zero point, global scale of a value's own range, or of a smaller one."""
    flat = flatten_for_calibration(value.detach(), base_name, args)
    low, high = flat.amin((0, -1)) * shrink, flat.amax((0, -1)) * shrink
    found = compute_qparams(low, high, args, compute_global_scale([(low, high)], args))
    return found["scale"], found["zero_point"], found["global_scale"]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bits, the sign of zero included."""
    bits = {2: torch.int16, 4: torch.int32}
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(bits[a.element_size()]), b.contiguous().view(bits[b.element_size()])
    )


def quiet(test):
    """What dynamo says once about compressed-tensors' cached range and about its own stand-in for a context."""
    test = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")(test)
    return pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")(test)
