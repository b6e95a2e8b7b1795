"""The loops for a GPU without one: what test_gpu_loops.py runs in a process of its own.

    python gpu_loops_apart.py interpret   # in Triton's interpreter, on the CPU
    python gpu_loops_apart.py compile     # for two generations of GPUs

The interpreter cuts float32 to bfloat16 where a GPU rounds, so ranges are in float32 and float16 here. At its end, a
process that compiled prints what Triton leaks.
"""

import contextlib
import os
import sys

if sys.argv[1:] == ["interpret"]:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

from lightning_obs.numerics import on_gpu, rounding
from lightning_obs.numerics.candidates import Candidates, improvements, shrink_factors
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.histogram import BINS
from lightning_obs.numerics.search import torch_loop
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.rows import Rows

FACTORS = shrink_factors(0.2, 20)
INT4 = QuantizationArgs(num_bits=4, group_size=32)
FP8 = QuantizationArgs(num_bits=8, type="float")
#: values (A, B, N, G), rows of importance
CASES = {
    "int4 in groups": (INT4, (1, 24, 1, 32), None),
    "int4 weighed by inputs": (INT4, (1, 24, 1, 32), 8),
    "int4 asymmetric": (QuantizationArgs(num_bits=4, group_size=48, symmetric=False), (1, 10, 1, 48), None),
    "fp8 of long rows": (FP8, (1, 3, 2, 5000), None),
    "fp4": (preset_name_to_scheme("NVFP4", ["Linear"]).weights, (2, 7, 1, 16), None),
    "mxfp8": (preset_name_to_scheme("MXFP8", ["Linear"]).weights, (1, 9, 1, 32), None),
}


def largest_difference(args: QuantizationArgs, values: torch.Tensor, importance: torch.Tensor | None) -> float:
    """Of the errors of all candidates, relative."""
    rows = Rows(values, importance)
    search = GridSearch(NumberGrid.of(args), FACTORS)
    part = slice(1, rows.count)
    low, high = (end[part] for end in rows.observed_range())
    candidates = Candidates(low, high, torch.tensor(FACTORS, dtype=torch.float64))
    expected = torch_loop.errors_of(rows, part, candidates, search)
    found = torch.empty(expected.shape, dtype=torch.float32 if rows.size <= 4096 else torch.float64)
    for k in range(len(FACTORS)):  # the least error of one candidate is its error
        alone = candidates._replace(factors=candidates.factors[k : k + 1])
        found[k] = on_gpu.measure_ranges(values, part, importance, alone, search.grid, search.norm).least
    together = on_gpu.measure_ranges(values, part, importance, candidates, search.grid, search.norm)
    improved, least = improvements(found)
    assert torch.equal(together.improved, improved)
    assert torch.equal(together.least, least)
    return ((found - expected).abs() / expected).max().item()


def rounded_otherwise(grid: NumberGrid) -> float:
    """The share of values to which one panel of 100 columns gives another level than torch's operations."""
    left, inputs = torch.randn(100, 37), torch.randn(400, 100)
    step, zero = torch.rand(100, 37) * 0.1 + 0.05, torch.randint(-2, 3, (100, 37)).float()
    factor = rounding.inverse_factor(inputs.T @ inputs, 0.01)
    whole = torch.randn(200, 200)  # of which the panel's factor is a part
    whole[:100, :100] = factor
    found, _ = on_gpu.round_panel(left, step, zero, whole[:100, :100], grid)
    expected, _ = on_gpu.round_panel_plainly(left.clone(), step, zero, factor, grid)
    return (found != expected).double().mean().item()


def miscounted(values: torch.Tensor) -> int:
    """How many patterns of ``(N, Q, G)`` torch counts otherwise."""
    counts = torch.zeros(values.shape[1], BINS, dtype=torch.int64)
    on_gpu.count_patterns(values, counts)
    patterns = values.view(torch.uint16).long().transpose(0, 1).flatten(1)
    return sum(
        int((torch.bincount(row, minlength=BINS) != own).sum()) for row, own in zip(patterns, counts, strict=True)
    )


def moments_off(values: torch.Tensor) -> float:
    """How far sums and squares of ``(N, Q, G)`` are from torch's, in the units of the sum of magnitudes."""
    wide = values.double()
    expected = torch.stack([wide.sum((0, 2)), wide.square().sum((0, 2))])
    return ((on_gpu.moments(values) - expected).abs() / wide.abs().sum((0, 2))).max().item()


