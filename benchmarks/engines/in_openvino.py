"""INT8_ONNX files in OpenVINO: speed beside the float file, which precisions it computes in, and its answers.

make test installs OpenVINO in .venv/openvino, where only the process that runs the files sees it.

python benchmarks/engines/in_openvino.py [--models resnet18 vit]

The models are those of int8_onnx.py. Both files of a model run in one process, in turn, on one thread; a time is the
median of the process's CPU time. ``difference`` is the largest of an output from onnxruntime's, beside the largest
output.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from int8_onnx import CASES, calibrated, open_file, run

from lightning_obs import export_onnx

DEFAULT_MODELS = ["efficientnet_lite0", "resnet18, 224x224", "vit_tiny, batch 1", "convnext_atto", "encoder"]

#: runs both files of a folder; prints the medians and the precisions of the products
SCRIPT = """
import collections, json, statistics, sys, time
import numpy, openvino

folder, rounds = sys.argv[1], int(sys.argv[2])
options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}
core = openvino.Core()
models = [core.compile_model(core.read_model(f"{folder}/{name}.onnx"), "CPU", options) for name in ("float", "int8")]
inputs = numpy.load(f"{folder}/inputs.npy")
times = [[], []]
for _ in range(rounds):
    for model, seconds in zip(models, times):
        started = time.process_time()
        outputs = model(inputs)[0]
        seconds.append(time.process_time() - started)
numpy.save(f"{folder}/outputs.npy", outputs)
products = collections.Counter()
for operation in models[1].get_runtime_model().get_ordered_ops():
    info = operation.get_rt_info()
    if info["layerType"].astype(str) in ("Convolution", "FullyConnected", "MatMul"):
        products[info["runtimePrecision"].astype(str)] += 1
print(json.dumps([statistics.median(times[0]) / statistics.median(times[1]), products]))
"""


def measure(name: str, folder: Path, rounds: int) -> None:
    """Print the row of one model."""
    case = CASES[name]()
    model = calibrated(case, "INT8_ONNX")
    file = export_onnx(model, folder / "int8.onnx", case.example)
    torch.onnx.export(case.model, (case.example,), folder / "float.onnx", dynamo=True, verbose=False)
    np.save(folder / "inputs.npy", case.example.numpy())
    environment = {**os.environ, "PYTHONPATH": str(Path(sys.prefix, "openvino"))}
    command = [sys.executable, "-c", SCRIPT, str(folder), str(rounds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    speed, products = json.loads(done.stdout.splitlines()[-1])
    expected = run(open_file(file), case.example, len(case.example))
    difference = np.abs(np.load(folder / "outputs.npy") - expected.numpy()).max()
    counts = ", ".join(f"{count} in {precision}" for precision, count in products.items())
    print(f"| {name} | {speed:.2f} | {counts} | {difference:.3f} of {expected.abs().max():.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=DEFAULT_MODELS, help="parts of names")
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print("| model | speed | products | difference |\n|---|---|---|---|")
    for name in CASES:
        if any(part in name for part in options.models):
            torch.manual_seed(0)
            with tempfile.TemporaryDirectory() as folder:
                measure(name, Path(folder), options.rounds)


if __name__ == "__main__":
    main()
