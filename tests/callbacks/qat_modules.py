"""Modules, data and trainers for the tests of quantization-aware training."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.model.module_qparams import read_qparams
from tests.support.lightning_package import L, ModelCheckpoint

W4 = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 8}}
ASYMMETRIC = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel", "symmetric": False}}
#: NVFP4 for modules of eight columns in float32, of which transformers has none
NVFP4_SMALL = CalibrationOptions(
    {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 8,
                    "scale_dtype": "torch.float8_e4m3fn"},
    },
    engines="unchecked",
)  # fmt: skip
W8 = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}


def trainer(*callbacks, **kwargs):
    options = {
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(callbacks=list(callbacks), **{**options, **kwargs})


def loader(seed=1, count=16):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=4)


class Regression(L.LightningModule):
    """A module of one's own, which remembers its losses and its validation outputs."""

    def __init__(self, lr=1e-2):
        super().__init__()
        self.net = self.build()
        self.lr = lr
        self.losses, self.validated = [], []

    def build(self):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def on_validation_epoch_start(self):
        self.validated = []

    def validation_step(self, batch, batch_idx):
        out = self(batch[0])
        self.validated.append(out.clone())
        self.log("val_loss", F.mse_loss(out, batch[1]))

    def test_step(self, batch, batch_idx):
        out = self(batch[0])
        self.validated.append(out)
        self.log("test_loss", F.mse_loss(out, batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Language(L.LightningModule):
    """Calls its model with keywords only, as transformers' users do."""

    def __init__(self, model):
        super().__init__()
        self.model = model.train()

    def training_step(self, batch, batch_idx):
        return self.model(**batch, labels=batch["input_ids"]).loss

    def on_validation_epoch_start(self):
        self.logits = []

    def validation_step(self, batch, batch_idx):
        out = self.model(**batch, labels=batch["input_ids"])
        self.logits.append(out.logits.clone())
        self.log("val_loss", out.loss.float())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def language_data(batches):
    return DataLoader(batches, batch_size=None)


def outputs(module, data=None):
    with torch.no_grad():
        return torch.cat([module(batch[0]) for batch in data or loader(seed=2)])


def left_behind(module):
    return [m for m in module.modules() if "forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks] or [
        name for name in ("training_step",) if name in vars(module)
    ]


class Watch(L.Callback):
    """What a batch of training and of validation gave, and which ranges were in force."""

    def __init__(self):
        self.scales, self.starts = [], []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.scales.append(read_qparams(pl_module.net[0]))

    def on_train_batch_start(self, trainer, pl_module, *_):
        self.starts.append(read_qparams(pl_module.net[0]))


class Classifier(Regression):
    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1].argmax(-1))
        self.losses.append(loss.item())
        return loss


class FromStep(DataLoader):
    """Its first pass starts at batch ``skip``, as that of a loader does that Lightning can restore."""

    skip = 0

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def __iter__(self):
        skip, self.skip = self.skip, 0
        return itertools.islice(super().__iter__(), skip, None)


def from_step(skip, *args, **kwargs):
    data = FromStep(*args, **kwargs)
    data.skip = skip
    return data


def quiet(test):
    """What torch.compile says once about compressed-tensors and about any autograd function."""
    test = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")(test)
    return pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")(test)
