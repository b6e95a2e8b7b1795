"""Make a language model whose weights were never quantized: what 4-bit numbers are measured on.

    python benchmarks/accuracy/unquantized_model.py            # prints its folder
    python -m lightning_obs experiment=w4a16_small model.path=$(python benchmarks/accuracy/unquantized_model.py)

The default model comes as GGUF Q4_1: 32 neighbouring weights have at most 16 values, so 4 bits of it are a second
rounding of a 4-bit lattice. Here each of these weights gets a uniform random number of one step of its lattice, which
is what Q4_1 had taken away from it. Then the model is trained until it is a good one again: next-token loss plus
divergence from the default model's predictions, once on all the text that shares no run of 32 tokens with the first
90 blocks of the held-out text, of which runs measure on 16 unless they are told otherwise, and that runs do not
calibrate on. Embeddings (8 bits) and norms stay.

Seeded and on one thread, so it is the same model each time on one kind of CPU; ``--device cuda`` trains on a GPU, which
makes another model, about as good. It is made once, in about ten minutes of
a free core, and kept beside the default model ($LIGHTNING_OBS_CACHE). A run that is interrupted leaves nothing there;
the next one starts anew. What it says goes to stderr. Exit code 1, and nothing is kept, where the perplexity on
held-out text ends above 16.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from rich.console import Console
from rich.progress import track
from torch import nn
from torchmetrics.text import Perplexity

from lightning_obs.app.data.module import TextData
from lightning_obs.app.models.pretrained import DEFAULT_MODEL, cache_folder, load_pretrained
from lightning_obs.files.write import whole_folder
from lightning_obs.numerics.divergence import divergence

#: the version is that of the text that it was trained on: the first one had seen two fifths of the held-out text
NAME = f"{DEFAULT_MODEL}-unquantized-2"
STEPS, WARM_UP, LEARNING_RATE = 80, 10, 2e-4
#: blocks of 512 tokens
HELD_OUT, MEASURED = 90, 16
PERPLEXITY = 16.0
#: weights of a block of Q4_1, which share their 16 values
BLOCK = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    torch.set_num_threads(1)
    folder = cache_folder() / NAME
    if not (folder / "config.json").is_file():
        with redirect_stdout(sys.stderr):
            make(folder, device)
    print(folder)
    return 0


def make(folder: Path, device: str = "cpu") -> None:
    """Write the model, the whole folder or nothing.

    Args:
        folder: to write.
        device: to train and to measure on.

    Raises:
        SystemExit: it is not good enough.
    """
    seed_everything(0, verbose=False)
    model, tokenizer = load_pretrained(dtype="float32")
    teacher, _ = load_pretrained(dtype="float32")
    weights = take_off_lattice(model)
    model.to(device)
    teacher.to(device)
    data = TextData(tokenizer, train_batches=STEPS, eval_batches=HELD_OUT)
    train(model, teacher, weights, data)
    reached = perplexity(model, data)
    print(f"perplexity {reached:.3f} on held-out text", file=sys.stderr)
    if reached > PERPLEXITY:
        raise SystemExit(f"the perplexity is above {PERPLEXITY}, so nothing was written")
    with whole_folder(folder, overwrite=True) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


@torch.no_grad()
def take_off_lattice(model: nn.Module) -> list[nn.Parameter]:
    """Add a random number to each weight that was 4 bits wide, and return these weights."""
    weights = [
        module.weight for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"
    ]
    for weight in weights:
        blocks = weight.view(len(weight), -1, BLOCK)
        step = (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 15
        blocks += (torch.rand_like(blocks) - 0.5) * step
    return weights


def train(model: Any, teacher: Any, weights: list[nn.Parameter], data: TextData) -> None:
    """Train ``weights`` for one epoch; the rate rises over a few steps, and falls to 0."""
    model.requires_grad_(False)
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(weights, LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    factors = [min((step + 1) / WARM_UP, (STEPS - step) / (STEPS - WARM_UP)) for step in range(STEPS)]
    batches = track(data.train_dataloader(), f"training {NAME}", console=Console(stderr=True))
    for factor, batch in zip(factors, batches, strict=True):
        optimizer.param_groups[0]["lr"] = factor * LEARNING_RATE
        ids = batch["input_ids"].to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16):
            with torch.no_grad():
                wanted = teacher(input_ids=ids, use_cache=False).logits
            output = model(input_ids=ids, labels=ids, use_cache=False)
        loss = output.loss + divergence(output.logits, wanted)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.inference_mode()
def perplexity(model: Any, data: TextData) -> float:
    """Of every token but the first of each block, as the command line measures it, on as many blocks."""
    metric = Perplexity().to(model.device)
    for batch in islice(data.test_dataloader(), MEASURED):
        ids = batch["input_ids"].to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits
        metric.update(logits[:, :-1].float(), ids[:, 1:])
    return float(metric.compute())


if __name__ == "__main__":
    sys.exit(main())
