"""Forward of fake quantization, against compressed-tensors' bit for bit, and what training does with it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization import fake_quantize as reference
from torch.utils.checkpoint import checkpoint

from lightning_obs.numerics.fake_quantize import fake_quantize, fake_quantize_dynamic
from tests.numerics.fake_quantize_cases import (
    DTYPES,
    DYNAMIC,
    FP4,
    LEARNABLE,
    LOCAL,
    STATIC,
    WEIGHTS,
    named,
    qparams_of,
    quiet,
    same_bits,
)


@pytest.mark.parametrize("args", WEIGHTS)
def test_the_forward_of_a_weight_is_compressed_tensors_bit_for_bit(args):
    for dtype, no_zero_point in itertools.product(DTYPES, (False, True)):
        weight = torch.randn(12, 64, dtype=dtype)
        weight[0, :3] = torch.tensor([0.0, -0.0, 40.0])
        scale, zero_point, global_scale = qparams_of(weight, args, shrink=0.7)
        zero = None if no_zero_point else zero_point
        expected = reference(weight, scale, zero, args, global_scale=global_scale)
        given = weight.clone().requires_grad_()
        assert same_bits(fake_quantize(given, scale, zero, args, global_scale=global_scale), expected)
        with torch.inference_mode():
            assert same_bits(fake_quantize(weight, scale, zero, args, global_scale=global_scale), expected)


@pytest.mark.parametrize("args", named(**LEARNABLE))
def test_the_forward_under_a_learned_scale_is_compressed_tensors_bit_for_bit(args):
    for dtype in DTYPES:
        weight = torch.randn(12, 64, dtype=dtype, requires_grad=True)
        scale, zero_point, _ = qparams_of(weight, args, shrink=0.7)
        expected = reference(weight, scale, zero_point, args)
        assert same_bits(fake_quantize(weight, scale.requires_grad_(), zero_point, args), expected)


@pytest.mark.parametrize("args", named(fp4=QuantizationArgs(strategy="tensor", **FP4)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_half_precision_number_is_rounded_to_fp4_as_compressed_tensors_does(args, dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    value = every.view(torch.float16 if dtype == torch.float16 else torch.bfloat16).to(dtype)
    for zero in (torch.zeros(1, dtype=torch.float8_e4m3fn), torch.ones(1, dtype=torch.float8_e4m3fn), None):
        found = fake_quantize(value, torch.ones(1, dtype=dtype), zero, args)
        expected = reference(value, torch.ones(1, dtype=dtype), zero, args)
        assert torch.equal(found.isnan(), expected.isnan())
        assert same_bits(found.nan_to_num(9.0), expected.nan_to_num(9.0))


# ---------------------------------------------------------------------- in training

SOME = named(**{k: LEARNABLE[k] for k in ("int4 group", "int8 asymmetric channel", "fp8 blocks that do not divide")})


def loss_of(weight, scale, zero_point, args):
    return fake_quantize(weight, scale, zero_point, args).square().sum()


@pytest.mark.parametrize("args", SOME)
def test_activation_checkpointing_changes_nothing(args):
    grads = []
    weight = torch.randn(12, 64)
    for run in (lambda f, *a: f(*a), lambda f, *a: checkpoint(f, *a, use_reentrant=False)):
        w = weight.clone().requires_grad_()
        scale, zero_point, _ = qparams_of(w, args, shrink=0.5)
        run(loss_of, w, scale.requires_grad_(), zero_point, args).backward()
        grads.append((w.grad, scale.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def compiled(run, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(run, backend=backend, fullgraph=True)


@pytest.mark.slow
@quiet
@pytest.mark.parametrize(("args", "learn"), [(*SOME[0].values, True), (*SOME[2].values, False)])
def test_it_compiles_without_a_graph_break(args, learn):
    weight = torch.randn(12, 64)
    found = []
    for run in (loss_of, compiled(loss_of)):
        w = weight.clone().requires_grad_()
        scale, zero_point, _ = qparams_of(w, args, shrink=0.5)
        loss = run(w, scale.requires_grad_(learn), zero_point, args)
        loss.backward()
        found.append((loss.detach(), w.grad, scale.grad if learn else torch.zeros(1)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_half_precision_activation_under_a_learned_scale_gets_gradients_of_its_own_dtype(scale_dtype):
    args = STATIC["tensor int8"]
    value = torch.randn(2, 3, 64).bfloat16().requires_grad_()
    scale = torch.tensor([0.01], dtype=scale_dtype, requires_grad=True)
    found = fake_quantize(value, scale, None, args)
    assert found.dtype == reference(value, scale, None, args).dtype
    found.sum().backward()
    assert (value.grad.dtype, scale.grad.dtype) == (torch.bfloat16, scale_dtype)
    assert scale.grad.isfinite().all()


def kept_by(compute) -> list[tuple[torch.dtype, int]]:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t.dtype, t.numel())), lambda t: t):
        compute()
    return kept


def test_the_backward_keeps_one_byte_a_value_and_nothing_for_a_dynamic_range():
    value = torch.randn(2, 3, 64, requires_grad=True)
    assert kept_by(lambda: fake_quantize(value, torch.ones(1), None, STATIC["tensor int8"])) == [(torch.bool, 384)]
    assert kept_by(lambda: fake_quantize_dynamic(value, DYNAMIC["token int8"])) == []


def test_a_change_in_place_under_a_learned_scale_is_an_error_and_not_a_wrong_gradient():
    scale = torch.ones(1, requires_grad=True)
    for args in (STATIC["tensor int8"], LEARNABLE["int4 group"]):
        result = fake_quantize(torch.randn(4, 64), scale.expand(4, 8 if args.group_size else 1), None, args)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.mul_(2).sum().backward()


# ---------------------------------------------------------------------- odd values


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_an_empty_value_passes_and_keeps_its_graph(shape):
    value = torch.randn(shape, requires_grad=True)
    scale = torch.ones(1, requires_grad=True)
    for result in (
        fake_quantize(value, scale, None, STATIC["tensor int8"]),
        fake_quantize_dynamic(value, DYNAMIC["token int8"]),
        fake_quantize_dynamic(value, LOCAL, global_scale=torch.ones(1)),
    ):
        assert result.shape == value.shape
        result.sum().backward()
    assert scale.grad == 0


@pytest.mark.parametrize("learn", [False, True], ids=["fixed", "learned"])
def test_an_infinite_value_takes_the_last_level_and_leaves_other_gradients_alone(learn):
    value = torch.tensor([1.0, math.inf, -math.inf], requires_grad=True)
    scale = torch.tensor([0.5], requires_grad=learn)
    result = fake_quantize(value, scale, None, QuantizationArgs(num_bits=4))
    assert result.tolist() == [1.0, 3.5, -4.0]
    result.sum().backward()
    assert value.grad.tolist() == [1, 0, 0]
    if learn:
        assert scale.grad.item() == pytest.approx((7 - 8) / math.sqrt(3 * 7))


def test_a_nan_stays_a_nan():
    value = torch.tensor([1.0, math.nan], requires_grad=True)
    result = fake_quantize(value, torch.tensor([0.5]), None, QuantizationArgs(num_bits=4))
    assert result.isnan().tolist() == [False, True]
    result.nansum().backward()
    assert value.grad[0] == 1


def test_a_scale_of_an_all_zero_weight_lets_every_gradient_through():
    weight = torch.zeros(4, 64, requires_grad=True)
    args = LEARNABLE["int4 group"]
    scale, zero_point, _ = qparams_of(weight, args)
    fake_quantize(weight, scale, zero_point, args).sum().backward()
    assert (weight.grad == 1).all()
