"""Your own nn.Module, convolutions included: train it, calibrate in every validation, export, load.

python examples/03_own_module.py --out digits_int8
"""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_obs import CalibrationCallback, load_checkpoint, quantized

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()


class Stripes(L.LightningModule):
    """Says whether the stripes of a 16x16 picture are horizontal or vertical."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(128, 32), nn.ReLU(),
            nn.Linear(32, 2),
        )  # fmt: skip

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def pictures(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    lines = (torch.rand(count, 1, 16, 1, generator=generator) > 0.5).float().expand(-1, -1, -1, 16)
    vertical = torch.rand(count, generator=generator) > 0.5
    images = torch.where(vertical.view(-1, 1, 1, 1), lines.transpose(-1, -2), lines)
    return TensorDataset(images + 0.3 * torch.randn(images.shape, generator=generator), vertical.long())


L.seed_everything(0)
module = Stripes()
held_out = DataLoader(pictures(256, seed=1), batch_size=64)
# The convolution is stored in int8 like the Linear modules; load_checkpoint reads both.
calibration = CalibrationCallback("INT8_STATIC", targets=["Linear", "Conv2d"], module="net")
trainer = L.Trainer(
    max_epochs=options.epochs, callbacks=[calibration], logger=False, enable_checkpointing=False, accelerator="cpu"
)
trainer.fit(module, DataLoader(pictures(512, seed=0), batch_size=64), held_out)
calibration.export(options.out)

images, labels = held_out.dataset.tensors
with torch.no_grad(), quantized(module.net):
    calibrated = module.net(images)
with torch.no_grad():
    loaded = load_checkpoint(Stripes().net, options.out)(images)
print(f"accuracy {(module.net(images).argmax(-1) == labels).float().mean():.3f} in full precision")
print(f"accuracy {(loaded.argmax(-1) == labels).float().mean():.3f} quantized and loaded")
print("largest difference after loading:", (loaded - calibrated).abs().max().item())
