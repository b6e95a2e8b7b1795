"""What observers and searches take on a device: as a share of its memory bandwidth, beside llm-compressor's.

    python benchmarks/cost/gpu.py                        # the first CUDA device
    python benchmarks/cost/gpu.py --device cpu --quick   # small tensors, once each: shows that it runs

Where llm-compressor is installed (``make parity`` makes that venv), its observer of the same name sees the same tensor
in the same process; else its columns stay empty.

``share`` is the time of one read of the tensor at the bandwidth that a copy of a large one reaches, over the time that
observing takes, of everything from the call to the statistics: 100 % is as fast as memory allows. Times are medians,
after one call that compiles and allocates. On CUDA, ``peak`` is the most memory at once beside the tensor.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from rich.console import Console
from rich.table import Table

from lightning_obs.observers import Observer

try:
    from llmcompressor.observers import Observer as Peer
except ImportError:
    Peer = None

INT8 = QuantizationArgs(num_bits=8, strategy="tensor")
INT4 = QuantizationArgs(num_bits=4, group_size=128)
CHANNEL = QuantizationArgs(num_bits=8, strategy="channel")
BLOCKS = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
#: observer, what it observes, number format
ROWS: list[tuple[str, str, str, Any]] = [
    ("static_minmax", "input", "int8", INT8),
    ("minmax", "input", "int8", INT8),
    ("mse", "input", "int8", INT8),
    ("histogram", "input", "int8", INT8),
    ("percentile", "input", "int8", INT8),
    ("normal_observer", "input", "int8", INT8),
    ("memoryless_minmax", "weight", "int4 group 128", INT4),
    ("memoryless_mse", "weight", "int4 group 128", INT4),
    ("memoryless_mse", "weight", "int8 channel", CHANNEL),
    ("memoryless_mse", "weight", "fp8 block 128", BLOCKS),
    ("memoryless_mse", "weight", "NVFP4", NVFP4),
    ("nvfp4_expanded_mse", "weight", "NVFP4", NVFP4),
    ("imatrix_mse", "weight", "int4 group 128", INT4),
    ("local_hessian", "weight", "int4 group 128", INT4),
]


def main() -> int:
    """Print one table; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="small tensors, once each")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--size", type=int, default=4096, help="a weight has size x size values, an input 2 x size x size"
    )
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here; --device cpu --quick shows that this runs.", file=sys.stderr)
        return 1
    size, repeats = (256, 1) if options.quick else (options.size, options.repeats)
    bandwidth = measure_bandwidth(device, 1 << 22 if options.quick else 1 << 28, repeats)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    columns = (
        "observer",
        "of",
        "format",
        "ours [ms]",
        "share [%]",
        "peak [MiB]",
        "llm-compressor [ms]",
        "share [%]",
        "ratio",
    )
    table = Table(*columns, title=f"{name}: {bandwidth / 1e9:.0f} GB/s; {options.dtype}, {size} x {size}")
    torch.manual_seed(0)
    for observer, base_name, number_format, args in ROWS:
        shape = (size, size) if base_name == "weight" else (2, size, size)
        value = (torch.randn(shape) * 0.02).to(getattr(torch, options.dtype)).to(device)
        inputs = torch.rand(64, size).to(value)
        once = value.nbytes / bandwidth * 1e3
        row, times = [observer, base_name, number_format], []
        for kind in (Observer, Peer):
            try:
                took, peak = measure(kind, observer, base_name, args, value, inputs, repeats)
            except (AttributeError, ValueError, KeyError):  # none of this name, or of this package
                row += ["", ""] + ([""] if kind is Observer else [])
                continue
            times.append(took)
            row += [f"{took:.2f}", f"{100 * once / took:.1f}"]
            row += [f"{peak / 2**20:.0f}" if peak else ""] if kind is Observer else []
        table.add_row(*row, f"{times[1] / times[0]:.1f}x" if len(times) == 2 else "")
    Console(width=120).print(table)
    return 0


@torch.no_grad()
def measure(
    kind: Any,
    name: str,
    base_name: str,
    args: QuantizationArgs,
    value: torch.Tensor,
    inputs: torch.Tensor,
    repeats: int,
) -> tuple[float, int]:
    """Median milliseconds of one observation, and the bytes at once beside the tensor (0 where nobody counts them)."""

    def observe() -> None:
        observer = kind.load_from_registry(name, base_name=base_name, args=args.model_copy(deep=True))
        if getattr(observer, "needs_inputs", False):
            observer.observe_inputs(inputs)
        elif hasattr(observer, "_imatrix_sum"):
            observer._imatrix_sum, observer._imatrix_count = inputs.float().square().sum(0), torch.tensor(len(inputs))
        observer(value)

    took = milliseconds(observe, value.device, repeats)
    if value.device.type != "cuda":
        return took, 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    observe()
    return took, torch.cuda.max_memory_allocated() - before


def milliseconds(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of a call, until the device has done its work."""
    function()
    times = []
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        function()
        wait(device)
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)


def measure_bandwidth(device: torch.device, values: int, repeats: int) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.zeros(values, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source), device, repeats) * 1e3


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
