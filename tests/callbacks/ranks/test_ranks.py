"""CalibrationCallback on several ranks of DDP. Each `on_*` function runs on every rank, in a process of its own."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_obs import CalibrationError, load_checkpoint, quantized
from lightning_obs.callbacks.strategies import collectives_of
from lightning_obs.errors import CalibrationWarning
from lightning_obs.model.module_qparams import read_qparams
from lightning_obs.observers.mse import MemorylessMSEObserver
from tests.support.lightning_package import Callback, ModelCheckpoint, WeightAveraging, needs_weight_averaging
from tests.support.lightning_ranks import Module, Net, calibration, like_torchrun, loader, same, samples, trainer
from tests.support.rank_processes import run_ranks

EXACT = [
    ("static_minmax", "memoryless_minmax"),
    ("histogram", "memoryless_mse"),
    ("static_minmax", "imatrix_mse"),
    ("static_minmax", "hessian"),
]


EVERY = samples(24, experts=(0, 1, 2))


def alone(x, entry="validate", **options):
    """Qparams of one device that sees all samples."""
    callback = calibration(**options)
    run(entry, trainer(callback, max_epochs=1), Module(), loader(x, 3))
    return callback.result.qparams


def run(entry, with_trainer, module, data):
    if entry == "validate":
        with_trainer.validate(module, data, verbose=False)
    else:
        with_trainer.fit(module, loader(samples(8)), data)


def caught(function, *args):
    """The text of the CalibrationError that it raises, and of all its CalibrationWarnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            function(*args)
            error = None
        except CalibrationError as raised:
            error = str(raised)
    return error, [str(w.message) for w in said if issubclass(w.category, CalibrationWarning)]


# ---------------------------------------------------------------------- the qparams of one device


def on_share(rank, ranks, entry, x, options):
    like_torchrun(rank, ranks)
    callback = calibration(**options)
    with_trainer = trainer(callback, ranks=ranks, max_epochs=1)
    _, said = caught(run, entry, with_trainer, Module(), loader(x))
    return callback.result.qparams, callback.result.ranks, said


def on_shares(rank, ranks, entry, cases):
    return [on_share(rank, ranks, entry, x, options) for x, options in cases]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("ranks", "entry", "counts"),
    [
        (2, "validate", [13, 16, 3, 1]),
        (4, "fit", [13, 3]),
        pytest.param(2, "fit", [13, 16, 3, 1], marks=pytest.mark.nightly),
        pytest.param(4, "validate", [13, 16, 3, 1], marks=pytest.mark.nightly),
        *(pytest.param(8, entry, [13, 16, 3, 1], marks=pytest.mark.nightly) for entry in ("validate", "fit")),
    ],
)
def test_ddp_writes_the_qparams_of_one_device(ranks, entry, counts):
    """Also where ranks do not divide the samples: what DistributedSampler repeats is left out, and told."""
    options = [{"input": inputs, "weight": weight, "ignore": ["re:experts.*"]} for inputs, weight in EXACT]
    cases = [(samples(count), each) for count in counts for each in options]
    expected = [alone(x, **each) for x, each in cases]
    for rank, found in enumerate(run_ranks(on_shares, ranks, ranks, entry, cases, timeout=120)):
        for (x, _), one_device, (qparams, number, said) in zip(cases, expected, found, strict=True):
            assert number == ranks
            assert same(qparams, one_device)
            repeats = rank >= len(x) % ranks > 0
            assert [f"rank {rank}: DistributedSampler repeats 1 sample(s)" in text for text in said] == [True] * repeats


class Stream(IterableDataset):
    """Lightning refuses a rank whose loader has length 0; a stream has no length.

    A module that logs with ``sync_dist`` cannot have a rank without batches: it would not log there.
    """

    def __init__(self, x):
        self.x = x

    def __iter__(self):
        return iter([(row,) for row in self.x])


