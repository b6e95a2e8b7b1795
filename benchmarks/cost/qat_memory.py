"""Memory and time of fine-tuning through quantization, beside Lightning's plain fine-tuning of the same model.

    python benchmarks/cost/qat_memory.py                         # every table, on the default model
    python benchmarks/cost/qat_memory.py memory --tokens 256
    python benchmarks/cost/qat_memory.py logits step --rounds 5

Four tables, in float32 on one thread, one sequence a step, with AdamW (where it says so SGD, which keeps no state):

- ``memory``: the peak of resident memory above what is resident before ``fit``. Each row is a process of its own.
- ``logits``: the same peak in copies of the logits in float32, of one small block under a vocabulary of 49,152, where
  little else takes memory, with SGD. Each row is a process of its own.
- ``convolutions``: the same peak of 24 convolutions with 2.4 million weights each, on one small image, with SGD.
- ``step``: CPU time of a step, divided by plain fine-tuning's, and by that and the forward of a teacher together. One
  process, in which the rows take turns; the median over rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_obs import QuantizationAwareTraining
from lightning_obs.app.models.pretrained import load_pretrained

W4A16 = {"weights": {"num_bits": 4, "strategy": "group", "group_size": 64}}
CONVOLUTIONS = {"targets": ["Conv2d"], "weights": {"num_bits": 4, "strategy": "channel"}}
#: options of the callback by row; None: no callback
ROWS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "W4A16": {},
    "W4A16, distill=1.0": {"distill": 1.0},
    "W4A16, distill='only'": {"distill": "only"},
}
VOCABULARY = 49152
STEPS = 3


class FineTuning(LightningModule):
    """Next-token prediction; without labels where the divergence is the whole loss."""

    def __init__(self, model: nn.Module, row: str, optimizer_class: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.model = model
        self.has_loss = "only" not in row
        self.optimizer_class = optimizer_class

    def training_step(self, batch: Mapping[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        tokens = batch["input_ids"]
        if self.has_loss:
            return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return logits[0, 0, 0].detach()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer_class(self.parameters(), lr=1e-5)


class OfImages(LightningModule):
    """Brings the outputs of a network for images to zero."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-5)


class Clock(Callback):
    """Takes the CPU time of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._started = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.process_time() - self._started)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="*", default=["memory", "logits", "convolutions", "step"])
    parser.add_argument("--model", help="a folder; default: the default model")
    parser.add_argument("--tokens", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="of the table step, beside plain")
    parser.add_argument("--row", help="measure this row in this process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if options.row is not None:
        print(json.dumps({"peak": peak_of_row(options.tables[0], options.row, options.tokens[0], options.model)}))
        return
    for tokens in options.tokens:
        if "memory" in options.tables:
            print_memory(tokens, options.model)
    if "logits" in options.tables:
        print_logits(max(options.tokens))
    if "convolutions" in options.tables:
        print_convolutions()
    for tokens in options.tokens:
        if "step" in options.tables:
            print_steps(tokens, options.rounds, options.model, ["plain", *options.rows])


def print_memory(tokens: int, folder: str | None) -> None:
    print(f"\npeak above the memory before fit, 1 x {tokens} tokens [MB]")
    plain = 0.0
    for row in ROWS:
        peak = in_a_process("memory", row, tokens, folder)
        plain = plain or peak
        print(f"{row:24s} {peak / 1e6:8.0f}  {peak / plain:5.3f} x plain", flush=True)


def print_logits(tokens: int) -> None:
    print(f"\npeak above the memory before fit, {tokens} x {VOCABULARY} logits [copies of them in float32]")
    for row in ROWS:
        peak = in_a_process("logits", row, tokens, None)
        print(f"{row:24s} {peak / (4 * tokens * VOCABULARY):5.2f}", flush=True)


def print_convolutions() -> None:
    print("\npeak above the memory before fit, 24 convolutions [MB]")
    plain = 0.0
    for row in ("plain", "W4A16"):
        peak = in_a_process("convolutions", row, 0, None)
        plain = plain or peak
        print(f"{row:24s} {peak / 1e6:8.0f}  {peak / plain:5.3f} x plain", flush=True)


def in_a_process(table: str, row: str, tokens: int, folder: str | None) -> float:
    """The peak that this script measures in a process of its own [bytes]."""
    command = [sys.executable, __file__, table, "--row", row, "--tokens", str(tokens)]
    if folder is not None:
        command += ["--model", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])["peak"]


def peak_of_row(table: str, row: str, tokens: int, folder: str | None) -> int:
    """The peak of this process above its memory before fit [bytes]."""
    if table == "logits":
        model = small_block()
        fit(model, row, 16, torch.optim.SGD)  # what is imported and allocated once
        model.zero_grad()
    elif table == "convolutions":
        model = nn.Sequential(*(nn.Conv2d(512, 512, 3, padding=1) for _ in range(24)))
        images = [torch.randn(1, 512, 4, 4) for _ in range(STEPS)]
        return peak_of(lambda: fit_module(OfImages(model), images, row, CONVOLUTIONS))
    else:
        model = load_in_memory(folder)
    optimizer_class = torch.optim.SGD if table == "logits" else torch.optim.AdamW
    return peak_of(lambda: fit(model, row, tokens, optimizer_class))


def load_in_memory(folder: str | None) -> nn.Module:
    """A model in float32, with no weight in a mapped file, which may be resident or not."""
    model = load_pretrained(folder, dtype="float32")[0]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def peak_of(run: Callable[[], object]) -> int:
    """The peak of this process in ``run()`` above its memory before [bytes]."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def resident(key: str) -> int:
    """``VmRSS``, the resident memory, or ``VmHWM``, its peak [bytes]."""
    status = Path("/proc/self/status").read_text()
    kilobytes = re.search(rf"{key}:\s+(\d+)", status)
    assert kilobytes is not None
    return int(kilobytes[1]) * 1024


