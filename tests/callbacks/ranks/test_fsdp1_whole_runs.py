"""FSDP1: the quantized model, training, transformers, resume. Each `on_*` function runs on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lightning_obs import CalibrationCallback, QuantizationAwareTraining, quantized
from lightning_obs.model.kinds import without_wrappers
from lightning_obs.model.module_qparams import read_qparams
from tests.callbacks.ranks.fsdp1_modules import Module, data, fsdp1_trainer, run, same_files
from tests.support.lightning_package import Callback, L
from tests.support.lightning_ranks import calibration, like_torchrun, loader, same, trainer
from tests.support.rank_processes import run_ranks
from tests.support.tiny_model import save_tiny_llama

# ---------------------------------------------------------------------- the quantized model


def on_quantized(rank):
    like_torchrun(rank, 2)
    callback, module = calibration(), Module()
    with_trainer = fsdp1_trainer(callback)
    run(with_trainer, module)
    with torch.no_grad(), quantized(module.net):
        return with_trainer.strategy.model(data(5))


def test_quantized_runs_through_the_wrapper_with_the_outputs_of_one_device():
    module = Module()
    trainer(calibration()).validate(module, loader(data()), verbose=False)
    with torch.no_grad(), quantized(module.net):
        expected = module(data(5))
    for outputs in run_ranks(on_quantized, 2):
        assert torch.equal(outputs, expected)


def on_training(rank, strategy, weight, folder):
    like_torchrun(rank, 2)
    observers = {"input": "static_minmax", "weight": weight}
    callback = QuantizationAwareTraining("INT8_STATIC", module="net", observers=observers)
    options = {"ranks": 2, "max_epochs": 3}
    with_trainer = fsdp1_trainer(callback, **options) if strategy == "fsdp1" else trainer(callback, **options)
    with_trainer.fit(Module(lr=1e-2), loader(data(16)), loader(data()))
    callback.export(folder / strategy)
    return callback.result.qparams


@pytest.mark.slow_but_first
@pytest.mark.parametrize("weight", ["memoryless_minmax", "memoryless_mse"])
def test_training_quantized_ends_with_the_weights_and_scales_of_ddp(weight, tmp_path):
    results = [run_ranks(on_training, 2, strategy, weight, tmp_path) for strategy in ("ddp", "fsdp1")]
    assert all(same(qparams, results[0][0]) for of_strategy in results for qparams in of_strategy)
    assert same_files(tmp_path / "ddp", tmp_path / "fsdp1")


# ---------------------------------------------------------------------- transformers


class Llama(L.LightningModule):
    """Tied embeddings, which the outermost unit holds, as it does the last norm."""

    def __init__(self, folder):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder)

    def validation_step(self, batch, batch_idx):
        self.model(input_ids=batch)


def calibrate_llama(folder, out, ranks):
    options = {"kv_cache": "FP8", "observers": {"input": "static_minmax"}}
    callback = CalibrationCallback("FP8", ignore=["lm_head"], **options)
    options = {"policy": {LlamaDecoderLayer}, "ranks": ranks}
    with_trainer = fsdp1_trainer(callback, **options) if ranks > 1 else trainer(callback)
    ids = torch.randint(3, 200, (1, 16), generator=torch.Generator().manual_seed(0)).repeat(4, 1)
    with_trainer.validate(Llama(folder), DataLoader(ids, batch_size=2), verbose=False)
    callback.export(out)


def on_llama(rank, folder, out):
    like_torchrun(rank, 2)
    calibrate_llama(folder, out, 2)


def test_a_transformers_model_is_exported_as_one_device_exports_it(tmp_path):
    folder = save_tiny_llama(tmp_path / "tiny")
    calibrate_llama(folder, tmp_path / "one", 1)
    run_ranks(on_llama, 2, folder, tmp_path / "many")
    assert same_files(tmp_path / "one", tmp_path / "many")
    AutoModelForCausalLM.from_pretrained(tmp_path / "many")


# ---------------------------------------------------------------------- resume


def on_resume(rank, ranks, path, kind, entry):
    like_torchrun(rank, ranks)
    seen = {}

    class Look(Callback):
        def on_train_start(self, with_trainer, module):
            with without_wrappers(module.net):
                found = [(f"{n}.{k}", v) for n, m in module.net.named_modules() for k, v in read_qparams(m).items()]
            seen["before"] = {name: value.cpu().clone() for name, value in found}

        on_test_start = on_train_start

    callback, module = calibration(), Module(lr=1e-2)
    resumed = Path(path).exists()
    options = {"max_epochs": 2 if resumed else 1}
    if ranks > 1:
        with_trainer = fsdp1_trainer(callback, Look(), ranks=ranks, state_dict_type=kind, **options)
    else:
        with_trainer = trainer(callback, Look(), **options)
    if entry == "test":
        with_trainer.test(module, loader(data()), ckpt_path=path, verbose=False)
        return seen["before"]
    with_trainer.fit(module, loader(data(8)), loader(data()), ckpt_path=path if resumed else None)
    if resumed:
        return seen["before"]
    with_trainer.save_checkpoint(path)
    return callback.result.qparams


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("kind", "then", "entries"),
    [
        ("full", 2, ["fit", "test"]),
        ("full", 1, ["test"]),
        ("sharded", 2, ["fit", "test"]),
        pytest.param("full", 4, ["fit"], marks=pytest.mark.nightly),
        pytest.param("sharded", 4, ["fit"], marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_two_ranks_resumes_with_the_same_qparams(kind, then, entries, tmp_path):
    """On one device only to test: Lightning names the optimizer's state there by number, FSDP1 by parameter."""
    path = str(tmp_path / "last.ckpt")
    written = run_ranks(on_resume, 2, 2, path, kind, "fit")
    assert same(*written)
    assert len(written[0]) == 18
    for entry in entries:
        for before in run_ranks(on_resume, then, then, path, kind, entry):
            assert same(before, written[0])


def test_a_full_checkpoint_loads_strictly_without_the_callback(tmp_path):
    path = str(tmp_path / "last.ckpt")
    run_ranks(on_resume, 2, 2, path, "full", "fit")
    state = torch.load(path, weights_only=True)
    assert Module().load_state_dict(state["state_dict"], strict=True)
