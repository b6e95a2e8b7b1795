"""Which optimizer trains learned scales."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_obs import CalibrationError, CalibrationSession, QuantizationAwareTraining
from lightning_obs.fine_tuning.learned_scales import LearnedScales
from tests.callbacks.qat_modules import loader, trainer


def learned_of(model):
    return LearnedScales(CalibrationSession(model, "INT8_STATIC").plan)


def held(optimizer, learned):
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return sum(id(p) in ids for p in learned.parameters)


def test_each_scale_joins_the_optimizer_of_its_module_once():
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 4)})
    optimizers = [torch.optim.SGD(model[name].parameters(), lr=0.1) for name in ("g", "d")]
    learned = learned_of(model)
    for _ in range(2):
        learned.join(optimizers)
        assert [held(optimizer, learned) for optimizer in optimizers] == [2, 2]
    assert optimizers[1].param_groups[0]["params"][2:] == learned.parameters[2:]


def test_a_frozen_module_goes_with_the_others_of_its_model():
    model, other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (other, model[1])]
    learned = learned_of(model)
    learned.join(optimizers)
    assert [held(optimizer, learned) for optimizer in optimizers] == [0, 4]


@pytest.mark.parametrize("split", [True, False])
def test_a_module_of_no_single_optimizer_is_an_error_that_names_it(split):
    model, other = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
    own = [[model[0].weight], [model[0].bias]] if split else [[other.weight], [other.bias]]
    optimizers = [torch.optim.SGD(parameters, lr=0.1) for parameters in own]
    with pytest.raises(CalibrationError, match=r"no single optimizer trains these modules.*: 0\. Got 2 optimizers"):
        learned_of(model).join(optimizers)
    assert all(len(optimizer.param_groups[0]["params"]) == 1 for optimizer in optimizers)


class Adversarial(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.g, self.d = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            loss = self.d(self.g(batch[0])).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.g.parameters(), lr=0.1), torch.optim.SGD(self.d.parameters(), lr=0.1)]


def test_the_scales_of_the_discriminator_are_trained_by_its_optimizer():
    module = Adversarial()
    callback = QuantizationAwareTraining("INT8_STATIC", module="d", train="all", calibration_batches=1)
    run = trainer(callback, max_epochs=1, limit_val_batches=0)
    run.fit(module, loader())
    of_g, of_d = ([p for group in each.param_groups for p in group["params"]] for each in run.optimizers)
    assert len(of_g) == 2
    assert len(of_d) == 4 + 4
    assert all(p.abs().max() > 0 for p in of_d[4:])
