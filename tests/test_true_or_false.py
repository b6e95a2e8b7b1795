"""An option that is on or off takes True or False: any other text or number is an error where it is given."""

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
    export_checkpoint,
    export_gguf,
    export_onnx,
)


def callback(**options):
    return CalibrationCallback("FP8", export_to="out", **options)


def training(**options):
    return QuantizationAwareTraining("FP8", export_to="out", **options)


def weight_observer(**hyperparameters):
    return Observer.load_from_registry(
        "imatrix_mse", base_name="weight", args=QuantizationArgs(num_bits=8), **hyperparameters
    )


def calibrated():
    model = nn.Sequential(nn.Linear(16, 4))
    with CalibrationSession(model, "W8A8"):
        pass
    return model


def options(**fields):
    return CalibrationOptions("FP8", **fields)


@pytest.mark.parametrize(
    ("taker", "name"),
    [
        (options, "calibrate_all_experts"),
        (options, "join_fused_scales"),
        (callback, "calibrate_all_experts"),
        (callback, "export_overwrite"),
        (callback, "sanity_check"),
        (callback, "log"),
        (callback, "show"),
        (training, "export_overwrite"),
        (training, "sanity_check"),
        (weight_observer, "signed"),
        (weight_observer, "strict"),
        (weight_observer, "weigh_tokens"),
    ],
)
@pytest.mark.parametrize("value", ["no", "flase", "true", 0, 1])
def test_an_option_that_is_on_or_off_takes_nothing_else(taker, name, value):
    with pytest.raises(CalibrationError, match=rf"{name}\. Got {value!r}, expected True or False"):
        taker(**{name: value})


@pytest.mark.parametrize("value", ["no", "flase", None])
def test_a_share_is_no_text(value):
    with pytest.raises(CalibrationError, match=r"evaluate\. Got .*expected True, False, or a share"):
        callback(evaluate=value)


def test_a_checkpoint_and_an_onnx_file_are_not_overwritten_by_the_text_no(tmp_path):
    model, x = calibrated(), torch.zeros(1, 16)
    folder = export_checkpoint(model, tmp_path / "out")
    before = (folder / "model.safetensors").stat()
    with pytest.raises(CalibrationError, match=r"overwrite\. Got 'no', expected True or False"):
        export_checkpoint(model, folder, overwrite="no")
    with pytest.raises(CalibrationError, match=r"overwrite\. Got 'no', expected True or False"):
        export_onnx(model, tmp_path / "new.onnx", (x,), overwrite="no")
    with pytest.raises(CalibrationError, match=r"overwrite\. Got 'no', expected True or False"):
        export_gguf(model, tmp_path / "new.gguf", tmp_path / "base.gguf", overwrite="no")
    assert (folder / "model.safetensors").stat() == before
    assert not (tmp_path / "new.onnx").exists()


@pytest.mark.parametrize("hyperparameter", [{"averaging_constant": "often"}, {"averaging_constant": True}])
def test_a_number_of_an_observer_is_no_text(hyperparameter):
    args = QuantizationArgs(num_bits=8)
    with pytest.raises(CalibrationError, match=r"MinMaxObserver: averaging_constant\. Got .*expected a number"):
        Observer.load_from_registry("minmax", base_name="input", args=args, **hyperparameter)
