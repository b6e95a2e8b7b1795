"""Modules that Lightning Fabric has set up: their own names, on one device and on ranks."""

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_obs import CalibrationSession, export_checkpoint, load_checkpoint, quantized
from lightning_obs.ranks.collectives import Collectives
from tests.support.lightning_ranks import Net, like_torchrun, samples
from tests.support.rank_processes import run_ranks

KEYS = ["0.input_scale", "0.weight_scale", "2.1.input_scale", "2.1.weight_scale"]


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Identity(), nn.Linear(16, 4)))


def set_up(model, **options):
    fabric = Fabric(accelerator="cpu", devices=1, **options)
    fabric.launch()
    return fabric.setup(model)


def calibrate(model):
    with CalibrationSession(model, "INT8_STATIC") as session, torch.no_grad():
        for seed in range(3):
            model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))
    return session


@pytest.fixture(params=["plain", "compiled"])
def module(request):
    model = build()
    return set_up(torch.compile(model, backend="eager") if request.param == "compiled" else model)


def test_a_module_that_fabric_has_set_up_has_the_qparams_and_names_of_the_plain_one(module):
    of_fabric, plain = calibrate(module).result, calibrate(build()).result
    assert sorted(of_fabric.qparams) == KEYS
    assert of_fabric.batches == 3
    assert all(torch.equal(of_fabric.qparams[key], plain.qparams[key]) for key in KEYS)


def test_what_fabric_has_set_up_is_exported_and_loads_into_a_plain_module(module, tmp_path):
    calibrate(module)
    x = torch.randn(4, 8)
    with torch.no_grad(), quantized(module):
        expected = module(x)
    export_checkpoint(module, tmp_path / "out")
    assert not any("_module" in key for key in load_file(tmp_path / "out" / "model.safetensors"))
    assert torch.equal(load_checkpoint(build(), tmp_path / "out")(x), expected)
    assert torch.equal(load_checkpoint(set_up(build()), tmp_path / "out")(x), expected)


def test_a_transformers_model_that_fabric_has_set_up_is_exported_as_one(tiny_llama, tmp_path):
    model = set_up(tiny_llama())
    with CalibrationSession(model, "FP8", ignore=["lm_head"]), torch.no_grad():
        model(input_ids=torch.arange(8)[None])
    export_checkpoint(model, tmp_path / "out")
    x = torch.arange(5)[None]
    with torch.no_grad(), quantized(model):
        expected = model(input_ids=x).logits
    loaded = type(model.module).from_pretrained(tmp_path / "out")
    assert torch.equal(loaded(input_ids=x).logits, expected)


def on_ranks(rank, ranks, folder, sharded):
    like_torchrun(rank, ranks)

    def shard(model, mesh):
        fully_shard(model.last, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    strategy = ModelParallelStrategy(shard, data_parallel_size=ranks, tensor_parallel_size=1) if sharded else "ddp"
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    model = fabric.setup(Net())
    with CalibrationSession(model, "INT8_STATIC", collectives=Collectives.of_group()) as session, torch.no_grad():
        for batch in samples(8, experts=(0, 1, 2))[rank::ranks].split(2):
            model(batch)
    export_checkpoint(model, folder) if sharded or rank == 0 else None
    return session.result.qparams


@pytest.mark.slow_but_first
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_ranks_of_fabric_have_the_qparams_of_one_device(tmp_path, sharded):
    model = Net()
    with CalibrationSession(model, "INT8_STATIC") as session, torch.no_grad():
        model(samples(8, experts=(0, 1, 2)))
    for qparams in run_ranks(on_ranks, 2, 2, tmp_path / "out", sharded):
        assert qparams.keys() == session.result.qparams.keys()
        assert all(torch.equal(value, session.result.qparams[key]) for key, value in qparams.items())
    export_checkpoint(model, tmp_path / "one")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "out"))
    assert one.keys() == other.keys()
    assert all(torch.equal(value.float(), other[key].float()) for key, value in one.items())
