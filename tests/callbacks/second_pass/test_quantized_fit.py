"""CalibrationCallback(evaluate=True) over a fit and a test: monitors between calibrations, scales of a checkpoint."""

import warnings

import pytest
import torch

from lightning_obs import CalibrationCallback, quantized
from lightning_obs.errors import CalibrationWarning
from tests.callbacks.calibration_modules import Plain, hooks_on, loader, trainer
from tests.callbacks.second_pass.test_quantized_validation import W2
from tests.support.lightning_package import EarlyStopping, L, ModelCheckpoint

# ---------------------------------------------------------------------- a monitor has a value in every validation


class Falls(Plain):
    """A loss that falls from epoch to epoch."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(batch[0]).pow(2).mean() / (1 + self.current_epoch))


@pytest.mark.parametrize("every", [2, 3])
def test_early_stopping_does_not_wait_for_the_next_calibration(every):
    stop = EarlyStopping("val_loss_quantized", patience=1)
    run = trainer(CalibrationCallback("INT8_STATIC", evaluate=True, every_n_epochs=every), stop, max_epochs=7)
    run.fit(Falls(), loader(), loader())
    assert run.current_epoch == 7
    assert stop.wait_count == 0


def test_a_checkpoint_that_monitors_the_quantized_loss_finds_it_in_the_first_epoch(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss_quantized", save_top_k=-1)
    callback = CalibrationCallback(W2, evaluate=True, every_n_epochs=3)
    trainer(callback, checkpoint, max_epochs=4, enable_checkpointing=True).fit(Falls(), loader(), loader())
    assert len(checkpoint.best_k_models) == 4


def test_between_calibrations_the_weights_of_today_run_with_the_scales_of_the_last_one():
    found, expected, calibrated = [], [], []

    class Look(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            found.append(float(trainer.callback_metrics["val_loss_quantized"]))
            calibrated.append(callback.result)
            with torch.no_grad(), warnings.catch_warnings(), quantized(pl_module):
                warnings.simplefilter("ignore")
                expected.append(float(pl_module(loader().dataset.tensors[0]).pow(2).mean()))

    warnings_before = warnings.filters[:]
    callback = CalibrationCallback(W2, evaluate=True, every_n_epochs=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*have changed since the model", category=CalibrationWarning)
        trainer(callback, Look(), max_epochs=5, num_sanity_val_steps=0).fit(Plain(), loader(), loader())
    assert warnings.filters == warnings_before
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(set(found)) == 5
    assert [one is calibrated[i - 1] for i, one in enumerate(calibrated) if i] == [False, True, False, True]


# ---------------------------------------------------------------------- trainer.test


def test_a_test_of_a_calibrated_model_measures_the_quantized_one():
    torch.manual_seed(0)
    module, callback = Plain(), CalibrationCallback(W2, evaluate=True, show=False)
    run = trainer(callback)
    run.validate(module, loader(), verbose=False)
    (found,) = run.test(module, loader(3), verbose=False)
    with torch.no_grad(), quantized(module):
        expected = float(module(loader(3).dataset.tensors[0]).pow(2).mean())
    assert found["test_loss_quantized"] == pytest.approx(expected, rel=1e-5)
    assert found["test_loss_quantized"] != found["test_loss"]
    (plain,) = trainer().test(module, loader(3), verbose=False)
    assert plain["test_loss"] == found["test_loss"]
    assert not hooks_on(module)


def test_a_test_of_a_checkpoint_takes_the_scales_of_that_checkpoint(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", mode="max", filename="worst")
    run = trainer(CalibrationCallback(W2, evaluate=True), checkpoint, max_epochs=3, enable_checkpointing=True)
    run.fit(Plain(), loader(), loader(2))
    (worst,) = run.test(ckpt_path=checkpoint.best_model_path, dataloaders=loader(2), verbose=False)
    assert worst["test_loss"] == pytest.approx(float(checkpoint.best_model_score))
    fresh = trainer(CalibrationCallback(W2, evaluate=True))
    (again,) = fresh.test(Plain(), loader(2), ckpt_path=checkpoint.best_model_path, verbose=False)
    assert again == worst


def test_a_test_before_any_calibration_says_that_nothing_is_measured():
    with pytest.warns(CalibrationWarning, match="nothing was calibrated, so evaluate has nothing to measure"):
        (found,) = trainer(CalibrationCallback(W2, evaluate=True)).test(Plain(), loader(), verbose=False)
    assert set(found) == {"test_loss"}
