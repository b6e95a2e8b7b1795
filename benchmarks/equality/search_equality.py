"""Are the ranges that the compiled loops of the range search find as good as those of torch's operations?

    python benchmarks/equality/search_equality.py                    # 6,000 tensors, three minutes of one core
    python benchmarks/equality/search_equality.py --tensors 400 --seed 1

Each tensor is searched twice, with the loops and as without numba. A scale may have another range only if that loses
no more: its error in float64 is at most 1 + 1e-5 times the other's. Every dtype meets every format; values, shape,
norm, expansion and importance are drawn. Two in three tensors hold odd values: tiny, huge, at the end of float16 and
above, constant, zeros of both signs, on the format's own grid, rows of very different size. No NaN or infinity: they
are no range. All candidates are visited: where a search ends early, a tie may decide which are.

Loops do not read float64, so there torch runs twice; it must end all the same. Exit code 1 if any scale loses more.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from rich.console import Console
from rich.table import Table

from lightning_obs.numerics.candidates import shrink_factors
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.kernels import launch
from lightning_obs.numerics.qparams import flatten_for_calibration
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.ranges import search_range
from lightning_obs.numerics.search.rows import Range

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


#: errors that differ by less are equally good
TIE = 1 + 1e-5


class Drawn(NamedTuple):
    """A tensor, how it is searched, and both in words."""

    observed: torch.Tensor
    search: GridSearch
    importance: torch.Tensor | None
    words: str


class Counts(NamedTuple):
    """How many scales a tensor has, how many have another range by the loops, and how many lose more by it."""

    scales: int
    differ: int
    worse: int


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tensors", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cases = list(itertools.product(FORMATS, DTYPES))
    counts: dict[Any, list[Counts]] = {case: [] for case in cases}
    for number in range(options.tensors):
        name, dtype = cases[number % len(cases)]
        seed = options.seed * 1_000_003 + number
        drawn = draw(name, dtype, torch.Generator().manual_seed(seed))
        found = compare(drawn)
        counts[name, dtype].append(found)
        if found.worse:
            print(f"worse: {name}, {dtype}, seed {seed}, {drawn.words}: {found}", file=sys.stderr, flush=True)
    dtypes = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    table = Table("format", *dtypes, title="scales: other ranges, and worse ones")
    for name in FORMATS:
        cells = [total(counts[name, dtype]) for dtype in DTYPES]
        table.add_row(name, *(f"{cell.scales}: {cell.differ}, {cell.worse}" for cell in cells))
    Console(width=100).print(table)
    scales, differ, worse = total(itertools.chain.from_iterable(counts.values()))
    print(f"{options.tensors:,} tensors, {scales:,} scales: {differ:,} have another range, {worse} lose more by it")
    return int(worse > 0)


def total(counts: Iterable[Counts]) -> Counts:
    """The sums of several counts."""
    columns = zip(Counts(0, 0, 0), *counts, strict=True)
    return Counts(*map(sum, columns))


def compare(drawn: Drawn) -> Counts:
    """Search a drawn tensor by the loops and by torch's operations."""
    by_loops = search_range(drawn.observed, drawn.search, importance=drawn.importance)
    with without_loops():
        by_torch = search_range(drawn.observed, drawn.search, importance=drawn.importance)
    differs = torch.zeros_like(by_loops[0], dtype=torch.bool)
    for ours, theirs in zip(by_loops, by_torch, strict=True):
        differs |= (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    loses_more = exact_error(drawn, by_loops) > exact_error(drawn, by_torch) * TIE
    return Counts(differs.numel(), int(differs.sum()), int((differs & loses_more).sum()))


@contextlib.contextmanager
def without_loops() -> Iterator[None]:
    """Run torch's own operations, as where there is no numba."""
    fault = launch.numba_fault
    launch.numba_fault = lambda: "not asked for"  # type: ignore[assignment]
    try:
        yield
    finally:
        launch.numba_fault = fault


def exact_error(drawn: Drawn, found: Range) -> torch.Tensor:
    """The error of a range in float64, with the scale as it is stored."""
    grid = drawn.search.grid
    observed = drawn.observed
    if observed.ndim == 2:
        observed = flatten_for_calibration(observed, "weight", grid.args)
    scale, zero_point = grid.qparams(*found)
    zeros = torch.zeros_like(scale) if zero_point is None else zero_point
    wide_scale, wide_zeros = scale.double().unsqueeze(-1), zeros.double().unsqueeze(-1)
    values = observed.double()
    level = grid.round((values / wide_scale + wide_zeros).float()).double() - wide_zeros
    lost = (level * wide_scale - values).abs() ** drawn.search.norm
    if drawn.importance is not None:
        lost = lost * drawn.importance
    return lost.sum((0, -1)).nan_to_num(torch.inf)


def draw(name: str, dtype: torch.dtype, generator: torch.Generator) -> Drawn:
    """A tensor and its search in a format."""

    def one_of(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=generator))]

    args = FORMATS[name]
    if not isinstance(args, QuantizationArgs):
        layout = {} if "strategy" in args else one_of(*LAYOUTS)
        args = QuantizationArgs(**layout, **args)
    rows, columns = one_of((8, 32), (8, 32), (16, 64), (24, 96), (64, 32), (8, 160), (32, 512), (1, 32))
    if args.strategy == "tensor" and one_of(True, False, False):
        rows, columns = 1, one_of(LONG, LONG, 2 * LONG)
    if args.strategy == "block":
        rows = max(8, rows)
    kind = one_of(*VALUES) if one_of(True, True, False) else "normal"
    value = VALUES[kind](rows, columns, dtype, generator)
    value = value.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    expand, maxshrink = one_of((1.0, 0.2), (1.0, 0.2), (1.0, 0.8), (1.8, 1 - 0.8 / 1.8))
    norm = one_of(2.4, 2.4, 2.0, 1.0, 3.0)
    factors = shrink_factors(maxshrink, one_of(100.0, 20.0))
    search = GridSearch(NumberGrid.of(args, name.endswith("signed")), factors, None, norm, expand)
    words = f"{args.strategy}, {rows}x{columns}, {kind}, norm {norm}, expand {expand}, {len(factors)} candidates"
    if args.strategy == "block":
        return Drawn(value, search, None, words)
    observed = flatten_for_calibration(value, "weight", args)
    importance = None
    if one_of(True, False, False):
        importance = torch.rand(1, observed.shape[-1], generator=generator) ** 3
    return Drawn(observed, search, importance, words)


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
