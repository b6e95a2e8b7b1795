"""LightningCLI: the callback and its checkpoint's folder stand in a YAML file, no code of the project knows of them.

python examples/14_lightning_cli.py fit --config examples/14_lightning_cli.yaml
"""

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Stripes(L.LightningModule):
    """Says whether the stripes of a 16x16 picture are horizontal or vertical."""

    def __init__(self, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class Pictures(L.LightningDataModule):
    """Noisy stripes; what is validated on is not trained on."""

    def pictures(self, count: int, seed: int) -> DataLoader:
        generator = torch.Generator().manual_seed(seed)
        lines = (torch.rand(count, 1, 16, 1, generator=generator) > 0.5).float().expand(-1, -1, -1, 16)
        vertical = torch.rand(count, generator=generator) > 0.5
        images = torch.where(vertical.view(-1, 1, 1, 1), lines.transpose(-1, -2), lines)
        noisy = images + 0.3 * torch.randn(images.shape, generator=generator)
        return DataLoader(TensorDataset(noisy, vertical.long()), batch_size=64)

    def train_dataloader(self) -> DataLoader:
        return self.pictures(1024, seed=0)

    def val_dataloader(self) -> DataLoader:
        return self.pictures(256, seed=1)


if __name__ == "__main__":
    LightningCLI(Stripes, Pictures, seed_everything_default=0, save_config_callback=None)
