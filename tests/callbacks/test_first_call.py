"""callback.export_onnx and callback.export_program trace with the arguments of the first validation batch's call."""

import copy
import re

import onnxruntime
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_obs import (
    CalibrationCallback,
    CalibrationError,
    CalibrationWarning,
    QuantizationAwareTraining,
    quantized,
)
from lightning_obs.callbacks import measured_export
from tests.callbacks.calibration_modules import Language, Plain, hooks_on, loader, trainer
from tests.support.lightning_package import MESSAGES, L
from tests.support.tiny_model import save_tiny_llama

DYNAMIC = torch.export.Dim.DYNAMIC


def quantized_outputs(module, x):
    with torch.no_grad(), quantized(module):
        return module(x)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("make", [CalibrationCallback, QuantizationAwareTraining])
def test_a_callback_writes_programs_for_one_sample_or_any_number(make, tmp_path):
    module, callback = Plain(), make("INT8_STATIC")
    trainer(callback).validate(module, loader(), verbose=False)
    assert hooks_on(module) == []
    x = torch.randn(5, 8)
    expected = quantized_outputs(module, x)
    one = torch.export.load(callback.export_program(tmp_path / "one.pt2")).module()
    torch.testing.assert_close(one(x[:1]), expected[:1], atol=1e-6, rtol=1e-5)
    file = callback.export_program(tmp_path / "any.pt2", dynamic_shapes=({0: DYNAMIC},))
    torch.testing.assert_close(torch.export.load(file).module()(x), expected, atol=1e-6, rtol=1e-5)


def test_a_callback_writes_an_onnx_file_in_the_same_way(tmp_path):
    module, callback = Plain(), CalibrationCallback("INT8_STATIC")
    trainer(callback).validate(module, loader(), verbose=False)
    file = callback.export_onnx(tmp_path / "any.onnx", dynamic_shapes=({0: DYNAMIC},))
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    x = torch.randn(5, 8)
    [outputs] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(outputs), quantized_outputs(module, x), atol=2e-5, rtol=1e-5)


def written_onnx(callback, file, caplog, **options):
    """Validate, export, and return what was said."""
    trainer(callback).validate(Plain(), loader(), verbose=False)
    with caplog.at_level("INFO", logger=MESSAGES):
        callback.export_onnx(file, **options)
    return [record.message for record in caplog.records if str(file) in record.message]


def test_it_is_said_what_onnxruntime_makes_of_an_onnx_file(tmp_path, caplog):
    [said] = written_onnx(CalibrationCallback("INT8_ONNX"), tmp_path / "m.onnx", caplog)
    assert re.search(r"2 of 2 products in integers, [\d.]+x the speed of float", said)


def test_an_onnx_file_is_not_run_unless_asked_or_without_onnxruntime(tmp_path, caplog, monkeypatch):
    assert written_onnx(CalibrationCallback("INT8_ONNX"), tmp_path / "m.onnx", caplog, measure=False) == []
    monkeypatch.setattr(measured_export, "find_spec", lambda name: None)
    assert written_onnx(CalibrationCallback("INT8_ONNX"), tmp_path / "n.onnx", caplog) == []
    assert {file.name for file in tmp_path.iterdir()} == {"m.onnx", "n.onnx"}


def test_an_onnx_file_that_onnxruntime_does_not_run_is_kept_with_a_warning(tmp_path, caplog, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(onnxruntime, "InferenceSession", fail)
    with pytest.warns(CalibrationWarning, match="does not run it: no kernel"):
        written_onnx(CalibrationCallback("INT8_ONNX"), tmp_path / "m.onnx", caplog)
    assert (tmp_path / "m.onnx").stat().st_size > 0


def test_an_example_of_ones_own_and_options_are_passed_on(tmp_path):
    module, callback = Plain(), CalibrationCallback("INT8_STATIC")
    trainer(callback).validate(module, loader(), verbose=False)
    file = callback.export_program(tmp_path / "m.pt2", torch.randn(3, 8))
    with pytest.raises(CalibrationError, match="is already there"):
        callback.export_program(file)
    callback.export_program(file, torch.randn(3, 8), overwrite=True)
    x = torch.randn(3, 8)
    torch.testing.assert_close(torch.export.load(file).module()(x), quantized_outputs(module, x), atol=1e-6, rtol=1e-5)


def test_two_samples_are_kept_and_no_more():
    module, callback = Plain(), CalibrationCallback("INT8_STATIC")
    data = loader()
    trainer(callback).validate(module, data, verbose=False)
    [x] = callback.results.first_call.example(module, is_dynamic=True)
    first = next(iter(data))[0]
    assert torch.equal(x, first[:2])
    assert x.untyped_storage().nbytes() == x.nbytes
    assert not x.is_inference()
    [x] = callback.results.first_call.example(module, is_dynamic=False)
    assert torch.equal(x, first[:1])


class Masked(Plain):
    """Its second tensor has no dimension of samples."""

    def forward(self, x, mask, *, scale=1.0):
        return self.net(x * mask) * scale

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(batch[0], torch.ones(8), scale=2.0).mean())


