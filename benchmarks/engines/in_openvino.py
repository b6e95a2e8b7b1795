"""int8 ONNX files in OpenVINO: speed beside the float file, which precisions it computes in, and its answers.

make test installs OpenVINO in .venv/openvino, where only the process that runs the files sees it.

python benchmarks/engines/in_openvino.py [--models resnet18 vit] [--schemes INT8_ONNX INT8_STATIC_ASYM]

The models are those of int8_onnx.py. All files of a model run in one process, in turn, on one thread; a time is the
median of the process's CPU time. ``difference`` is the largest of an output from onnxruntime's, beside the largest
output; ``error``, of trained models, is the mean squared difference from the float file's outputs, divided by that of
the first scheme.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from int8_onnx import CASES, calibrated, open_file, run

from lightning_obs import export_onnx

DEFAULT_MODELS = ["efficientnet_lite0", "resnet18, 224x224", "vit_tiny, batch 1", "convnext_atto", "encoder"]

#: runs all files of a folder, the float file first; prints, for each of the others, its speed and the precisions of its
#: products
SCRIPT = """
import collections, json, statistics, sys, time
import numpy, openvino

folder, rounds, *names = sys.argv[1:]
options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}
core = openvino.Core()
models = {name: core.compile_model(core.read_model(f"{folder}/{name}.onnx"), "CPU", options) for name in names}
inputs = numpy.load(f"{folder}/inputs.npy")
times = {name: [] for name in names}
outputs = {}
for _ in range(int(rounds)):
    for name, model in models.items():
        started = time.process_time()
        outputs[name] = model(inputs)[0]
        times[name].append(time.process_time() - started)
medians = {name: statistics.median(values) for name, values in times.items()}
for name, model in models.items():
    numpy.save(f"{folder}/{name}.npy", outputs[name])
    products = collections.Counter()
    for operation in model.get_runtime_model().get_ordered_ops():
        info = operation.get_rt_info()
        if info["layerType"].astype(str) in ("Convolution", "FullyConnected", "MatMul"):
            products[info["runtimePrecision"].astype(str)] += 1
    print(json.dumps([medians["float"] / medians[name], products]))
"""


def measure(name: str, folder: Path, schemes: Sequence[str], rounds: int) -> None:
    """Print the rows of one model."""
    case = CASES[name]()
    # Before the float export, which leaves fake tensors on models that keep tensors in attributes.
    models = {scheme: calibrated(case, scheme) for scheme in schemes}
    torch.onnx.export(case.model, (case.example,), folder / "float.onnx", dynamo=True, verbose=False)
    for scheme, model in models.items():
        export_onnx(model, folder / f"{scheme}.onnx", case.example)
    np.save(folder / "inputs.npy", case.example.numpy())
    environment = {**os.environ, "PYTHONPATH": str(Path(sys.prefix, "openvino"))}
    command = [sys.executable, "-c", SCRIPT, str(folder), str(rounds), "float", *schemes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    results = [json.loads(line) for line in done.stdout.splitlines()[-len(schemes) :]]
    in_float = np.load(folder / "float.npy")
    outputs = {scheme: np.load(folder / f"{scheme}.npy") for scheme in schemes}
    errors = {scheme: np.square(output - in_float).mean() for scheme, output in outputs.items()}
    for scheme, (speed, products) in zip(schemes, results, strict=True):
        expected = run(open_file(folder / f"{scheme}.onnx"), case.example, len(case.example))
        difference = np.abs(outputs[scheme] - expected.numpy()).max()
        counts = ", ".join(f"{count} in {precision}" for precision, count in products.items())
        cells = [name, f"`{scheme}`", f"{speed:.2f}", counts, f"{difference:.3f} of {expected.abs().max():.2f}"]
        cells.append(f"{errors[scheme] / errors[schemes[0]]:.2f}" if case.is_trained else "")
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=DEFAULT_MODELS, help="parts of names")
    parser.add_argument("--schemes", nargs="+", default=["INT8_ONNX"])
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print("| model | scheme | speed | products | difference | error |\n|---|---|---|---|---|---|")
    for name in CASES:
        if any(part in name for part in options.models):
            torch.manual_seed(0)
            with tempfile.TemporaryDirectory() as folder:
                measure(name, Path(folder), options.schemes, options.rounds)


if __name__ == "__main__":
    main()
