"""How much faster numba's loops search ranges than torch's operations, which a plain installation has.

python benchmarks/cost/without_numba.py [rows [columns]]

One thread; the best of three times each. Weights are float32 and normal, all 80 candidates are visited.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from compressed_tensors.quantization import QuantizationArgs
from rich.console import Console
from rich.table import Table

from lightning_obs.numerics.candidates import shrink_factors
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.qparams import flatten_for_calibration
from lightning_obs.numerics.search import numba_loop, torch_loop
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.ranges import range_of_rows
from lightning_obs.numerics.search.rows import Range, rows_of_observed

FORMATS = {
    "int4, groups of 128": QuantizationArgs(num_bits=4, strategy="group", group_size=128),
    "int8, channels": QuantizationArgs(num_bits=8, strategy="channel"),
    "fp8, tensor": QuantizationArgs(num_bits=8, type="float", strategy="tensor"),
}
FACTORS = shrink_factors(0.2, 100)


def best_time(search: Callable[[], Range]) -> tuple[float, Range]:
    """Seconds of the fastest of three searches, and its ranges."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        found = search()
        times.append(time.perf_counter() - start)
    return min(times), found


def main() -> None:
    sizes = [int(argument) for argument in sys.argv[1:]]
    rows = sizes[0] if sizes else 1024
    columns = sizes[1] if len(sizes) > 1 else rows
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = torch.randn(rows, columns) * 0.02
    table = Table("float32", "numba [s]", "torch [s]", "ratio", "equal ranges", title=f"{rows} x {columns}", box=None)
    for name, args in FORMATS.items():
        values = rows_of_observed(flatten_for_calibration(weight, "weight", args))
        search = GridSearch(NumberGrid.of(args), FACTORS)
        with_numba = partial(range_of_rows, values, search, numba_loop.measure)
        with_torch = partial(range_of_rows, values, search, torch_loop.measure)
        with_numba()  # compiles the loops
        numba_time, found = best_time(with_numba)
        torch_time, expected = best_time(with_torch)
        equal = (found[0] == expected[0]).float().mean().item()
        ratio = f"{torch_time / numba_time:.1f}x"
        table.add_row(name, f"{numba_time:.3f}", f"{torch_time:.3f}", ratio, f"{equal:.4%}")
    Console().print(table)


if __name__ == "__main__":
    main()
