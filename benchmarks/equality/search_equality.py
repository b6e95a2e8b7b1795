"""Do the compiled loops of the range search find what its definition finds, bit for bit?

    python benchmarks/equality/search_equality.py                    # 6,000 tensors, three minutes of one core
    python benchmarks/equality/search_equality.py --tensors 400 --seed 1

Each tensor is searched twice, with the loops and as without numba: smallest and largest value of every scale must be
the same. Every dtype meets every format; values, shape, norm, expansion, patience and importance are drawn. Two in
three tensors hold odd values: tiny, huge, at the end of float16 and above, constant, zeros of both signs, on the
format's own grid, rows of very different size. No NaN or infinity: they are no range.

Loops do not read float64, so there the definition runs twice; it must end all the same. Exit code 1 if any differs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from rich.console import Console
from rich.table import Table

from lightning_obs.numerics.candidates import shrink_factors
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.kernels import launch
from lightning_obs.numerics.qparams import flatten_for_calibration
from lightning_obs.numerics.search.definition import GridSearch
from lightning_obs.numerics.search.ranges import Found, search_range

BLOCK = {"strategy": "block", "block_structure": [8, 16]}
FORMATS: dict[str, Any] = {
    "int4": {"num_bits": 4},
    "int4 asymmetric": {"num_bits": 4, "symmetric": False},
    "int8": {"num_bits": 8},
    "int4 signed": {"num_bits": 4},
    "int8 signed": {"num_bits": 8},
    "int8 asymmetric": {"num_bits": 8, "symmetric": False},
    "fp8": {"num_bits": 8, "type": "float"},
    "fp8 in blocks": {"num_bits": 8, "type": "float", **BLOCK},
    **{name: preset_name_to_scheme(name, ["Linear"]).weights for name in ("NVFP4", "MXFP4", "MXFP8")},
}
LAYOUTS = ({"strategy": "tensor"}, {"strategy": "channel"}, {"strategy": "group", "group_size": 16}, BLOCK)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
END = 65504.0  # of float16
LONG = 90_000  # values of a scale that is searched in pieces; for bfloat16, twice as many are counted


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tensors", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cases = list(itertools.product(FORMATS, DTYPES))
    counts = {case: [0, 0, 0] for case in cases}  # tensors, scales, tensors that differ
    for number in range(options.tensors):
        name, dtype = case = cases[number % len(cases)]
        scales, differs, what = compare(name, dtype, options.seed * 1_000_003 + number)
        counts[case] = [a + b for a, b in zip(counts[case], (1, scales, differs), strict=True)]
        if differs:
            print(f"differs: {name}, {dtype}, {what}", file=sys.stderr, flush=True)
    table = Table("format", *(str(dtype).removeprefix("torch.") for dtype in DTYPES), title="tensors that differ")
    for name in FORMATS:
        table.add_row(name, *(f"{counts[name, dtype][2]} of {counts[name, dtype][0]}" for dtype in DTYPES))
    Console(width=100).print(table)
    tensors, scales, differ = (sum(each) for each in zip(*counts.values(), strict=True))
    print(f"{tensors:,} tensors, {scales:,} scales: {differ} tensors differ")
    return int(differ > 0)


def compare(name: str, dtype: torch.dtype, seed: int) -> tuple[int, bool, str]:
    """How many scales a drawn tensor has, whether the two executions differ, and what it was."""
    generator = torch.Generator().manual_seed(seed)
    search, what = draw_search(name, dtype, generator)
    by_loops = search()
    with without_loops():
        by_definition = search()
    same = all(
        torch.equal(*(end.nan_to_num(nan=-0.1) for end in ends))
        for ends in zip(by_loops[:2], by_definition[:2], strict=True)
    )
    return by_loops.low.numel(), not same, f"seed {seed}, {what}"


@contextlib.contextmanager
def without_loops() -> Iterator[None]:
    """Run torch's own operations, as where there is no numba."""
    can_read = launch.can_read
    launch.can_read = lambda _: False
    try:
        yield
    finally:
        launch.can_read = can_read


