"""Biases where engines compute from integers to integers: they add an int32, and so does quantized()."""

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_obs import (
    CalibrationSession,
    export_checkpoint,
    export_onnx,
    export_program,
    load_checkpoint,
    quantized,
)
from lightning_obs.forward.quantized_forward import quantize_training_forward
from lightning_obs.forward.quantized_module import Switch, bias_in_use

INPUTS = {"linear": (64, 16), "convolution": (8, 3, 6, 6)}


def net(kind="linear"):
    torch.manual_seed(0)
    if kind == "linear":
        layers = [nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)]
    else:
        layers = [nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 4, 3)]
    return nn.Sequential(*layers).eval()


def calibrated(kind="linear", scheme="INT8_ONNX"):
    model = net(kind)
    with CalibrationSession(model, scheme), torch.no_grad():
        model(torch.randn(INPUTS[kind]))
    return model


def steps_of(bias, module):
    """The multiples of the sums' step that a bias is."""
    return (bias / (module.weight_scale.flatten() * module.input_scale)).double()


@pytest.mark.parametrize("kind", list(INPUTS))
def test_an_output_is_what_integer_arithmetic_gives(kind):
    model = calibrated(kind)
    x = torch.randn(INPUTS[kind])
    for module in (model[0], model[2]):
        with torch.no_grad(), quantized(model):
            output = module(x)
        input_codes = torch.round(x / module.input_scale) + module.input_zero_point
        sums_of = (input_codes.clamp(-128, 127) - module.input_zero_point).double()
        scale = module.weight_scale.double()
        codes = torch.round(module.weight.double() / scale.view(-1, *[1] * (module.weight.ndim - 1))).clamp(-128, 127)
        bias = torch.round(steps_of(module.bias, module))  # an int32
        if kind == "linear":
            sums = sums_of @ codes.T + bias
            factor = scale.flatten()
        else:
            sums = torch.nn.functional.conv2d(sums_of, codes, bias)
            factor = scale.view(1, -1, 1, 1)
        values = sums * factor * module.input_scale.double() / module.output_scale.double()
        expected = (torch.round(values) + module.output_zero_point).clamp(-128, 127) - module.output_zero_point
        torch.testing.assert_close(output.double(), expected * module.output_scale.double(), atol=1e-6, rtol=1e-6)
        x = torch.nn.functional.gelu(output) if kind == "linear" else torch.nn.functional.silu(output)


def test_the_users_bias_stays_as_it_is():
    model = calibrated()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with quantized(model):
        rounded = bias_in_use(model[0])
        assert list(model.state_dict()) == list(before)
    assert (steps_of(rounded, model[0]) - steps_of(rounded, model[0]).round()).abs().max() < 1e-3
    assert (steps_of(model[0].bias, model[0]) - steps_of(model[0].bias, model[0]).round()).abs().max() > 0.1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("scheme", ["INT8_STATIC", "INT8_STATIC_ASYM", "FP8"])
def test_where_a_module_gives_floats_its_bias_is_added_in_float(scheme):
    model = calibrated(scheme=scheme)
    with quantized(model):
        assert bias_in_use(model[0]) is model[0].bias


def test_a_bias_in_front_of_a_batch_norm_is_not_rounded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    with CalibrationSession(model, "INT8_ONNX"), torch.no_grad():
        model(torch.randn(INPUTS["convolution"]))
    with quantized(model):  # engines fold the norm, and round what the two biases become
        assert bias_in_use(model[0]) is model[0].bias


def test_the_checkpoint_holds_the_rounded_bias(tmp_path):
    model = calibrated()
    x = torch.randn(INPUTS["linear"])
    with torch.no_grad(), quantized(model):
        expected = model(x)
        rounded = bias_in_use(model[0])
    export_checkpoint(model, tmp_path / "checkpoint")
    stored = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert torch.equal(stored["0.bias"], rounded)
    loaded = load_checkpoint(net(), tmp_path / "checkpoint")
    with torch.no_grad():
        assert torch.equal(loaded(x), expected)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", list(INPUTS))
def test_files_hold_the_rounded_bias_as_a_constant(kind, tmp_path):
    model = calibrated(kind)
    x = torch.randn(INPUTS[kind])
    with torch.no_grad(), quantized(model):
        expected = model(x)
    program = torch.export.load(export_program(model, tmp_path / "model.pt2", x))
    torch.testing.assert_close(program.module()(x), expected, atol=0, rtol=0)
    operations = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any("round" in operation or "div" in operation for operation in operations)
    assert not hasattr(model[0], "rounded_bias")
    session = onnxruntime.InferenceSession(export_onnx(model, tmp_path / "model.onnx", x))
    [output] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert np.array_equal(output, expected.numpy())  # onnxruntime rounds biases to the same integers


def test_a_bias_in_training_gets_its_gradient():
    model = calibrated()
    undo = [quantize_training_forward(module, Switch()) for module in (model[0], model[2])]
    model(torch.randn(INPUTS["linear"])).square().sum().backward()
    for function in undo:
        function()
    assert model[2].bias.grad.abs().min() > 0
