"""An option that counts takes whole numbers: a fraction, or True for 1, is an error where it is given."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn

from lightning_obs import (
    CalibrationCallback,
    CalibrationError,
    CalibrationOptions,
    CalibrationSession,
    Observer,
    QuantizationAwareTraining,
    choose_observers,
    export_checkpoint,
    mixed_precision,
    sensitivity,
    smooth_inputs,
)
from lightning_obs.choice.mixed_precision import frontier

NOT_WHOLE = [1.5, 2.0, float("nan"), True, "2"]


def network():
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4))


def batches():
    return [torch.randn(8, 16) for _ in range(4)]


@pytest.mark.parametrize("value", NOT_WHOLE)
@pytest.mark.parametrize("name", ["max_batches", "every_n_epochs"])
def test_a_callback_counts_in_whole_numbers(name, value):
    with pytest.raises(CalibrationError, match=rf"^{name}\. Got {value!r}, expected a whole number, one or more\."):
        CalibrationCallback("FP8", **{name: value})


@pytest.mark.parametrize("value", NOT_WHOLE)
@pytest.mark.parametrize("name", ["calibration_batches", "start_epoch", "start_step", "freeze_after"])
def test_training_counts_in_whole_numbers(name, value):
    with pytest.raises(CalibrationError, match=rf"^{name}\. Got {value!r}, expected a whole number, zero or more\."):
        QuantizationAwareTraining("FP8", **{name: value})


@pytest.mark.parametrize("value", [1.5, True, [0, True], [0.5]])
def test_loaders_have_whole_numbers_or_keys(value):
    with pytest.raises(CalibrationError, match=r"dataloaders\. Got .*, expected numbers or keys of validation loaders"):
        CalibrationCallback("FP8", dataloaders=value)


@pytest.mark.parametrize("value", [1.5, True, "2", -1])
def test_a_seed_is_a_whole_number(value):
    message = rf"^seed\. Got {value!r}, expected a whole number, zero or more\."
    with pytest.raises(CalibrationError, match=message):
        sensitivity(network(), batches(), ["INT8_STATIC"], seed=value)
    with pytest.raises(CalibrationError, match=message):
        mixed_precision(network(), batches(), ["INT8_STATIC"], 8.0, seed=value)
    with pytest.raises(CalibrationError, match=message):
        choose_observers(network(), batches(), "INT8_STATIC", {"input": ["minmax"]}, seed=value)


def test_a_frontier_has_a_whole_number_of_points():
    measured = sensitivity(network(), batches(), ["INT8_STATIC", None])
    with pytest.raises(CalibrationError, match=r"^points\. Got 2\.5, expected a whole number, one or more\."):
        frontier(measured, points=2.5)


@pytest.mark.parametrize("value", [1e9, True])
def test_a_file_has_a_whole_number_of_bytes(value, tmp_path):
    model = network()
    with CalibrationSession(model, "W8A8"):
        pass
    with pytest.raises(CalibrationError, match=r"max_shard_size\. Got .*, expected a whole number of bytes, or '5GB'"):
        export_checkpoint(model, tmp_path / "out", max_shard_size=value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("observer", "base_name"), [("memoryless_mse", "weight"), ("histogram", "input")])
def test_patience_is_a_whole_number(observer, base_name):
    with pytest.raises(CalibrationError, match=r"patience\. Got 1\.5, expected a whole number"):
        Observer.load_from_registry(observer, base_name=base_name, args=QuantizationArgs(num_bits=8), patience=1.5)


@pytest.mark.parametrize("value", [True, "half"])
def test_a_share_is_no_truth_and_no_text(value):
    with pytest.raises(CalibrationError, match=r"strength\. Got .*, expected a number above 0 and at most 1"):
        smooth_inputs(network(), batches(), "INT8_STATIC", strength=value)
    with pytest.raises(CalibrationError, match=r"distill\. Got .*, expected zero or more, or 'only'"):
        QuantizationAwareTraining("FP8", distill=value)
    with pytest.raises(CalibrationError, match=r"rounding\. Got .*'damping'"):
        CalibrationOptions("W4A16", rounding={"name": "gptq", "damping": value})
