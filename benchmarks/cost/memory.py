"""Peak memory and CPU time of calibrating and exporting a model, by the way it is done.

    python benchmarks/cost/memory.py  # every row, on a random Llama of 1.1B parameters (2.2 GB)
    python benchmarks/cost/memory.py --size two                  # of two blocks of it
    python benchmarks/cost/memory.py --size tiny                 # of a few MB, in seconds
    python benchmarks/cost/memory.py "export W4A16" "export FP8_DYNAMIC" --scratch /data

The model is made in a scratch folder once (bfloat16, files of 500 MB) and kept there. Each row is a process of its own,
on one thread, that has done the same with a tiny model before; on 2 ranks two processes, of which the larger number is
shown. Memory is above what it has when the row begins; where a
row exports a model that is in memory, with that model. ``resident`` is the peak of resident memory, mapped files
included, ``anonymous`` that of memory that no file backs, sampled every 4 ms.

Exit code 1 if a row takes more than its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_obs import CalibrationSession, calibrate_layerwise, export_checkpoint, quantize_checkpoint, sensitivity
from lightning_obs.files.tensors import TensorReader, give_back_freed
from lightning_obs.numerics.kernels import launch  # noqa: F401  (numba counts as an import)
from lightning_obs.ranks.collectives import Collectives, gather_objects

SIZES = {
    "big": {"hidden_size": 2048, "num_hidden_layers": 22, "intermediate_size": 5632, "vocab_size": 32000},
    "two": {"hidden_size": 2048, "num_hidden_layers": 2, "intermediate_size": 5632, "vocab_size": 1024},  # such blocks
    "tiny": {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 1024},
}


@dataclass(frozen=True)
class Row:
    """A way to be measured: a generator that yields where the measurement begins.

    Attributes:
        limit: MB of resident memory that the big model may take, on each rank.
        ranks: processes that do it together.
    """

    run: Callable[[Path, Path], Iterator[None]]
    limit: float | None = None
    ranks: int = 1


def in_memory(scheme: str, weight: str | None = None, export_alone: bool = False) -> Callable[..., Iterator[None]]:
    """Load, calibrate, export; ``export_alone``: only the export is measured, of a model that no file backs."""

    def run(folder: Path, out: Path) -> Iterator[None]:
        if not export_alone:
            yield
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        if export_alone:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        with CalibrationSession(model, scheme, ignore=["lm_head"], observers=weight and {"weight": weight}):
            pass
        if export_alone:
            yield
        export_checkpoint(model, out)

    return run


def from_files(scheme: str, weight: str | None = None) -> Callable[..., Iterator[None]]:
    """``quantize_checkpoint``."""

    def run(folder: Path, out: Path) -> Iterator[None]:
        yield
        quantize_checkpoint(folder, out, scheme, ignore=["lm_head"], observers=weight and {"weight": weight})

    return run


def with_data(offload: bool) -> Callable[..., Iterator[None]]:
    """Load, calibrate on 8 batches of 256 tokens, export; ``offload``: the model stays on disk."""

    def run(folder: Path, out: Path) -> Iterator[None]:
        yield
        where = {"device_map": {"": "disk"}, "offload_folder": f"{out}-offload"} if offload else {}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **where).eval()
        calibrate(model, out, Collectives())

    return run


def with_sensitivity(offload: bool) -> Callable[..., Iterator[None]]:
    """Load, and measure a scheme layer by layer on 256 tokens; ``offload``: the model stays on disk."""

    def run(folder: Path, out: Path) -> Iterator[None]:
        yield
        where = {"device_map": {"": "disk"}, "offload_folder": f"{out}-offload"} if offload else {}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **where).eval()
        tokens = torch.randint(model.config.vocab_size, (1, 256), generator=torch.Generator().manual_seed(1))
        found = sensitivity(model, [tokens], ["W4A16"], ignore=["lm_head"])
        out.mkdir()
        (out / "losses.json").write_text(json.dumps(found.layers))

    return run


def layer_by_layer(folder: Path, out: Path, scheme: str = "FP8", **options: Any) -> Iterator[None]:
    """``calibrate_layerwise`` on 32 batches of 256 tokens."""
    vocabulary = LlamaConfig.from_pretrained(folder).vocab_size
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(vocabulary, (1, 256), generator=generator) for _ in range(32)]
    yield
    calibrate_layerwise(folder, batches, scheme, out, ignore=["lm_head"], **options)


def in_shards(folder: Path, out: Path, forward_alone: bool = False) -> Iterator[None]:
    """The same under FSDP2, with a share of the rows of each weight in each rank's memory, and of the batches.

    ``forward_alone``: what FSDP2 itself takes, on one batch.
    """
    yield
    config = LlamaConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.model.layers, model.model.embed_tokens, model.lm_head, model):
        # Not to keep a unit's buffer until the next one is gathered, beside which gathers run on a GPU and not here.
        fully_shard(module, mesh=mesh)._set_unshard_async_op(True)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    with closing(TensorReader(folder)) as reader, torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            start = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)[1][0]
            local.copy_(reader.read(name)[start : start + len(local)])
    if forward_alone:
        with torch.no_grad():
            model(torch.ones(1, 256, dtype=torch.int64))
    else:
        calibrate(model, out, Collectives.of_group())


def calibrate(model: Any, out: Path, ranks: Collectives) -> None:
    """Of the batches, this rank's; export."""
    generator = torch.Generator().manual_seed(1)
    with CalibrationSession(model, "FP8", ignore=["lm_head"], collectives=ranks), torch.no_grad():
        for number in range(8):
            batch = torch.randint(model.config.vocab_size, (1, 256), generator=generator)
            if number % ranks.size == ranks.rank:
                model(batch)
    export_checkpoint(model, out)


