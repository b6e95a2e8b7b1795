"""What the quantized forward of a module keeps for the backward, and that its gradients are those of torch's graph."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lightning_obs.forward.quantized_forward import set_learned_scale
from lightning_obs.forward.quantized_module import fake_quantize_for, quantized_weight, weight_quantizer
from lightning_obs.forward.recomputed_product import (
    LinearProduct,
    Scratch,
    StaticQuantizer,
    WeightQuantizer,
    recomputed_product,
)
from lightning_obs.model.weight import register_surroundings
from tests.forward.quantized_modules import calibrated, train_quantized
from tests.numerics.fake_quantize_cases import preset, qparams_of

#: what the scales of four layers, one for 16 weights, and a few rows take at most: less than a third of one weight
SCALES = 0.3 * 4 * 256 * 256
W4 = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}


def bytes_kept(run, model):
    """Bytes that autograd keeps for the backward of ``run()``, without the model's parameters."""
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    assert output.requires_grad
    return sum(storages.values())


def stack(layers=4, width=256):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("scheme", [W4, "FP8_BLOCK", "NVFP4A16"], ids=str)
def test_no_copy_of_a_weight_waits_for_the_backward(scheme, autocast):
    x = torch.randn(2, 256)
    model = calibrated(stack(), scheme, x, engines="unchecked")
    train_quantized(model)

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x)

    assert bytes_kept(run, model) < SCALES


def test_no_copy_of_a_weight_waits_under_a_learned_scale_or_a_rounding():
    x = torch.randn(2, 256)
    rows = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "channel"}}
    for learned in ("int4", "rounded"):
        model = calibrated(stack(), rows, x)
        train_quantized(model)
        for layer in model:
            layer.weight.requires_grad_(False)
            if learned == "rounded":
                layer.weight_rounded = torch.randint(-8, 8, layer.weight.shape, dtype=torch.int8)
            factor = nn.Parameter(torch.zeros_like(layer.weight_scale))
            set_learned_scale(layer, "weight", layer.weight_scale, factor)
        assert bytes_kept(lambda model=model: model(x), model) < SCALES


def test_no_copy_of_a_weight_waits_beside_adapters():
    peft = pytest.importorskip("peft")
    x = torch.randn(2, 256)
    config = peft.LoraConfig(r=2, target_modules=["0", "2"])
    model = peft.get_peft_model(stack(), config)
    inner = model.base_model.model
    calibrated(inner, W4, x)
    register_surroundings(inner)
    train_quantized(inner)
    assert bytes_kept(lambda: inner(x), inner) < SCALES


def test_a_frozen_linear_keeps_no_input_either():
    model = calibrated(stack(), W4, torch.randn(2, 256))
    model.requires_grad_(False)
    train_quantized(model)
    x = torch.randn(512, 256, requires_grad=True)
    assert bytes_kept(lambda: model(x), model) < SCALES