def on_cut(rank, x, parts):
    like_torchrun(rank, len(parts))
    callback = calibration(input="histogram")
    data = DataLoader(Stream(x[parts[rank]]), batch_size=3)
    with_trainer = trainer(callback, ranks=len(parts), use_distributed_sampler=False)
    with_trainer.validate(Module(logs=False), data, verbose=False)
    return callback.result.qparams, callback.result.batches


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "parts", [[[0, 1, 2, 3, 4, 5, 6], [7]], [[], [0, 7, 2, 5, 4, 3, 6, 1]], [[5, 6], [], [7, 1, 0, 2, 3, 4]]]
)
def test_ranks_may_have_unequal_numbers_of_batches_or_none(parts):
    x = samples(8, experts=(0, 1, 2))
    expected = alone(x, input="histogram")
    for (qparams, batches), part in zip(run_ranks(on_cut, len(parts), x, parts), parts, strict=True):
        assert same(qparams, expected)
        assert batches == -(-len(part) // 3)


def test_a_batch_of_nothing_but_repeats_reaches_no_expert():
    """2 samples on 4 ranks: those of ranks 2 and 3 are repeats, and an expert's rows do not say so by their number."""
    x = samples(2, experts=(0, 1))
    expected = alone(x, ignore=["experts.2"])
    for qparams, _, _ in run_ranks(on_share, 4, 4, "validate", x, {"ignore": ["experts.2"]}):
        assert same(qparams, expected)


def test_a_repeat_among_an_experts_rows_is_an_error_that_says_what_to_do():
    def expect(rank, error):
        text = "which rows are of samples that DistributedSampler repeated" if rank == 2 else "another rank ended"
        return text in error

    results = run_ranks(on_experts, 3, 3, samples(11, experts=(0, 1, 2)), {}, timeout=30)
    assert [expect(rank, error) for rank, (error, _, _) in enumerate(results)] == [True] * 3


# ---------------------------------------------------------------------- what ranks do not share


def on_experts(rank, ranks, x, options):
    like_torchrun(rank, ranks)
    callback = calibration(**options)
    with_trainer = trainer(callback, ranks=ranks)
    error, said = caught(lambda: with_trainer.validate(Module(logs=False), loader(x), verbose=False))
    return error, said, None if error else callback.result.qparams


def test_an_expert_that_only_rank_1_reaches_is_calibrated_on_both():
    x = samples(16, experts=(0, 1, 2, 1))  # even samples, those of rank 0, never reach expert 1
    expected = alone(x)
    for error, _, qparams in run_ranks(on_experts, 2, 2, x, {}):
        assert error is None
        assert same(qparams, expected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_expert_that_none_reaches_is_the_same_error_on_every_rank(ranks):
    results = run_ranks(on_experts, ranks, ranks, samples(12, experts=(0, 1)), {}, timeout=30)
    assert len({error for error, _, _ in results}) == 1
    assert "no data reached 1 of 5 observers: experts.2 (input)" in results[0][0]


def test_an_expert_that_none_reaches_can_be_left_out_on_every_rank():
    x = samples(12, experts=(0, 1))
    results = run_ranks(on_experts, 2, 2, x, {"on_missing": "warn"})
    assert all(same(qparams, results[0][2]) for _, _, qparams in results)
    assert not any(name.startswith("experts.2") for name in results[0][2])
    assert all("experts.2 (input)" in said[0] for _, said, _ in results)


def test_nan_on_one_rank_is_raised_on_all_and_named():
    x = samples(12, experts=(0, 1, 2))
    x[5, 2] = float("nan")  # rank 1 has the odd samples
    results = run_ranks(on_experts, 2, 2, x, {}, timeout=30)
    assert len({error for error, _, _ in results}) == 1
    assert "first (input, rank 1: " in results[0][0]


def on_rank_that_dies(rank, folder, how):
    like_torchrun(rank, 2)

    class Die(Callback):
        def on_validation_batch_start(self, with_trainer, module, batch, batch_idx):
            if with_trainer.global_rank == 1 and batch_idx == 1 and with_trainer.current_epoch == 1:
                os._exit(9) if how == "exit" else os.kill(os.getpid(), 9)

    callback = calibration(ignore=["re:experts.*"])
    save = ModelCheckpoint(folder, save_top_k=-1)
    with_trainer = trainer(callback, save, Die(), ranks=2, max_epochs=3, enable_checkpointing=True)
    with_trainer.fit(Module(logs=False), loader(samples(8)), loader(samples(8)))


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("exit", marks=pytest.mark.nightly), "kill"])
def test_a_rank_killed_in_the_middle_ends_the_others_with_a_readable_error(how, tmp_path):
    with pytest.raises(RuntimeError, match="another rank ended, or did not answer in time") as raised:
        run_ranks(on_rank_that_dies, 2, str(tmp_path), how, timeout=30)
    assert "rank 1:\ndied" in str(raised.value)
    written = list(tmp_path.iterdir())
    assert [path.name for path in written] == ["epoch=0-step=2.ckpt"]  # that of the epoch before, whole
    state = torch.load(written[0], weights_only=True)
    assert Module().load_state_dict(state["state_dict"], strict=True)
    options = {"ignore": ["re:experts.*"]}
    for qparams, _, _ in run_ranks(on_share, 2, 2, "validate", samples(8), options):
        assert same(qparams, alone(samples(8), **options))


# ---------------------------------------------------------------------- resume


def on_resume(rank, ranks, path, entry, options):
    """Fit from a checkpoint, or start; return the qparams before the first and after the last step of this run."""
    like_torchrun(rank, ranks)
    seen = {}

    class Look(Callback):
        def on_train_start(self, with_trainer, module):
            seen["before"] = qparams_on(module.net) if callback.session.result is None else {}

        on_test_start = on_train_start

    callback = calibration(**options)
    module = Module(lr=1e-2)
    with_trainer = trainer(callback, Look(), ranks=ranks, max_epochs=2 if os.path.exists(path) else 1)
    if entry == "test":
        with_trainer.test(module, loader(samples(8)), ckpt_path=path, verbose=False)
        return seen["before"]
    resumed = os.path.exists(path)
    with_trainer.fit(module, loader(samples(24)), loader(EVERY), ckpt_path=path if resumed else None)
    if resumed:
        return seen["before"]
    with_trainer.save_checkpoint(path)
    return callback.result.qparams


