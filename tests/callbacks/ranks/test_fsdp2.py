"""CalibrationCallback under ModelParallelStrategy (FSDP2). Each `on_*` function runs on every rank."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationCallback, CalibrationError, load_checkpoint, quantized
from lightning_obs.model.module_qparams import read_qparams
from tests.support.lightning_package import Callback, L, ModelParallelStrategy
from tests.support.lightning_ranks import Module, Net, calibration, like_torchrun, loader, same, samples, trainer
from tests.support.rank_processes import run_ranks
from tests.support.tiny_model import save_tiny_llama

EVERY = samples(24, experts=(0, 1, 2))


class Sharded(Module):
    """Under ModelParallelStrategy the rows of its weights are shared out over ranks."""

    def configure_model(self):
        strategy = self.trainer.strategy
        if not isinstance(strategy, ModelParallelStrategy) or isinstance(self.net.first.weight, DTensor):
            return
        tensor = self.device_mesh["tensor_parallel"]
        if tensor.size() > 1:
            parallelize_module(self.net.first, tensor, ColwiseParallel())
            for expert in self.net.experts:
                parallelize_module(expert, tensor, RowwiseParallel())
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net.first, self.net.last, self.net):
            fully_shard(layer, mesh=mesh)


def sharded_trainer(*callbacks, ranks, tensor=1, full=True, **options):
    if ranks > 1:
        options["strategy"] = ModelParallelStrategy(ranks // tensor, tensor, save_distributed_checkpoint=not full)
    return trainer(*callbacks, ranks=ranks, **options)


def qparams_on(net):
    return {f"{n}.{k}": v.cpu().clone() for n, m in net.named_modules() for k, v in read_qparams(m).items()}


OPTIONS = [
    {"input": "histogram", "weight": "memoryless_mse"},
    {"input": "static_minmax", "weight": "imatrix_mse"},
    {"input": "static_minmax", "weight": "memoryless_minmax"},
    {"input": "static_minmax", "weight": "local_hessian"},
]


def on_calibrate(rank, ranks, entry, options, folder):
    like_torchrun(rank, ranks)
    callback, module = calibration(**options), Sharded()
    with_trainer = sharded_trainer(callback, ranks=ranks, max_epochs=1)
    if entry == "validate":
        with_trainer.validate(module, loader(EVERY), verbose=False)
    else:
        with_trainer.fit(module, loader(EVERY), loader(EVERY))
    callback.export(folder)
    with torch.no_grad(), quantized(module.net):
        outputs = module.net(samples(5))
    return callback.result.qparams, callback.result.collectives, outputs


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("ranks", "entry"), [(2, "validate"), (4, "fit")])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o.values()))
@pytest.mark.filterwarnings("ignore:.*fitted weights have larger errors")  # a few samples
def test_fsdp2_gives_the_qparams_the_outputs_and_the_checkpoint_of_one_device(ranks, entry, options, tmp_path):
    callback, module = calibration(**options), Module()
    trainer(callback).validate(module, loader(EVERY, 3), verbose=False)
    callback.export(tmp_path / "one")
    for qparams, collectives, outputs in run_ranks(on_calibrate, ranks, ranks, entry, options, tmp_path / "many"):
        assert same(qparams, callback.result.qparams)
        assert collectives <= 8
        with torch.no_grad(), quantized(module.net):
            assert torch.equal(outputs, module.net(samples(5)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many", "one"]
    one, many = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "many"))
    assert same(one, many)
    assert json.loads((tmp_path / "one/config.json").read_text()) == json.loads(
        (tmp_path / "many/config.json").read_text()
    )
    load_checkpoint(Net(), tmp_path / "many")


class Llama(L.LightningModule):
    """A transformers model with tied embeddings, each decoder layer sharded by itself."""

    def __init__(self, folder):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder)

    def configure_model(self):
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.model, FSDPModule):
            for layer in (*self.model.model.layers, self.model):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def validation_step(self, batch, batch_idx):
        self.model(input_ids=batch)


def calibrate_llama(folder, out, ranks):
    callback = CalibrationCallback({"weights": {"num_bits": 4, "group_size": 32}})
    with_trainer = sharded_trainer(callback, ranks=ranks)
    ids = torch.randint(3, 200, (4, 16), generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no data is needed; Lightning sets the strategy up only where it runs some
        with_trainer.validate(Llama(folder), DataLoader(ids, batch_size=2), verbose=False)
    callback.export(out)


def on_llama(rank, folder, out):
    like_torchrun(rank, 2)
    calibrate_llama(folder, out, 2)


def test_a_sharded_transformers_model_is_exported_as_one_device_exports_it(tmp_path):
    folder = save_tiny_llama(tmp_path / "tiny")
    calibrate_llama(folder, tmp_path / "one", 1)
    run_ranks(on_llama, 2, folder, tmp_path / "many")
    names = [sorted(path.name for path in (tmp_path / out).iterdir()) for out in ("one", "many")]
    assert names[0] == names[1]
    for name in names[0]:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "many" / name).read_bytes(), name
    AutoModelForCausalLM.from_pretrained(tmp_path / "many")


# ---------------------------------------------------------------------- resume


def on_resume(rank, ranks, path, full, entry):
    like_torchrun(rank, ranks)
    seen = {}

    class Look(Callback):
        def on_train_start(self, with_trainer, module):
            seen["before"] = qparams_on(module.net)

        on_test_start = on_train_start

    callback, module = calibration(), Sharded(lr=1e-2)
    resumed = Path(path).exists()
    with_trainer = sharded_trainer(callback, Look(), ranks=ranks, full=full, max_epochs=2 if resumed else 1)
    if entry == "test":
        with_trainer.test(module, loader(EVERY), ckpt_path=path, verbose=False)
        return seen["before"]
    with_trainer.fit(module, loader(EVERY), loader(EVERY), ckpt_path=path if resumed else None)
    if resumed:
        return seen["before"]
    with_trainer.save_checkpoint(path)
    return callback.result.qparams


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("full", "then"),
    [
        pytest.param(True, 1, id="full 1"),
        pytest.param(True, 4, id="full 4"),
        pytest.param(False, 2, id="sharded 2"),
        pytest.param(False, 4, id="sharded 4", marks=pytest.mark.nightly),
        pytest.param(True, 2, id="full 2", marks=pytest.mark.nightly),
    ],
)
def test_a_checkpoint_of_two_ranks_resumes_with_the_same_qparams(full, then, tmp_path):
    path = str(tmp_path / "last.ckpt")
    written = run_ranks(on_resume, 2, 2, path, full, "fit")
    assert same(*written)
    assert len(written[0]) == 10
    for entry in ("fit", "test"):
        for before in run_ranks(on_resume, then, then, path, full, entry):
            assert same(before, written[0])


def test_a_full_checkpoint_loads_strictly_without_the_callback(tmp_path):
    path = str(tmp_path / "last.ckpt")
    run_ranks(on_resume, 2, 2, path, True, "fit")
    state = torch.load(path, weights_only=True)
    assert Module().load_state_dict(state["state_dict"], strict=True)
    Module.load_from_checkpoint(path, strict=True)


# ---------------------------------------------------------------------- faults


def on_taken_folder(rank, folder):
    like_torchrun(rank, 2)
    callback = calibration()
    sharded_trainer(callback, ranks=2).validate(Sharded(), loader(EVERY), verbose=False)
    try:
        callback.export(folder)
    except CalibrationError as error:
        return str(error)


def test_a_folder_that_is_there_is_refused_on_every_rank(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    for error in run_ranks(on_taken_folder, 2, tmp_path / "out", timeout=30):
        assert "out is already there" in error


def on_rank_that_dies(rank, folder, when):
    like_torchrun(rank, 2)

    class Die(Callback):
        def on_validation_batch_start(self, with_trainer, module, batch, batch_idx):
            if (when, with_trainer.global_rank, batch_idx) == ("batch", 1, 1):
                os._exit(9)

        def on_validation_epoch_end(self, with_trainer, module):
            if (when, with_trainer.global_rank) == ("epoch end", 1):
                os._exit(9)

    callback, module = calibration(weight="memoryless_mse"), Sharded()
    sharded_trainer(Die(), callback, ranks=2).validate(module, loader(EVERY), verbose=False)
    if (when, rank) == ("export", 1):
        os._exit(9)
    callback.export(f"{folder}/exported")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "text"),
    [
        ("batch", "rank 0:"),  # the forward's own collective fails, with torch's error
        ("epoch end", "another rank ended, or did not answer in time"),
        ("export", "another rank ended, or did not answer in time"),
    ],
)
def test_a_killed_rank_ends_the_other_and_leaves_no_checkpoint(when, text, tmp_path):
    with pytest.raises(RuntimeError, match=text) as raised:
        run_ranks(on_rank_that_dies, 2, str(tmp_path), when, timeout=30)
    assert "rank 1:\ndied" in str(raised.value)
    assert "did not end in time" not in str(raised.value)
    assert not list(tmp_path.iterdir())
    if when == "export":  # the only one that has begun to write
        run_ranks(on_rank_that_dies, 2, str(tmp_path), "never")
        load_checkpoint(Net(), tmp_path / "exported")


# ---------------------------------------------------------------------- tensor parallel


def on_tensor_parallel(rank, options, folder):
    like_torchrun(rank, 4)
    callback = calibration(**options)
    with_trainer = sharded_trainer(callback, ranks=4, tensor=2)
    try:
        with_trainer.validate(Sharded(), loader(EVERY), verbose=False)
    except CalibrationError as error:
        return str(error)
    callback.export(folder)
    return callback.result.qparams


@pytest.mark.slow_but_first
@pytest.mark.parametrize("weight", ["memoryless_minmax", "memoryless_mse"])
def test_data_by_tensor_parallel_gives_the_qparams_of_one_device(weight, tmp_path):
    options = {"input": "static_minmax", "weight": weight}
    callback = calibration(**options)
    trainer(callback).validate(Module(), loader(EVERY, 3), verbose=False)
    callback.export(tmp_path / "one")
    for qparams in run_ranks(on_tensor_parallel, 4, options, tmp_path / "many"):
        assert same(qparams, callback.result.qparams)
    assert same(*(load_file(tmp_path / name / "model.safetensors") for name in ("one", "many")))


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"input": "histogram"}, "first (input: HistogramObserver, tensor)"),
        ({"input": "minmax"}, "first (input: MinMaxObserver, tensor)"),
        ({"weight": "imatrix_mse"}, "first (weight: IMatrixMSEObserver, channel)"),
    ],
)
def test_statistics_that_tensor_parallel_ranks_would_count_twice_are_refused_on_every_rank(options, text, tmp_path):
    for error in run_ranks(on_tensor_parallel, 4, options, tmp_path / "out", timeout=30):
        assert "under tensor parallelism ranks share the data" in error
        assert text in error
