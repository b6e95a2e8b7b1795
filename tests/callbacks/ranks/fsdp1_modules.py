"""FSDP1 on CPUs, and a module whose numbers have the same bits however ranks hold it.

Lightning and torch refuse FSDP1 on CPUs; `OnCPU` runs it there all the same, for these tests only.
"""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

from tests.support.lightning_package import FABRIC, FSDPStrategy, L
from tests.support.lightning_ranks import calibration, exact, loader, trainer

_setup_activation_checkpointing = import_module(f"{FABRIC}.strategies.fsdp")._setup_activation_checkpointing


class OnCPU(FSDPStrategy):
    """FSDP1 on CPUs. Full checkpoints are not moved to the host there: they are on it, and torch would free them."""

    def _setup_model(self, model):
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            return model
        options = {"cpu_offload": self.cpu_offload, "sharding_strategy": self.sharding_strategy, **self.kwargs}
        wrapped = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), mixed_precision=self.mixed_precision_config, **options
        )
        _setup_activation_checkpointing(wrapped, self._activation_checkpointing_kwargs)
        return wrapped

    def _full(self):
        options = {"offload_to_cpu": False, "rank0_only": False}
        configs = FullStateDictConfig(**options), FullOptimStateDictConfig(**options)
        return FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, *configs)

    def lightning_module_state_dict(self):
        if self._state_dict_type == "sharded":
            return super().lightning_module_state_dict()
        with self._full():
            return self.model.state_dict()

    def optimizer_state(self, optimizer):
        if self._state_dict_type == "sharded":
            return super().optimizer_state(optimizer)
        with self._full():
            return FullyShardedDataParallel.optim_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer))

    def load_checkpoint(self, path, weights_only=None):
        if self._state_dict_type == "sharded":
            return super().load_checkpoint(path, weights_only)
        checkpoint = torch.load(path, weights_only=False)
        with self._full():
            self.model.load_state_dict(checkpoint.pop("state_dict"))
            for optimizer, state in zip(self.optimizers, checkpoint.pop("optimizer_states"), strict=False):
                state = FullyShardedDataParallel.optim_state_dict_to_load(self.model, optimizer, state)
                optimizer.load_state_dict(state)
        return checkpoint


class Scale(nn.Module):
    """As in a norm: parameters that are not quantized. A norm itself would round."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x * self.weight


class Block(nn.Module):
    """q, k and v share a global scale in NVFP4."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(32, 16)
        self.scale = Scale()
        self.out = nn.Linear(16, 32, bias=False)

    def forward(self, x):
        x = self.out(self.scale(self.q_proj(x) + self.k_proj(x) - self.v_proj(x)))
        return x + ((x / 64).round().clamp(-16, 16) / 4 - x).detach()  # few bits, so that the next block is exact too


class Blocks(nn.Module):
    """Flat shards of two ranks end inside of rows here, and some hold nothing of a weight."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.few = nn.Linear(32, 3)
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            exact(parameter, generator)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.few(x)


class Module(L.LightningModule):
    def __init__(self, lr=0.0):
        super().__init__()
        self.net, self.lr = Blocks(), lr

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0)


def data(count=12):
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-16, 17, (count, 32), generator=generator) / 4


POLICIES = {"every Linear": {nn.Linear}, "whole blocks": {Block}, "no policy": None}
policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
one_policy = pytest.mark.parametrize(  # and the others nightly
    "policy",
    [pytest.param(p, id=name, marks=[pytest.mark.nightly] * (p != {Block})) for name, p in POLICIES.items()],
)


def fsdp1_trainer(*callbacks, policy=frozenset({Block}), ranks=2, max_epochs=1, **options):
    strategy = OnCPU(auto_wrap_policy=None if policy is None else set(policy), **options)
    return trainer(*callbacks, ranks=ranks, strategy=strategy, max_epochs=max_epochs)


def run(with_trainer, module, entry="validate"):
    if entry == "validate":
        with_trainer.validate(module, loader(data()), verbose=False)
    else:
        with_trainer.fit(module, loader(data(8)), loader(data()))


def alone(folder=None, **options):
    """Qparams of one device that sees all samples; in ``folder`` its checkpoint."""
    callback = calibration(**options)
    trainer(callback).validate(Module(), loader(data(), 3), verbose=False)
    if folder is not None:
        callback.export(folder)
    return callback.result.qparams


def same_files(one, other):
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)