def test_tensors_without_a_common_first_dimension_are_kept_whole(tmp_path):
    module, callback = Masked(), CalibrationCallback("INT8_STATIC")
    trainer(callback).validate(module, loader(), verbose=False)
    example = callback.results.first_call.example(module, is_dynamic=False)
    assert {name: getattr(value, "shape", value) for name, value in example.items()} == {
        "x": (4, 8),
        "mask": (8,),
        "scale": 2.0,
    }
    program = torch.export.load(callback.export_program(tmp_path / "m.pt2"))
    x = torch.randn(4, 8)
    with torch.no_grad(), quantized(module):
        expected = module(x, torch.ones(8), scale=2.0)
    torch.testing.assert_close(program.module()(x=x, mask=torch.ones(8), scale=2.0), expected)


class Gathering(Plain):
    """Its inputs have no names, its scale has one."""

    def forward(self, *inputs, scale=1.0):
        return self.net(sum(inputs)) * scale

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(batch[0], 2 * batch[0], scale=2.0).mean())


class BeforeASlash(Plain):
    """Its inputs have names that no call can use, its scale has one."""

    def forward(self, x, y, /, scale=1.0):
        return self.net(x + y) * scale

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(batch[0], 2 * batch[0], scale=2.0).mean())


@pytest.mark.slow_but_first
@pytest.mark.parametrize("module_class", [Gathering, BeforeASlash])
def test_arguments_without_names_stay_positional_beside_keyword_arguments(module_class, tmp_path):
    module, callback = module_class(), CalibrationCallback("INT8_STATIC")
    trainer(callback).validate(module, loader(), verbose=False)
    x = torch.randn(1, 8)
    with torch.no_grad(), quantized(module):
        expected = module(x, 2 * x, scale=2.0)
    program = torch.export.load(callback.export_program(tmp_path / "m.pt2"))
    torch.testing.assert_close(program.module()(x, 2 * x, scale=2.0), expected, atol=1e-6, rtol=1e-5)
    session = onnxruntime.InferenceSession(callback.export_onnx(tmp_path / "m.onnx"))
    names = [value.name for value in session.get_inputs()]
    [outputs] = session.run(None, dict(zip(names, (x.numpy(), 2 * x.numpy()), strict=True)))
    torch.testing.assert_close(torch.from_numpy(outputs), expected, atol=2e-5, rtol=1e-5)


def test_labels_of_a_transformers_model_are_left_out(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_tiny_llama(tmp_path / "tiny"))
    ids = torch.randint(0, 128, (4, 8))
    module, callback = Language(model), CalibrationCallback("INT8_STATIC")
    data = DataLoader([{"input_ids": row} for row in ids], batch_size=4)
    trainer(callback).validate(module, data, verbose=False)
    example = callback.results.first_call.example(module.model, is_dynamic=False)
    assert list(example) == ["input_ids"]
    assert torch.equal(example["input_ids"], ids[:1])


class InParts(Plain):
    """Its validation calls the parts of the module, and never the module."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).pow(2).mean())


def test_without_a_call_there_is_no_example(tmp_path):
    module, callback = InParts(), CalibrationCallback("INT8_STATIC")
    trainer(callback).validate(module, loader(), verbose=False)
    assert hooks_on(module) == []
    with pytest.raises(CalibrationError, match=r"no validation batch has called InParts.*export_onnx\(file, example\)"):
        callback.export_program(tmp_path / "m.pt2")


def test_nothing_calibrated_is_told_before_the_example(tmp_path):
    with pytest.raises(CalibrationError, match="calibrat"):
        CalibrationCallback("INT8_STATIC").export_program(tmp_path / "m.pt2")


def test_the_copy_that_has_run_answers_for_the_original(tmp_path):
    module, callback = Plain(), CalibrationCallback("INT8_STATIC")
    trainer(copy.deepcopy(callback)).validate(module, loader(), verbose=False)
    assert callback.export_program(tmp_path / "m.pt2").exists()


class Inner(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def test_after_a_fit_the_model_is_traced_as_it_is_then(tmp_path):
    module, callback = Inner(), CalibrationCallback("INT8_STATIC")
    trainer(callback, max_epochs=2).fit(module, loader(), loader(2))
    program = torch.export.load(callback.export_program(tmp_path / "m.pt2"))
    x = torch.randn(1, 8)
    torch.testing.assert_close(program.module()(x), quantized_outputs(module.net, x), atol=1e-6, rtol=1e-5)
