"""Is the range search llm-compressor's, and what does it take?

    python benchmarks/equality/range_search.py                      # 1024x4096, one thread
    python benchmarks/equality/range_search.py --rows 4096          # 4096x4096
    python benchmarks/equality/range_search.py --case "channel int8" --repeat 5
    python benchmarks/equality/range_search.py --memory --rows 4096 # instead: what is allocated beside the weight
    python benchmarks/equality/range_search.py --model default  # instead: the default model's weights, in int4

Runs in the venv of ``make parity``, which holds both packages. Each case gives one seeded weight (Student's t, 5
degrees of freedom: tails heavier than a normal distribution's, as weights have) to both observers, in one process.

- float32: ``equal`` is the share of scales whose range is the peer's, bit for bit. Of those that differ, the error
  (float64, sum of all scales) must not be above the peer's.
- bfloat16, where the peer searches in bfloat16 arithmetic: ``error`` is ours over the peer's, in float64, of the scales
  as they would be stored. At most 1.

Times are CPU time (other load matters less then), medians of alternating runs. Exit code 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from llmcompressor.observers import Observer as PeerObserver
from rich.console import Console
from rich.table import Table

from lightning_obs.numerics.qparams import flatten_for_calibration
from lightning_obs.observers import Observer

INT4 = {"num_bits": 4}
INT8 = {"num_bits": 8}
FP8 = {"num_bits": 8, "type": "float"}
BLOCK = {"strategy": "block", "block_structure": [128, 128]}
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
#: name -> (observer, args)
CASES = {
    "channel int4": ("memoryless_mse", QuantizationArgs(strategy="channel", **INT4)),
    "channel int8": ("memoryless_mse", QuantizationArgs(strategy="channel", **INT8)),
    "channel fp8": ("memoryless_mse", QuantizationArgs(strategy="channel", **FP8)),
    "group128 int4": ("memoryless_mse", QuantizationArgs(group_size=128, **INT4)),
    "group128 int4 asym": ("memoryless_mse", QuantizationArgs(group_size=128, symmetric=False, **INT4)),
    "group128 int8": ("memoryless_mse", QuantizationArgs(group_size=128, **INT8)),
    "group128 fp8": ("memoryless_mse", QuantizationArgs(group_size=128, **FP8)),
    "block128 int8": ("memoryless_mse", QuantizationArgs(**BLOCK, **INT8)),
    "block128 fp8": ("memoryless_mse", QuantizationArgs(**BLOCK, **FP8)),
    "tensor_group fp4": ("memoryless_mse", NVFP4),
    "tensor_group fp4 expanded": ("nvfp4_expanded_mse", NVFP4),
    "imatrix group128 int4": ("imatrix_mse", QuantizationArgs(group_size=128, **INT4)),
    "tensor int8": ("memoryless_mse", QuantizationArgs(strategy="tensor", **INT8)),
    "tensor fp8": ("memoryless_mse", QuantizationArgs(strategy="tensor", **FP8)),
}
MOST_UNEQUAL = 1e-4  # share of scales where the order of a sum may decide a tie


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--model", choices=["default"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")

    if options.model:
        return compare_on_model()
    if options.memory:
        return show_memory(options)
    shape = f"{options.rows}x{options.columns}"
    title = f"{shape}, {options.threads} thread(s), torch {torch.__version__}"
    table = Table("dtype", "case", "scales", "equal", "error", "ours [ms]", "peer [ms]", "ratio", title=title)
    failed = False
    for dtype in options.dtype:
        for case in options.case:
            weight = make_weight(options.rows, options.columns).to(getattr(torch, dtype))
            row, is_right = compare(case, weight, options.repeat)
            failed |= not is_right
            print(dtype, case, *row, file=sys.stderr, flush=True)  # the table comes at the end
            table.add_row(dtype, case, *row, style=None if is_right else "red")
    Console(width=120).print(table)
    return int(failed)


def make_weight(rows: int, columns: int) -> torch.Tensor:
    """A weight with heavy tails and rows of different size."""
    torch.manual_seed(0)
    values = torch.distributions.StudentT(5.0).sample((rows, columns))
    return values * 0.02 * torch.rand(rows, 1).add_(0.5)


@torch.no_grad()
def compare(case: str, weight: torch.Tensor, repeat: int) -> tuple[list[str], bool]:
    """One line of the table, and whether the bounds hold."""
    name, args = CASES[case]
    squares = torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(1)) * 9  # of the inputs, for imatrix

    def ours() -> Observer:
        observer = Observer.load_from_registry(name, base_name="weight", args=args)
        if observer.needs_inputs:
            observer.load_statistics({"input_squares": squares.double(), "input_count": torch.tensor([9])})
        return observer(weight)

    def theirs() -> PeerObserver:
        peer_args = args.model_copy(deep=True)  # the peer writes into it
        observer = PeerObserver.load_from_registry(name, base_name="weight", args=peer_args)
        if hasattr(observer, "_imatrix_sum"):
            observer._imatrix_sum, observer._imatrix_count = squares, torch.tensor(9)
        return observer(weight)

    own, peer = ours(), theirs()
    same = (own.min_vals == peer.min_vals) & (own.max_vals == peer.max_vals)
    weights = squares if name == "imatrix_mse" else torch.ones_like(squares)
    errors = [error(weight, args, found.min_vals, found.max_vals, own.norm, weights) for found in (own, peer)]
    ratio = (errors[0].sum() / errors[1].sum()).item()
    if weight.dtype == torch.float32:
        few = (~same).sum().item() <= MOST_UNEQUAL * same.numel()
        is_right = few and errors[0][~same].sum() <= errors[1][~same].sum() * (1 + 1e-6)
    else:
        is_right = ratio <= 1
    times = alternate(ours, theirs, repeat=repeat)
    share = f"{same.sum().item()}/{same.numel()}" if not same.all() else "all"
    row = [str(same.numel()), share, f"{ratio:.6f}", *(f"{t * 1e3:.0f}" for t in times), f"{times[1] / times[0]:.1f}x"]
    return row, bool(is_right)


@torch.no_grad()
def compare_on_model() -> int:
    """All Linear weights of the default model, int4 in groups of 64, one after the other."""
    from lightning_obs.app.models.pretrained import load_pretrained

    model, _ = load_pretrained()
    weights = [m.weight.detach() for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    args = QuantizationArgs(group_size=64, **INT4)
    seconds, differ = [0.0, 0.0], 0
    for weight in weights:
        found = []
        for number, make in enumerate((Observer, PeerObserver)):
            start = time.process_time()
            observer = make.load_from_registry("memoryless_mse", base_name="weight", args=args.model_copy(deep=True))
            found.append(observer(weight).min_vals)
            seconds[number] += time.process_time() - start
        differ += (found[0] != found[1]).sum().item()
    count = sum(weight.numel() for weight in weights)
    print(f"{len(weights)} weights, {count / 1e6:.1f} million values, {weights[0].dtype}")
    print(f"ours {seconds[0]:.1f} s, peer {seconds[1]:.1f} s, {seconds[1] / seconds[0]:.1f}x; {differ} ranges differ")
    return 0


def show_memory(options: argparse.Namespace) -> int:
    """Most that is allocated at once beside the weight, results included, by torch's count (no tiles of numpy's)."""
    for dtype in options.dtype:
        weight = make_weight(options.rows, options.columns).to(getattr(torch, dtype))
        for case in options.case:
            name, args = CASES[case]
            own = partial(observe_anew, Observer, name, args, weight)
            theirs = partial(observe_anew, PeerObserver, name, args, weight)
            most = [peak(own), peak(theirs)]
            print(f"{dtype:9} {case:26} ours {most[0] / 2**20:7.1f} MiB, peer {most[1] / 2**20:7.1f} MiB", flush=True)
    return 0


def observe_anew(kind: Any, name: str, args: QuantizationArgs, weight: torch.Tensor, **kwargs: Any) -> object:
    """By a new observer: at a second observation llm-compressor's does nothing."""
    return kind.load_from_registry(name, base_name="weight", args=args.model_copy(deep=True), **kwargs)(weight)


