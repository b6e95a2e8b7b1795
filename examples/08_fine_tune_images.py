"""Fine-tune a vision model through quantization: scanned digits, 2-bit weights, 4-bit inputs, convolutions too.

python examples/08_fine_tune_images.py --out digits_w2a4

One scale per tensor, which is the cheapest to compute with: calibration alone is not enough here.
"""

import argparse

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_obs import QuantizationAwareTraining, load_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--epochs", type=int, default=30, help="of training, before and through quantization")
options = parser.parse_args()

SCHEME = {
    "targets": ["Linear", "Conv2d"],
    "weights": {"num_bits": 2, "strategy": "tensor"},
    "input_activations": {"num_bits": 4, "strategy": "tensor"},
}


class Digits(L.LightningModule):
    """Says which digit an 8x8 picture shows; knows nothing of quantization."""

    def __init__(self, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(128, 10),
        )  # fmt: skip

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_validation_epoch_start(self) -> None:
        self.logits: list[torch.Tensor] = []

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.logits.append(logits)
        self.log("accuracy", (logits.argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class DigitsData(L.LightningDataModule):
    """1,797 scanned digits; every fourth is held out, calibration and training see the others."""

    def setup(self, stage: str) -> None:
        digits = load_digits()
        data = TensorDataset(torch.tensor(digits.images).float().unsqueeze(1) / 16, torch.tensor(digits.target))
        generator = torch.Generator().manual_seed(0)
        self.training, self.held_out = random_split(data, [0.75, 0.25], generator)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.training, batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, batch_size=64)


def trainer(epochs: int = 1, *callbacks: L.Callback) -> L.Trainer:
    return L.Trainer(
        max_epochs=epochs,
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def accuracy(*callbacks: L.Callback) -> float:
    return trainer(1, *callbacks).validate(module, data, verbose=False)[0]["accuracy"]


L.seed_everything(0)
module = Digits()
data = DigitsData()
trainer(options.epochs).fit(module, data)
full = accuracy()

callback = QuantizationAwareTraining(SCHEME, module="net", train="all")
# The first validation calibrates, later ones measure. It is given training data: held-out data choose no range.
trainer(1, callback).validate(module, data.train_dataloader(), verbose=False)
calibrated = accuracy(callback)

trainer(options.epochs, callback).fit(module, data)
tuned = accuracy(callback)
callback.export(options.out)

# Convolutions are stored in int8 like Linear; load_checkpoint reads both.
quantized_logits = module.logits
loaded = Digits()
load_checkpoint(loaded.net, options.out)
(reloaded,) = trainer().validate(loaded, data, verbose=False)

print(f"accuracy on {len(data.held_out)} held-out images: full precision {full:.3f}", end=", ")
print(f"calibrated only {calibrated:.3f}, fine-tuned {tuned:.3f}, exported and loaded again {reloaded['accuracy']:.3f}")
difference = (torch.cat(loaded.logits) - torch.cat(quantized_logits)).abs().max().item()
print("largest difference of logits after loading:", difference)
