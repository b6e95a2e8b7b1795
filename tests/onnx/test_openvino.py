"""OpenVINO reads the files of export_onnx as they are, and computes with their integers.

OpenVINO is in a folder of its own, ``<environment>/openvino``, which only the process of this file's tests sees.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lightning_obs import CalibrationSession, export_onnx, quantized

OPENVINO = Path(sys.prefix) / "openvino"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not OPENVINO.is_dir(), reason="make test installs OpenVINO in .venv/openvino"),
]

#: runs a file on inputs; writes the outputs, and prints the precision of each operation of the compiled model
SCRIPT = """
import json, sys
import numpy, openvino

model, inputs, outputs = sys.argv[1:]
core = openvino.Core()
compiled = core.compile_model(core.read_model(model), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
numpy.save(outputs, compiled(numpy.load(inputs))[0])
precisions = []
for operation in compiled.get_runtime_model().get_ordered_ops():
    info = operation.get_rt_info()
    precisions.append([info["layerType"].astype(str), info["runtimePrecision"].astype(str)])
print(json.dumps(precisions))
"""

#: operations of a compiled model that multiply integers
INTEGERS = {(layer, integer) for layer in ("Convolution", "FullyConnected") for integer in ("u8", "i8")}


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
    ).eval()  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "products"),
    [
        ("INT8_STATIC", INTEGERS),
        pytest.param(
            "INT8_STATIC_ASYM", INTEGERS - {("Convolution", "i8"), ("FullyConnected", "i8")}, marks=pytest.mark.slow
        ),
        ("INT8_ONNX", INTEGERS - {("Convolution", "i8"), ("FullyConnected", "i8")}),
    ],
)
def test_openvino_computes_with_integers_what_quantized_computes(scheme, products, tmp_path):
    model, images = net(), torch.randn(32, 3, 16, 16)
    with CalibrationSession(model, scheme, targets=["Conv2d", "Linear"]), torch.no_grad():
        model(images)
    with quantized(model), torch.no_grad():
        expected = model(images).numpy()
    with torch.no_grad():
        in_float = model(images).numpy()
    file = export_onnx(model, tmp_path / "model.onnx", images)
    np.save(tmp_path / "inputs.npy", images.numpy())
    command = [sys.executable, "-c", SCRIPT, str(file), str(tmp_path / "inputs.npy"), str(tmp_path / "outputs.npy")]
    environment = {**os.environ, "PYTHONPATH": str(OPENVINO)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    outputs = np.load(tmp_path / "outputs.npy")
    # It rounds biases to integers of its own, so single values go to the next level.
    assert np.abs(outputs - expected).max() < 0.5 * np.abs(in_float - expected).max()
    assert (outputs.argmax(1) == expected.argmax(1)).all()
    precisions = [tuple(pair) for pair in json.loads(done.stdout.splitlines()[-1])]
    multiplied = [pair for pair in precisions if pair[0] in ("Convolution", "FullyConnected")]
    assert len(multiplied) == 4
    assert set(multiplied) <= products
