from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationStatus,
    forward_quantize,
    preset_name_to_scheme,
)
from compressed_tensors.quantization import fake_quantize as reference
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_obs import CalibrationSession, quantized
from lightning_obs.errors import CalibrationError
from lightning_obs.model.qparams import get_scheme
from lightning_obs.numerics import compute_global_scale, compute_qparams, flatten_for_calibration
from lightning_obs.numerics.fake_quantize import (
    fake_quantize,
    fake_quantize_dynamic,
    forward_fake_quantize,
    learned_scale,
)

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


# ---------------------------------------------------------------------- forward


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


def holder(base_name: str, value: torch.Tensor, args: QuantizationArgs) -> nn.Module:
    """A module with the parameters that compressed-tensors' forward reads."""
    module = nn.Identity()
    module.quantization_status = QuantizationStatus.FROZEN
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
    found = forward_fake_quantize(module, value, base_name, args)
    assert same_bits(found, forward_quantize(module, value, base_name, args))
    assert found.requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("base_name", ["q", "k", "v"])
@pytest.mark.parametrize("args", named(**HEADS, **STATIC))
def test_the_forward_of_an_attention_state_is_compressed_tensors_bit_for_bit(args, base_name, dtype):
    state = torch.randn(2, 3, 5, 16, dtype=dtype, requires_grad=True)
    module = holder(base_name, state, args)
    found = forward_fake_quantize(module, state, base_name, args)
    assert same_bits(found, forward_quantize(module, state, base_name, args))
    assert found.requires_grad


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


# ---------------------------------------------------------------------- gradients, against the formula in float64


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


@pytest.mark.parametrize(
    ("base_name", "args", "shape", "features"),
    [
        ("weight", STATIC["tensor int8"], (12, 64), 12 * 64),
        ("input", STATIC["tensor int8"], (2, 3, 64), 64),
        ("output", STATIC["tensor int8"], (6, 64), 64),
        ("k", STATIC["tensor int8"], (2, 3, 5, 16), 3 * 16),
        ("v", HEADS["head int8"], (2, 3, 5, 16), 16),
    ],
)
def test_the_step_gradient_counts_the_features_of_one_observation(base_name, args, shape, features):
    value = torch.randn(shape)
    module = holder(base_name, value, args)
    scale = getattr(module, f"{base_name}_scale").requires_grad_()
    forward_fake_quantize(module, value, base_name, args).sum().backward()
    s, z = scale.detach().double(), 0
    v = value.double() / s
    slope = torch.where((v >= -128.5) & (v <= 127.5), v.round().clamp(-128, 127) - v, v.clamp(-128, 127) - z)
    expected = slope.sum_to_size(s.shape) / math.sqrt(features * 127)
    torch.testing.assert_close(scale.grad.double(), expected, rtol=1e-3, atol=1e-3)


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


class Quantized(nn.Module):
    """Runs each Linear of a calibrated model through differentiable fake quantization."""

    def __init__(self, layers: nn.Sequential, scheme: str, data: torch.Tensor):
        super().__init__()
        self.layers = layers
        with CalibrationSession(layers, scheme, reload="unchecked") as session:
            if session.plan.needs_data:
                layers(data)

    def forward(self, x):
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                scheme = get_scheme(layer)
                if scheme.input_activations is not None:
                    x = forward_fake_quantize(layer, x, "input", scheme.input_activations)
                weight = forward_fake_quantize(layer, layer.weight, "weight", scheme.weights)
                x = F.linear(x, weight, layer.bias)
            else:
                x = layer(x)
        return x


def two_layers(width: int = 128) -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, width), nn.GELU(), nn.Linear(width, 128))


