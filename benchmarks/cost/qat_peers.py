"""Fine-tuning through int4 weights here and with torchao's QAT: memory, time, and the loss on text that was held out.

    python -m venv --system-site-packages peer && peer/bin/pip install torchao==0.18.0   # beside the package
    peer/bin/python benchmarks/cost/qat_peers.py [memory] [step] [loss] [--tokens 256] [--rounds 3] [--steps 24]

The default model in float32 under AdamW, groups of 64, symmetric, the language head left out; one thread.

- ``memory``: peak of resident memory above what is resident before ``fit``. Each row is a process of its own.
- ``step``: CPU time of a step divided by plain fine-tuning's. One process, the rows take turns; medians over rounds.
- ``loss``: on 8 x 256 held-out tokens, through int4 weights: before training and after it, from the same texts in the
  same order with the same learning rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import Trainer
from qat_memory import STEPS, W4A16, FineTuning, fit, load_in_memory, peak_of
from torch import nn
from torch.utils.data import DataLoader
from torchao.quantization import quantize_
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

from lightning_obs import CalibrationSession, QuantizationAwareTraining, quantized
from lightning_obs.app.data.module import TextData
from lightning_obs.app.models.pretrained import load_pretrained

ROWS = ("plain", "here", "torchao")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="*", default=["memory", "step", "loss"])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--row", help="measure the memory of this row in this process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if options.row is not None:
        model = prepared(load_in_memory(None), options.row)
        peak = peak_of(lambda: fit(model, row_of_fit(options.row), options.tokens, torch.optim.AdamW))
        print(json.dumps({"peak": peak}))
        return
    if "memory" in options.tables:
        print_memory(options.tokens)
    if "step" in options.tables:
        print_steps(options.tokens, options.rounds)
    if "loss" in options.tables:
        print_losses(options.tokens, options.steps, options.learning_rate)


def prepared(model: nn.Module, row: str) -> nn.Module:
    """The model, in whose Linear torchao quantizes where the row is torchao's."""
    if row == "torchao":
        weights = IntxFakeQuantizeConfig(torch.int4, group_size=64, is_symmetric=True)

        def is_quantized(module: nn.Module, name: str) -> bool:
            return isinstance(module, nn.Linear) and not name.endswith("lm_head")

        quantize_(model, QATConfig(weight_config=weights, step="prepare"), filter_fn=is_quantized)
    return model


def row_of_fit(row: str) -> str:
    """The row of qat_memory.py that trains a prepared model."""
    return "W4A16" if row == "here" else "plain"


def print_memory(tokens: int) -> None:
    print(f"\npeak above the memory before fit, 1 x {tokens} tokens [MB]")
    plain = 0.0
    for row in ROWS:
        command = [sys.executable, __file__, "--row", row, "--tokens", str(tokens)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        peak = json.loads(done.stdout.splitlines()[-1])["peak"]
        plain = plain or peak
        print(f"{row:10s} {peak / 1e6:8.0f}  {peak / plain:5.3f} x plain", flush=True)


def print_steps(tokens: int, rounds: int) -> None:
    models = {row: prepared(load_in_memory(None), row) for row in ROWS}
    ratios: dict[str, list[float]] = {row: [] for row in ROWS}
    for _ in range(rounds):
        seconds = {}
        for row, model in models.items():
            _first, *others = fit(model, row_of_fit(row), tokens, torch.optim.AdamW)
            assert len(others) == STEPS - 1
            seconds[row] = statistics.median(others)
        for row in ROWS:
            ratios[row].append(seconds[row] / seconds["plain"])
    print(f"\nCPU time of a step, 1 x {tokens} tokens")
    for row in ROWS:
        print(f"{row:10s} {statistics.median(ratios[row]):5.2f} x plain", flush=True)


class AtRate(FineTuning):
    """The same fine-tuning at a learning rate that is given."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        super().__init__(model, "plain", torch.optim.AdamW)
        self.learning_rate = learning_rate

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def print_losses(tokens: int, steps: int, learning_rate: float) -> None:
    data = TextData(load_pretrained(None)[1], tokens=tokens, batches=1, eval_batches=8, train_batches=steps)
    batches = [{"input_ids": block["input_ids"][None]} for block in data.training]
    held_out = [block["input_ids"][None] for block in data.held_out]
    print(f"\nheld-out loss through int4 weights, {steps} steps of 1 x {tokens} tokens, learning rate {learning_rate}")
    for row in ROWS[1:]:
        model = prepared(load_in_memory(None), row)
        callbacks = []
        if row == "here":
            callbacks.append(QuantizationAwareTraining(W4A16, ignore=["lm_head"]))
            with CalibrationSession(model, W4A16, ignore=["lm_head"]):
                pass
        before = loss_of(model, row, held_out)
        trainer = Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
        )
        trainer.fit(AtRate(model.train(), learning_rate), DataLoader(batches, batch_size=None))
        print(f"{row:10s} {before:7.4f} -> {loss_of(model, row, held_out):7.4f}", flush=True)


@torch.no_grad()
def loss_of(model: Any, row: str, held_out: Sequence[torch.Tensor]) -> float:
    """The mean loss of next-token prediction, of a model whose weights are rounded to int4."""
    with quantized(model) if row == "here" else nullcontext():
        losses = [model.eval()(input_ids=tokens, labels=tokens, use_cache=False).loss.item() for tokens in held_out]
    return statistics.mean(losses)


if __name__ == "__main__":
    main()
