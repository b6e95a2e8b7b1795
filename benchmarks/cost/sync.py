"""What it costs to make two ranks' statistics one: packed, against one reduction per statistic.

    python benchmarks/cost/sync.py                         # 448 observers, two processes, gloo
    python benchmarks/cost/sync.py --observer histogram

Both sides use Lightning's ``DDPStrategy.reduce``. ``packed`` is ``sync_statistics``: agreeing, checking that every
value is finite, packing, reducing, unpacking. ``one by one`` is a reduction of every statistic that the observers
declare, and nothing else. They take turns; medians over the repeats, on rank 0.

Each rank wants a core of its own: what both do in turn on one core counts twice for ``packed``.

Exit code 1 if packed does not take 50 times less time (for static_minmax).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from statistics import median

import torch
from compressed_tensors.quantization import QuantizationArgs
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from rich.table import Table
from torch import distributed as dist
from torch import multiprocessing

from lightning_obs.observers import Observer
from lightning_obs.ranks.collectives import Collectives, Op
from lightning_obs.ranks.sync import sync_statistics

GOAL = 50


def main() -> int:
    """Start the ranks, return rank 0's exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--observers", type=int, default=448, help="how many")
    parser.add_argument("--observer", default="static_minmax", help="which")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        queue = multiprocessing.get_context("spawn").SimpleQueue()
        multiprocessing.spawn(rank_main, (options, f"{folder}/store", queue), nprocs=options.ranks)
        return int(queue.get())


def rank_main(rank: int, options: argparse.Namespace, store: str, queue: multiprocessing.SimpleQueue[int]) -> None:
    """Time both ways on one rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(minutes=5),
    )
    strategy = DDPStrategy()

    def reduce(tensor: torch.Tensor, op: Op) -> torch.Tensor:
        return strategy.reduce(tensor, reduce_op=op)

    collectives = replace(Collectives.of_group(), reduce=reduce)
    observers = {}
    for i in range(options.observers):
        observer = Observer.load_from_registry(options.observer, base_name="input", args=QuantizationArgs(num_bits=8))
        value = torch.randn(64, 512, generator=torch.Generator().manual_seed(options.ranks * i + rank))
        observers[f"model.layers.{i}.mlp", "input"] = observer(value)
    packed, apart, taken = [], [], 0
    for _ in range(options.repeats):
        dist.barrier()
        start = time.perf_counter()
        taken = sync_statistics(observers, collectives).collectives
        packed.append(time.perf_counter() - start)
        statistics = [
            (getattr(observer, name).clone(), op)
            for observer in observers.values()
            for name, op in observer._act_sync_dict.items()
        ]
        dist.barrier()
        start = time.perf_counter()
        for value, op in statistics:
            strategy.reduce(value, reduce_op=op)
        apart.append(time.perf_counter() - start)
    dist.destroy_process_group()
    if rank == 0:
        queue.put(report(options, median(packed), median(apart), taken, len(statistics)))


def report(options: argparse.Namespace, packed: float, apart: float, taken: int, reductions: int) -> int:
    """Print the table; 1 if the goal was missed."""
    table = Table(title=f"{options.observers} observers ({options.observer}), {options.ranks} ranks, gloo, CPU")
    for column in ("", "collectives", "time [ms]", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("one by one", str(reductions), f"{apart * 1e3:.1f}", "1.0x")
    table.add_row("packed", str(taken), f"{packed * 1e3:.1f}", f"{apart / packed:.1f}x")
    Console(width=100).print(table)
    return int(options.observer == "static_minmax" and apart < GOAL * packed)


if __name__ == "__main__":
    sys.exit(main())
