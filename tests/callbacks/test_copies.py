"""A LightningModule that copies its net while a callback of ours watches it or trains it quantized."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from lightning_obs import CalibrationCallback, QuantizationAwareTraining, quantized
from tests.callbacks import calibration_modules, qat_modules
from tests.callbacks.qat_modules import left_behind
from tests.support.lightning_package import L


def averaged(net):
    return AveragedModel(net).module


def copying(base, copied):
    class Copying(base):
        """A teacher, made anew for every validation, that reads ten times what the net reads."""

        def on_validation_epoch_start(self):
            super().on_validation_epoch_start()
            self.teacher = [copied(self.net)]

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.teacher[0](10 * batch[0])

    return Copying()


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, averaged])


@COPIES
def test_a_teacher_made_in_validation_is_not_observed(copied):
    scales = []
    for module in (calibration_modules.Plain(), copying(calibration_modules.Plain, copied)):
        torch.manual_seed(0)
        module.net = module.build()
        callback = CalibrationCallback("INT8_STATIC")
        calibration_modules.trainer(callback).validate(module, calibration_modules.loader(), verbose=False)
        scales.append(callback.result.qparams)
    assert all(torch.equal(value, scales[1][name]) for name, value in scales[0].items())
    assert not left_behind(module.teacher[0])


@COPIES
def test_a_teacher_made_while_training_quantized_is_neither_observed_nor_quantized(copied):
    scales = []
    for module in (qat_modules.Regression(), copying(qat_modules.Regression, copied)):
        torch.manual_seed(0)
        module.net = module.build()
        callback = QuantizationAwareTraining("INT8_STATIC")
        qat_modules.trainer(callback).fit(module, qat_modules.loader(), qat_modules.loader(seed=2))
        scales.append(callback.result.qparams)
    assert all(torch.equal(value, scales[1][name]) for name, value in scales[0].items())
    assert not left_behind(module.teacher[0])


class Whole(L.Callback):
    """Copies the whole LightningModule at every batch."""

    def __init__(self):
        self.copies = []

    def on_train_batch_start(self, trainer, pl_module, *_):
        self.copies.append(copy.deepcopy(pl_module))

    on_validation_batch_start = on_train_batch_start


@pytest.mark.parametrize("distill", [0.0, 1.0])
def test_a_copy_of_the_lightning_module_trains_by_itself(distill):
    torch.manual_seed(0)
    module, whole = qat_modules.Classifier(), Whole()
    callback = QuantizationAwareTraining("INT8_STATIC", distill=distill)
    qat_modules.trainer(whole, callback, max_epochs=1).fit(module, qat_modules.loader(), qat_modules.loader(seed=2))
    assert len(whole.copies) == 8
    for copied in whole.copies:
        assert not left_behind(copied)
        losses = len(copied.losses)
        copied.training_step(next(iter(qat_modules.loader())), 0)
        assert len(copied.losses) == losses + 1


def test_a_copy_made_while_validating_can_be_run_quantized():
    torch.manual_seed(0)
    module, whole = calibration_modules.Plain(), Whole()
    for _ in range(2):  # the second time there are scales to copy
        callback = CalibrationCallback("INT8_STATIC")
        data = calibration_modules.loader()
        calibration_modules.trainer(callback, whole).validate(module, data, verbose=False)
    copied, (x,) = whole.copies[-1], next(iter(calibration_modules.loader()))
    with quantized(copied.net), quantized(module.net), torch.no_grad():
        assert torch.equal(copied.net(x), module.net(x))
