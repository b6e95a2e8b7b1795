"""The second pass on several ranks: DDP, FSDP2, FSDP1. Each `on_*` function runs on every rank."""

import warnings

import pytest
import torch

from lightning_obs.callbacks import quantized_validation
from tests.callbacks.ranks.fsdp1_modules import Module as Flat
from tests.callbacks.ranks.fsdp1_modules import data, fsdp1_trainer
from tests.callbacks.ranks.test_fsdp2 import Sharded, sharded_trainer
from tests.support.lightning_ranks import Module, calibration, like_torchrun, loader, samples, trainer
from tests.support.rank_processes import run_ranks

COARSE = {"weights": {"num_bits": 3}, "input_activations": {"num_bits": 4, "dynamic": False}}


def numbers(metrics):
    return {name: float(value) for name, value in metrics.items()}


def on_share(rank, ranks, entry):
    like_torchrun(rank, ranks)
    callback = calibration(scheme="INT8_STATIC", evaluate=True, ignore=["re:experts.*"])
    run = trainer(callback, ranks=ranks, max_epochs=1)
    if entry == "validate":
        run.validate(Module(), loader(samples(16)), verbose=False)
    else:
        run.fit(Module(), loader(samples(8)), loader(samples(16)))
    return numbers(run.callback_metrics)


@pytest.mark.parametrize("entry", ["validate", "fit"])
def test_ranks_measure_what_one_device_measures(entry):
    (one,) = run_ranks(on_share, 1, 1, entry)
    assert one["val_loss_quantized"] != one["val_loss"]
    for two in run_ranks(on_share, 2, 2, entry):
        assert two == pytest.approx(one, rel=1e-6)


class Kept(Sharded):
    """Keeps what people keep: a plain metric, a list, and a buffer that differs from rank to rank."""

    def __init__(self):
        super().__init__()
        self.outputs, self.sums = [], {"total": 0.0}
        self.register_buffer("seen", torch.zeros(()))

    def validation_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.log("val_loss", out.pow(2).mean(), sync_dist=True)
        self.outputs.append(out)
        self.sums["total"] += float(out.abs().sum())
        self.seen += out.abs().sum()

    def on_validation_epoch_end(self):
        self.log("val_mean", torch.cat(self.outputs).mean(), sync_dist=True)
        self.log("val_total", torch.tensor(self.sums["total"]), sync_dist=True)
        self.log("val_seen", self.seen, sync_dist=True)
        self.outputs.clear()


def on_kept(rank, strategy, evaluate):
    like_torchrun(rank, 2)
    callback = calibration(evaluate=evaluate, ignore=["re:experts.*"])
    options = {"ranks": 2, "max_epochs": 2}
    run = sharded_trainer(callback, **options) if strategy == "fsdp2" else trainer(callback, **options)
    module = Kept()
    run.fit(module, loader(samples(8)), loader(samples(16)))
    return numbers(run.callback_metrics), float(module.seen)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_what_a_module_keeps_is_not_changed_on_any_rank(strategy):
    for (found, seen), (plain, plain_seen) in zip(
        run_ranks(on_kept, 2, strategy, True), run_ranks(on_kept, 2, strategy, False), strict=True
    ):
        assert found["val_loss_quantized"] != found["val_loss"]
        assert seen == plain_seen
        assert {name: value for name, value in found.items() if "_quantized" not in name} == plain


class Logs(Flat):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(batch[0]).pow(2).mean(), sync_dist=True)


def on_sharded(rank, ranks, strategy):
    if ranks > 1:
        like_torchrun(rank, ranks)
    callback = calibration(scheme=COARSE, evaluate=True, ignore=["re:experts.*"])
    if strategy == "fsdp2":
        run, module, batches = sharded_trainer(callback, ranks=ranks), Sharded(), loader(samples(16))
    else:
        run, module, batches = (fsdp1_trainer if ranks > 1 else trainer)(callback), Logs(), loader(32 * data())
    run.validate(module, batches, verbose=False)
    return numbers(run.callback_metrics)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_sharded_weights_are_measured_as_whole_ones(strategy):
    (one,) = run_ranks(on_sharded, 1, 1, strategy)
    assert one["val_loss_quantized"] != one["val_loss"]
    for two in run_ranks(on_sharded, 2, 2, strategy):
        assert two == pytest.approx(one, rel=1e-6)


def on_uneven(rank, strategy):
    like_torchrun(rank, 2)
    callback = calibration(evaluate=True, ignore=["re:experts.*"])
    run = sharded_trainer(callback, ranks=2) if strategy == "fsdp2" else trainer(callback, ranks=2)
    # Undone afterwards: this process runs other tests, too.
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings(record=True) as said:
        patched.setattr(quantized_validation, "KEPT_BYTES", (4 if rank else 2) * 64)  # a batch has 2 x 8 floats
        warnings.simplefilter("always")
        run.validate(Sharded(), loader(samples(16)), verbose=False)
    return [str(one.message) for one in said]


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def warned(request):
    """The warnings of each rank."""
    return run_ranks(on_uneven, 2, request.param)


def test_ranks_run_as_many_batches_as_the_one_that_has_kept_the_fewest(warned):
    for said in warned:
        (text,) = (text for text in said if "measured on" in text)
        assert "measured on 2 of 4 batches" in text


def test_lightning_does_not_ask_to_reduce_metrics_that_are_reduced(warned):
    assert not [text for said in warned for text in said if "sync_dist" in text]