def small_block() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def fit(model: nn.Module, row: str, tokens: int, optimizer_class: type[torch.optim.Optimizer]) -> list[float]:
    """Train a few steps; their CPU times [s]."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(STEPS):
        batches.append({"input_ids": torch.randint(0, 40000, (1, tokens), generator=generator)})
    return fit_module(FineTuning(model.train(), row, optimizer_class), batches, row, W4A16)


def fit_module(module: LightningModule, batches: Sequence[Any], row: str, scheme: dict[str, Any]) -> list[float]:
    """Train a few steps; their CPU times [s]."""
    clock = Clock()
    callbacks: list[Callback] = [clock]
    arguments = ROWS[row]
    if arguments is not None:
        callbacks.append(QuantizationAwareTraining(scheme, ignore=["lm_head"], **arguments))
    trainer = Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return clock.seconds


def print_steps(tokens: int, rounds: int, folder: str | None, rows: Sequence[str]) -> None:
    rows = list(dict.fromkeys(rows))
    model = load_pretrained(folder, dtype="float32")[0]
    seconds: dict[str, list[float]] = {row: [] for row in [*rows, "teacher"]}
    for _ in range(rounds):
        for row in rows:
            _first, *others = fit(model, row, tokens, torch.optim.AdamW)  # the first makes the optimizer's state
            seconds[row].append(statistics.median(others))
        seconds["teacher"].append(forward_time(model, tokens))
    print(f"\nCPU time of a step, 1 x {tokens} tokens; plain {statistics.median(seconds['plain']):.2f} s")
    for row in rows:
        of_plain = [step / plain for step, plain in zip(seconds[row], seconds["plain"], strict=True)]
        text = f"{row:24s} {statistics.median(of_plain):5.2f} x plain"
        if "distill" in row:
            of_both = []
            for step, plain, teacher in zip(seconds[row], seconds["plain"], seconds["teacher"], strict=True):
                of_both.append(step / (plain + teacher))
            text += f"  {statistics.median(of_both):5.2f} x plain and the teacher's forward"
        print(text, flush=True)


@torch.no_grad()
def forward_time(model: nn.Module, tokens: int) -> float:
    started = time.process_time()
    model.eval()(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return time.process_time() - started


if __name__ == "__main__":
    main()
