"""QuantizationAwareTraining under ModelParallelStrategy (FSDP2). Each `on_*` function runs on every rank."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

from lightning_obs import CalibrationError, load_checkpoint
from lightning_obs.model.weight import whole_tensor
from tests.callbacks.qat_modules import from_step
from tests.callbacks.ranks.test_qat_ranks import INT8, SYMMETRIC_W4, W4, Trained, X, close, fit, qat, qparams_of, share
from tests.support.lightning_package import ModelCheckpoint, ModelParallelStrategy
from tests.support.lightning_ranks import like_torchrun, same
from tests.support.rank_processes import run_ranks

OPTIONS = {
    "static": {"calibration_batches": 3},
    "observe val": {"calibration_batches": 3, "observe": "val"},
    "histogram": {"calibration_batches": 3, "observers": {"input": "histogram"}},
    "weights": {"scheme": W4},
    "distilled": {"calibration_batches": 3, "distill": 1.0},
}


class Sharded(Trained):
    """Under ModelParallelStrategy the rows of its weights are shared out over ranks."""

    def configure_model(self):
        if not isinstance(self.trainer.strategy, ModelParallelStrategy) or isinstance(self.net.last.weight, DTensor):
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net.first, self.net.last, self.net):
            fully_shard(layer, mesh=mesh)

    def on_before_optimizer_step(self, optimizer):
        if self.gradients is None:
            self.gradients = {name: whole_tensor(p.grad).clone() for name, p in self.named_parameters()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-3)


def weights_of(module):
    return {name: whole_tensor(p).clone() for name, p in module.named_parameters()}


def fit_sharded(callback, module, *callbacks, rank, full=True, **options):
    strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=not full)
    return fit(callback, module, *callbacks, rank=rank, ranks=2, strategy=strategy, **options)


def on_fit(rank, options):
    like_torchrun(rank, 2)
    module, callback = Sharded(), qat(**options)
    fit_sharded(callback, module, rank=rank)
    return {
        "losses": module.losses,
        "gradients": module.gradients,
        "weights": weights_of(module),
        "qparams": qparams_of(module),
    }


@pytest.mark.slow_but_first
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_ranks_train_as_one_device_and_end_alike(options):
    one = Sharded()
    fit(qat(**options), one)
    first, second = run_ranks(on_fit, 2, options)
    assert same(first["weights"], second["weights"])
    assert same(first["qparams"], second["qparams"])
    assert close(first["gradients"], one.gradients)
    mean = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    torch.testing.assert_close(mean, one.losses, rtol=1e-9, atol=0)
    assert close(first["weights"], weights_of(one))
    assert close(first["qparams"], qparams_of(one))


def on_export(rank, folder, options):
    like_torchrun(rank, 2)
    module, callback = Sharded(), qat(**options)
    with_trainer = fit_sharded(callback, module, rank=rank)
    callback.export(folder)
    with_trainer.strategy.barrier()
    reloaded = load_checkpoint(Trained().net, folder)
    with torch.no_grad():
        return torch.equal(torch.cat([reloaded(x) for (x,) in share(X[:8], rank, 2)]), torch.cat(module.validated))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("scheme", ["INT8_STATIC", INT8, SYMMETRIC_W4], ids=["INT8_STATIC", "asymmetric", "weights"])
def test_rank_0_writes_what_the_last_validation_of_all_ranks_saw(scheme, tmp_path):
    options = {"scheme": scheme, "calibration_batches": 3}
    assert run_ranks(on_export, 2, tmp_path / "out", options) == [True, True]


def on_resume(rank, folder, options, full, steps):
    like_torchrun(rank, 2)
    whole = Sharded()
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    fit_sharded(qat(**options), whole, saver, rank=rank, full=full)
    for step in steps:
        module = Sharded()
        data = from_step(step % 8, TensorDataset(X[rank::2]), batch_size=2)
        fit_sharded(qat(**options), module, rank=rank, full=full, data=data, ckpt_path=folder / f"step={step}.ckpt")
        assert module.losses == whole.losses[step:], step
        assert same(weights_of(module), weights_of(whole))
        assert same(qparams_of(module), qparams_of(whole))
    return len(whole.losses)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "full"),
    [
        pytest.param(OPTIONS["histogram"], False, id="histogram-sharded"),
        pytest.param(OPTIONS["weights"], True, id="weights-full"),
        pytest.param(OPTIONS["histogram"], True, id="histogram-full", marks=pytest.mark.nightly),
        pytest.param(OPTIONS["weights"], False, id="weights-sharded", marks=pytest.mark.nightly),
    ],
)
def test_a_sharded_run_resumes_bit_for_bit(options, full, tmp_path):
    assert run_ranks(on_resume, 2, tmp_path, options, full, (2, 5, 8, 10), timeout=120) == [16, 16]


def on_learned(rank):
    like_torchrun(rank, 2)
    try:
        fit_sharded(qat(train="all"), Sharded(), rank=rank)
    except CalibrationError as error:
        return str(error)


def test_learned_scales_of_sharded_weights_are_refused_on_every_rank():
    for error in run_ranks(on_learned, 2, timeout=30):
        assert "scales of sharded weights (FSDP) cannot be learned: first" in error
        assert "use DDP" in error
