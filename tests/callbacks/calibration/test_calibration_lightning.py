"""CalibrationCallback beside the rest of Lightning: the bugs that ended Lightning's own quantization callback."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from lightning_obs import CalibrationCallback, QuantizationAwareTraining, load_checkpoint, quantized
from lightning_obs.model.module_qparams import read_qparams
from tests.callbacks.calibration_modules import Plain, loader, trainer
from tests.support.lightning_package import L, ModelCheckpoint, ModelPruning

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", [CalibrationCallback, QuantizationAwareTraining])
def test_16609_a_callback_by_itself_runs_with_its_defaults(kind, tmp_path):
    """pytorch-lightning #16609: Trainer(callbacks=QuantizationAwareTraining()) failed in the default configuration."""
    callback = kind("INT8_STATIC")
    alone = L.Trainer(callbacks=callback, max_epochs=1, accelerator="cpu", logger=False, default_root_dir=tmp_path)
    module = Plain()
    alone.fit(module, loader(), loader(2))
    callback.export(tmp_path / "net")
    with quantized(module):
        assert torch.equal(load_checkpoint(Plain(), tmp_path / "net").net(X), module.net(X))


def test_12896_a_checkpoint_is_tested_by_a_fresh_trainer(tmp_path):
    """pytorch-lightning #12896: Trainer.test(ckpt_path=...) failed beside the callback."""
    module, saver = Plain(), ModelCheckpoint(tmp_path, filename="best", monitor="val_loss")
    callback = CalibrationCallback("INT8_STATIC")
    trainer(callback, saver, max_epochs=1, enable_checkpointing=True).fit(module, loader(), loader(2))
    fresh, again = Plain(), CalibrationCallback("INT8_STATIC", evaluate=True)
    (metrics,) = trainer(again).test(fresh, loader(2), ckpt_path=tmp_path / "best.ckpt", verbose=False)
    assert metrics["test_loss"] == saver.best_model_score
    assert metrics["test_loss_quantized"] != metrics["test_loss"]
    for layer in (0, 2):
        expected = read_qparams(module.net[layer])
        found = read_qparams(fresh.net[layer])
        assert found.keys() == expected.keys() == {"weight_scale", "input_scale"}
        assert all(torch.equal(found[name], expected[name]) for name in expected)


class TwoInputs(Plain):
    """Two positional arguments and a keyword, as in pytorch-lightning #7926."""

    def build(self):
        return nn.ModuleDict({"shared": nn.Linear(8, 16), "last": nn.Linear(16, 2)})

    def forward(self, a, b, *, gain=1.0):
        hidden = self.net["shared"](a) + self.net["shared"](input=b)
        return self.net["last"](hidden * gain)

    def training_step(self, batch, batch_idx):
        return self(batch[0], -2 * batch[0], gain=3.0).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))


@pytest.mark.parametrize("kind", [CalibrationCallback, QuantizationAwareTraining])
def test_15862_7926_a_forward_with_several_inputs_and_keywords_is_calibrated(kind):
    """pytorch-lightning #15862 and #7926: the callback's forward took one positional argument."""
    module, callback = TwoInputs(), kind("INT8_STATIC")
    before = [parameter.clone() for parameter in module.parameters()]
    trainer(callback, max_epochs=1, num_sanity_val_steps=0).fit(module, loader(), loader(2))
    assert not any(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    trainer(calibration := CalibrationCallback("INT8_STATIC")).validate(module, loader(2), verbose=False)
    x = torch.cat([batch for (batch,) in loader(2)])
    both = torch.cat([x, -2 * x])
    assert calibration.result.input_ranges["net.shared"] == (both.min().item(), both.max().item())


@pytest.mark.slow_but_first
@pytest.mark.parametrize("after_training", [True, False])
@pytest.mark.parametrize("order", ["before", "after"])
def test_11047_pruned_weights_are_calibrated_and_exported_as_zeros(order, after_training, tmp_path):
    """pytorch-lightning #11047: the callback and ModelPruning could not run in one Trainer."""
    module, callback = Plain(), CalibrationCallback("INT8_STATIC", evaluate=True, show=False)
    pruning = ModelPruning(
        "l1_unstructured",
        parameters_to_prune=[(module.net[0], "weight")],
        amount=0.5,
        prune_on_train_epoch_end=after_training,
    )
    callbacks = [callback, pruning] if order == "before" else [pruning, callback]
    trainer(*callbacks, max_epochs=2, num_sanity_val_steps=0).fit(module, loader(), loader(2))
    assert not prune.is_pruned(module)
    trainer(callback).validate(module, loader(2), verbose=False)
    callback.export(tmp_path / "out")
    loaded = load_checkpoint(Plain(), tmp_path / "out")
    x = next(iter(loader(2)))[0]
    with torch.no_grad(), quantized(module):
        expected = module(x)
    with torch.no_grad():
        assert torch.equal(loaded(x), expected)
    assert (loaded.net[0].weight == 0).float().mean() >= 0.5