def peak(function: Callable[[], object]) -> int:
    """Most bytes that were allocated at once."""
    function()
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    now = most = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def error(
    weight: torch.Tensor,
    args: QuantizationArgs,
    low: torch.Tensor,
    high: torch.Tensor,
    norm: float,
    importance: torch.Tensor,
) -> torch.Tensor:
    """Quantization error per scale in float64, with the scale of the range as it would be stored."""
    if args.strategy == "tensor_group":
        args = args.model_copy(update={"scale_dtype": None})
    scale, zero_point = calculate_qparams(low, high, args)
    observed, weights = (flatten_for_calibration(x, "weight", args) for x in (weight, importance.expand(weight.shape)))
    found = []
    # By rows: float64 is large.
    for values, w, s, z in zip(observed.squeeze(0), weights.squeeze(0), scale, zero_point, strict=True):
        x, s, z = values.double(), s.double().unsqueeze(-1), z.double().unsqueeze(-1)
        found.append((((nearest(x / s + z, args) - z) * s) - x).abs().pow(norm).mul(w).sum(-1))
    return torch.stack(found)


def nearest(x: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """The nearest number of the format."""
    if args.type == "int":
        return x.round().clamp(-(2.0 ** (args.num_bits - 1)), 2.0 ** (args.num_bits - 1) - 1)
    if args.num_bits == 8:
        return x.clamp(-448, 448).float().to(torch.float8_e4m3fn).double()
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=x.dtype)
    middles = (numbers[1:] + numbers[:-1]) / 2
    return numbers[torch.bucketize(x.abs(), middles)] * x.sign()


def alternate(*functions: Callable[[], object], repeat: int) -> list[float]:
    """Median seconds of each, run in turns."""
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(repeat):
        for function, kept in zip(functions, seconds, strict=True):
            start = time.process_time()
            function()
            kept.append(time.process_time() - start)
    return [statistics.median(kept) for kept in seconds]


if __name__ == "__main__":
    sys.exit(main())
