"""A step that reads the Trainer finds in the second pass (``evaluate``) what it finds in the first."""

import pytest
import torch

from lightning_obs import CalibrationCallback, CalibrationError
from lightning_obs.errors import CalibrationWarning
from tests.callbacks.calibration_modules import Plain, loader, trainer
from tests.support.lightning_package import EarlyStopping, L, ModelCheckpoint

BATCHES = len(loader())


class Reads(Plain):
    """Tells ``views`` what each batch finds. It is no attribute of the module, whose attributes are copied."""

    views: list

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.views.append(self.view())
        super().validation_step(batch, batch_idx)

    def view(self):
        run = self.trainer
        assert run.early_stopping_callback.patience == 5
        return {
            "list of callbacks": id(run.callbacks),
            "callbacks": list(run.callbacks),
            "checkpoint": run.checkpoint_callback,
            "checkpoints": list(run.checkpoint_callbacks),
            "progress bar": run.progress_bar_callback,
            "loggers": list(run.loggers),
            "names of metrics": sorted(run.callback_metrics),
            "metric of training": run.callback_metrics.get("train_loss"),
            "state": (run.global_step, run.current_epoch, run.validating, run.sanity_checking, run.num_val_batches),
            "loaders": run.val_dataloaders,
        }


def fitted(tmp_path, module, *callbacks, **options):
    saver = ModelCheckpoint(tmp_path / "best", monitor="val_loss")
    stop = EarlyStopping("val_loss", patience=5)
    options = {"max_epochs": 2, "enable_checkpointing": True, "enable_progress_bar": True, **options}
    run = trainer(saver, stop, *callbacks, **options)
    run.fit(module, loader(), loader())
    return run


def test_its_callbacks_metrics_loggers_and_loaders(tmp_path):
    module = Reads()
    type(module).views = views = []
    callback = CalibrationCallback("INT8_STATIC", evaluate=True, show=False)
    run = fitted(tmp_path, module, callback, num_sanity_val_steps=0)
    assert "val_loss_quantized" in run.callback_metrics
    assert len(views) == 2 * 2 * BATCHES
    for epoch in (views[: 2 * BATCHES], views[2 * BATCHES :]):
        for first, second in zip(epoch[:BATCHES], epoch[BATCHES:], strict=True):
            assert second == first
            assert callback in second["callbacks"]
    assert "train_loss" in views[-1]["names of metrics"]
    assert id(run.callbacks) == views[0]["list of callbacks"]


class SeesTheEnd(Reads):
    """Reads callbacks in the hook at the epoch's end too."""

    def on_validation_epoch_end(self):
        self.log("patience", float(self.trainer.early_stopping_callback.wait_count))


def test_a_metric_may_be_made_of_a_callback(tmp_path):
    module = SeesTheEnd()
    type(module).views = []
    run = fitted(tmp_path, module, CalibrationCallback("INT8_STATIC", evaluate=True, show=False))
    assert run.callback_metrics["patience_quantized"] == run.callback_metrics["patience"]


class SavesInItsStep(Plain):
    """Writes a checkpoint with the last batch of each pass."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if batch_idx == BATCHES - 1 and not self.trainer.sanity_checking:
            pass_number = len(list(self.folder.iterdir()))
            self.trainer.save_checkpoint(self.folder / f"{pass_number}.ckpt")


def test_a_checkpoint_that_a_step_writes_has_the_states_of_all_callbacks(tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    callback = CalibrationCallback("INT8_STATIC", evaluate=True, show=False)
    fitted(tmp_path, SavesInItsStep(folder), callback, max_epochs=1)
    states = [torch.load(path, weights_only=False)["callbacks"] for path in sorted(folder.iterdir())]
    assert len(states) == 2
    assert states[0].keys() <= states[1].keys()
    assert any("EarlyStopping" in key for key in states[1])


class Fails(Reads):
    """Raises in the second pass."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if "forward" in vars(self.net[0]):
            raise RuntimeError("stop")


def test_after_an_error_the_trainer_has_what_it_had(tmp_path):
    module = Fails()
    type(module).views = views = []
    run = trainer(EarlyStopping("val_loss", patience=5), CalibrationCallback("INT8_STATIC", evaluate=True))
    run.validate_loop.verbose = False
    before = dict(vars(run))
    with pytest.raises(RuntimeError, match="stop"):
        run.validate(module, loader())
    assert len(views) == BATCHES + 1
    for name in ("callbacks", "validate_loop", "test_loop", "fit_loop", "_logger_connector"):
        assert vars(run)[name] is before[name]
    assert views[-1]["list of callbacks"] == id(run.callbacks)


# ---------------------------------------------------------------------- the step that runs


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`")
def test_validation_step_none_is_a_fit_without_validation():
    module, callback = Plain(), CalibrationCallback("INT8_STATIC", evaluate=True)
    module.validation_step = None
    with pytest.warns(CalibrationWarning, match="this Trainer will not validate, so nothing will be calibrated"):
        trainer(callback, max_epochs=1).fit(module, loader(), loader())
    assert callback.result is None


def test_validation_step_none_is_refused_by_lightning_where_validate_needs_it():
    module = Plain()
    module.validation_step = None
    with pytest.raises(Exception, match=r"No `validation_step\(\)` method defined to run `Trainer.validate`"):
        trainer(CalibrationCallback("INT8_STATIC", evaluate=True)).validate(module, loader(), verbose=False)


def test_test_step_none_does_not_matter_to_a_validation():
    module = Plain()
    module.test_step = None
    [metrics] = trainer(CalibrationCallback("INT8_STATIC", evaluate=True)).validate(module, loader(), verbose=False)
    assert "val_loss_quantized" in metrics


class FetchesInValidation(Plain):
    def validation_step(self, dataloader_iter):
        pytest.fail("validated")


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_a_validation_step_that_fetches_its_batches_is_nothing_to_predict_and_test():
    module, callback = FetchesInValidation(), CalibrationCallback("INT8_STATIC", evaluate=True)
    predictions = trainer(callback).predict(module, loader())
    assert len(predictions) == BATCHES
    with pytest.warns(CalibrationWarning, match="nothing was calibrated"):
        trainer(callback).test(module, loader(), verbose=False)


class FetchesInTest(Plain):
    def test_step(self, dataloader_iter):
        pytest.fail("tested")


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_a_test_step_that_fetches_its_batches_is_refused_in_a_test_only():
    module, callback = FetchesInTest(), CalibrationCallback("INT8_STATIC", evaluate=True)
    [metrics] = trainer(callback).validate(module, loader(), verbose=False)
    assert "val_loss_quantized" in metrics
    with pytest.raises(CalibrationError, match=r"Got test_step\(dataloader_iter\).*leave evaluate out"):
        trainer(callback).test(module, loader(), verbose=False)


def test_a_nested_trainer_in_a_step_calls_its_own_callbacks():
    """Hooks are silent for the loop of the second pass only."""
    calls = []

    class Count(L.Callback):
        def on_validation_end(self, run, pl_module):
            calls.append(run)

    class Nested(Plain):
        def on_validation_epoch_end(self):
            trainer(Count()).validate(Plain(), loader(), verbose=False)

    trainer(CalibrationCallback("INT8_STATIC", evaluate=True, show=False)).validate(Nested(), loader(), verbose=False)
    assert len(calls) == 2