@pytest.mark.parametrize(
    "scheme", ["W8A8", "INT8_STATIC", "FP8", "FP8_DYNAMIC", "W4A16", "W4A16_ASYM", "W4A8", "NVFP4", "MXFP4"]
)
def test_every_parameter_of_a_model_gets_a_gradient_and_the_forward_is_the_exported_one(scheme):
    x = torch.randn(2, 3, 128)
    model = Quantized(two_layers(), scheme, x)
    output = model(x)
    with quantized(model.layers), torch.no_grad():
        assert same_bits(output, model.layers(x))
    output.square().mean().backward()
    assert all((parameter.grad != 0).double().mean() > 0.95 for parameter in model.parameters())


@pytest.mark.parametrize("scheme", ["W8A8", "NVFP4"])
def test_training_reaches_at_most_half_the_loss_of_compressed_tensors_own_wrapper(scheme):
    x = torch.randn(64, 1, 128)
    y = torch.sin(3 * x @ torch.randn(128, 128) / 128**0.5)
    losses = []
    for ours in (False, True):
        torch.manual_seed(1)
        model = Quantized(two_layers(), scheme, x)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        with quantized(model.layers):
            for _ in range(60):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x) if ours else model.layers(x), y)
                loss.backward()
                optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0] / 2


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


# What dynamo says about compressed-tensors' cached range and about its own stand-in for an autograd context.
quiet_dynamo = (
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated"),
)


def quiet(test):
    for mark in quiet_dynamo:
        test = mark(test)
    return test


def compiled(run, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(run, backend=backend, fullgraph=True)


@quiet
@pytest.mark.parametrize("learn", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("args", [SOME[0], SOME[2]])
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


@quiet
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("scheme", ["W8A8", "FP8", "NVFP4", "MXFP4"])
def test_a_model_with_quantized_activations_compiles_without_a_graph_break(scheme, backend):
    x = torch.randn(2, 3, 128)
    model = Quantized(two_layers(), scheme, x)
    grads = []
    for run in (model, compiled(model, backend)):
        model.zero_grad()
        run(x).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


ACTIVATIONS = {
    "tensor int8": (STATIC["tensor int8"], "input", False),
    "tensor int8, learned": (STATIC["tensor int8"], "input", True),
    "head fp8": (HEADS["head fp8"], "k", False),
    "token int8": (DYNAMIC["token int8"], "input", False),
    "NVFP4": (LOCAL, "input", False),
}


@quiet
@pytest.mark.parametrize(
    ("args", "base_name", "learn"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name == "NVFP4")) for name, case in ACTIVATIONS.items()],
)
def test_activations_of_any_length_compile_without_a_graph_break(args, base_name, learn):
    """Shapes are symbols then: what is computed from them must be something that dynamo traces."""
    shape = (2, 4, 11, 64) if base_name == "k" else (2, 11, 64)
    module = holder(base_name, torch.randn(shape), args)
    if learn:
        module.input_scale.requires_grad_()

    def run(value):
        return forward_fake_quantize(module, value, base_name, args)

    torch._dynamo.reset()
    fast = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (5, 11):
        value = torch.randn(*shape[:-2], length, shape[-1], requires_grad=True)
        leaves = (value, module.input_scale) if learn else (value,)
        one, other = run(value), fast(value)
        assert torch.equal(one, other)
        grads = [torch.autograd.grad(out.square().sum(), leaves) for out in (one, other)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("scheme", ["W8A8", "INT8_STATIC", "NVFP4", "W4A16"])
def test_under_autocast_every_gradient_has_its_parameter_s_dtype(scheme):
    x = torch.randn(2, 3, 128)
    model = Quantized(two_layers(), scheme, x)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    assert all(p.grad.dtype == p.dtype and (p.grad != 0).any() for p in model.parameters())


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


@pytest.mark.parametrize("args", named(**DYNAMIC, **{f"static {k}": v for k, v in STATIC.items()}))
def test_an_operation_in_place_may_follow(args):
    value = torch.randn(2, 3, 256)
    module = holder("output", value, args)
    grads = []
    for activation in (F.relu, F.relu_):
        leaf = value.clone().requires_grad_()
        activation(forward_fake_quantize(module, leaf, "output", args)).square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)
    assert (grads[0] != 0).any()


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