def qparams_on(net):
    return {f"{n}.{k}": v.cpu().clone() for n, m in net.named_modules() for k, v in read_qparams(m).items()}


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("first", "then", "options"),
    [
        (2, 1, {"input": "histogram"}),
        (2, 2, {"input": "minmax"}),
        (2, 4, {"input": "minmax"}),
        (1, 2, {"input": "histogram"}),
        pytest.param(2, 1, {"input": "minmax"}, marks=pytest.mark.nightly),
        pytest.param(2, 2, {"input": "histogram"}, marks=pytest.mark.nightly),
        pytest.param(2, 4, {"input": "histogram"}, marks=pytest.mark.nightly),
        pytest.param(1, 2, {"input": "minmax"}, marks=pytest.mark.nightly),
    ],
)
def test_a_checkpoint_resumes_on_another_number_of_ranks_with_the_same_qparams(first, then, options, tmp_path):
    """Of running observers (minmax) too. Their statistics are of one validation: the next starts them anew."""
    path = str(tmp_path / "last.ckpt")
    written = run_ranks(on_resume, first, first, path, "fit", options)
    assert all(same(qparams, written[0]) for qparams in written)
    assert len(written[0]) == 10
    for entry in ("fit", "test"):
        for before in run_ranks(on_resume, then, then, path, entry, options):
            assert same(before, written[0])


def test_a_checkpoint_of_two_ranks_loads_strictly_without_the_callback(tmp_path):
    path = str(tmp_path / "last.ckpt")
    run_ranks(on_resume, 2, 2, path, "fit", {})
    state = torch.load(path, weights_only=True)
    assert Module().load_state_dict(state["state_dict"], strict=True)
    loaded = Module.load_from_checkpoint(path, strict=True)
    assert torch.equal(loaded.net.first.weight, state["state_dict"]["net.first.weight"])


def on_averaging(rank):
    like_torchrun(rank, 2)
    seen = {}

    class Look(Callback):
        def on_validation_epoch_end(self, with_trainer, module):
            seen["weight"] = module.net.first.weight.detach().clone()

    callback, average = calibration(), WeightAveraging()
    with_trainer = trainer(callback, Look(), average, ranks=2, max_epochs=2)
    module = Module(lr=1e-2)
    with_trainer.fit(module, loader(samples(24)), loader(EVERY))
    return callback.result.qparams, seen["weight"]


@needs_weight_averaging
def test_with_weight_averaging_the_qparams_are_those_of_the_averaged_weights():
    results = run_ranks(on_averaging, 2)
    for qparams, weight in results:
        torch.testing.assert_close(qparams["first.weight_scale"], weight.abs().amax(1, keepdim=True) / 127.5)
        assert same(qparams, results[0][0])


# ---------------------------------------------------------------------- export


def on_export(rank, folder):
    like_torchrun(rank, 2)
    callback = calibration(ignore=["re:experts.*"])
    with_trainer = trainer(callback, ranks=2)
    module = Module()
    with_trainer.validate(module, loader(samples(13)), verbose=False)
    gone_on = Path(folder).with_name("gone on")
    while rank == 0 and not gone_on.exists():  # until rank 1 has left export, or the time limit
        time.sleep(0.01)
    callback.export(folder)
    if rank == 1:
        gone_on.touch()
    with_trainer.strategy.barrier()
    with torch.no_grad(), quantized(module.net):
        return module.net(samples(5))


def test_rank_0_writes_a_checkpoint_that_loads_and_nobody_waits(tmp_path):
    results = run_ranks(on_export, 2, str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gone on", "out"]
    loaded = load_checkpoint(Net(), tmp_path / "out")
    for outputs in results:
        with torch.no_grad():
            assert torch.equal(loaded(samples(5)), outputs)


# ---------------------------------------------------------------------- what is refused


def test_processes_that_end_with_the_run_are_refused():
    with_trainer = trainer(calibration(), ranks=2, strategy="ddp_fork")
    with pytest.raises(CalibrationError, match="is lost with them"):
        collectives_of(with_trainer)


# ---------------------------------------------------------------------- work shared out


def on_counting(rank, ranks):
    like_torchrun(rank, ranks)
    searched = []
    measure = MemorylessMSEObserver.measure

    def counting(self, observed):
        searched.append(observed.numel())
        return measure(self, observed)

    MemorylessMSEObserver.measure = counting
    try:
        module = Module()
        caught(run, "validate", trainer(calibration(weight="memoryless_mse"), ranks=ranks), module, loader(EVERY))
    finally:
        MemorylessMSEObserver.measure = measure
    return sum(searched), sum(m.weight.numel() for m in module.net.modules() if isinstance(m, torch.nn.Linear))


def test_each_rank_searches_at_most_its_share_of_the_elements():
    results = run_ranks(on_counting, 2, 2)
    total = results[0][1]
    assert sum(searched for searched, _ in results) == total
    assert max(searched for searched, _ in results) <= 0.55 * total
