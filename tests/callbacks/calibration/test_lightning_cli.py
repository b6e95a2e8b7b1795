"""LightningCLI makes both callbacks from YAML, and runs them."""

from importlib import import_module

import pytest
import torch
import yaml

from lightning_obs import CalibrationCallback, QuantizationAwareTraining, load_checkpoint
from tests.callbacks.calibration_modules import Plain, loader
from tests.support.lightning_package import PYTORCH

LightningCLI = import_module(f"{PYTORCH}.cli").LightningCLI

OFF = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(autouse=True)
def no_arguments_of_pytest(monkeypatch):
    monkeypatch.setattr("sys.argv", ["script.py"])


class WithData(Plain):
    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return loader(2)


def config(folder, *callbacks, **options):
    text = yaml.dump({"trainer": {**OFF, "accelerator": "cpu", "callbacks": list(callbacks), **options}})
    (folder / "config.yaml").write_text(text)
    return str(folder / "config.yaml")


def run(command, *arguments):
    return LightningCLI(
        WithData, args=[command, "--config", *arguments], save_config_callback=None, seed_everything_default=0
    )


def callback(name, **options):
    return {"class_path": f"lightning_obs.{name}", "init_args": options}


def of(cli, kind):
    return next(one for one in cli.trainer.callbacks if isinstance(one, kind))


def test_observers_can_be_chosen_by_measurement_from_yaml(tmp_path):
    chosen = callback("CalibrationCallback", scheme="INT8_STATIC", module="net", observers="auto", show=False)
    cli = run("validate", config(tmp_path, chosen))
    assert of(cli, CalibrationCallback).choice is not None


def test_every_option_of_calibration_can_stand_in_yaml(tmp_path):
    options = {
        "scheme": {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": {"num_bits": 8}},
        "targets": ["Linear"],
        "ignore": ["re:.*2$"],
        "observers": {"input": {"name": "minmax", "averaging_constant": 0.5}},
        "module": "net",
        "evaluate": 0.5,
        "every_n_epochs": 1,
        "max_batches": 2,
        "dataloaders": [0],
        "show": False,
        "on_missing": "warn",
        "engines": "unchecked",
        "fused_sets": [["a", "b"]],
        "join_fused_scales": True,
        "export_to": str(tmp_path / "out"),
    }
    cli = run("validate", config(tmp_path, callback("CalibrationCallback", **options)))
    done = of(cli, CalibrationCallback)
    assert done.result.modules == ["0"]
    assert done.result.batches == 2
    assert done.session.observers["0", "input"].averaging_constant == 0.5
    load_checkpoint(Plain().net, tmp_path / "out")


def test_fine_tuning_from_yaml_ends_with_a_checkpoint(tmp_path):
    options = {"scheme": "INT8_STATIC", "module": "net", "train": "all", "export_to": str(tmp_path / "out")}
    path = config(tmp_path, callback("QuantizationAwareTraining", **options), max_epochs=2)
    cli = run("fit", path)
    assert of(cli, QuantizationAwareTraining).train == "all"
    found = load_checkpoint(Plain().net, tmp_path / "out")[0].input_scale
    assert torch.equal(found, cli.model.net[0].input_scale)


def test_the_command_line_has_the_last_word(tmp_path):
    path = config(tmp_path, callback("CalibrationCallback", scheme="FP8", module="net"))
    cli = run("validate", path, "--trainer.callbacks.scheme=INT8_STATIC")
    assert of(cli, CalibrationCallback).label == "INT8_STATIC"


def test_a_wrong_option_is_named_before_anything_runs(tmp_path, capsys):
    path = config(tmp_path, callback("CalibrationCallback", scheme="FP8", export_foldr="out"))
    with pytest.raises(SystemExit):
        run("validate", path)
    assert "export_foldr" in capsys.readouterr().err


def test_a_wrong_value_is_told_in_the_package_s_own_words(tmp_path):
    path = config(tmp_path, callback("CalibrationCallback", scheme="FP9"))
    with pytest.raises(ValueError, match="unknown scheme 'FP9'"):
        run("validate", path)


def test_the_kv_cache_alone_can_stand_in_yaml(tmp_path):
    """For jsonargparse null is a missing argument, so an empty scheme stands for None."""
    cache = callback("CalibrationCallback", scheme={}, kv_cache="FP8")
    cli = LightningCLI(WithData, args=["--config", config(tmp_path, cache)], run=False, save_config_callback=None)
    assert of(cli, CalibrationCallback).label == "float8 tensor kv cache"