def interpret() -> None:
    """Print a line for each case: its name, and how far it is off."""
    torch.cuda.device_of = lambda _: contextlib.nullcontext()  # there is none
    on_gpu.LOOPS["cpu"] = on_gpu.LOOPS["cuda"]
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38])
    flat = torch.cat([torch.randn(9000).relu(), torch.randn(3000), special]).bfloat16().view(1, 1, -1)
    heads = torch.randn(6, 70, 3, 16).bfloat16().permute(1, 0, 2, 3).flatten(2)  # a view of other strides
    print(f"counted: {miscounted(flat)}")
    print(f"counted by head: {miscounted(heads)}")
    on_gpu._PROGRAMS_OF_TABLE = 1
    print(f"counted in several tables: {miscounted(flat)}")
    on_gpu._PROGRAMS_OF_TABLE = 16
    print(f"moments of many: {moments_off(torch.randn(3, 1, 30001) + 100)}")
    print(f"moments by head: {moments_off(heads)}")
    for name, (args, shape, repeats) in CASES.items():
        # values are read in one place, whatever the format
        for dtype in (torch.float32, torch.float16) if name in ("int4 in groups", "fp4") else (torch.float32,):
            importance = None if repeats is None else torch.rand(repeats, shape[-1])
            print(f"{name}, {dtype}: {largest_difference(args, torch.randn(shape).to(dtype), importance)}")
    blocks = torch.randn(16, 32).unflatten(1, (-1, 8)).unflatten(0, (-1, 4)).transpose(1, 2)
    print(f"fp8 in blocks: {largest_difference(FP8, blocks, None)}")
    for name, args in (("int4", INT4), ("fp8", FP8)):
        print(f"rounding to {name}: {rounded_otherwise(NumberGrid.of(args))}")
    print(f"before the first use: {on_gpu._difference(torch.device('cpu'))}")


def compile_loops() -> None:
    """Print a line for each loop and generation: its name, and those of the instructions that tests ask for."""
    from lightning_obs.numerics.kernels import gpu_loops

    numbers = ("half", "eps", "norm", "low", "high", "smallest", "rounder")
    of_searches = ("importance", "scales", "zeros", "factors", "least_errors")
    of_roundings = ("left", "step", "factor", "levels", "errors")
    types = dict.fromkeys(numbers, "fp32") | dict.fromkeys(of_searches + of_roundings, "*fp32")
    flat = {"values": "*i16", "tables": "*i32"}, {"values": "*bf16", "out": "*fp64"}
    for generation in (80, 90):
        print(f"counts {generation}: {instructions(gpu_loops.count_patterns, flat[0], {'BLOCK': 4096}, generation)}")
        fixed = {"SPAN": 1 << 15, "BLOCK": 4096}
        print(f"moments {generation}: {instructions(gpu_loops.moments, flat[1], fixed, generation)}")
        for dtype in ("bf16", "fp32"):
            ends = dict.fromkeys(("values", "low_ends", "high_ends"), f"*{dtype}")
            for form in ("ranges", "scales", "pieces of rows"):
                scaled, whole = form == "scales", form != "pieces of rows"
                fixed = {"INTEGERS": True, "WHOLE": whole, "SCALED": scaled, "SHIFTED": scaled, "WEIGHED": True}
                fixed |= {"ROWS": 8, "COLUMNS": 128} if whole else {"ROWS": 1, "COLUMNS": 4096}
                out = {"out": "*i1" if whole else "*fp32"}
                found = instructions(gpu_loops.measure_ranges, types | ends | out, fixed, generation)
                print(f"search {generation} {dtype} {form}: {found}")
        fixed = {"INTEGERS": False, "ROWS": 16, "PANEL": 128}
        print(f"rounding {generation}: {instructions(gpu_loops.round_panel, types, fixed, generation)}")


def instructions(function, types, fixed, generation) -> str:
    """Those of some instructions that are in the assembler of a loop."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=fixed)
    options = {"enable_fp_fusion": on_gpu._loop_arguments(NumberGrid.of(INT4))["enable_fp_fusion"]}
    made = triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options)
    assert made.asm["cubin"]
    return " ".join(each for each in ("div.rn.f32", "cvt.rn.bf16", "fma.rn.f32") if each in made.asm["ptx"])


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_loops}[sys.argv[1]]()
