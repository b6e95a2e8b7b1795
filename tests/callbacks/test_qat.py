"""QuantizationAwareTraining in Lightning's own loops: what training, validation, checkpoint and export see."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM

from lightning_obs import QuantizationAwareTraining, load_checkpoint, quantized

W4 = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 8}}


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
        self.validated.append(self(batch[0]))
        self.log("test_loss", F.mse_loss(self(batch[0]), batch[1]))

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


# ---------------------------------------------------------------------- the checkpoint has the numbers


@pytest.mark.parametrize("scheme", ["INT8_STATIC", "FP8", "W4A16", "NVFP4", "W8A8"])
@pytest.mark.parametrize("observe", ["train", "val"])
def test_the_reloaded_checkpoint_gives_the_logits_of_the_last_validation(
    scheme, observe, tiny_llama, batches, tmp_path
):
    module = Language(tiny_llama(torch.bfloat16))
    callback = QuantizationAwareTraining(scheme, ignore=["lm_head"], observe=observe, calibration_batches=2)
    trainer(callback).fit(module, language_data(batches), language_data(batches))
    callback.export(tmp_path / "out")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        for batch, expected in zip(batches, module.logits, strict=True):
            assert torch.equal(reloaded(**batch).logits, expected)
    assert not left_behind(module)


@pytest.mark.parametrize("observe", ["train", "val", "none"])
@pytest.mark.parametrize("scheme", ["INT8_STATIC", W4])
def test_a_module_of_ones_own_reloads_with_the_outputs_of_the_last_validation(scheme, observe, tmp_path):
    module, callback = Regression(), QuantizationAwareTraining(scheme, observe=observe, calibration_batches=2)
    trainer(callback).fit(module, loader(), loader(seed=2))
    callback.export(tmp_path / "out")
    reloaded = load_checkpoint(Regression(), tmp_path / "out")
    assert torch.equal(outputs(reloaded), torch.cat(module.validated))
    with quantized(module):
        assert torch.equal(outputs(module), torch.cat(module.validated))


def test_learned_scales_are_exported(tmp_path):
    module, callback = Regression(), QuantizationAwareTraining("INT8_STATIC", learn_scales=True, calibration_batches=2)
    trainer(callback).fit(module, loader(), loader(seed=2))
    absmax = module.net[0].weight.abs().amax(1, keepdim=True) / 127.5
    assert not torch.allclose(module.net[0].weight_scale, absmax, rtol=1e-4)
    callback.export(tmp_path / "out")
    assert torch.equal(outputs(load_checkpoint(Regression(), tmp_path / "out")), torch.cat(module.validated))
