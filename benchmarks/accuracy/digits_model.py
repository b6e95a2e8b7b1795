"""Make a vision transformer that reads handwritten digits: what quantized pictures are measured on.

    python benchmarks/accuracy/digits_model.py                 # prints its folder
    python benchmarks/accuracy/accuracy.py --model digits

No package brings a vision transformer. So one of transformers' ViT, 6 layers 96 wide, is trained on scikit-learn's
1,797 pictures of digits, 8 by 8 pixels of handwriting, in four patches: on 1,200 of them, turned and shifted a little
in each epoch. The others are calibrated on and held out (``held_out_pictures.py``).

Seeded and on one thread. It is made once, in half a minute of a free core, and kept beside the default model
($LIGHTNING_OBS_CACHE). What it says goes to stderr. Exit code 1, and nothing is kept, where it reads less than 95 % of
the held-out pictures as they are.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
from held_out_pictures import Pictures, digits, turned
from held_out_texts import SAME_KIND
from lightning.pytorch import seed_everything
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

from lightning_obs.app.models.pretrained import cache_folder
from lightning_obs.files.write import whole_folder

NAME = "ViT-digits"
EPOCHS, BATCH, LEARNING_RATE = 40, 100, 2e-3
#: of the pictures in training
DEGREES, PIXELS = 10.0, 0.5
ACCURACY = 0.95


def main() -> int:
    torch.set_num_threads(1)
    folder = cache_folder() / NAME
    if not (folder / "config.json").is_file():
        with redirect_stdout(sys.stderr):
            make(folder, EPOCHS)
    print(folder)
    return 0


def make(folder: Path, epochs: int) -> None:
    """Write the model, the whole folder or nothing.

    Raises:
        SystemExit: it is not good enough.
    """
    seed_everything(0, verbose=False)
    config = ViTConfig(
        hidden_size=96,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=192,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=10,
    )
    model = ViTForImageClassification(config)
    data = digits()
    train(model, data.training, epochs)
    model.eval()
    for name, pictures in data.held_out.items():
        print(f"{accuracy(model, pictures):.1%} of {len(pictures.labels)} pictures ({name})")
    reached = accuracy(model, data.held_out[SAME_KIND])
    if reached < ACCURACY:
        raise SystemExit(f"the accuracy is below {ACCURACY:.0%}, so nothing was written")
    with whole_folder(folder, overwrite=True) as partial:
        model.save_pretrained(partial)


def train(model: nn.Module, pictures: Pictures, epochs: int) -> None:
    """Train all weights; the rate rises in the first tenth of the steps, and falls to 0."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.05, fused=True)
    steps = epochs * (len(pictures.labels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    for _ in track(range(epochs), "training", console=Console(stderr=True)):
        for chosen in torch.randperm(len(pictures.labels)).split(BATCH):
            degrees = DEGREES * (2 * torch.rand(len(chosen)) - 1)
            pixels = PIXELS * (2 * torch.rand(len(chosen), 2) - 1)
            values = turned(pictures.values[chosen], degrees, pixels)
            loss = F.cross_entropy(model(pixel_values=values).logits, pictures.labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


@torch.inference_mode()
def accuracy(model: nn.Module, pictures: Pictures) -> float:
    """The share of pictures whose digit is read."""
    return (model(pixel_values=pictures.values).logits.argmax(-1) == pictures.labels).float().mean().item()


if __name__ == "__main__":
    sys.exit(main())
