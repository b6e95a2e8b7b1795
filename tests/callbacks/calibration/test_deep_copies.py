"""Libraries that deep-copy callbacks and run the copies, as neuralforecast does: the user asks the original."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationCallback, CalibrationError, QuantizationAwareTraining, load_checkpoint, quantized
from tests.callbacks.calibration_modules import Plain, loader, trainer

SCHEME = "INT8_STATIC"


class Forecaster:
    """Holds a model with its callbacks; its fit runs a deep copy of both."""

    def __init__(self, callback, kind=Plain):
        self._before = kind(), [callback]

    def fit(self):
        self.module, self.callbacks = copy.deepcopy(self._before)
        self.trainer = trainer(*self.callbacks, max_epochs=1)
        self.trainer.fit(self.module, loader(), loader())
        return self


def test_the_original_exports_and_reports_what_its_copy_has_calibrated(tmp_path):
    callback = CalibrationCallback(SCHEME, evaluate=True)
    forecaster = Forecaster(callback).fit()
    assert callback.session is None
    assert callback.result is forecaster.callbacks[0].result
    assert callback.result.modules == ["net.0", "net.2"]
    assert set(callback.metrics) == {"val_loss"}
    assert len(callback.results.curves) == 1
    assert len(callback.layer_errors()) == 2
    assert callback.report(tmp_path / "report").is_file()
    callback.export(tmp_path / "out")
    loaded, x = load_checkpoint(Plain(), tmp_path / "out").eval(), torch.randn(4, 8)
    with torch.no_grad(), quantized(forecaster.module.eval()):
        assert torch.equal(loaded(x), forecaster.module(x))


def test_a_copy_of_a_copy_answers_too(tmp_path):
    callback = QuantizationAwareTraining(SCHEME)
    Forecaster(copy.deepcopy(callback)).fit()
    callback.export(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_of_two_fits_in_turn_the_last_one_stands():
    callback = CalibrationCallback(SCHEME)
    forecaster = Forecaster(callback).fit()
    first = forecaster.callbacks[0].result
    forecaster.fit()
    assert callback.result is forecaster.callbacks[0].result
    assert callback.result is not first


def test_the_copy_is_there_after_the_library_has_let_it_go(tmp_path):
    callback = CalibrationCallback(SCHEME)
    Forecaster(callback).fit()
    gc.collect()
    callback.export(tmp_path / "out")
    assert len(callback.result.modules) == 2


def test_copies_that_calibrated_two_models_are_not_guessed_among(tmp_path):
    class Wide(Plain):
        def build(self):
            return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))

    callback = CalibrationCallback(SCHEME)
    forecasters = [Forecaster(callback, kind).fit() for kind in (Plain, Wide)]
    expected = r"copies of this callback have calibrated 2 different models, .*: Plain, Wide[.] Remedy: give each"
    with pytest.raises(CalibrationError, match=expected):
        callback.export(tmp_path / "out")
    assert [len(forecaster.callbacks[0].result.modules) for forecaster in forecasters] == [2, 2]


def test_what_a_callback_has_calibrated_itself_stays_its_result():
    callback = CalibrationCallback(SCHEME)
    trainer(callback).validate(Plain(), loader(), verbose=False)
    result = callback.result
    Forecaster(callback).fit()
    assert callback.result is result


def test_without_a_run_nothing_was_calibrated_by_the_copies_either(tmp_path):
    callback = CalibrationCallback(SCHEME)
    arrived = pickle.loads(pickle.dumps(callback))
    assert copy.deepcopy(callback).result is arrived.result is None
    with pytest.raises(CalibrationError, match="nothing was calibrated yet"):
        callback.export(tmp_path / "out")
    Forecaster(arrived).fit()
    assert callback.result is None  # that was in another process
