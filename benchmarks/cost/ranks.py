"""What calibration costs each of two ranks, which share out the search (DDP) and also gather the weights for it (FSDP2,
FSDP1, where each layer is a unit), and memory of export.

python benchmarks/cost/ranks.py --layers 8 --width 1024

CPU seconds are of one process; wall time says little where ranks share a core. Memory is the resident peak above what
the process held before the step (Linux).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

sys.path.insert(0, str(Path(__file__).parents[2]))
from lightning_obs import CalibrationSession, export_checkpoint
from lightning_obs.ranks.collectives import Collectives
from tests.support.rank_processes import run_ranks

SCHEME = {"weights": {"num_bits": 4, "group_size": 128}}


def build(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


class Cost:
    """CPU seconds, and MiB of memory at the peak above what there was before."""

    def __enter__(self) -> Cost:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self.before, self.start = status("VmRSS"), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, self.memory = time.process_time() - self.start, status("VmHWM") - self.before


def on_rank(rank: int, how: str, observer: str, layers: int, width: int, folder: str) -> list[float]:
    model = build(layers, width)
    collectives = Collectives()
    if how != "one device":
        collectives = Collectives.of_group()
    if how == "FSDP2":
        mesh = init_device_mesh("cpu", (collectives.size,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
    if how == "FSDP1":
        policy = ModuleWrapPolicy({nn.Linear})
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    held = sum(p.to_local().numel() if how == "FSDP2" else p.numel() for p in model.parameters()) * 4 / 2**20
    warnings.simplefilter("ignore")
    session = CalibrationSession(model, SCHEME, observers={"weight": observer}, collectives=collectives)
    with Cost() as calibration, session:
        pass
    with Cost() as export:
        if rank == 0 or how.startswith("FSDP"):
            export_checkpoint(model, os.path.join(folder, how))
    return [held, calibration.seconds, calibration.memory, export.seconds, export.memory]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--observer", default="memoryless_mse")
    options = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)  # what a process frees is then no longer counted as its memory
    given = (options.observer, options.layers, options.width)
    title = "rank  weights held [MiB]  calibration [CPU s]  [MiB]  export [CPU s]  [MiB]"
    for how in ("one device", "DDP", "FSDP2", "FSDP1"):
        with tempfile.TemporaryDirectory() as folder:
            results = run_ranks(on_rank, 1 if how == "one device" else 2, how, *given, folder, timeout=600)
        print(f"{how}\n{title}")
        for rank, (held, seconds, memory, export_seconds, export_memory) in enumerate(results):
            print(
                f"{rank:4}  {held:18.0f}  {seconds:19.2f}  {memory:5.0f}  {export_seconds:14.2f}  {export_memory:5.0f}"
            )


if __name__ == "__main__":
    main()
