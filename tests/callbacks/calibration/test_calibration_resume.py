"""CalibrationCallback and checkpoints: every row of what a single device can resume."""

import io

import pytest
import torch
from safetensors.torch import load_file

from lightning_obs import CalibrationCallback, CalibrationError, QuantizationAwareTraining
from lightning_obs.model.module_qparams import read_qparams
from tests.callbacks.calibration_modules import Plain, loader, trainer
from tests.support.lightning_package import MESSAGES, L, ModelCheckpoint

# ---------------------------------------------------------------------- resume: the rows of facts/lightning.md


def fit_and_save(path, callback):
    module = Plain()
    torch.manual_seed(3)
    tr = trainer(callback, max_epochs=1)
    tr.fit(module, loader(), loader(seed=2))
    tr.save_checkpoint(path)
    return module


class SeeAtTrainStart(L.Callback):
    def on_train_start(self, trainer, pl_module):
        self.qparams = {name: value.clone() for name, value in read_qparams(pl_module.net[0]).items()}


def test_a_resumed_fit_starts_with_the_same_qparams(tmp_path):
    module = fit_and_save(tmp_path / "c.ckpt", CalibrationCallback("INT8_STATIC"))
    look = SeeAtTrainStart()
    trainer(CalibrationCallback("INT8_STATIC"), look, max_epochs=2).fit(
        Plain(), loader(), loader(seed=2), ckpt_path=tmp_path / "c.ckpt"
    )
    assert look.qparams.keys() == read_qparams(module.net[0]).keys() != set()
    for name, value in read_qparams(module.net[0]).items():
        assert torch.equal(look.qparams[name], value)


def test_a_calibrated_checkpoint_loads_strictly_without_the_callback(tmp_path):
    module = fit_and_save(tmp_path / "c.ckpt", CalibrationCallback("INT8_STATIC"))
    loaded = Plain.load_from_checkpoint(tmp_path / "c.ckpt", strict=True)
    assert torch.equal(loaded.net[0].weight, module.net[0].weight)
    plain = Plain()
    plain.load_state_dict(torch.load(tmp_path / "c.ckpt", weights_only=True)["state_dict"], strict=True)
    trainer(max_epochs=2).fit(Plain(), loader(), loader(), ckpt_path=tmp_path / "c.ckpt")


def test_a_checkpoint_without_calibration_resumes_with_the_callback(tmp_path):
    tr = trainer(max_epochs=1)
    tr.fit(Plain(), loader(), loader())
    tr.save_checkpoint(tmp_path / "c.ckpt")
    callback = CalibrationCallback("INT8_STATIC")
    trainer(callback, max_epochs=2).fit(Plain(), loader(), loader(), ckpt_path=tmp_path / "c.ckpt")
    assert callback.result is not None


