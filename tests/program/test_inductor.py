"""backend="inductor": torch.compile multiplies the integers of a loaded program on x86."""

import platform

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config

from lightning_obs import CalibrationSession, export_program, quantized

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available(),
        reason="Inductor's integer products are oneDNN's, on x86",
    ),
]


def calibrated():
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 8))
    net.eval()
    with CalibrationSession(net, "INT8_ONNX"), torch.no_grad():
        net(torch.randn(16, 3, 8, 8))
    return net


def program(folder, backend):
    model, x = calibrated(), torch.randn(4, 3, 8, 8)
    loaded = torch.export.load(export_program(model, folder / "m.pt2", x, backend=backend))
    with torch.no_grad(), quantized(model):
        return loaded, x, model(x), float(model[4].output_scale)


def test_unsigned_activations_are_the_same_numbers(tmp_path):
    loaded, x, expected, _ = program(tmp_path, "inductor")
    torch.testing.assert_close(loaded.module()(x), expected, atol=1e-6, rtol=1e-5)
    nodes = [node for node in loaded.graph.nodes if "quantize_per_tensor" in str(node.target)]
    assert {node.args[-1] for node in nodes} == {torch.uint8}


@torch.no_grad()
def test_inductor_multiplies_the_integers_of_every_product(tmp_path):
    loaded, x, expected, step = program(tmp_path, "inductor")
    counters.clear()
    compiled = torch.compile(loaded.module())
    with config.patch(freezing=True):  # after monkeypatch the option would be gone, for all later tests
        outputs = compiled(x)
    assert counters["inductor"]["qconv_weight_prepack_matcher_count"] == 1
    assert counters["inductor"]["qlinear_weight_prepack_matcher_count"] == 1
    assert (outputs - expected).abs().max() < 1.01 * step  # beside a rounding boundary, to the next level
    assert torch.equal(outputs.argmax(1), expected.argmax(1))
    torch.compiler.reset()
