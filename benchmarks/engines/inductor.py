"""Programs of export_program under torch.compile, beside the compiled model in float.

python benchmarks/engines/inductor.py

One thread; times are medians of calls, in turns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters

from lightning_obs import CalibrationSession, export_program, quantized

CALLS = 50


def linears() -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 256)
    )  # fmt: skip


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (3, 64, 64):
        layers += [nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "three Linears, 32 rows": (linears, (32, 256)),
    "three convolutions, 32 x 32": (convolutions, (1, 3, 32, 32)),
}


def milliseconds(calls: dict[str, Callable[[], torch.Tensor]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(CALLS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: median(values) for name, values in times.items()}


@torch.no_grad()
def row(name: str, build: Callable[[], nn.Module], shape: tuple[int, ...]) -> str:
    model = build().eval()
    with CalibrationSession(model, "INT8_ONNX"):
        model(torch.randn(4, *shape).flatten(0, 1))
    x = torch.randn(shape)
    with quantized(model):
        expected = model(x)
    with tempfile.TemporaryDirectory() as folder:
        file = export_program(model, Path(folder) / "model.pt2", x, backend="inductor")
        program = torch.compile(torch.export.load(file).module())
    counters.clear()
    difference = float((program(x) - expected).abs().max() / (expected.max() - expected.min()) * 255)
    counted = counters["inductor"]
    integers = counted["qlinear_weight_prepack_matcher_count"] + counted["qconv_weight_prepack_matcher_count"]
    compiled = torch.compile(model)
    compiled(x)
    times = milliseconds({"int8": partial(program, x), "float": partial(compiled, x)})
    return (
        f"| {name} | {integers} of 3 | {difference:.2f} | {times['float']:.3f} ms | {times['int8']:.3f} ms | "
        f"{times['float'] / times['int8']:.2f} |"
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch._inductor.config.freezing = True
    print("| model | products of integers | largest difference [levels] | float, compiled | int8, compiled | speed |")
    print("|---|---|---|---|---|---|")
    for name, (build, shape) in MODELS.items():
        print(row(name, build, shape), flush=True)
