"""Fine-tuning on several ranks: stopped, gone on with, ended by an exception, exported."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_obs import CalibrationError, load_checkpoint
from tests.callbacks.qat_modules import from_step
from tests.callbacks.ranks.test_qat_ranks import (
    OPTIONS,
    SYMMETRIC_W4,
    W4,
    Trained,
    X,
    close,
    fit,
    qat,
    qparams_of,
    share,
)
from tests.support.lightning_package import Callback, ModelCheckpoint, needs_exact_resumption
from tests.support.lightning_ranks import WIDTH, like_torchrun, same
from tests.support.rank_processes import run_ranks

# ---------------------------------------------------------------------- resume


RESUMED = {
    **OPTIONS,
    "INT8_STATIC": {"scheme": "INT8_STATIC", "calibration_batches": 3},
    "moving": {"calibration_batches": 3, "observers": {"input": "minmax"}},
    "imatrix": {"scheme": W4, "calibration_batches": 3, "observers": {"weight": "imatrix_mse"}},
}


def resume(rank, ranks, options, path, step, **trainer_options):
    module, callback = Trained(), qat(**options)
    data = from_step(step % 8, TensorDataset(X[rank::ranks]), batch_size=4 // ranks)
    fit(callback, module, rank=rank, ranks=ranks, data=data, ckpt_path=path, **trainer_options)
    return module


def on_resume(rank, folder, options, steps):
    like_torchrun(rank, 2)
    whole = Trained()
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    fit(qat(**options), whole, saver, rank=rank, ranks=2)
    for step in steps:
        module = resume(rank, 2, options, folder / f"step={step}.ckpt", step)
        assert module.losses == whole.losses[step:], step
        assert same(module.state_dict(), whole.state_dict())
        assert same(qparams_of(module), qparams_of(whole))
        assert torch.equal(torch.cat(module.validated), torch.cat(whole.validated))
    return len(whole.losses), qparams_of(whole)


ON_RANKS = {"observe val", "histogram", "moving", "learned"}  # every night all; on one device in CI


@needs_exact_resumption
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [pytest.param(o, id=name, marks=[pytest.mark.nightly] * (name not in ON_RANKS)) for name, o in RESUMED.items()],
)
def test_a_run_of_two_ranks_resumes_bit_for_bit(options, tmp_path):
    """From the middle of the first observation, after it, before a validation, from the middle of the second one."""
    steps = (2, 5, 10) if options.get("observe") == "val" else (2, 5, 8, 10)  # Lightning leaves that validation out
    results = run_ranks(on_resume, 2, tmp_path, options, steps, timeout=120)
    assert [steps for steps, _ in results] == [16, 16]


def observation_in(path):
    states = torch.load(path, weights_only=True)["callbacks"]
    return next(state["training"] for state in states.values() if "training" in state)["observed"]


@needs_exact_resumption
def test_a_half_done_observation_goes_on_with_another_number_of_ranks_where_that_is_exact(tmp_path):
    options = OPTIONS["histogram"]
    _, expected = run_ranks(on_resume, 2, tmp_path, options, ())[0]
    path = tmp_path / "step=2.ckpt"
    counts = observation_in(path)["reduced"]["first.input"]["counts"]
    assert int(counts.sum()) == 2 * 4 * WIDTH  # of both ranks, and once
    module = resume(0, 1, options, path, 2)
    assert close(qparams_of(module), expected)


def test_a_half_done_moving_average_starts_again_with_another_number_of_ranks(tmp_path):
    options = RESUMED["moving"]
    run_ranks(on_resume, 2, tmp_path, options, ())
    path = tmp_path / "step=2.ckpt"
    assert len(observation_in(path)["of_ranks"]) == 2
    starts = []

    class Look(Callback):
        def on_train_batch_end(self, with_trainer, module, *_):
            starts.append("net.first.input_scale" in qparams_of(module))

    callback = qat(**options)
    data = from_step(2, TensorDataset(X), batch_size=4)
    fit(callback, Trained(), Look(), data=data, ckpt_path=path, max_epochs=1)
    assert starts == [False, False, True, True, True, True]


def on_exception(rank, folder):
    like_torchrun(rank, 2)
    module, callback = Trained(), qat(calibration_batches=3)

    class Fail(Callback):
        def on_train_batch_end(self, with_trainer, module, outputs, batch, batch_idx):
            if batch_idx == 1:
                raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fit(callback, module, Fail(), rank=rank, ranks=2)
    if rank == 1:  # an exception comes to each rank at another time, so nobody may wait for the other
        return callback.state_dict()["training"]
    return None


def test_after_an_exception_the_state_of_a_rank_asks_nothing_of_the_others(tmp_path):
    _, state = run_ranks(on_exception, 2, tmp_path, timeout=30)
    assert state["phase"] == "new"


def on_lonely_state(rank):
    like_torchrun(rank, 2)
    done, midway = qat(calibration_batches=3), qat(calibration_batches=3)
    fit(done, Trained(), rank=rank, ranks=2)
    fit(midway, Trained(), rank=rank, ranks=2, max_steps=2, limit_val_batches=0)
    if rank == 1:
        return None
    done.state_dict()
    with pytest.raises(CalibrationError, match="another rank ended, or did not answer in time"):
        midway.state_dict()
    return True


def test_only_the_state_of_a_half_done_observation_needs_every_rank():
    assert run_ranks(on_lonely_state, 2, timeout=20)[0]


# ---------------------------------------------------------------------- export


def on_export(rank, folder, options):
    like_torchrun(rank, 2)
    module, callback = Trained(), qat(**options)
    with_trainer = fit(callback, module, rank=rank, ranks=2)
    callback.export(folder)
    with_trainer.strategy.barrier()
    reloaded = load_checkpoint(Trained().net, folder)
    with torch.no_grad():
        return torch.equal(torch.cat([reloaded(x) for (x,) in share(X[:8], rank, 2)]), torch.cat(module.validated))


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "options",
    [RESUMED["INT8_STATIC"], RESUMED["learned"], {"scheme": SYMMETRIC_W4}],
    ids=["INT8_STATIC", "learned", "weights"],
)
def test_rank_0_writes_what_the_last_validation_of_all_ranks_saw(options, tmp_path):
    assert run_ranks(on_export, 2, tmp_path / "out", options) == [True, True]
