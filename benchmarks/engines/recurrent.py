"""LSTM and GRU whose weights are int8 (`linearize_recurrent`, `INT8_ONNX`) beside float, in torch and in onnxruntime.

    python benchmarks/engines/recurrent.py

`loop` is the float layer as a loop of Linears over the steps, whose products could be quantized. One thread, medians,
all in one process.
"""

from __future__ import annotations

import copy
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import nn

from lightning_obs import CalibrationSession, export_onnx, linearize_recurrent, quantized

_SIZES = ((16, 32, 24, 32), (32, 128, 96, 1), (32, 128, 96, 32), (128, 512, 96, 1))
_SECONDS = 2.0


class Forecast(nn.Module):
    """A recurrent layer of two levels, and a Linear that reads its last step."""

    def __init__(self, kind: type[nn.RNNBase], inputs: int, hidden: int) -> None:
        super().__init__()
        self.rnn = kind(inputs, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def lstm_as_loop(layer: nn.LSTM, x: torch.Tensor) -> torch.Tensor:
    """What the layer computes, step by step with two products each."""
    for level in range(layer.num_layers):
        of_input = [getattr(layer, f"{name}_ih_l{level}") for name in ("weight", "bias")]
        of_state = [getattr(layer, f"{name}_hh_l{level}") for name in ("weight", "bias")]
        projected = nn.functional.linear(x, *of_input)
        state = cell = x.new_zeros(len(x), layer.hidden_size)
        states = []
        for step in range(x.shape[1]):
            gates = projected[:, step] + nn.functional.linear(state, *of_state)
            into, keep, new, out = gates.chunk(4, -1)
            cell = keep.sigmoid() * cell + into.sigmoid() * new.tanh()
            state = out.sigmoid() * cell.tanh()
            states.append(state)
        x = torch.stack(states, 1)
    return x


def medians(functions: Sequence[Callable[[], object]]) -> list[float]:
    """The median milliseconds of a call of each function; the functions are called in turn."""
    milliseconds: list[list[float]] = [[] for _ in functions]
    began = time.perf_counter()
    while len(milliseconds[0]) < 7 or time.perf_counter() - began < _SECONDS:
        for function, times in zip(functions, milliseconds, strict=True):
            started = time.perf_counter()
            function()
            times.append(1000 * (time.perf_counter() - started))
    return [median(times[1:]) for times in milliseconds]


def session(file: Path):
    """A session of onnxruntime with one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


@torch.no_grad()
def row(kind: type[nn.RNNBase], inputs: int, hidden: int, steps: int, batch: int, folder: Path) -> str:
    """A row of the table for one model."""
    torch.manual_seed(0)
    model = Forecast(kind, inputs, hidden).eval()
    x = torch.randn(batch, steps, inputs)
    calls: list[Callable[[], object]] = [lambda: model(x)]
    if kind is nn.LSTM:
        torch.testing.assert_close(lstm_as_loop(model.rnn, x), model.rnn(x)[0], atol=1e-5, rtol=1e-4)
        calls.append(lambda: lstm_as_loop(model.rnn, x))
    in_torch = medians(calls)
    loop = f"{in_torch[1] / in_torch[0]:.1f}" if len(in_torch) > 1 else ""
    float_file = folder / "float.onnx"
    torch.onnx.export(model, (x,), dynamo=True, verbose=False, external_data=False).save(float_file)
    int8 = copy.deepcopy(model)
    linearize_recurrent(int8)
    with CalibrationSession(int8, "INT8_ONNX"):
        int8(x)
    int8_file = export_onnx(int8, folder / "int8.onnx", x, overwrite=True)
    float_session, int8_session = session(float_file), session(int8_file)
    feeds = {int8_session.get_inputs()[0].name: x.numpy()}
    float_time, int8_time = medians([lambda: float_session.run(None, feeds), lambda: int8_session.run(None, feeds)])
    with quantized(int8):
        expected = int8(x)
    difference = (torch.from_numpy(int8_session.run(None, feeds)[0]) - expected).abs().max()
    sizes = [file.stat().st_size // 1024 for file in (float_file, int8_file)]
    return (
        f"| {kind.__name__} {inputs} -> {hidden}, {steps} steps, batch {batch} | {sizes[0]} kB -> {sizes[1]} kB "
        f"| {float_time:.2f} ms | {float_time / int8_time:.2f} | {difference:.0e} | {loop} |"
    )


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    print("| model, two levels | file | float | speed of int8 | difference | loop in torch, times as slow |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for kind in (nn.LSTM, nn.GRU):
            for sizes in _SIZES:
                print(row(kind, *sizes, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
