"""The data and the model of the project."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class DigitsDataModule(L.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.save_hyperparameters(logger=False)

    def setup(self, stage):
        digits = load_digits()
        data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
        self.data_train, self.data_val = torch.utils.data.random_split(data, [1500, 297])

    def train_dataloader(self):
        return DataLoader(self.data_train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data_val, self.hparams.batch_size)


class DigitsLitModule(L.LightningModule):
    def __init__(self, net, optimizer):
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return self.hparams.optimizer(params=self.trainer.model.parameters())
