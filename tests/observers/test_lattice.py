"""``lattice`` finds the grid that a weight lies on, and stores it without an error; elsewhere it searches a range."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn
from transformers import CompressedTensorsConfig, LlamaForCausalLM

from lightning_obs import CalibrationError, CalibrationSession, quantize_checkpoint, quantized
from lightning_obs.numerics.fake_quantize import fake_quantize
from lightning_obs.observers import Observer
from tests.streaming.test_checkpoint_weights import tiny_llama as tiny_llama_of

INT4 = QuantizationArgs(num_bits=4, group_size=32)
ASYMMETRIC = QuantizationArgs(num_bits=4, group_size=32, symmetric=False)
SCHEME = {"weights": {"num_bits": 4, "group_size": 32}}


def on_grid(rows=16, groups=4, *, dtype=torch.float32, scale_dtype=torch.float32, args=INT4, seed=0):
    """A weight ``(rows, 32 * groups)`` of codes times scales of both signs, with zero points where the format has."""
    generator = torch.Generator().manual_seed(seed)
    half = 2 ** (args.num_bits - 1)
    codes = torch.randint(-half, half, (rows, groups, 32), generator=generator).float()
    scales = (0.001 + 0.02 * torch.rand(rows, groups, 1, generator=generator)).to(scale_dtype).float()
    if args.symmetric:
        scales *= torch.randint(0, 2, scales.shape, generator=generator) * 2 - 1
    else:
        codes -= torch.randint(-half, half, scales.shape, generator=generator)
    return (codes * scales).to(dtype).flatten(1)


def observe(weight, args=INT4, name="lattice", **kwargs):
    return Observer.load_from_registry(name, base_name="weight", args=args, **kwargs)(weight)


def stored(weight, observer):
    qparams = observer.get_qparams()
    return fake_quantize(weight, qparams["scale"], qparams["zero_point"], observer.args)


@pytest.mark.parametrize(
    "args",
    [INT4, ASYMMETRIC, QuantizationArgs(num_bits=8, group_size=32)],
    ids=["int4", "int4 asymmetric", "int8"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_weight_on_a_grid_comes_back_bit_for_bit(dtype, args):
    if args.num_bits == 8 and dtype == torch.bfloat16:
        pytest.skip("8 bits have more numbers than bfloat16 can tell apart")
    weight = on_grid(dtype=dtype, scale_dtype=dtype, args=args)
    observer = observe(weight, args)
    assert observer.grid_shares == (1, 1)
    assert torch.equal(stored(weight, observer), weight)


def test_a_step_that_is_finer_than_the_dtype_of_the_weight_is_found_up_to_that_rounding():
    """llama.cpp's scales are float16; Gemma's checkpoints of them are bfloat16."""
    narrow = on_grid(dtype=torch.bfloat16, scale_dtype=torch.float16)
    for weight in (narrow, narrow.float()):
        observer = observe(weight)
        on_a_grid, exact = observer.grid_shares
        assert on_a_grid == 1
        assert exact < 1
        error = (stored(weight, observer).float() - weight.float()).abs()
        assert (error <= 2**-7 * weight.float().abs()).all()


def test_a_weight_on_no_grid_gets_the_range_of_the_search():
    weight = on_grid() + 1e-4 * torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
    observer = observe(weight)
    assert observer.grid_shares == (0, 0)
    expected = observe(weight, name="memoryless_mse", signed=True).get_qparams()
    torch.testing.assert_close(observer.get_qparams()["scale"], expected["scale"])


def test_a_grid_is_found_scale_by_scale():
    weight = on_grid()
    weight[:, 32:64] += 1e-4 * torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    observer = observe(weight)
    assert observer.grid_shares == (0.75, 0.75)
    back = stored(weight, observer)
    assert torch.equal(back[:, 64:], weight[:, 64:])


def test_a_minimum_that_is_no_multiple_of_the_step_gives_no_grid():
    """GGUF's Q4_1: zero points of compressed-tensors are integers."""
    weight = on_grid(args=ASYMMETRIC) + 0.4e-3
    assert observe(weight, ASYMMETRIC).grid_shares == (0, 0)


def test_without_signed_scales_a_grid_that_is_turned_around_is_not_exact():
    codes = torch.arange(-8, 8).repeat(2).float()[None]
    codes = torch.cat([codes, -codes]) * 0.01
    assert observe(codes).grid_shares == (1, 1)
    assert observe(codes, signed=False).grid_shares == (0.5, 0.5)


@pytest.mark.parametrize(("base_name", "args"), [("input", INT4), ("weight", QuantizationArgs(type="float"))])
def test_all_but_weights_in_integers_are_refused(base_name, args):
    with pytest.raises(CalibrationError, match=r"grid of weights in integers.*memoryless_mse"):
        Observer.load_from_registry("lattice", base_name=base_name, args=args)


# ---------------------------------------------------------------------- a calibration


def test_a_calibration_says_how_many_weights_lie_on_a_grid():
    model = nn.Sequential(nn.Linear(128, 16, bias=False), nn.Linear(32, 16), nn.Linear(32, 16))
    with torch.no_grad():
        model[0].weight.copy_(on_grid())
        model[1].weight.copy_(on_grid(16, 1))
    with CalibrationSession(model, SCHEME, observers={"weight": "lattice"}) as session:
        pass
    text = "2 of 3 weights lie on a grid, stored exactly; of the other, 0 % of the scales"
    assert session.result.facts()["grids"] == text
    assert session.result.line(", ").endswith(text)
    with quantized(model), torch.no_grad():
        assert torch.equal(model[0](torch.eye(128)).T, on_grid())


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_checkpoint_of_weights_on_a_grid_is_quantized_without_a_difference(tmp_path, workers, warm_workers):
    folder = tiny_llama_of(tmp_path / "llama")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = []
    with torch.no_grad():
        for number, (name, module) in enumerate(model.model.named_modules()):
            if isinstance(module, nn.Linear):
                rows, columns = module.weight.shape
                module.weight.copy_(on_grid(rows, columns // 32, seed=number))
                names.append(f"model.{name}")
    model.save_pretrained(folder)
    observers = {"weight": "lattice"}
    result = quantize_checkpoint(
        folder, tmp_path / "out", SCHEME, ignore=["lm_head"], observers=observers, workers=workers
    )
    assert result.grids == dict.fromkeys(names, (1, 1))
    as_floats = CompressedTensorsConfig(dequantize=True)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out", quantization_config=as_floats)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_signed_scales_in_a_format_without_them_are_refused():
    args = ASYMMETRIC.model_copy(update={"observer_kwargs": {"signed": True}})
    with pytest.raises(CalibrationError, match="signed scales are for weights in symmetric integer formats"):
        observe(on_grid(args=ASYMMETRIC), args)
