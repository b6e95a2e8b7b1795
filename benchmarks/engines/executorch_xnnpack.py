"""Programs of export_program in ExecuTorch with XNNPACK: a residual net, a vision transformer, two language models.

make executorch, or: .venv-executorch/bin/python benchmarks/engines/executorch_xnnpack.py

The nets are small and trained here, on scikit-learn's digits and on the bytes of Python's documentation;
answers are compared on data that were not calibrated. Times are medians of calls on one thread, in turns.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from pydoc_data import topics
from statistics import median
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from lightning_obs import CalibrationSession, export_program, quantized
from lightning_obs.program.xnnpack import write_for_xnnpack

SCHEME = "INT8_ONNX"  # inputs and outputs with one range each, behind batch norms and ReLUs
#: left in float: logits of 256 classes in 256 steps are often equal, and then the first one wins
IGNORE = {"language model": ["head"], "language model with biases": ["head"]}
TOKENS = 64
CALLS = 200


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x + self.body(x))


def residual_net() -> nn.Module:
    stem = [nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    blocks = [Block(32) for _ in range(3)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class Attention(nn.Module):
    """Attention of four heads."""

    def __init__(self, width: int, is_causal: bool, has_biases: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        projections = [nn.Linear(width, width, has_biases) for _ in range(4)]
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = projections

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (proj(x).unflatten(-1, (4, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out_proj(heads.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and two Linears, each behind a norm."""

    def __init__(self, width: int, is_causal: bool, has_biases: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, is_causal, has_biases)
        inner, outer = nn.Linear(width, 4 * width, has_biases), nn.Linear(4 * width, width, has_biases)
        self.mlp = nn.Sequential(inner, nn.GELU(), outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class VisionTransformer(nn.Module):
    """Patches of 4 x 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 64, 4, stride=4)
        self.positions = nn.Parameter(torch.randn(1, 16, 64) * 0.02)
        self.layers = nn.Sequential(*[Layer(64, is_causal=False, has_biases=True) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.layers(tokens)).mean(1))


class LanguageModel(nn.Module):
    """The next byte, from the bytes before it.

    Args:
        has_biases: whether its Linears have biases, as was usual once.
    """

    def __init__(self, has_biases: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.positions = nn.Parameter(torch.randn(1, TOKENS, 64) * 0.02)
        self.layers = nn.Sequential(*[Layer(64, is_causal=True, has_biases=has_biases) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 256, has_biases)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.embedding(tokens) + self.positions)))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    pictures = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return F.interpolate(pictures, scale_factor=2, mode="bilinear"), torch.tensor(digits.target)


def text() -> tuple[torch.Tensor, torch.Tensor]:
    written = "\n".join(topics.topics.values()).encode()
    tokens = torch.frombuffer(bytearray(written), dtype=torch.uint8).long()
    rows = tokens[: len(tokens) // (TOKENS + 1) * (TOKENS + 1)].view(-1, TOKENS + 1)
    rows = rows[torch.randperm(len(rows))]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, torch.Tensor]], int]] = {
    "residual net": (residual_net, images, 150),
    "vision transformer": (VisionTransformer, images, 300),
    "language model": (LanguageModel, text, 1000),
    "language model with biases": (partial(LanguageModel, has_biases=True), text, 1000),
}


def train(model: nn.Module, inputs: torch.Tensor, answers: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        rows = torch.randint(0, len(inputs), (32,))
        optimizer.zero_grad()
        logits = model(inputs[rows])
        F.cross_entropy(logits.flatten(0, -2), answers[rows].flatten()).backward()
        optimizer.step()


class Lowered:
    """A program that XNNPACK has taken as far as it can, loaded by ExecuTorch."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        targets = [str(node.target) for node in lowered.exported_program().graph.nodes if node.op == "call_function"]
        self.delegates = sum("call_delegate" in target for target in targets)
        self.others = len([target for target in targets if "delegate" not in target and "getitem" not in target])
        self.file = lowered.to_executorch().buffer
        self._program = Runtime.get().load_program(self.file)
        self._method = self._program.load_method("forward")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._method.execute([x])[0].clone()


def in_float(model: nn.Module, x: torch.Tensor, *, for_xnnpack: bool) -> torch.export.ExportedProgram:
    program = torch.export.export(model, (x,))
    if not for_xnnpack:
        return program
    graph_module = program.module()
    write_for_xnnpack(graph_module)
    graph_module.recompile()
    return torch.export.export(graph_module, (x,))


def milliseconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(CALLS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: median(values) for name, values in times.items()}


@torch.no_grad()
def measure(name: str, model: nn.Module, inputs: torch.Tensor, answers: torch.Tensor, folder: Path) -> dict[str, Any]:
    held_out, expected_answers = inputs[-200:], answers[-200:]
    with CalibrationSession(model, SCHEME, ignore=IGNORE.get(name, [])):
        model(inputs[:256])
    with quantized(model):
        expected = torch.cat([model(x) for x in held_out.split(1)])
    x = held_out[:1]
    file = export_program(model, folder / "model.pt2", x, backend="xnnpack")
    program = torch.export.load(file)
    run = program.module()  # before ExecuTorch changes the program
    ours = Lowered(program)
    plain = Lowered(in_float(model, x, for_xnnpack=False))
    written = Lowered(in_float(model, x, for_xnnpack=True))
    by_program = torch.cat([run(x) for x in held_out.split(1)])
    by_executorch = torch.cat([ours(x) for x in held_out.split(1)])
    logits = torch.cat([model(x) for x in held_out.split(1)])
    times = milliseconds({"int8": partial(ours, x), "float": partial(plain, x), "written": partial(written, x)})

    def other(outputs: torch.Tensor) -> float:
        return float((outputs.argmax(-1) != expected.argmax(-1)).float().mean())

    def accuracy(outputs: torch.Tensor) -> float:
        return float((outputs.argmax(-1) == expected_answers).float().mean())

    return {
        "model": name,
        "delegates": ours.delegates,
        "operations outside": ours.others,
        "delegates of float": plain.delegates,
        "delegates of float, written": written.delegates,
        "other answers of the program": other(by_program),
        "other answers of ExecuTorch": other(by_executorch),
        "accuracy": [accuracy(outputs) for outputs in (logits, expected, by_executorch)],
        "bytes": len(ours.file),
        "bytes of float": len(plain.file),
        "bytes of the program": file.stat().st_size,
        "ms": times["int8"],
        "ms of float": times["float"],
        "ms of float, written": times["written"],
    }


def results(names: Sequence[str], steps: float) -> Iterator[dict[str, Any]]:
    for name in names:
        build, data, count = MODELS[name]
        torch.manual_seed(0)
        inputs, answers = data()
        model = build()
        train(model, inputs[:-200], answers[:-200], max(1, round(steps * count)))
        with tempfile.TemporaryDirectory() as folder:
            yield measure(name, model.eval(), inputs, answers, Path(folder))


def row(result: dict[str, Any]) -> str:
    accuracies = ", ".join(f"{value:.1%}" for value in result["accuracy"])
    return (
        f"| {result['model']} | {result['delegates']} ({result['delegates of float']}) | "
        f"{result['other answers of ExecuTorch']:.2%} | {accuracies} | "
        f"{result['bytes'] / 1000:.0f} kB ({result['bytes of float'] / 1000:.0f} kB) | {result['ms']:.3f} ms | "
        f"{result['ms of float'] / result['ms']:.2f} ({result['ms of float, written'] / result['ms']:.2f}) |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="print one result a line, for tests/engines")
    parser.add_argument("--steps", type=float, default=1.0, help="share of the training steps")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if not options.json:
        columns = [
            "delegates (float)",
            "other answers than `quantized()`",
            "accuracy",
            "`.pte` (float)",
            "time",
            "speed",
        ]
        print(f"| model | {' | '.join(columns)} |")
        print("|---|---|---|---|---|---|---|")
    for result in results(options.models, options.steps):
        print(json.dumps(result) if options.json else row(result), flush=True)
