"""Modules, data and trainers for the tests of CalibrationCallback."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_obs.model.module_qparams import read_qparams
from tests.support.lightning_package import L

#: options of a quiet Trainer
OFF = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


def trainer(*callbacks, **kwargs):
    return L.Trainer(callbacks=list(callbacks), **{**OFF, **kwargs})


def loader(seed=1, count=16):
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(torch.randn(count, 8, generator=generator)), batch_size=4)


class Plain(L.LightningModule):
    """A module of one's own; nothing of transformers in it."""

    def __init__(self):
        super().__init__()
        self.net = self.build()

    def build(self):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self(batch[0]).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(batch[0]).pow(2).mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self(batch[0]).pow(2).mean())

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Late(Plain):
    """The inner model is created in configure_model."""

    def __init__(self):
        L.LightningModule.__init__(self)
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = self.build()


class Language(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.model(**batch, labels=batch["input_ids"]).loss)


def hooks_on(module):
    return [
        hook
        for m in module.modules()
        for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values(), *m._backward_hooks.values())
    ]


def bare(module):
    return not hooks_on(module) and not any(read_qparams(m) for m in module.modules())
