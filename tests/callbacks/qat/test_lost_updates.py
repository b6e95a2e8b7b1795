"""Weights in half precision that swallow the optimizer's updates are named; any other warning is an error."""

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationWarning, QuantizationAwareTraining
from tests.callbacks.qat_modules import W4, Regression, loader, trainer


class Half(Regression):
    """Its weights are far from zero, as a trained model's are beside its updates."""

    dtype_of_weights = torch.bfloat16

    def build(self):
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).to(self.dtype_of_weights)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(parameter.sign() * (0.1 + parameter.abs()))
        return net

    def forward(self, x):
        return self.net(x.to(self.dtype_of_weights)).float()


def fit(module, **options):
    callback = QuantizationAwareTraining(W4, **options)
    trainer(callback, max_epochs=1).fit(module, loader(), loader())


def test_updates_that_are_lost_are_named_once_with_their_share():
    with pytest.warns(CalibrationWarning, match=r"first step has changed 0.0%.*bfloat16.*bf16-mixed") as record:
        fit(Half(lr=1e-5))
    assert len([warning for warning in record if "first step" in str(warning.message)]) == 1


def test_large_updates_float32_weights_and_frozen_ones_are_no_matter():
    class Single(Half):
        dtype_of_weights = torch.float32

    fit(Half(lr=1e-2))
    fit(Single(lr=1e-5))
    fit(Half(lr=1e-3), train="scales")


def test_a_warm_up_is_measured_where_it_begins_to_move():
    class Warming(Half):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step > 1))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    fit(Warming(lr=1e-2))
    with pytest.warns(CalibrationWarning, match=r"learning rate 1e-05"):
        fit(Warming(lr=1e-5))


def test_an_optimizer_that_rounds_stochastically_loses_nothing():
    """Named by torchao's attribute; test_optimizers.py runs torchao's own where it is installed."""

    class Stochastic(torch.optim.AdamW):
        bf16_stochastic_round = True

    class Rounding(Half):
        def configure_optimizers(self):
            return Stochastic(self.parameters(), lr=1e-5)

    fit(Rounding())


def test_every_optimizer_is_measured_and_left_without_hooks():
    class Two(Half):
        def __init__(self):
            super().__init__(lr=0)
            self.automatic_optimization = False

        def configure_optimizers(self):
            first, _, last = self.net
            return torch.optim.SGD(first.parameters(), lr=1e-1), torch.optim.SGD(last.parameters(), lr=1e-6)

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    module = Two()
    with pytest.warns(CalibrationWarning, match=r"learning rate 1e-06"):
        fit(module)
    for optimizer in module.trainer.optimizers:
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
