"""How much faster numba's loops search ranges than torch's operations, which a plain installation has.

python benchmarks/cost/without_numba.py [rows [columns]]

One thread; the best of three times each. Weights are float32 and normal, all 80 candidates are visited.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from compressed_tensors.quantization import QuantizationArgs
from rich.console import Console
from rich.table import Table

from lightning_obs.numerics.candidates import shrink_factors
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.qparams import flatten_for_calibration
from lightning_obs.numerics.search import cpu, definition
from lightning_obs.numerics.search.definition import Found, GridSearch
from lightning_obs.numerics.search.rows import rows_of_observed

FORMATS = {
    "int4, groups of 128": QuantizationArgs(num_bits=4, strategy="group", group_size=128),
    "int8, channels": QuantizationArgs(num_bits=8, strategy="channel"),
    "fp8, tensor": QuantizationArgs(num_bits=8, type="float", strategy="tensor"),
}
FACTORS = shrink_factors(0.2, 100)


def best_time(search: Callable[[], Found]) -> tuple[float, Found]:
    """Seconds of the fastest of three searches, and what it found."""
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
        cpu.visit(values, search)  # compiles the loops
        with_numba, found = best_time(lambda values=values, search=search: cpu.visit(values, search))
        with_torch, expected = best_time(lambda values=values, search=search: definition.visit(values, search))
        equal = torch.equal(found.low, expected.low) and torch.equal(found.high, expected.high)
        ratio = f"{with_torch / with_numba:.1f}x"
        table.add_row(name, f"{with_numba:.3f}", f"{with_torch:.3f}", ratio, "yes" if equal else "no")
    Console().print(table)


if __name__ == "__main__":
    main()
