"""One tensor of a module, quantized with the module's parameters: what every quantized forward is made of."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStatus, forward_quantize
from torch import nn

from lightning_obs.forward.quantized_module import fake_quantize_for
from tests.numerics.fake_quantize_cases import (
    DTYPES,
    DYNAMIC,
    HEADS,
    LOCAL,
    STATIC,
    named,
    qparams_of,
    quiet,
    same_bits,
)


def holder(base_name: str, value: torch.Tensor, args: QuantizationArgs) -> nn.Module:
    """A module with the parameters that compressed-tensors' forward reads."""
    module = nn.Identity()
    module.quantization_status = QuantizationStatus.FROZEN
    field = {"weight": "weights", "output": "output_activations"}.get(base_name, "input_activations")
    module.quantization_scheme = QuantizationScheme(targets=[], **{field: args})
    if args.dynamic is not True:
        observed = QuantizationArgs(**{**args.model_dump(), "dynamic": False}) if args.dynamic else args
        scale, zero_point, global_scale = qparams_of(value, observed, base_name, shrink=0.7)
        setattr(module, f"{base_name}_global_scale", global_scale)
        if not args.dynamic:
            setattr(module, f"{base_name}_scale", scale)
            setattr(module, f"{base_name}_zero_point", zero_point)
    return module


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("base_name", ["input", "output"])
@pytest.mark.parametrize("args", named(**DYNAMIC, **{"NVFP4": LOCAL}, **{f"static {k}": v for k, v in STATIC.items()}))
def test_the_forward_of_an_activation_is_compressed_tensors_bit_for_bit(args, base_name, dtype):
    value = torch.randn(2, 3, 256, dtype=dtype, requires_grad=True)
    module = holder(base_name, value, args)
    found = fake_quantize_for(module, value, base_name)
    with torch.no_grad():
        expected = forward_quantize(module, value, base_name, args)
    assert same_bits(found, expected)
    assert found.requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("base_name", ["q", "k", "v"])
@pytest.mark.parametrize("args", named(**HEADS, **STATIC))
def test_the_forward_of_an_attention_state_is_compressed_tensors_bit_for_bit(args, base_name, dtype):
    state = torch.randn(2, 3, 5, 16, dtype=dtype, requires_grad=True)
    module = holder(base_name, state, args)
    found = fake_quantize_for(module, state, base_name)
    with torch.no_grad():
        expected = forward_quantize(module, state, base_name, args)
    assert same_bits(found, expected)
    assert found.requires_grad


@pytest.mark.parametrize(
    ("base_name", "args", "shape", "features"),
    [
        ("weight", STATIC["tensor int8"], (12, 64), 12 * 64),
        ("input", STATIC["tensor int8"], (2, 3, 64), 64),
        ("output", STATIC["tensor int8"], (6, 64), 64),
    ],
)
def test_the_step_gradient_counts_the_features_of_one_observation(base_name, args, shape, features):
    value = torch.randn(shape)
    module = holder(base_name, value, args)
    scale = getattr(module, f"{base_name}_scale").requires_grad_()
    fake_quantize_for(module, value, base_name).sum().backward()
    s, z = scale.detach().double(), 0
    v = value.double() / s
    slope = torch.where((v >= -128.5) & (v <= 127.5), v.round().clamp(-128, 127) - v, v.clamp(-128, 127) - z)
    expected = slope.sum_to_size(s.shape) / math.sqrt(features * 127)
    torch.testing.assert_close(scale.grad.double(), expected, rtol=1e-3, atol=1e-3)


ACTIVATIONS = {
    "tensor int8": (STATIC["tensor int8"], "input", False),
    "tensor int8, learned": (STATIC["tensor int8"], "input", True),
    "head fp8": (HEADS["head fp8"], "k", False),
    "token int8": (DYNAMIC["token int8"], "input", False),
    "NVFP4": (LOCAL, "input", False),
}
MARKS = {"NVFP4": pytest.mark.slow, "tensor int8": pytest.mark.nightly, "head fp8": pytest.mark.nightly}


@pytest.mark.slow_but_first
@quiet
@pytest.mark.parametrize(
    ("args", "base_name", "learn"),
    [pytest.param(*case, id=name, marks=MARKS.get(name, ())) for name, case in ACTIVATIONS.items()],
)
def test_activations_of_any_length_compile_without_a_graph_break(args, base_name, learn):
    """Shapes are symbols then: what is computed from them must be something that dynamo traces."""
    shape = (2, 4, 11, 64) if base_name == "k" else (2, 11, 64)
    module = holder(base_name, torch.randn(shape), args)
    if learn:
        module.input_scale.requires_grad_()

    def run(value):
        return fake_quantize_for(module, value, base_name)

    torch._dynamo.reset()
    fast = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (5, 11):
        value = torch.randn(*shape[:-2], length, shape[-1], requires_grad=True)
        leaves = (value, module.input_scale) if learn else (value,)
        one, other = run(value), fast(value)
        assert torch.equal(one, other)
        grads = [torch.autograd.grad(out.square().sum(), leaves) for out in (one, other)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("args", named(**DYNAMIC, **{f"static {k}": v for k, v in STATIC.items()}))
def test_an_operation_in_place_may_follow(args):
    value = torch.randn(2, 3, 256)
    module = holder("output", value, args)
    grads = []
    for activation in (F.relu, F.relu_):
        leaf = value.clone().requires_grad_()
        activation(fake_quantize_for(module, leaf, "output")).square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)
    assert (grads[0] != 0).any()
