"""The forward that runs quantized, against compressed-tensors' own; nothing of it is left afterwards."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from compressed_tensors.quantization import QuantizationStatus, set_forward_quantized
from torch import nn

from lightning_obs import CalibrationError, CalibrationSession, quantized
from lightning_obs.forward.eager import eager_blocks
from lightning_obs.forward.quantized_forward import quantize_training_forward, weights_kept
from lightning_obs.forward.quantized_module import Switch, quantized_weight
from tests.forward.quantized_modules import (
    INT8,
    Everything,
    as_compressed_tensors_runs,
    calibrated,
    tokens,
    train_quantized,
    two_layers,
)
from tests.numerics.fake_quantize_cases import same_bits

OUTPUTS = {"targets": ["Linear"], "weights": INT8, "output_activations": INT8}
SCHEMES = ["W8A8", "INT8_STATIC", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16", "W4A16_ASYM", "W4A8", "NVFP4", "MXFP4"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", [*SCHEMES, OUTPUTS], ids=[*SCHEMES, "outputs"])
def test_the_numbers_are_those_of_compressed_tensors_own_forward(scheme, dtype):
    x = torch.randn(2, 3, 128, dtype=dtype)
    model = calibrated(two_layers().to(dtype), scheme, x, engines="unchecked")
    with torch.no_grad():
        expected = as_compressed_tensors_runs(model)(x)
        with quantized(model):
            assert same_bits(model(x), expected)
    train_quantized(model)
    assert same_bits(model(x), expected)


@pytest.mark.parametrize("scheme", ["W8A8", "INT8_STATIC", "NVFP4", "W4A16"])
def test_under_autocast_the_numbers_are_those_of_compressed_tensors_own_forward(scheme):
    x = torch.randn(2, 3, 128)
    model = calibrated(two_layers(), scheme, x, engines="unchecked")
    train_quantized(model)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            expected = as_compressed_tensors_runs(model)(x)
        output = model(x)
    assert same_bits(output, expected)
    output.float().square().mean().backward()
    assert all(p.grad.dtype == p.dtype and (p.grad != 0).any() for p in model.parameters())


def test_an_embedding_gives_the_numbers_of_compressed_tensors_own_forward():
    model = nn.Sequential(nn.Embedding(10, 16))
    calibrated(model, {"targets": ["Embedding"], "weights": {"num_bits": 4, "strategy": "channel"}}, tokens())
    with torch.no_grad(), quantized(model):
        assert same_bits(model(tokens()), as_compressed_tensors_runs(model)(tokens()))


def test_every_kind_of_module_gives_the_numbers_of_the_quantized_model(everything):
    with quantized(everything), torch.no_grad():
        expected = everything(tokens())
    train_quantized(everything)
    assert torch.equal(everything(tokens()), expected)


def test_quantized_inside_it_does_not_quantize_twice(everything):
    train_quantized(everything)
    expected = everything(tokens())
    with quantized(everything), torch.no_grad():
        assert torch.equal(everything(tokens()), expected)
    assert torch.equal(everything(tokens()), expected)


@pytest.mark.parametrize("scheme", ["INT8_STATIC", {"input_activations": {"num_bits": 4, "dynamic": True}}])
def test_a_module_that_compressed_tensors_runs_quantized_is_not_quantized_twice(scheme, mlp):
    x = torch.randn(5, 16)
    calibrated(mlp, scheme, x, **({} if isinstance(scheme, str) else {"targets": "Linear"}))
    with quantized(mlp), torch.no_grad():
        expected = mlp(x)
    set_forward_quantized(mlp.fc1)
    theirs = mlp.fc1.forward
    with quantized(mlp), torch.no_grad():
        assert torch.equal(mlp(x), expected)
    assert mlp.fc1.forward == theirs


def test_a_weight_on_the_grid_already_is_not_quantized_again(mlp):
    calibrated(mlp, {"targets": ["Linear"], "weights": INT8}, None)
    assert quantized_weight(mlp.fc1) is not mlp.fc1.weight
    mlp.fc1.quantization_status = QuantizationStatus.DECOMPRESSED
    assert quantized_weight(mlp.fc1) is mlp.fc1.weight


def test_what_compressed_tensors_has_switched_off_stays_switched_off(mlp):
    x = torch.randn(5, 16)
    plain = mlp(x)
    calibrated(mlp, "INT8_STATIC", x)
    mlp.fc1.quantization_enabled = mlp.fc2.quantization_enabled = False
    with quantized(mlp):
        assert torch.equal(mlp(x), plain)


# ---------------------------------------------------------------------- what is switched on, what is known


def test_switched_off_it_is_the_float_model(everything):
    switch = Switch(weights=False, activations=False)
    expected = everything(tokens())
    train_quantized(everything, switch)
    assert torch.equal(everything(tokens()), expected)


@pytest.mark.parametrize("part", ["weights", "activations"])
def test_weights_or_activations_alone_can_be_quantized(part, mlp):
    x = torch.randn(5, 16)
    calibrated(mlp, "INT8_STATIC", x)
    train_quantized(mlp, Switch(weights=part == "weights", activations=part == "activations"))
    with torch.no_grad():
        step = mlp.fc1.weight_scale if part == "weights" else mlp.fc1.input_scale
        value = mlp.fc1.weight if part == "weights" else x
        rounded = (value / step).round().clamp(-128, 127) * step
        expected = nn.functional.linear(
            x if part == "weights" else rounded, rounded if part == "weights" else mlp.fc1.weight, mlp.fc1.bias
        )
    assert torch.equal(mlp.fc1(x), expected)


def test_a_module_without_ranges_passes_unquantized(mlp):
    x = torch.randn(5, 16)
    expected = mlp(x)
    undo = quantize_training_forward(mlp.fc1, Switch())
    assert torch.equal(mlp(x), expected)
    undo()


# ---------------------------------------------------------------------- nothing is left, nothing is registered


def test_state_dict_parameters_and_buffers_are_what_they_were(everything):
    keys = list(everything.state_dict())
    names = [n for n, _ in (*everything.named_parameters(), *everything.named_buffers())]
    train_quantized(everything)
    everything(tokens()).sum().backward()
    assert list(everything.state_dict()) == keys
    assert [n for n, _ in (*everything.named_parameters(), *everything.named_buffers())] == names
    Everything().load_state_dict(everything.state_dict(), strict=True)


def test_undo_restores_every_forward(everything):
    expected = everything(tokens())
    attributes = {name: set(vars(m)) for name, m in everything.named_modules()}
    undo = train_quantized(everything)
    assert not torch.equal(everything(tokens()), expected)
    undo()
    assert torch.equal(everything(tokens()), expected)
    assert {name: set(vars(m)) for name, m in everything.named_modules()} == attributes
    assert not any(m._forward_hooks for m in everything.modules())


def test_a_forward_of_the_users_is_run_and_is_back_afterwards(mlp):
    x = torch.randn(5, 16)
    calibrated(mlp, "INT8_STATIC", x)
    plain = mlp.fc1.forward

    def own(value):
        return plain(value) + 1

    with quantized(mlp), torch.no_grad():
        expected = mlp.fc1(x) + 1
    mlp.fc1.forward = own
    undo = quantize_training_forward(mlp.fc1, Switch())
    assert torch.equal(mlp.fc1(x), expected)
    undo()
    assert mlp.fc1.forward is own


def test_a_copy_runs_with_its_own_weights(everything):
    train_quantized(everything)
    twin = copy.deepcopy(everything)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert not twin(tokens()).any()
    assert everything(tokens()).any()


def test_a_second_thread_is_refused_and_the_first_ends_as_ever(mlp):
    x = torch.randn(5, 16)
    calibrated(mlp, "INT8_STATIC", x)
    plain = mlp(x)

    def enter(model):
        with quantized(model), torch.no_grad():
            return model(x)

    with ThreadPoolExecutor(1) as other, quantized(mlp), torch.no_grad():
        expected = mlp(x)
        for model in (mlp, nn.Sequential(mlp), mlp.fc1):
            with pytest.raises(CalibrationError, match=r"another thread.*enter quantized\(\) once"):
                other.submit(enter, model).result()
        assert torch.equal(enter(mlp), expected)
        assert torch.equal(mlp(x), expected)
    assert torch.equal(mlp(x), plain)
    assert "forward" not in vars(mlp.fc1)
    with ThreadPoolExecutor(1) as other:
        assert torch.equal(other.submit(enter, mlp).result(), expected)


def test_many_threads_leave_a_model_as_it_was(mlp):
    x = torch.randn(5, 16)
    calibrated(mlp, "INT8_STATIC", x)
    before = [set(vars(module)) for module in mlp.modules()]

    def enter(_):
        try:
            with quantized(mlp), torch.no_grad():
                mlp(x)
        except CalibrationError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert any(threads.map(enter, range(200)))
    assert [set(vars(module)) for module in mlp.modules()] == before
    assert not eager_blocks.open


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_blocks_end_in_any_order(mlp, order):
    x = torch.randn(5, 16)
    calibrated(mlp, "INT8_STATIC", x)
    plain, blocks = mlp(x), [quantized(mlp), quantized(mlp)]
    for block in blocks:
        block.__enter__()
    for at in order:
        assert not torch.equal(mlp(x), plain)
        blocks[at].__exit__(None, None, None)
    assert torch.equal(mlp(x), plain)
    assert "forward" not in vars(mlp.fc1)
    assert not mlp.fc1._buffers


def test_an_exception_in_the_forward_gives_the_parameter_back(everything):
    train_quantized(everything)
    with pytest.raises(RuntimeError):
        everything.conv(torch.randn(2, 3, 4))
    assert "weight" not in vars(everything.conv)
    assert everything.conv.weight is everything.conv._parameters["weight"]


def test_the_forward_holds_no_reference_to_a_deleted_model(mlp):
    calibrated(mlp, "INT8_STATIC", torch.randn(5, 16))
    model = copy.deepcopy(mlp)
    train_quantized(model)()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W4A16"])
def test_kept_weights_are_the_quantized_ones_and_gone_afterwards(tiny_llama, batches, scheme):
    model, ids = tiny_llama(), batches[0]["input_ids"]
    weights = {"weights": {"num_bits": 4, "group_size": 32}} if scheme == "W4A16" else scheme
    with CalibrationSession(model, weights, ignore=["lm_head"]):
        pass
    with torch.no_grad(), quantized(model):
        expected = model(input_ids=ids).logits
        with weights_kept(model):
            assert torch.equal(model(input_ids=ids).logits, expected)
            assert torch.equal(model(input_ids=ids).logits, expected)
            model.model.layers[0].mlp.up_proj.weight.zero_()
            assert torch.equal(model(input_ids=ids).logits, expected)
        assert not torch.equal(model(input_ids=ids).logits, expected)
