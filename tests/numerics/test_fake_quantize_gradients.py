"""Gradients of fake quantization, against the formulas in float64 and finite differences; learned scales."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization import fake_quantize as reference
from torch import nn

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics import compute_global_scale
from lightning_obs.numerics.fake_quantize import dequantize, fake_quantize, fake_quantize_dynamic, learned_scale
from tests.numerics.fake_quantize_cases import (
    DTYPES,
    DYNAMIC,
    LAYOUTS,
    LEARNABLE,
    LOCAL,
    WEIGHTS,
    named,
    preset,
    qparams_of,
)


def scale_number(shape: tuple[int, int], args: QuantizationArgs) -> torch.Tensor:
    """Which scale, counted row by row, each element of a matrix belongs to."""
    rows, columns = torch.meshgrid(torch.arange(shape[0]), torch.arange(shape[1]), indexing="ij")
    if args.strategy == "tensor":
        return rows * 0
    if args.strategy == "channel":
        return rows
    height, width = (1, args.group_size) if args.block_structure is None else args.block_structure
    return (rows // height) * math.ceil(shape[1] / width) + columns // width


def levels_of(args: QuantizationArgs) -> torch.Tensor:
    """The grid, ascending, in float64."""
    if args.type == "int":
        return torch.arange(-(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1)).double()
    if args.num_bits == 8:
        levels = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        return levels[levels.isfinite()].unique()
    half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
    return torch.cat([-half, half]).unique()


def by_formula(value, scale, zero_point, args, upstream):
    """Gradients to value and scale, and which values are too near a bound or a tie to say, all in float64."""
    number = scale_number(value.shape, args)
    s, z = scale.double().flatten()[number], zero_point.double().flatten()[number]
    levels = levels_of(args)
    v = value.double() / s + z
    level = levels[(v.unsqueeze(-1) - levels).abs().argmin(-1)]
    half_step = (levels[-1] - levels[-2]) / 2 if args.type == "float" else 0.5
    low, high = levels[0] - half_step, levels[-1] + half_step
    inside = (v >= low) & (v <= high)
    doubtful = torch.minimum((v - low).abs(), (v - high).abs()) < 1e-3 * (high - low)
    slope = torch.where(inside, level - v, level - z)
    per_scale = torch.zeros(scale.numel()).double().index_add(0, number.flatten(), (upstream * slope).flatten())
    factor = 1 / math.sqrt(value.numel() / scale.numel() * levels[-1])
    return inside * upstream.double(), per_scale.reshape(scale.shape) * factor, doubtful


@pytest.mark.parametrize("args", named(**LEARNABLE))
def test_gradients_follow_the_formulas(args):
    value = torch.randn(12, 64)
    scale, zero_point, _ = qparams_of(value, args, shrink=0.4)
    upstream = torch.randn_like(value)
    doubtful = by_formula(value, scale, zero_point, args, upstream)[2]
    upstream[doubtful] = 0
    expected_value, expected_scale, _ = by_formula(value, scale, zero_point, args, upstream)
    value.requires_grad_(), scale.requires_grad_()
    fake_quantize(value, scale, zero_point, args).backward(upstream)
    assert torch.equal(value.grad.double(), expected_value)
    torch.testing.assert_close(scale.grad.double(), expected_scale, rtol=1e-4, atol=1e-5)
    alone = value.detach().clone().requires_grad_()
    fake_quantize(alone, scale.detach(), zero_point, args).backward(upstream)
    assert torch.equal(alone.grad, value.grad)
    assert 0.02 < (value.grad[~doubtful] == 0).double().mean() < 0.8  # the test clips some and not all


@pytest.mark.parametrize("args", named(**{k: v for k, v in LEARNABLE.items() if "int4" in k or "fp8" in k}))
def test_where_everything_is_clipped_finite_differences_give_the_gradients(args):
    value = torch.randn(12, 64).sign() * 3
    scale = torch.full_like(qparams_of(value, args)[0], 0.001)
    zero_point = torch.full(scale.shape, 0 if args.symmetric else 2)
    weights = torch.randn_like(value)

    def loss(value, scale):
        return (reference(value, scale, zero_point, args) * weights).double().sum().item()

    n, qmax = value.numel() / scale.numel(), levels_of(args)[-1].item()
    value.requires_grad_(), scale.requires_grad_()
    (fake_quantize(value, scale, zero_point, args) * weights).sum().backward()
    assert (value.grad == 0).all()
    assert loss(value.detach() + 0.01, scale.detach()) == loss(value.detach(), scale.detach())
    for i in range(min(scale.numel(), 6)):
        step = torch.zeros(scale.numel()).index_fill(0, torch.tensor(i), 1e-4).view_as(scale)
        difference = (loss(value.detach(), scale.detach() + step) - loss(value.detach(), scale.detach() - step)) / 2e-4
        assert scale.grad.flatten()[i].item() == pytest.approx(difference / math.sqrt(n * qmax), rel=2e-3, abs=1e-2)


def test_one_step_of_the_value_moves_the_result_by_one_step():
    value = torch.tensor([-1.3, 0.2, 0.9], dtype=torch.float64)
    scale, args = torch.tensor([0.5], dtype=torch.float64), QuantizationArgs(num_bits=4)
    given = value.clone().requires_grad_()
    fake_quantize(given, scale, None, args).sum().backward()
    secant = (reference(value + scale, scale, None, args) - reference(value, scale, None, args)) / scale
    assert torch.equal(given.grad, secant)


def test_observations_do_not_count_as_values_of_a_scale():
    args = QuantizationArgs(strategy="tensor")
    value = torch.randn(2, 3, 16)
    grads = []
    for observations in (1, 6):
        scale = torch.tensor([0.01], requires_grad=True)
        fake_quantize(value, scale, None, args, observations=observations).square().sum().backward()
        grads.append(scale.grad)
    torch.testing.assert_close(grads[1], grads[0] * math.sqrt(6))


# ---------------------------------------------------------------------- nothing is left without a gradient


@pytest.mark.parametrize("args", WEIGHTS)
def test_no_weight_inside_its_own_range_is_left_without_gradient(args):
    for dtype, spread in itertools.product(DTYPES, (0.02, 1.0, 30.0)):
        weight = (torch.randn(24, 64) * spread).to(dtype).requires_grad_()
        scale, zero_point, global_scale = qparams_of(weight, args)
        fake_quantize(weight, scale, zero_point, args, global_scale=global_scale).sum().backward()
        assert (weight.grad == 1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("args", named(**DYNAMIC))
def test_a_dynamic_range_clips_no_gradient(args, dtype):
    value = (torch.randn(2, 3, 256) * torch.logspace(-6, 2, 256)).to(dtype).requires_grad_()
    fake_quantize_dynamic(value, args).sum().backward()
    assert (value.grad == 1).all()


def test_a_local_range_clips_where_the_global_scale_ends():
    value = torch.randn(1, 4, 64)
    global_scale = compute_global_scale(
        [(value.min(), value.max())], QuantizationArgs(**{**LOCAL.model_dump(), "dynamic": False})
    )
    value[0, 0, 0] = value.abs().max() * 8
    value.requires_grad_()
    fake_quantize_dynamic(value, LOCAL, global_scale=global_scale).sum().backward()
    assert (value.grad == 0).sum() == 1
    assert value.grad[0, 0, 0] == 0


# ---------------------------------------------------------------------- learned scales


def test_a_learned_scale_starts_as_calibrated_and_can_only_stay_positive():
    calibrated = torch.tensor([[0.1], [3e-3]], dtype=torch.bfloat16)
    log_factor = nn.Parameter(torch.zeros(2, 1))
    assert torch.equal(learned_scale(calibrated, log_factor), calibrated)
    with torch.no_grad():
        log_factor.copy_(torch.tensor([[-1e4], [0.1]]))
    scale = learned_scale(calibrated, log_factor)
    assert scale.dtype == calibrated.dtype
    assert (scale > 0).all()
    assert (1 / scale).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("log_factor", [None, -1e3, 1e3], ids=["near", "far below", "far above"])
def test_a_learned_scale_that_is_stored_as_float8_is_the_nearest_of_its_numbers(log_factor, dtype):
    numbers = levels_of(QuantizationArgs(num_bits=8, type="float"))
    calibrated = numbers[numbers > 0].to(dtype)  # subnormal ones too
    assert torch.equal(learned_scale(calibrated, torch.zeros(len(calibrated)), torch.float8_e4m3fn), calibrated)
    factors = torch.randn(len(calibrated)) * 0.3 if log_factor is None else torch.full((len(calibrated),), log_factor)
    wanted = (calibrated.double() * factors.double().exp()).clamp(calibrated.double().clamp(max=2.0**-6)).clamp(max=448)
    expected = numbers[(wanted.unsqueeze(-1) - numbers).abs().argmin(-1)]
    assert torch.equal(learned_scale(calibrated, factors, torch.float8_e4m3fn).double(), expected)


@pytest.mark.parametrize("args", named(**LEARNABLE, NVFP4=preset("NVFP4")))
def test_the_gradient_of_the_scale_of_numbers_that_stay_is_that_of_a_product(args):
    weight = torch.randn(12, 64)
    calibrated, zero_point, global_scale = qparams_of(weight, args)
    levels = levels_of(args)[torch.randint(len(levels_of(args)), weight.shape)]
    codes = levels.to(torch.int8 if args.type == "int" else torch.float8_e4m3fn)
    stored = torch.float8_e4m3fn if global_scale is not None else None
    log_factor, upstream = nn.Parameter(torch.randn(calibrated.shape) * 0.2), torch.randn_like(weight)
    scale = learned_scale(calibrated, log_factor, stored)
    found = dequantize(codes, scale, zero_point, args, global_scale=global_scale)
    found.backward(upstream)

    number, divisor = scale_number(weight.shape, args), 1.0 if global_scale is None else global_scale.double()
    level = levels - zero_point.double().flatten()[number]
    torch.testing.assert_close(found.double(), level * (scale.detach().double() / divisor).flatten()[number])
    total = torch.zeros(scale.numel()).double().index_add(0, number.flatten(), (upstream * level).flatten())
    expected = total.view_as(scale) / divisor * calibrated.double() * log_factor.detach().double().exp()
    torch.testing.assert_close(log_factor.grad.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("factor", [0.2, 5.0], ids=["too small", "too large"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_learned_scale_finds_from_a_bad_range_to_a_smaller_error_than_absmax(layout, factor):
    args = QuantizationArgs(num_bits=4, **LAYOUTS[layout])
    weight = torch.randn(12, 64)
    scale = qparams_of(weight, args)[0]
    log_factor = nn.Parameter(torch.zeros_like(scale))
    optimizer = torch.optim.Adam([log_factor], lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        error = F.mse_loss(fake_quantize(weight, learned_scale(scale * factor, log_factor), None, args), weight)
        error.backward()
        optimizer.step()
    assert error < F.mse_loss(reference(weight, scale, None, args), weight)


@pytest.mark.parametrize(
    ("args", "asked", "message"),
    [
        (preset("NVFP4"), "scale", r"this scale cannot be learned.*strategy tensor_group.*requires_grad_\(False\)"),
        (preset("MXFP4"), "scale", r"this scale cannot be learned.*scale_dtype torch.uint8"),
        (preset("NVFP4"), "global_scale", r"this global scale cannot be learned"),
        (QuantizationArgs(symmetric=False), "zero_point", r"this zero point cannot be learned"),
    ],
)
def test_a_parameter_that_the_checkpoint_rounds_is_not_learned(args, asked, message):
    weight = torch.randn(4, 64)
    scale, zero_point, global_scale = qparams_of(weight, args)
    given = {"scale": scale, "zero_point": zero_point.float(), "global_scale": global_scale}
    given[asked].requires_grad_()
    with pytest.raises(CalibrationError, match=message):
        fake_quantize(weight, args=args, **given)
    with torch.no_grad():
        fake_quantize(weight, args=args, **given)