@pytest.mark.parametrize("shape", [(32,), (5, 32), (2, 3, 32), (2, 2, 3, 32), (0, 32)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "calibrated"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_outputs_and_gradients_have_the_bits_of_torchs_own_graph(shape, bias, autocast, learned):
    args = preset("W4A16").model_copy(update={"group_size": 16})
    weight = nn.Parameter(torch.randn(24, 32))
    scale, zero_point, _ = qparams_of(weight, args)
    weight.data *= 1.3  # some values are clipped
    scale = scale.detach().requires_grad_(learned)
    vector = torch.randn(24, requires_grad=True) if bias else None
    x = torch.randn(shape, requires_grad=True)
    sources = [tensor for tensor in (x, weight, vector, scale) if tensor is not None and tensor.requires_grad]

    quantizer = StaticQuantizer(args, zero_point, None, codes=None, is_scale_learned=True)
    quantize = WeightQuantizer(nn.Linear(32, 24), quantizer, Scratch())
    runs = []
    for recomputes in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if recomputes:
                output = recomputed_product(
                    LinearProduct(),
                    x,
                    weight,
                    vector,
                    scale,
                    quantize,
                    merge=lambda weight: weight,
                    parameters=[weight],
                )
            else:
                output = F.linear(x, quantize(weight, scale), vector)
        upstream = torch.sin(torch.arange(output.numel()).view(output.shape)).to(output.dtype)
        runs.append([output, *torch.autograd.grad(output, sources, upstream)])
    assert (runs[0][2] == 0).any()
    for expected, actual in zip(*runs, strict=True):
        assert expected.dtype == actual.dtype
        assert torch.equal(expected, actual)


def test_adapters_and_a_learned_scale_have_the_gradients_of_torchs_own_graph():
    args = preset("W4A16").model_copy(update={"group_size": 16})
    weight = torch.randn(24, 32)
    scale, zero_point, _ = qparams_of(weight, args)
    scale = scale.detach().requires_grad_()
    adapter = torch.randn(24, 32, requires_grad=True)
    x = torch.randn(5, 32)

    def merge(weight):
        return weight + adapter

    quantizer = StaticQuantizer(args, zero_point, None, codes=None, is_scale_learned=True)
    quantize = WeightQuantizer(nn.Linear(32, 24), quantizer, Scratch())
    actual_output = recomputed_product(
        LinearProduct(), x, merge(weight), None, scale, quantize, merge=merge, parameters=[weight, adapter]
    )
    expected_output = F.linear(x, quantize(merge(weight), scale))
    actual = torch.autograd.grad(actual_output.square().sum(), [adapter, scale])
    expected = torch.autograd.grad(expected_output.square().sum(), [adapter, scale])
    assert expected[0].any()
    for actual_gradient, expected_gradient in zip(actual, expected, strict=True):
        assert torch.equal(actual_gradient, expected_gradient)


def test_second_gradients_are_those_of_torchs_own_graph():
    layer = nn.Linear(32, 8)
    x = torch.randn(4, 32, requires_grad=True)
    train_quantized(calibrated(nn.Sequential(layer), W4, x))
    penalties = []
    for run in (layer, lambda x: F.linear(x, fake_quantize_for(layer, layer.weight, "weight"), layer.bias)):
        (gradient,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        penalties.append(torch.autograd.grad(gradient.square().sum(), [x, layer.weight]))
    for actual, expected in zip(*penalties, strict=True):
        assert actual.any()
        torch.testing.assert_close(actual, expected)


def test_a_weight_that_changes_before_the_backward_is_an_error():
    layer = nn.Linear(32, 8)
    x = torch.randn(4, 32, requires_grad=True)
    train_quantized(calibrated(nn.Sequential(layer), W4, x))
    output = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_hooks_of_a_parameter_see_its_gradient_once():
    layer = nn.Linear(32, 8)
    x = torch.randn(4, 32)
    train_quantized(calibrated(nn.Sequential(layer), W4, x))
    seen = []
    layer.weight.register_hook(seen.append)
    layer(x).sum().backward()
    assert len(seen) == 1


def test_layers_that_share_memory_have_the_gradients_of_torchs_own_graph():
    wide, narrow = nn.Linear(32, 64), nn.Linear(64, 32)
    x = torch.randn(4, 32, requires_grad=True)
    train_quantized(calibrated(nn.Sequential(wide, narrow), W4, x))

    def in_torchs_graph(layer, x):
        return F.linear(x, fake_quantize_for(layer, layer.weight, "weight"), layer.bias)

    runs = []
    for call in (lambda layer, x: layer(x), in_torchs_graph):
        output = call(narrow, call(wide, call(narrow, call(wide, x)).sin()).cos())
        runs.append([output, *torch.autograd.grad(output.square().sum(), [x, wide.weight, narrow.weight])])
    for actual, expected in zip(*runs, strict=True):
        assert torch.equal(actual, expected)


def test_memory_for_a_weight_is_used_again_but_by_nobody_else_meanwhile():
    layer = nn.Linear(32, 8)
    train_quantized(calibrated(nn.Sequential(layer), W4, torch.randn(4, 32)))
    quantizer = weight_quantizer(layer, layer.weight)
    with quantizer.borrowed(layer.weight, layer.weight_scale) as before:
        address = before.data_ptr()
    with quantizer.borrowed(layer.weight, layer.weight_scale) as first:
        assert first.data_ptr() == address
        expected = first.clone()
        with quantizer.borrowed(layer.weight + 1, layer.weight_scale) as second:
            assert not torch.equal(second, expected)
        assert torch.equal(first, expected)
    assert pickle.dumps(quantizer.scratch) == pickle.dumps(Scratch())


def modules():
    """Modules that compute a product, and an input of each."""
    yield nn.Conv1d(16, 24, 3, stride=2, padding=1), torch.randn(2, 16, 9)
    yield nn.Conv2d(16, 24, 3, padding=1), torch.randn(2, 16, 6, 5)
    yield nn.Conv2d(16, 24, 3, groups=4, dilation=2, bias=False), torch.randn(2, 16, 9, 8)
    yield nn.Conv2d(16, 24, 3).to(memory_format=torch.channels_last), torch.randn(2, 16, 6, 5)
    yield nn.Conv2d(16, 24, 3), torch.randn(2, 16, 6, 5).to(memory_format=torch.channels_last)
    yield nn.Conv2d(16, 24, 1), torch.randn(16, 6, 5)  # without a batch
    yield nn.Conv3d(4, 8, 2), torch.randn(1, 4, 3, 4, 5)
    yield Conv1D(24, 16), torch.randn(2, 5, 16)
    yield nn.Linear(16, 24), torch.randn(2, 5, 16)


CASES = [(type(module).__name__, module, x) for module, x in modules()]
ROWS = {
    "targets": ["Linear", "Conv1d", "Conv2d", "Conv3d", "Conv1D"],
    "weights": {"num_bits": 4, "strategy": "channel"},
}


@pytest.mark.parametrize(("name", "module", "x"), CASES)
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "calibrated"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_modules_of_every_kind_have_the_bits_of_torchs_own_graph(name, module, x, learned, autocast):
    module = copy.deepcopy(module)
    plain = copy.deepcopy(module)
    x = x.clone().requires_grad_()
    train_quantized(calibrated(nn.Sequential(module), ROWS, x, engines="unchecked"))
    module.weight.data *= 1.3  # some values are clipped
    sources = [x, *module.parameters()]
    if learned:
        factor = nn.Parameter(torch.zeros_like(module.weight_scale))
        set_learned_scale(module, "weight", module.weight_scale, factor)
        sources.append(factor)

    def in_torchs_graph(x):
        return functional_call(plain, {**dict(module.named_parameters()), "weight": quantized_weight(module)}, (x,))

    runs = []
    for run in (module, in_torchs_graph):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = run(x)
        upstream = torch.sin(torch.arange(output.numel()).view(output.shape)).to(output.dtype)
        runs.append([output, *torch.autograd.grad(output, sources, upstream)])
    assert (runs[0][2] == 0).any()
    for actual, expected in zip(*runs, strict=True):
        assert expected.dtype == actual.dtype
        assert torch.equal(expected, actual)


@pytest.mark.parametrize(("name", "module", "x"), CASES)
def test_no_copy_of_a_weight_of_any_kind_waits_for_the_backward(name, module, x):
    module = copy.deepcopy(module)
    train_quantized(calibrated(nn.Sequential(module), ROWS, x, engines="unchecked"))
    inputs = x.numel() * x.itemsize
    assert bytes_kept(lambda: module(x), module) <= inputs + 4 * len(module.weight_scale)


@pytest.mark.parametrize(("name", "module", "x"), CASES)
def test_second_gradients_of_modules_of_every_kind_are_those_of_torchs_own_graph(name, module, x):
    module = copy.deepcopy(module)
    plain = copy.deepcopy(module)
    x = x.clone().requires_grad_()
    train_quantized(calibrated(nn.Sequential(module), ROWS, x, engines="unchecked"))

    def in_torchs_graph(x):
        return functional_call(plain, {**dict(module.named_parameters()), "weight": quantized_weight(module)}, (x,))

    penalties = []
    for run in (module, in_torchs_graph):
        (gradient,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        penalties.append(torch.autograd.grad(gradient.square().sum(), [x, module.weight]))
    for actual, expected in zip(*penalties, strict=True):
        assert actual.any()
        torch.testing.assert_close(actual, expected)
