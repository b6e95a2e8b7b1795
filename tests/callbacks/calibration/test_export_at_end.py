"""`export_to`: the checkpoint is written when a run has ended, whole, once, and on all ranks or none."""

import pytest
import torch

from lightning_obs import CalibrationCallback, CalibrationError, QuantizationAwareTraining, load_checkpoint, quantized
from tests.callbacks.calibration_modules import Plain, bare, hooks_on, loader, trainer
from tests.support.lightning_package import MESSAGES
from tests.support.lightning_ranks import Module, like_torchrun, samples
from tests.support.lightning_ranks import loader as rank_loader
from tests.support.lightning_ranks import trainer as rank_trainer
from tests.support.rank_processes import run_ranks

CALLBACKS = pytest.mark.parametrize("kind", [CalibrationCallback, QuantizationAwareTraining])


def make(folder, kind=CalibrationCallback, **options):
    return kind("INT8_STATIC", module="net", export_to=folder, log=False, **options)


def fit(callback, module, **options):
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}
    trainer(callback, **options).fit(module, loader(), loader(2))


def outputs(model):
    with torch.no_grad():
        return model(torch.linspace(-2, 2, 32).view(4, 8))


def is_written(folder, module):
    with quantized(module.net):
        expected = outputs(module.net)
    assert torch.equal(outputs(load_checkpoint(Plain().net, folder)), expected)
    return True


@CALLBACKS
def test_validate_ends_with_the_checkpoint(kind, tmp_path):
    module = Plain()
    trainer(make(tmp_path / "out", kind)).validate(module, loader(), verbose=False)
    assert is_written(tmp_path / "out", module)


@CALLBACKS
def test_fit_ends_with_the_checkpoint_of_its_last_validation(kind, tmp_path):
    module, folder, there = Plain(), tmp_path / "out", []
    module.on_validation_end = lambda: there.append(folder.exists())
    fit(make(folder, kind), module)
    assert is_written(folder, module)
    assert there == [False, False]


def test_a_second_run_of_the_callback_replaces_what_the_first_has_written(tmp_path):
    module, callback = Plain(), make(tmp_path / "out")
    trainer(callback).validate(module, loader(), verbose=False)
    fit(callback, module)
    assert is_written(tmp_path / "out", module)


@pytest.mark.parametrize("run", ["validate", "fit"])
def test_a_folder_that_is_taken_is_an_error_before_the_first_batch(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    module, callback = Plain(), make(tmp_path / "out")
    module.training_step = module.validation_step = lambda *_: pytest.fail("a batch was run")
    with pytest.raises(CalibrationError, match="out is already there"):
        fit(callback, module) if run == "fit" else trainer(callback).validate(module, loader(), verbose=False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_export_overwrite_replaces_the_checkpoint_of_another_callback(tmp_path):
    trainer(make(tmp_path / "out")).validate(Plain(), loader(), verbose=False)
    module = Plain()
    trainer(make(tmp_path / "out", export_overwrite=True)).validate(module, loader(), verbose=False)
    assert is_written(tmp_path / "out", module)


def test_export_overwrite_without_a_folder_is_an_error():
    with pytest.raises(CalibrationError, match="export_overwrite without export_to"):
        make(None, export_overwrite=True)


@CALLBACKS
def test_a_fit_without_validation_is_an_error_before_training(kind, tmp_path):
    module = Plain()
    module.training_step = lambda *_: pytest.fail("a batch was run")
    with pytest.raises(CalibrationError, match="this fit will not validate"):
        fit(make(tmp_path / "out", kind), module, limit_val_batches=0)


def test_a_validation_without_batches_is_an_error_and_writes_nothing(tmp_path):
    with pytest.raises(CalibrationError, match="the validation has ended and nothing was calibrated"):
        trainer(make(tmp_path / "out"), limit_val_batches=0).validate(Plain(), loader(), verbose=False)
    assert list(tmp_path.iterdir()) == []


def test_training_after_the_last_validation_is_an_error_and_writes_nothing(tmp_path):
    with pytest.raises(CalibrationError, match="have changed since the model was calibrated"):
        fit(make(tmp_path / "out"), Plain(), check_val_every_n_epoch=2, max_epochs=3)
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_it_is_written_leaves_nothing_half_written(tmp_path):
    class Tokenizer:
        def save_pretrained(self, folder):
            raise OSError("the disk is full")

    module = Plain()
    module.tokenizer = Tokenizer()
    with pytest.raises(CalibrationError, match="the disk is full"):
        trainer(make(tmp_path / "out")).validate(module, loader(), verbose=False)
    assert list(tmp_path.iterdir()) == []
    assert not hooks_on(module)


def test_a_run_that_ends_with_an_error_writes_nothing(tmp_path):
    module = Plain()

    def fails(batch, batch_idx):
        raise RuntimeError("in the second batch")

    module.training_step = fails
    with pytest.raises(RuntimeError, match="second batch"):
        fit(make(tmp_path / "out", sanity_check=True), module, num_sanity_val_steps=1)
    assert list(tmp_path.iterdir()) == []


def test_fast_dev_run_writes_nothing_and_says_so(tmp_path, caplog):
    with caplog.at_level("INFO", logger=MESSAGES):
        fit(make(tmp_path / "out"), Plain(), fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []
    assert "out is not written" in caplog.text


def test_other_runs_write_nothing(tmp_path):
    module, callback = Plain(), make(tmp_path / "out")
    trainer(callback).test(module, loader(), verbose=False)
    assert list(tmp_path.iterdir()) == []
    assert bare(module)


def on_ranks(rank, folder):
    like_torchrun(rank, 2)
    callback = CalibrationCallback("INT8_STATIC", module="net", export_to=folder / "out")
    rank_trainer(callback, ranks=2).validate(Module(), rank_loader(samples(8, (0, 1, 2))), verbose=False)
    there = (folder / "out" / "model.safetensors").is_file()
    try:  # a callback that has not written it
        callback = CalibrationCallback("INT8_STATIC", module="net", export_to=folder / "out")
        rank_trainer(callback, ranks=2).validate(Module(), rank_loader(samples(8, (0, 1, 2))), verbose=False)
    except CalibrationError as error:
        return there, str(error)


def test_on_ranks_no_rank_goes_on_before_it_is_there_and_a_taken_folder_is_an_error_on_all(tmp_path):
    for there, error in run_ranks(on_ranks, 2, tmp_path, timeout=120):
        assert there
        assert "rank 0: " in error
        assert "out is already there" in error
