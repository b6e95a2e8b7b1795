"""A plain installation, without the extras. `make lean` runs this file in one; elsewhere the extras are hidden."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_obs import (
    CalibrationCallback,
    CalibrationError,
    CalibrationSession,
    export_gguf,
    export_onnx,
    load_checkpoint,
    mixed_precision,
    packages,
    quantized,
)
from lightning_obs.numerics.kernels import launch
from lightning_obs.numerics.search import numba_loop

HIDDEN = f"import sys; sys.modules.update(dict.fromkeys({sorted(packages.EXTRAS)}))"


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))

    def forward(self, x):
        return self.net(x)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))


def data():
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(64, 128), torch.randint(4, (64,))), batch_size=16)


def validated(callback, folder):
    torch.manual_seed(0)
    module = Classifier()
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(callbacks=[callback], default_root_dir=folder, **options)
    trainer.validate(module, data(), verbose=False)
    return module, trainer


@pytest.fixture(autouse=True)
def without_the_extras(monkeypatch):
    for name in {*packages.EXTRAS, *sys.modules}:
        if name.partition(".")[0] in packages.EXTRAS:
            monkeypatch.setitem(sys.modules, name, None)
    launch.numba_fault.cache_clear()
    yield
    launch.numba_fault.cache_clear()


@pytest.mark.filterwarnings("ignore:W4A16 needs no data")
@pytest.mark.parametrize("scheme", ["INT8_STATIC", "W4A16"])
def test_a_module_is_calibrated_evaluated_exported_and_reloaded(tmp_path, scheme):
    callback = CalibrationCallback(scheme, evaluate=True)
    module, trainer = validated(callback, tmp_path)
    assert trainer.callback_metrics["val_loss_quantized"] != trainer.callback_metrics["val_loss"]
    callback.export(tmp_path / "exported")
    assert callback.report(tmp_path / "report").exists()
    reloaded = load_checkpoint(Classifier().eval(), tmp_path / "exported")
    x = torch.randn(8, 128)
    with torch.no_grad(), quantized(module):
        expected = module(x)
    assert torch.equal(reloaded(x), expected)


OBSERVERS = [
    ("memoryless_mse", "static_minmax"),
    ("imatrix_mse", "minmax"),
    ("memoryless_minmax", "histogram"),
    ("hessian", "percentile"),
    ("normal_observer", "mse"),
]


@pytest.mark.slow  # compiling takes seconds
@pytest.mark.parametrize(("weight", "inputs"), OBSERVERS)
def test_torch_alone_finds_the_ranges_of_the_compiled_loops(monkeypatch, weight, inputs):
    def scales():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
        with CalibrationSession(model, "INT8_STATIC", observers={"weight": weight, "input": inputs}) as session:
            model(torch.randn(96, 64))
        return session.qparams

    without = scales()
    monkeypatch.undo()
    launch.numba_fault.cache_clear()
    if launch.numba_fault() is not None:
        pytest.skip("numba is not installed: there is nothing to compare with")
    torch.testing.assert_close(without, scales(), rtol=0, atol=0)


def test_long_searches_propose_numba_once():
    slow_steps = launch.SlowSteps(limit=100)
    slow_steps.add(60)
    message = r'numba cannot be imported \(.*\).* about ten times as fast.*pip install "lightning-obs\[fast\]"'
    with pytest.warns(UserWarning, match=message):
        slow_steps.add(60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slow_steps.add(60)


def test_the_steps_of_a_search_are_counted(monkeypatch):
    slow_steps = launch.SlowSteps(limit=1 << 40)
    monkeypatch.setattr(numba_loop, "slow_steps", slow_steps)
    session = CalibrationSession(nn.Sequential(nn.Linear(128, 8)), "W8A16", observers={"weight": "memoryless_mse"})
    session.finalize()
    assert slow_steps.steps >= 128 * 8 * 10


def test_onnx_names_its_extra(tmp_path):
    message = r'export_onnx needs the package onnx.*pip install "lightning-obs\[onnx\]"'
    with pytest.raises(CalibrationError, match=message):
        export_onnx(nn.Linear(2, 2), tmp_path / "m.onnx", torch.randn(1, 2))


def test_gguf_names_its_extra(tmp_path):
    message = r'export_gguf needs the package gguf.*pip install "lightning-obs\[gguf\]"'
    with pytest.raises(CalibrationError, match=message):
        export_gguf(nn.Linear(2, 2), tmp_path / "model.gguf", tmp_path / "base.gguf")


def test_mixed_precision_names_its_extra_before_anything_is_measured():
    class Unread:
        def __iter__(self):
            raise AssertionError("a batch was read")

    with pytest.raises(CalibrationError, match=r'within a budget needs.*scipy.*pip install "lightning-obs\[mixed\]"'):
        mixed_precision(nn.Linear(2, 2), Unread(), {"int4": "W4A16", "int8": "W8A16"}, budget=5.0)


@pytest.mark.parametrize("arguments", [[], ["scheme=fp8"], ["--help"]], ids=str)
def test_the_command_line_names_its_extra(arguments):
    code = f"{HIDDEN}; sys.argv[1:] = {arguments}; from lightning_obs.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "CalibrationError: the command line needs the package hydra, which cannot be imported"
    )
    assert 'pip install "lightning-obs[cli]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_versions_are_told_without_the_command_line_s_extra():
    code = f"{HIDDEN}; sys.argv[1:] = ['--version']; from lightning_obs.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("lightning_obs ")


def test_an_old_transformers_shuts_out_only_its_own_models(monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
    monkeypatch.setattr(packages, "version", lambda name: "4.57.0")
    CalibrationSession(nn.Sequential(nn.Linear(128, 4)), "W8A16")
    message = r"a model of transformers needs transformers>=5\.17\. Got transformers 4\.57\.0\. .*pip install -U"
    with pytest.raises(CalibrationError, match=message):
        CalibrationSession(model, "W8A16")
