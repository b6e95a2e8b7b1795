"""What the range of one large activation costs, beside llm-compressor.

    .venv-parity/bin/python benchmarks/cost/histogram.py

Runs where both packages are installed; ``make parity`` makes that venv. One tensor of (8, 512, 4096) normal values,
one thread, everything in one process, medians. ``mse`` of llm-compressor searches the tensor; ``histogram`` counts it
(update) and searches the counts (search). The ranges are printed too; they differ, because ``histogram mse`` looks at
95 candidates where llm-compressor looks at 20, for the least squared error where llm-compressor's norm is 2.4.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.observers import Observer as Peer
from rich.console import Console
from rich.table import Table

from lightning_obs.observers import Observer

FORMATS = {"int8": {"num_bits": 8}, "fp8": {"num_bits": 8, "type": "float"}}
CRITERIA = ("mse", "percentile", "entropy")


def main() -> None:
    """Print one table per dtype."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=3, default=[8, 512, 4096])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--peer-repeats", type=int, default=1, help="llm-compressor takes seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(options.shape)
    for dtype in (torch.float32, torch.bfloat16):
        compare(x.to(dtype), options.repeats, options.peer_repeats)


def compare(x: torch.Tensor, repeats: int, peer_repeats: int) -> None:
    """Time both packages on one tensor."""
    columns = ("format", "observer", "update [ms]", "search [ms]", "sum [ms]", "llm-compressor's mse is", "range")
    table = Table(*columns, title=f"{tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}, 1 thread")
    for name, values in FORMATS.items():
        args = QuantizationArgs(**values)
        peer, peer_ms = timed(lambda args=args: peer_observer("mse", args)(x), peer_repeats, warm_up=False)
        table.add_row(
            name, "llm-compressor mse", *["", "", f"{peer_ms:.1f}", "1x"], _range(peer.min_vals, peer.max_vals)
        )
        for criterion in CRITERIA:
            found, update = timed(lambda args=args, c=criterion: observer("histogram", args, criterion=c)(x), repeats)
            _, search = timed(found._search, repeats)  # get_min_max remembers it
            total = update + search
            row = [
                f"{update:.1f}",
                f"{search:.2f}",
                f"{total:.1f}",
                f"{peer_ms / total:.0f}x",
                _range(*found.get_min_max()),
            ]
            table.add_row(name, f"histogram {criterion}", *row)
    args = QuantizationArgs(num_bits=8)
    rows = {
        "torch.aminmax": lambda: torch.aminmax(x),
        "llm-compressor static_minmax": lambda: peer_observer("static_minmax", args)(x),
        "static_minmax": lambda: observer("static_minmax", args)(x),
        "normal_observer": lambda: observer("normal_observer", args)(x),
    }
    for name, function in rows.items():
        table.add_row("", name, "", "", f"{timed(function, repeats)[1]:.1f}", "", "")
    Console(width=130).print(table)


def observer(name: str, args: QuantizationArgs, **kwargs: object) -> Observer:
    """One of ours."""
    return Observer.load_from_registry(name, base_name="input", args=args, **kwargs)


def peer_observer(name: str, args: QuantizationArgs) -> Peer:
    """One of llm-compressor's."""
    return Peer.load_from_registry(name, base_name="input", args=args.model_copy(deep=True))


def timed(function: Callable[[], object], repeats: int, warm_up: bool = True) -> tuple[object, float]:
    """What the function gives, and the median of its time in milliseconds."""
    if warm_up:
        function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return result, median(times) * 1e3


def _range(low: torch.Tensor, high: torch.Tensor) -> str:
    return f"[{low.item():.4g}, {high.item():.4g}]"


if __name__ == "__main__":
    main()