@pytest.mark.parametrize("entry", ["test", "predict"])
def test_test_and_predict_with_ckpt_path_restore_the_qparams(tmp_path, entry):
    module = fit_and_save(tmp_path / "c.ckpt", CalibrationCallback("INT8_STATIC"))
    fresh, callback = Plain(), CalibrationCallback("INT8_STATIC")
    getattr(trainer(callback), entry)(fresh, loader(), ckpt_path=tmp_path / "c.ckpt")
    assert torch.equal(fresh.net[0].input_scale, module.net[0].input_scale)
    callback.export(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_model_checkpoint_saves_the_calibration_of_the_same_epoch(tmp_path):
    module, callback = Plain(), CalibrationCallback("INT8_STATIC")
    saver = ModelCheckpoint(dirpath=tmp_path, filename="last", monitor="val_loss")
    trainer(saver, callback, max_epochs=1, enable_checkpointing=True).fit(module, loader(), loader())
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"][callback.state_key]
    assert torch.equal(saved["qparams"]["net.0.input_scale"], module.net[0].input_scale)


def test_two_calibrations_keep_their_states_apart():
    first, second = CalibrationCallback("FP8"), CalibrationCallback("INT8_STATIC")
    assert first.state_key != second.state_key
    trainer(first, second)  # Lightning refuses two callbacks with one key


def test_the_state_survives_a_weights_only_load():
    module, callback = Plain(), CalibrationCallback("INT8_STATIC")
    trainer(callback).validate(module, loader(), verbose=False)
    buffer = io.BytesIO()
    torch.save(callback.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True)["qparams"].keys() == callback.result.qparams.keys()


def test_a_resumed_run_saves_the_restored_qparams_again(tmp_path):
    module = fit_and_save(tmp_path / "c.ckpt", CalibrationCallback("INT8_STATIC"))
    callback = CalibrationCallback("INT8_STATIC")
    tr = trainer(callback, max_epochs=2, limit_val_batches=0)
    tr.fit(Plain(), loader(), loader(seed=2), ckpt_path=tmp_path / "c.ckpt")
    saved = callback.state_dict()["qparams"]
    assert torch.equal(saved["net.2.input_scale"], module.net[2].input_scale)


def test_weights_trained_on_after_the_last_validation_are_not_exported_with_old_scales(tmp_path):
    module, callback = Plain(), CalibrationCallback("INT8_STATIC")
    tr = trainer(callback, max_epochs=3, check_val_every_n_epoch=2, num_sanity_val_steps=0)
    tr.fit(module, loader(), loader())
    with pytest.raises(
        CalibrationError, match=r"4 parameters .*have changed since .*net\.0\.weight, net\.0\.bias.*trainer\.validate"
    ):
        callback.export(tmp_path / "out")
    trainer(callback).validate(module, loader(), verbose=False)
    callback.export(tmp_path / "out")


# ---------------------------------------------------------------------- options changed between runs


def notes(caplog):
    return [record.message for record in caplog.records if "other options" in record.message]


@pytest.mark.parametrize("entry", ["validate", "fit"])
def test_a_calibration_that_is_made_anew_drops_one_of_other_options_with_one_line(entry, tmp_path, caplog):
    module = fit_and_save(tmp_path / "c.ckpt", CalibrationCallback("INT8_STATIC"))
    resumed, callback = Plain(), CalibrationCallback("INT8_STATIC", ignore=["net.2"], show=False)
    with caplog.at_level("INFO", logger=MESSAGES):
        run = trainer(callback, max_epochs=2)
        if entry == "fit":
            run.fit(resumed, loader(), loader(seed=2), ckpt_path=tmp_path / "c.ckpt")
        else:
            run.validate(resumed, loader(seed=2), ckpt_path=tmp_path / "c.ckpt", verbose=False)
    assert callback.result.modules == ["net.0"]
    assert not read_qparams(resumed.net[2])
    (line,) = notes(caplog)
    assert "(ignore: now with 'net.2')" in line
    if entry == "validate":
        assert torch.equal(resumed.net[0].input_scale, module.net[0].input_scale)


@pytest.mark.parametrize("entry", ["test", "predict", "fit"])
def test_where_nothing_is_calibrated_anew_a_checkpoint_of_other_options_is_refused_by_the_fields_that_differ(
    entry, tmp_path
):
    fit_and_save(tmp_path / "c.ckpt", CalibrationCallback("INT8_STATIC"))
    other = CalibrationCallback("INT8_STATIC", observers={"input": "minmax"}, ignore=["net.2"])
    run = trainer(other, max_epochs=2, limit_val_batches=0)
    with pytest.raises(CalibrationError) as error:
        getattr(run, entry)(Plain(), *[loader()] * (1 + (entry == "fit")), ckpt_path=tmp_path / "c.ckpt")
    assert error.value.where == [
        "config_groups.group_0.input_activations.observer: 'static_minmax' -> 'minmax'",
        "ignore: now with 'net.2'",
    ]
    assert len(str(error.value)) < 400


def test_fine_tuning_cannot_drop_its_ranges_and_names_the_fields_that_differ(tmp_path):
    options = {"calibration_batches": 1, "train": "all"}
    fit_and_save(tmp_path / "c.ckpt", QuantizationAwareTraining("INT8_STATIC", **options))
    other = QuantizationAwareTraining("INT8_STATIC", ignore=["net.2"], **options)
    with pytest.raises(CalibrationError) as error:
        trainer(other, max_epochs=2).fit(Plain(), loader(), loader(), ckpt_path=tmp_path / "c.ckpt")
    assert error.value.where == ["ignore: now with 'net.2'"]


def test_auto_chooses_anew_for_other_options(tmp_path, caplog):
    def automatic(**options):
        return CalibrationCallback("INT8_STATIC", observers="auto", show=False, **options)

    fit_and_save(tmp_path / "c.ckpt", first := automatic())
    again, other, module = automatic(), automatic(ignore=["net.2"]), Plain()
    trainer(again).validate(Plain(), loader(seed=2), ckpt_path=tmp_path / "c.ckpt", verbose=False)
    assert again.choice is None  # what the first run chose
    assert again.options.config == first.options.config
    with caplog.at_level("INFO", logger=MESSAGES):
        trainer(other).validate(module, loader(seed=2), ckpt_path=tmp_path / "c.ckpt", verbose=False)
    assert (other.result.modules, set(other.choice.observers)) == (["net.0"], {"net.0"})
    (line,) = notes(caplog)
    assert "(ignore: now with 'net.2', observers: chosen by measurement" in line
    assert len(line) < 400


CHOSEN = 'observers: chosen by measurement, observers="auto" (input static_minmax, weight memoryless_minmax)'


@pytest.fixture
def chosen(tmp_path):
    """A checkpoint whose observers were chosen, each from a list of one."""
    candidates = {"input": ["static_minmax"], "weight": ["memoryless_minmax"]}
    fit_and_save(tmp_path / "c.ckpt", CalibrationCallback("INT8_STATIC", observers=candidates))
    return tmp_path / "c.ckpt"


def test_chosen_observers_are_dropped_by_name_where_this_run_calibrates_without_a_choice(chosen, caplog):
    module, callback = Plain(), CalibrationCallback("INT8_STATIC", ignore=["net.2"], show=False)
    with caplog.at_level("INFO", logger=MESSAGES):
        trainer(callback).validate(module, loader(seed=2), ckpt_path=chosen, verbose=False)
    assert callback.result.modules == ["net.0"]
    (line,) = notes(caplog)
    assert f"(ignore: now with 'net.2', {CHOSEN})" in line


@pytest.mark.parametrize("observers", [None, {"input": "minmax"}])
def test_chosen_observers_are_the_one_difference_that_is_named_where_nothing_is_calibrated_anew(chosen, observers):
    with pytest.raises(CalibrationError) as error:
        trainer(CalibrationCallback("INT8_STATIC", observers=observers)).test(Plain(), loader(), ckpt_path=chosen)
    assert error.value.where == [CHOSEN]


def test_a_second_callback_with_other_options_leaves_nothing_of_the_first_in_its_checkpoint(tmp_path):
    module = fit_and_save(tmp_path / "c.ckpt", CalibrationCallback("INT8_STATIC"))
    callback = CalibrationCallback("INT8_STATIC", ignore=["net.2"], export_to=tmp_path / "out", show=False)
    trainer(callback).validate(module, loader(), verbose=False)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "net.2.weight_scale" not in tensors
    assert tensors["net.2.weight"].dtype == torch.float32
