"""A LightningModule that keeps something from one validation batch to the next.

A kind is ``(make, add, value)``: what the module sets up, what each step does with its output, and the number that is
logged at the epoch's end. ``value`` leaves the state as a user would: cleared, or not.
"""

import torch
from torch import nn

from tests.support.lightning_package import L


class Base(L.LightningModule):
    """One linear layer; subclasses keep something of its outputs."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.net = nn.Sequential(self.layer(), nn.Linear(6, 1))
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.make()

    def layer(self):
        return nn.Linear(4, 6)

    def make(self):
        """Set up what is kept."""

    def add(self, out):
        """Do something with the outputs ``(B,)`` of one batch."""

    def value(self):
        """What is logged at the epoch's end."""
        return 0.0

    def training_step(self, batch, batch_idx):
        return self.net(samples(batch)).pow(2).mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        out = self.net(samples(batch))[:, 0]
        self.log("val_loss", out.pow(2).mean(), on_step=True, on_epoch=True, batch_size=len(out))
        self.add(out)

    def on_validation_epoch_end(self):
        self.log("val_value", torch.as_tensor(float(self.value())))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def samples(batch):
    """All tensors ``(B, 4)`` of a batch, one below the other."""
    if isinstance(batch, torch.Tensor):
        return batch
    values = batch.values() if isinstance(batch, dict) else batch
    return torch.cat([samples(value) for value in values if value is not None])


def kind(make=None, add=None, value=None, **attributes):
    """A LightningModule class with these methods."""
    functions = {"make": make, "add": add, "value": value, **attributes}
    return type("Kind", (Base,), {name: function for name, function in functions.items() if function is not None})


def mean(values):
    values = list(values)
    return sum(values) / max(1, len(values))


def drain(parts):
    result = mean(parts)
    parts.clear()
    return result
