"""CalibrationCallback on LoRA adapters: what is calibrated and measured is the merged model."""

import copy

import peft
import pytest
import torch
from torch import nn

from lightning_obs import CalibrationCallback, CalibrationError, QuantizationAwareTraining, load_checkpoint, quantized
from lightning_obs.callbacks.trainable import can_train
from tests.callbacks.calibration_modules import loader, trainer
from tests.support.lightning_package import L

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

OUTPUTS = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "strategy": "channel"},
    "output_activations": {"num_bits": 8, "strategy": "tensor", "dynamic": False},
}


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


class Adapted(L.LightningModule):
    """Two Linear layers, the first with adapters that change its outputs a lot."""

    def __init__(self, dropout=0.05):
        super().__init__()
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["0"], r=4, lora_dropout=dropout, init_lora_weights=False)
        self.net = peft.get_peft_model(net(), config)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def merged(module):
    """A copy whose adapters are a part of its weights; calibrated ones keep their parameters."""
    return copy.deepcopy(module).net.merge_and_unload()


def calibrate(module, scheme="INT8_STATIC", **options):
    callback = CalibrationCallback(scheme, module="net", show=False, **options)
    [metrics] = trainer(callback).validate(module, loader(), verbose=False)
    return callback, metrics


def test_dropout_of_adapters_is_nothing_to_a_calibration():
    with_dropout, _ = calibrate(Adapted(0.05))
    without, _ = calibrate(Adapted(0.0))
    assert with_dropout.result.qparams.keys() == without.result.qparams.keys()
    for name, value in without.result.qparams.items():
        assert torch.equal(with_dropout.result.qparams[name], value), name


def test_dropout_of_adapters_is_refused_where_they_are_trained():
    module = Adapted(0.05)
    module.training_step = lambda *_: pytest.fail("trained")
    callback = QuantizationAwareTraining("INT8_STATIC", module="net")
    with pytest.raises(CalibrationError, match=r"dropout.*: 0\. .*lora_dropout=0"):
        trainer(callback, max_epochs=1).fit(module, loader(), loader())


@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_training_is_proposed_where_it_is_not_refused_and_asking_changes_nothing(dropout):
    module = Adapted(dropout)
    callback, _ = calibrate(module)
    assert can_train(callback.session, module) == (dropout == 0)
    assert callback.session.observation.judges_fit


def test_a_quantized_validation_of_adapters_is_that_of_the_merged_model():
    module = Adapted()
    names = [name for name, _ in module.named_modules()]
    _, metrics = calibrate(module, evaluate=True)
    assert [name for name, _ in module.named_modules()] == names
    assert not [name for name, m in module.named_modules() if "forward" in vars(m)]
    x = loader().dataset.tensors[0]
    model = merged(module)
    with torch.no_grad(), quantized(model):
        expected = torch.stack([model(part).pow(2).mean() for part in x.split(4)]).mean()
    assert metrics["val_loss_quantized"] == pytest.approx(float(expected), rel=1e-6)
    assert metrics["val_loss_quantized"] != metrics["val_loss"]


def test_quantized_runs_adapters_as_the_merged_and_exported_model_runs(tmp_path):
    module = Adapted().eval()
    callback, _ = calibrate(module)
    callback.export(tmp_path / "out")
    reloaded = load_checkpoint(net(), tmp_path / "out")
    x = loader().dataset.tensors[0]
    with torch.no_grad(), quantized(module.net):
        outputs = module.net(x)
    with torch.no_grad():
        assert torch.equal(outputs, reloaded(x))
        assert not torch.equal(module.net(x), outputs)


class Merged(Adapted):
    """The same model, its adapters merged before the calibration."""

    def __init__(self):
        super().__init__()
        self.net = self.net.merge_and_unload()


def test_outputs_are_observed_with_the_adapters_share():
    callback, _ = calibrate(Adapted(), OUTPUTS)
    after_merging, _ = calibrate(Merged(), OUTPUTS)
    assert callback.result.qparams.keys() == after_merging.result.qparams.keys()
    torch.testing.assert_close(dict(callback.result.qparams), dict(after_merging.result.qparams), rtol=1e-5, atol=0)
