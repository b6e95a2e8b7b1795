"""State inside modules, and behind hooks."""

import torch
from torch import nn

from tests.callbacks.second_pass.kinds.base import drain, kind, mean


class CountingLayer(nn.Linear):
    """State of the calibrated module's own."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.calls, self.seen, self.maxima = 0, torch.zeros(()), []

    def forward(self, x):
        if not self.training:
            self.calls += 1
            self.seen += x.abs().sum()
            self.maxima.append(float(x.max()))
        return super().forward(x) + 0.01 * self.calls


class BufferLayer(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()), persistent=False)

    def forward(self, x):
        if not self.training:
            self.seen += x.abs().sum().detach()
            self.last = x.max().detach()
        return super().forward(x) + 0.01 * self.seen


class NoisyLayer(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.generator = torch.Generator().manual_seed(4)

    def forward(self, x):
        return super().forward(x + torch.randn(x.shape, generator=self.generator))


class LazyLayer(nn.Linear):
    def forward(self, x):
        if not hasattr(self, "cache"):
            self.cache = []
        self.cache.append(float(x.sum()))
        return super().forward(x) + 1e-3 * len(self.cache)


def module_kinds():
    """State inside modules, and behind hooks."""

    for layer in (CountingLayer, BufferLayer, NoisyLayer, LazyLayer):

        def make_layer(self, layer=layer):
            return layer(4, 6)

        yield f"calibrated module: {layer.__name__}", kind(layer=make_layer)

    def dropout(self):
        return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5))

    def always(self):
        self.net[0][1].train()

    yield "dropout left on", kind(layer=dropout, on_validation_epoch_start=always)

    def batch_norm(self):
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))

    yield (
        "batch norm left in training",
        kind(layer=batch_norm, on_validation_epoch_start=always, value=lambda self: self.net[0][1].running_mean.sum()),
    )

    def helper(self):
        self.helper = nn.Module()
        self.helper.inner = nn.Module()
        self.helper.inner.kept = []

    yield (
        "nested modules",
        kind(
            helper,
            lambda self, out: self.helper.inner.kept.append(float(out.sum())),
            lambda self: drain(self.helper.inner.kept),
        ),
    )

    def hidden(self):
        self.hidden = [CountingLayer(1, 1)]

    yield (
        "module in a list",
        kind(hidden, lambda self, out: self.hidden[0](out[:, None]), lambda self: self.hidden[0].seen),
    )

    def of_self(self):
        self.kept = []
        self.function = lambda x: self.kept.append(x)

    yield (
        "lambda of self",
        kind(of_self, lambda self, out: self.function(float(out.sum())), lambda self: drain(self.kept)),
    )

    def own_hook(self):
        self.kept = []
        self.net.register_forward_hook(lambda module, args, output: self.kept.append(float(output.detach().sum())))

    yield "lambda of self as a hook", kind(own_hook, value=lambda self: drain(self.kept))

    def with_property(self):
        self._parts = []

    def get(self):
        return sum(self._parts)

    def put(self, value):
        self._parts.append(value)

    yield (
        "property of the module",
        kind(
            with_property,
            lambda self, out: setattr(self, "part", float(out.sum())),
            lambda self: self.part,
            part=property(get, put),
        ),
    )

    def fresh(self):
        self.kept = []
        self.log("val_start", torch.tensor(float(getattr(self, "epochs", 0))))
        self.epochs = getattr(self, "epochs", 0) + 1

    yield (
        "reset in on_validation_epoch_start",
        kind(
            None,
            lambda self, out: self.kept.append(float(out.sum())),
            lambda self: mean(self.kept) + self.epochs,
            on_validation_epoch_start=fresh,
        ),
    )
    yield (
        "reset in on_validation_start",
        kind(
            None,
            lambda self, out: self.kept.append(float(out.sum())),
            lambda self: mean(self.kept),
            on_validation_start=lambda self: setattr(self, "kept", []),
        ),
    )

    def swap(self):
        self.backup = [p.detach().clone() for p in self.parameters()]
        for parameter in self.parameters():
            parameter.data.mul_(0.5)

    def swap_back(self):
        for parameter, before in zip(self.parameters(), self.backup, strict=True):
            parameter.data.copy_(before)

    yield "weights halved for the validation", kind(on_validation_start=swap, on_validation_end=swap_back)

    def batch_hooks(self, *_):
        self.batches = getattr(self, "batches", 0) + 1

    yield (
        "count in on_validation_batch_start",
        kind(value=lambda self: self.batches, on_validation_batch_start=batch_hooks),
    )
    yield "count in on_validation_batch_end", kind(value=lambda self: self.batches, on_validation_batch_end=batch_hooks)

    def after(self, batch, dataloader_idx):
        self.moved = getattr(self, "moved", 0) + (not self.training)
        return [2 * part for part in batch] if isinstance(batch, (list, tuple)) else 2 * batch

    yield "count in on_after_batch_transfer", kind(value=lambda self: self.moved, on_after_batch_transfer=after)

    def spoil(self, batch, batch_idx, dataloader_idx=0):
        part = batch[0] if isinstance(batch, (list, tuple)) else batch
        out = self.net(part)[:, 0]
        self.log("val_loss", out.pow(2).mean())
        part.mul_(0)
        if isinstance(batch, list):
            batch.clear()

    yield "step that spoils its batch", kind(validation_step=spoil)
