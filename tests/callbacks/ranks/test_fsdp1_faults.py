"""FSDP1: what goes wrong is the same error on every rank. Each `on_*` function runs on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_obs import CalibrationError, QuantizationAwareTraining
from lightning_obs.model.module_qparams import changed_since
from lightning_obs.observers import Observer
from lightning_obs.observers.min_max import MemorylessMinMaxObserver
from tests.callbacks.ranks.fsdp1_modules import Module, fsdp1_trainer, run
from tests.support.lightning_ranks import calibration, like_torchrun
from tests.support.rank_processes import run_ranks


@Observer.register("fails_on_rank_1")
class FailsOnRank1(MemorylessMinMaxObserver):
    def measure(self, observed):
        if dist.is_initialized() and dist.get_rank() == 1:
            raise MemoryError("no room for the search")
        return super().measure(observed)


def on_failing(rank, how):
    like_torchrun(rank, 2)
    callback, module = calibration(weight="fails_on_rank_1" if how == "search" else "memoryless_mse"), Module()
    if how == "nan":
        with torch.no_grad():
            module.net.few.weight[-1, -1] = float("nan")
    try:
        run(fsdp1_trainer(callback, policy={nn.Linear}), module)
    except CalibrationError as error:
        return str(error)


@pytest.mark.parametrize(
    ("how", "text"),
    [("nan", "not finite: few (weight"), ("search", "rank 1: MemoryError: no room for the search")],
)
def test_what_fails_on_one_rank_is_the_same_error_on_all(how, text):
    errors = run_ranks(on_failing, 2, how, timeout=30)
    assert len(set(errors)) == 1
    assert text in errors[0]


def on_stale(rank, folder):
    like_torchrun(rank, 2)
    callback, module = calibration(), Module()
    with_trainer = fsdp1_trainer(callback)
    run(with_trainer, module)
    fresh = changed_since(module.net)
    with FullyShardedDataParallel.summon_full_params(with_trainer.strategy.model):
        module.net.blocks[1].out.weight.data[-1, -1] += 1
    try:
        callback.export(folder)
    except CalibrationError as error:
        return fresh, changed_since(module.net), str(error)


def test_a_weight_that_changed_since_is_refused_at_export_on_every_rank(tmp_path):
    for fresh, changed, error in run_ranks(on_stale, 2, tmp_path / "out", timeout=30):
        assert fresh == []
        assert changed == ["blocks.1.out.weight"]
        assert "1 parameters and buffers have changed since the model was calibrated: blocks.1.out.weight." in error
    assert not (tmp_path / "out").exists()


def on_refused(rank, how):
    like_torchrun(rank, 2)
    callback, module, entry = calibration(), Module(), "validate"
    if how == "scales":
        how, entry = {}, "fit"
        callback = QuantizationAwareTraining("INT8_STATIC", module="net", train="all")
    elif how == "adapters":
        how, peft = {}, pytest.importorskip("peft")
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["few"]), module.net)
    try:
        run(fsdp1_trainer(callback, **how), module, entry)
    except CalibrationError as error:
        return str(error)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"use_orig_params": False}, "Remedy: FSDPStrategy(use_orig_params=True)"),
        ({"cpu_offload": True}, "Remedy: FSDPStrategy(cpu_offload=False), or FSDP2: ModelParallelStrategy."),
        ("scales", "scales of sharded weights (FSDP) cannot be learned"),
        ("adapters", "adapters beside weights that FSDP1 shards are not supported: few."),
    ],
    ids=["use_orig_params", "cpu_offload", "scales", "adapters"],
)
def test_what_is_not_supported_is_refused_on_every_rank_with_what_to_do(how, text):
    if how == "adapters":
        pytest.importorskip("peft")
    for error in run_ranks(on_refused, 2, how, timeout=30):
        assert text in error