def draw_search(name: str, dtype: torch.dtype, generator: torch.Generator) -> tuple[Callable[[], Found], str]:
    """A search of a drawn tensor in a format, and a description of the tensor and the options."""

    def one_of(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=generator))]

    args = FORMATS[name]
    if not isinstance(args, QuantizationArgs):
        args = QuantizationArgs(**({} if "strategy" in args else one_of(*LAYOUTS)), **args)
    rows, columns = one_of((8, 32), (8, 32), (16, 64), (24, 96), (64, 32), (8, 160), (32, 512), (1, 32))
    if args.strategy == "tensor" and one_of(True, False, False):
        rows, columns = 1, one_of(LONG, LONG, 2 * LONG)
    if args.strategy == "block":
        rows = max(8, rows)
    kind = one_of(*VALUES) if one_of(True, True, False) else "normal"
    value = VALUES[kind](rows, columns, dtype, generator)
    value = value.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    expand, maxshrink = one_of((1.0, 0.2), (1.0, 0.2), (1.0, 0.8), (1.8, 1 - 0.8 / 1.8))
    options: dict[str, Any] = {"expand": expand, "norm": one_of(2.4, 2.4, 2.0, 1.0, 3.0)}
    options["patience"] = one_of(5, 5, 1, None)
    grid = NumberGrid.of(args, name.endswith("signed"))
    search = GridSearch(grid, shrink_factors(maxshrink, one_of(100.0, 20.0)), **options)
    what = f"{args.strategy}, {rows}x{columns}, {kind}, {options}, {len(search.factors)} candidates"
    if args.strategy == "block":
        return lambda: search_range(value, search), what
    observed, importance = flatten_for_calibration(value, "weight", args), None
    if one_of(True, False, False):
        importance = torch.rand(1, observed.shape[-1], generator=generator) ** 3
    return lambda: search_range(observed, search, importance=importance), what


def normal(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return values * torch.rand(rows, 1, generator=generator, dtype=torch.float64)


def scaled_to(largest: Callable[[torch.dtype], float]) -> Any:
    def make(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        values = normal(rows, columns, dtype, generator)
        return values / values.abs().amax(1, keepdim=True) * largest(dtype)

    return make


def with_ends(*ends: float) -> Any:
    """Some rows hold one of ``ends``, of either sign, among values of any size below."""

    def make(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        values = normal(rows, columns, dtype, generator) * 10 ** (torch.rand(rows, 1, generator=generator) * 5)
        count = rows * columns // 24 + 1
        at = torch.randint(rows * columns, (count,), generator=generator)
        drawn = torch.tensor(ends, dtype=torch.float64)[torch.randint(len(ends), (count,), generator=generator)]
        values.view(-1)[at] = drawn * (torch.randint(2, (count,), generator=generator) * 2 - 1)
        return values

    return make


def rows_of_any_size(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return normal(rows, columns, dtype, generator) * 10.0 ** (torch.rand(rows, 1, generator=generator) * 76 - 38)


def constant(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return normal(rows, 1, dtype, generator).expand(rows, columns)


def zeros(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Of both signs; some rows have one value."""
    values = torch.where(torch.rand(rows, columns, generator=generator) < 0.5, -0.0, 0.0).double()
    values[::3, 0] = normal(rows, 1, dtype, generator)[::3, 0]
    return values


def whole_numbers(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Multiples of a power of two, where many candidates tie."""
    powers = torch.randint(-8, 8, (rows, 1), generator=generator).double().exp2()
    return torch.randint(-8, 9, (rows, columns), generator=generator) * powers


def one_sided(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return normal(rows, columns, dtype, generator).abs() * (torch.randint(2, (rows, 1), generator=generator) * 2 - 1)


VALUES: dict[str, Callable[..., torch.Tensor]] = {
    "normal": normal,
    "denormal": scaled_to(lambda dtype: torch.finfo(dtype).tiny / 3),
    "tiny": scaled_to(lambda dtype: torch.finfo(dtype).tiny * 300),
    "huge": scaled_to(lambda dtype: torch.finfo(dtype).max),
    "near the end of float16": scaled_to(lambda _: END * 0.9),
    "at the end of float16": with_ends(END, END - 32),
    "above the end of float16": with_ends(END, 65519.0, 65520.0, 65536.0, 1e5),
    "outliers": with_ends(1e3, 1e6),
    "rows of any size": rows_of_any_size,
    "constant": constant,
    "zeros": zeros,
    "whole numbers": whole_numbers,
    "one-sided": one_sided,
}

if __name__ == "__main__":
    sys.exit(main())
