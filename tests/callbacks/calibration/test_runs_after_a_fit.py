"""The package runs the user's model after a fit, which leaves it in training: it runs in evaluation, and is left so."""

from __future__ import annotations

import importlib.util
import random

import numpy as np
import pytest
import torch
from torch import nn

from lightning_obs import CalibrationCallback, export_onnx, sensitivity
from tests.callbacks.calibration_modules import Plain, loader, trainer

W8 = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}
BATCHES = [torch.randn(32, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


class Counter(nn.Module):
    """Counts its calls in a buffer, whatever the mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


class Normed(Plain):
    """Batch norm, dropout and a buffer of its own; a part that the user keeps in evaluation."""

    def build(self):
        parts = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), Counter(), nn.Linear(16, 2)
        return nn.Sequential(*parts)


@pytest.fixture
def fitted():
    """A module after a fit in which the user keeps the batch norm in evaluation, and its callback."""
    torch.manual_seed(0)
    module, callback = Normed(), CalibrationCallback("INT8_STATIC", module="net")
    trainer(callback, max_epochs=1).fit(module, loader(), loader(seed=2))
    module.train()
    module.net[2].eval()
    return module, callback


def state_of(module):
    tensors = {name: value.clone() for name, value in module.state_dict().items()}
    modes = [part.training for part in module.modules()]
    return tensors, modes, torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()


def same(before, after):
    tensors = all(torch.equal(value, after[0][name]) for name, value in before[0].items())
    return tensors and before[1] == after[1] and torch.equal(before[2], after[2]) and before[3:] == after[3:]


RUNS = {
    "layer_errors": lambda callback, folder: callback.layer_errors(BATCHES),
    "report": lambda callback, folder: callback.report(folder / "report", BATCHES),
    "sensitivity": lambda callback, folder: sensitivity(
        callback.session.model, BATCHES, {"static": "INT8_STATIC", "weights": W8}
    ),
}
if importlib.util.find_spec("onnxscript") is not None:
    RUNS["export_onnx"] = lambda callback, folder: export_onnx(callback.session.model, folder / "m.onnx", BATCHES[0])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_run_after_a_fit_leaves_the_model_as_it_was_and_the_export_goes_through(run, fitted, tmp_path):
    module, callback = fitted
    before = state_of(module)
    run(callback, tmp_path)
    assert same(before, state_of(module))
    callback.export(tmp_path / "checkpoint")


def test_layer_errors_after_a_fit_are_those_of_the_model_in_evaluation(fitted):
    module, callback = fitted
    in_training = callback.layer_errors(BATCHES)
    module.eval()
    assert in_training == callback.layer_errors(BATCHES)


def test_a_model_in_training_is_exported_to_onnx_as_in_evaluation(fitted, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    module, callback = fitted
    file = export_onnx(callback.session.model, tmp_path / "model.onnx", BATCHES[0])
    session = runtime.InferenceSession(file)
    (found,) = session.run(None, {session.get_inputs()[0].name: BATCHES[0].numpy()})
    module.eval()
    expected = module(BATCHES[0]).detach()
    assert (torch.from_numpy(found) - expected).norm() < 0.1 * expected.norm()
