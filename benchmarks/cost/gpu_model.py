"""What the calibration of a whole model takes on a device: hooks, search, memory, export; llm-compressor's beside it.

    python benchmarks/cost/gpu_model.py                            # a Llama of 1.1B parameters, the first CUDA device
    python benchmarks/cost/gpu_model.py --size 8b                  # of 8B parameters, 16 GB
    python benchmarks/cost/gpu_model.py --size tiny --device cpu   # shows that it runs

The model has random weights in bfloat16 and is made on the device; the tokens are random.

``batches`` is the time of the batches with hooks over their time without (after a warm-up, medians of ``--repeats``
turns); ``search`` is ``finalize()``; ``peak`` is the most memory at once beside the model, of which ``forward`` is
what the batches take alone; ``waits`` counts the operations of one batch and of ``finalize()`` for which the host
waits. Where llm-compressor is installed (``make parity`` makes that venv), ``oneshot`` with the same scheme, observers
and data runs on a copy of the model, and the last columns are its whole time and ours, batches and search.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_obs import CalibrationSession, export_checkpoint

SIZES = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 1024},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 22, "intermediate_size": 5632, "vocab_size": 32000},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256},
}
HEADS = {
    "tiny": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "1b": {"num_attention_heads": 32, "num_key_value_heads": 4},
    "8b": {"num_attention_heads": 32, "num_key_value_heads": 8},
}


@dataclass
class Row:
    """A calibration: ``observers`` by tensor, further options of the session; ``peer`` is what oneshot calls it."""

    scheme: str
    observers: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    peer: str | None = None


ROWS = {
    "FP8_DYNAMIC": Row("FP8_DYNAMIC", peer="quantization"),
    "INT8_STATIC minmax": Row("INT8_STATIC", {"input": "static_minmax"}),
    "INT8_STATIC histogram": Row("INT8_STATIC", {"input": "histogram"}),
    "INT8_STATIC mse": Row("INT8_STATIC", {"input": "mse", "weight": "memoryless_mse"}),
    "FP8 minmax": Row("FP8", {"input": "static_minmax"}, peer="quantization"),
    "NVFP4": Row("NVFP4", peer="quantization"),
    "W4A16 minmax": Row("W4A16", {"weight": "memoryless_minmax"}, peer="quantization"),
    "W4A16 mse": Row("W4A16", {"weight": "memoryless_mse"}, peer="quantization"),
    "W4A16 imatrix": Row("W4A16", {"weight": "imatrix_mse"}),
    "W4A16 local_hessian": Row("W4A16", {"weight": "local_hessian"}),
    "W4A16 hessian": Row("W4A16", {"weight": "hessian"}),
    "W4A16 rounded": Row("W4A16", {"weight": "memoryless_mse"}, {"rounding": "gptq"}, peer="gptq"),
}


def main() -> int:
    """Print a line for each row as it ends, and one table; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="1b", choices=SIZES)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="of a batch, in sequences of at most 512")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW")
    parser.add_argument("--no-peer", action="store_true", help="leave llm-compressor out")
    parser.add_argument("--export", action="store_true", help="time the export of the first row, too")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here; --size tiny --device cpu shows that this runs.", file=sys.stderr)
        return 1
    warnings.filterwarnings("ignore")
    model = make_model(options.size, device)
    batches = make_batches(model, options.batches, options.tokens, device)
    plain = timed(lambda: run(model, batches), device, options.repeats)
    _, forward = peak_of(lambda: run(model, batches), device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    title = f"{name}, {options.size}: {options.batches} batches of {options.tokens} tokens in {plain:.2f} s"
    columns = (
        "row",
        "batches",
        "search [s]",
        "peak [MiB]",
        "forward [MiB]",
        "waits",
        "ours [s]",
        "peer [s]",
        "peer / ours",
    )
    table = Table(*columns, title=title)
    print(title, flush=True)
    for label in options.only:
        table.add_row(label, *measure(ROWS[label], model, batches, plain, forward, options))
        print(label, *(list(column.cells)[-1] for column in table.columns[1:]), flush=True)
    Console(width=120).print(table)
    return 0


def measure(
    row: Row, model: nn.Module, batches: list[torch.Tensor], plain: float, forward: int, options: argparse.Namespace
) -> list[str]:
    """The cells of a row."""
    device = batches[0].device
    took, searched, peaks = [], [], []
    for number in range(options.repeats):
        session = session_of(row, model)

        def calibrate(session: CalibrationSession = session) -> tuple[float, float]:
            session.attach()
            start = now(device)
            if session.needs_data:
                run(model, batches)
            middle = now(device)
            session.finalize()
            return middle - start, now(device) - middle

        (batch_time, search_time), peak = peak_of(calibrate, device)
        took.append(batch_time)
        searched.append(search_time)
        peaks.append(peak)
        if options.export and number == 0 and row is ROWS[options.only[0]]:
            export(session, device)
        remove(session)
    ours = median(took) + median(searched)
    ratio = f"{median(took) / plain:.2f}" if session.needs_data else ""
    waits = "/".join(map(str, waits_of(row, model, batches))) if device.type == "cuda" else ""
    cells = [
        ratio,
        f"{median(searched):.2f}",
        f"{max(peaks) / 2**20:.0f}",
        f"{forward / 2**20:.0f}",
        waits,
        f"{ours:.2f}",
    ]
    peer = None if options.no_peer or row.peer is None else peer_seconds(row, model, batches)
    return [*cells, f"{peer:.2f}" if peer else "", f"{peer / ours:.1f}" if peer else ""]


def session_of(row: Row, model: nn.Module) -> CalibrationSession:
    """A new session of ``row``."""
    observers = row.observers or None
    return CalibrationSession(model, row.scheme, ignore=["lm_head"], observers=observers, **row.options)


def remove(session: CalibrationSession) -> None:
    """Leave the model as it was."""
    for module in session.model.modules():
        for key in [key for key in module._parameters if key.endswith(("_scale", "_zero_point", "_global_scale"))]:
            delattr(module, key)
        for key in ("quantization_scheme", "quantization_status"):
            if hasattr(module, key):
                delattr(module, key)
    gc.collect()


def waits_of(row: Row, model: nn.Module, batches: list[torch.Tensor]) -> tuple[int, int]:
    """Operations for which the host waits: in one batch that is not the first, and in ``finalize()``."""
    session = session_of(row, model)
    session.attach()
    counts = []
    if session.needs_data:
        run(model, batches[:1])
    for work in (lambda: run(model, batches[1:2]) if session.needs_data else None, session.finalize):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchronizing" in str(each.message) for each in caught))
    remove(session)
    return counts[0], counts[1]


def export(session: CalibrationSession, device: torch.device) -> None:
    """Print what writing the checkpoint takes."""
    with tempfile.TemporaryDirectory() as folder:
        start = now(device)
        export_checkpoint(session.model, folder)
        took = now(device) - start
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    print(f"export: {took:.2f} s, {size / 2**20:.0f} MiB", flush=True)


def peer_seconds(row: Row, model: nn.Module, batches: list[torch.Tensor]) -> float | None:
    """Seconds of llm-compressor's oneshot on a copy of the model, None where it is not installed."""
    try:
        from compressed_tensors.quantization import preset_name_to_scheme
        from llmcompressor import oneshot
        from llmcompressor.modifiers.gptq import GPTQModifier
        from llmcompressor.modifiers.quantization import QuantizationModifier
        from loguru import logger
    except ImportError:
        return None
    logger.remove()
    scheme = preset_name_to_scheme(row.scheme, ["Linear"])
    scheme.weights.observer = row.observers.get("weight", scheme.weights.observer)
    if row.peer == "gptq":
        scheme.weights.observer = "memoryless_minmax"
    if scheme.input_activations is not None and "input" in row.observers:
        scheme.input_activations.observer = row.observers["input"]
    modifier = {"quantization": QuantizationModifier, "gptq": GPTQModifier}[row.peer or ""]
    device, theirs = batches[0].device, copy.deepcopy(model)
    needs_data = scheme.input_activations is not None and scheme.input_activations.dynamic is not True
    data = [{"input_ids": each} for each in batches]
    with tempfile.TemporaryDirectory() as folder:
        theirs.config.save_pretrained(folder)  # oneshot reads it again
        theirs.name_or_path = theirs.config._name_or_path = folder
        start = now(device)
        oneshot(
            model=theirs,
            dataset=DataLoader(data, batch_size=None) if needs_data or row.peer == "gptq" else None,
            recipe=modifier(ignore=["lm_head"], config_groups={"group_0": scheme}),
            pipeline="sequential" if row.peer == "gptq" else "basic" if needs_data else "datafree",
            processor=object(),
        )
        return now(device) - start


@torch.no_grad()
def run(model: nn.Module, batches: list[torch.Tensor]) -> None:
    """Every batch through the model without its language head, whose logits of random tokens are not needed."""
    for batch in batches:
        model.model(input_ids=batch, use_cache=False)


def make_model(size: str, device: torch.device) -> LlamaForCausalLM:
    """A Llama of random weights in bfloat16, made where it runs."""
    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=2048, dtype="bfloat16", **SIZES[size], **HEADS[size])
    with device:
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def make_batches(model: LlamaForCausalLM, count: int, tokens: int, device: torch.device) -> list[torch.Tensor]:
    """(sequences, at most 512) random tokens each."""
    generator = torch.Generator().manual_seed(1)
    length = min(tokens, 512)
    shape = (tokens // length, length)
    return [torch.randint(model.config.vocab_size, shape, generator=generator).to(device) for _ in range(count)]


def now(device: torch.device) -> float:
    """Seconds, when the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of ``work``, after one call."""
    work()
    times = []
    for _ in range(repeats):
        start = now(device)
        work()
        times.append(now(device) - start)
    return median(times)


def peak_of(work: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """What ``work`` returns, and the most bytes at once on the device beside what was there before."""
    if device.type != "cuda":
        return work(), 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    return work(), torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    sys.exit(main())