#: name, scheme, observer of the weights
DATA_FREE = (
    ("W4A16 minmax", "W4A16", "memoryless_minmax"),
    ("W4A16 mse", "W4A16", "memoryless_mse"),
    ("FP8_DYNAMIC", "FP8_DYNAMIC", None),
    ("NVFP4A16", "NVFP4A16", None),
)
ROWS = {
    **{
        f"export {scheme}": Row(in_memory(scheme, export_alone=True), limit=100)
        for scheme in ("W4A16", "FP8_DYNAMIC", "NVFP4A16")
    },
    **{f"in memory {name}": Row(in_memory(scheme, weight)) for name, scheme, weight in DATA_FREE},
    **{f"files {name}": Row(from_files(scheme, weight), limit=220) for name, scheme, weight in DATA_FREE},
    "in memory FP8": Row(with_data(offload=False)),
    "offloaded FP8": Row(with_data(offload=True), limit=440),
    "sensitivity in memory": Row(with_sensitivity(offload=False)),
    "sensitivity offloaded": Row(with_sensitivity(offload=True), limit=1300),
    "layer by layer FP8": Row(layer_by_layer, limit=88 + 34 + 300),  # a block, its outputs, and 300
    "layer by layer GPTQ": Row(  # and its Hessians (of 3 inputs of 2048 channels, one of 5632), the last in float64
        partial(layer_by_layer, scheme="W4A16", rounding="gptq"), limit=88 + 34 + 300 + 177 + 254
    ),
    "FSDP2 FP8, 2 ranks": Row(in_shards, limit=1100 + 300, ranks=2),  # half of the model, and 300
    "FSDP2 forward, 2 ranks": Row(partial(in_shards, forward_alone=True), ranks=2),
}


def make_model(scratch: Path, size: str) -> Path:
    folder = scratch / f"llama-{size}"
    if not folder.is_dir():
        torch.manual_seed(0)
        heads = {"num_attention_heads": 8} if size == "tiny" else {"num_attention_heads": 32, "num_key_value_heads": 4}
        config = LlamaConfig(max_position_embeddings=2048, dtype="bfloat16", **SIZES[size], **heads)
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(f"{folder}.part", max_shard_size="1MB" if size == "tiny" else "500MB")
        os.rename(f"{folder}.part", folder)
    return folder


def status() -> dict[str, float]:
    """MB of each kind of memory of this process."""
    text = Path("/proc/self/status").read_text()
    return {name: int(kb) * 1024 / 1e6 for name, kb in re.findall(r"(Vm\w+|Rss\w+):\s+(\d+) kB", text)}


class Sampler(threading.Thread):
    """The largest anonymous memory since it was started."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0.0
        self.start()

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, status()["RssAnon"])
            time.sleep(0.004)


def measure(name: str, folder: Path) -> dict[str, float]:
    """Run a row in this process, as one of its ranks."""
    torch.set_num_threads(1)
    if ROWS[name].ranks > 1:
        dist.init_process_group("gloo")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # Beside the model, so that a scratch folder in memory counts for neither.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        if ROWS[name].ranks > 1:
            scratch = gather_objects(scratch)[0]
        # What is imported and compiled on first use is loaded before.
        list(ROWS[name].run(make_model(folder.parent, "tiny"), Path(scratch) / "tiny"))
        run = ROWS[name].run(folder, Path(scratch) / "out")
        next(run)
        give_back_freed()  # memory that calibration has freed is there for the export to take
        before, cpu, wall = status(), time.process_time(), time.perf_counter()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        sampler = Sampler()
        next(run, None)
        after = status()
        found = {
            "resident": after["VmHWM"] - before["VmRSS"],
            "anonymous": max(sampler.peak, after["RssAnon"]) - before["RssAnon"],
            "cpu": time.process_time() - cpu,
            "wall": time.perf_counter() - wall,
            "written": sum(path.stat().st_size for path in (Path(scratch) / "out").rglob("*")) / 1e6,
        }
        if ROWS[name].ranks > 1:
            dist.barrier()  # rank 0 deletes what it has written
        return found


def run_row(command: list[str], ranks: int) -> dict[str, float]:
    """Start the processes of a row; of what they measure, the larger."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    if ranks > 1:  # FSDP2 gathers weights in blocks that glibc would keep when they are freed
        shared |= {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **shared, "RANK": str(rank)})
        for rank in range(ranks)
    ]
    printed = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(1)
    found = [json.loads(text.strip().splitlines()[-1]) for text in printed]
    return {key: max(one[key] for one in found) for key in UNITS}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--size", choices=SIZES, default="big")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "lightning_obs_memory")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.scratch)))
        return 0
    if unknown := [row for row in options.rows if row not in ROWS]:
        parser.error(f"unknown row: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    options.scratch.mkdir(parents=True, exist_ok=True)
    folder, failed = make_model(options.scratch, options.size), False
    columns = (escape(f"{name} [{unit}]") for name, unit in UNITS.items())
    table = Table("row", *columns, escape("limit [MB]"))
    for name in options.rows or ROWS:
        command = [sys.executable, "-W", "ignore", __file__, "--measure", name, "--scratch", str(folder)]
        found, limit = run_row(command, ROWS[name].ranks), ROWS[name].limit
        failed |= limit is not None and options.size == "big" and found["resident"] > limit
        table.add_row(name, *(f"{found[key]:,.1f}" for key in UNITS), "" if limit is None else f"{limit:g}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return int(failed)


UNITS = {"resident": "MB", "anonymous": "MB", "cpu": "s", "wall": "s", "written": "MB"}


if __name__ == "__main__":
    sys.exit(main())
