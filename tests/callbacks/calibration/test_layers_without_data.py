"""A layer that validation does not run ends no training: it is named at the start, and stays in float."""

import warnings

import pytest
import torch
from torch import nn

from lightning_obs import (
    CalibrationCallback,
    CalibrationError,
    CalibrationWarning,
    QuantizationAwareTraining,
    load_checkpoint,
    quantized,
)
from tests.callbacks.calibration_modules import Plain, hooks_on, loader, trainer

SCHEME = "INT8_STATIC"


class WithAuxiliaryHead(Plain):
    """The head that training alone uses, as in segmentation nets and GANs."""

    def __init__(self):
        super().__init__()
        self.auxiliary = nn.Linear(8, 2)
        self.validated = 0

    def training_step(self, batch, batch_idx):
        return (self(batch[0]) + self.auxiliary(batch[0])).pow(2).mean()

    def on_validation_batch_start(self, *_):
        self.validated += 1


class ValidatesNothing(WithAuxiliaryHead):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", batch[0].mean())


def warned_in_fit(module, callback, **options):
    """The package's warnings in a fit of two epochs, and its Trainer."""
    runner = trainer(callback, max_epochs=2, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner.fit(module, loader(), loader())
    messages = [str(one.message) for one in caught if issubclass(one.category, CalibrationWarning)]
    return messages, runner


@pytest.mark.parametrize("evaluate", [False, True])
def test_the_fit_goes_on_without_the_layer_and_names_it_before_the_first_batch(evaluate, tmp_path):
    module = WithAuxiliaryHead()
    callback = CalibrationCallback(SCHEME, evaluate=evaluate, export_to=tmp_path / "out")
    messages, runner = warned_in_fit(module, callback)
    assert runner.current_epoch == 2
    assert messages[0].startswith(
        "INT8_STATIC: the sanity check's validation batches called 2 of 3 modules, and not: auxiliary. "
    )
    left = "left in full precision, because no data reached them: auxiliary (input). List them in `ignore`"
    assert [message.startswith(left) for message in messages[1:]] == [True, True]
    assert callback.result.modules == ["net.0", "net.2"]
    assert callback.result.skipped == ["auxiliary"]
    assert callback.result.plan.in_float["Linear"] == pytest.approx(18 / 196)
    assert ("val_loss_quantized" in runner.callback_metrics) is evaluate
    assert not hooks_on(module)
    loaded, x = load_checkpoint(WithAuxiliaryHead(), tmp_path / "out").eval(), torch.randn(4, 8)
    with torch.no_grad(), quantized(module.eval()):
        assert torch.equal(loaded(x), module(x))


@pytest.mark.parametrize("evaluate", [False, True])
def test_a_validation_that_runs_no_layer_at_all_calibrates_nothing_and_ends_no_training(evaluate):
    module, callback = ValidatesNothing(), CalibrationCallback(SCHEME, evaluate=evaluate)
    messages, runner = warned_in_fit(module, callback)
    assert runner.current_epoch == 2
    assert "called 0 of 3 modules, and not: net.0, net.2, auxiliary" in messages[0]
    nothing = "INT8_STATIC: this validation has calibrated nothing, and the training goes on. INT8_STATIC has static"
    assert [message.startswith(nothing) for message in messages[1:3]] == [True, True]
    end = "the fit has ended and nothing was calibrated: no validation batch has called the modules to quantize."
    assert end in messages[-1]
    assert callback.result is None
    assert not hooks_on(module)


def test_a_validation_of_its_own_still_raises():
    callback = CalibrationCallback(SCHEME)
    with pytest.raises(CalibrationError, match=r"no data reached 1 of 3 observers: auxiliary \(input\)"):
        trainer(callback).validate(WithAuxiliaryHead(), loader(), verbose=False)
    warned_in_fit(module := WithAuxiliaryHead(), callback)  # and one callback does both in turn
    with pytest.raises(CalibrationError, match="no data reached"):
        trainer(callback).validate(module, loader(), verbose=False)


def test_values_that_are_not_finite_are_an_error_in_a_fit_too():
    class Broken(WithAuxiliaryHead):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self(batch[0] * float("nan" if self.validated > 2 else 1)).mean())

    with pytest.raises(CalibrationError, match="not finite"), pytest.warns(CalibrationWarning, match="sanity check"):
        trainer(CalibrationCallback(SCHEME), max_epochs=1).fit(Broken(), loader(), loader())


def test_without_a_missing_layer_the_sanity_check_says_nothing():
    messages, _ = warned_in_fit(Plain(), CalibrationCallback(SCHEME))
    assert messages == []
    messages, _ = warned_in_fit(WithAuxiliaryHead(), CalibrationCallback(SCHEME, ignore=["auxiliary"]))
    assert messages == []
    messages, _ = warned_in_fit(WithAuxiliaryHead(), CalibrationCallback("FP8_DYNAMIC"))
    assert not any("sanity check" in message for message in messages)


def test_fine_tuning_on_ranges_of_the_validation_goes_on_as_well():
    callback = QuantizationAwareTraining(SCHEME, observe="val", sanity_check=True)
    messages, runner = warned_in_fit(WithAuxiliaryHead(), callback)
    assert runner.current_epoch == 2
    assert any("left in full precision, because no data reached them: auxiliary" in message for message in messages)
