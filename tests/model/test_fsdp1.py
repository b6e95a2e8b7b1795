"""Flat shards of FSDP1, without Lightning. Each `on_*` function runs on every rank, in a process of its own."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint, linearize_experts, quantized
from lightning_obs.model.fsdp1 import register_fsdp_units
from lightning_obs.model.kinds import unwrapped, without_wrappers
from lightning_obs.model.module_qparams import changed_since, checksums
from lightning_obs.model.weight import (
    by_unit,
    in_shards,
    matrix_shape,
    model_bytes,
    unit_of,
    whole_shape,
    whole_unit,
)
from lightning_obs.moe.experts import LinearExperts
from lightning_obs.ranks.collectives import Collectives
from tests.support.lightning_ranks import exact
from tests.support.moe_models import HIDDEN, StackedBlock
from tests.support.rank_processes import run_ranks


class Tied(nn.Module):
    """`last` has the weight of `embed`; `alone` is no part of FSDP1 in some tests."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, bias=False))
        self.alone = nn.Linear(16, 16)
        self.last = nn.Linear(16, 10, bias=False)
        self.last.weight = self.embed.weight
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x):
        return self.last(self.alone(self.inner(self.embed(x))))


def sharded(model, **options):
    policy = ModuleWrapPolicy({nn.Sequential})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"), **options
    )


def calibrate(model, ranks=1, **options):
    collectives = Collectives.of_group() if ranks > 1 else None
    given = {"observers": {"weight": "memoryless_mse"}, "collectives": collectives, **options}
    with CalibrationSession(model, "W8A8", **given) as session:
        pass
    return session.result


def read(folder):
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def caught(function, *args, **options):
    try:
        function(*args, **options)
    except CalibrationError as error:
        return str(error)


def on_session(rank, folder, how):
    model = Tied()
    options = {}
    if how == "ignored":
        options["ignored_modules"] = [model.alone]
    elif how == "hybrid":
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        options["device_mesh"] = init_device_mesh("cpu", (2, 2))
    wrapped = sharded(model, **options)
    result = calibrate(wrapped, 2)
    export_checkpoint(wrapped, folder)
    assert changed_since(wrapped) == []
    return result.qparams, in_shards(model.alone), model_bytes(wrapped)


@pytest.mark.parametrize(
    ("how", "ranks"), [("all", 2), ("ignored", 2), pytest.param("hybrid", 4, marks=pytest.mark.slow)]
)
def test_a_session_on_the_wrapper_before_any_forward_gives_what_one_device_gives(how, ranks, tmp_path):
    model = Tied()
    expected = calibrate(model).qparams
    export_checkpoint(model, tmp_path / "one")
    for qparams, alone_is_sharded, size in run_ranks(on_session, ranks, tmp_path / "many", how):
        assert same(qparams, expected)
        assert size == model_bytes(model) == sum(parameter.nbytes for parameter in model.parameters())
        assert alone_is_sharded == (how != "ignored")
    (state, config), (found, found_config) = read(tmp_path / "one"), read(tmp_path / "many")
    assert same(state, found)
    assert config == found_config


def parameters_of(model):
    return [(module, name) for module in model.modules() for name, _ in module.named_parameters(recurse=False)]


def on_units(rank):
    model = Tied()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    sums = checksums(parameters_of(model))
    wrapped = sharded(model)
    register_fsdp_units(wrapped)
    with without_wrappers(model):
        found = {
            f"{name}.{key}": whole_shape(module, key)
            for name, module in model.named_modules()
            for key, _ in module.named_parameters(recurse=False)
        }
        assert checksums(parameters_of(model)) == sums  # a collective
        units = [[type(module).__name__ for module in unit] for unit in by_unit(model.modules())]
    linear = unwrapped(model.inner)[1]
    outside, expected = linear.weight.shape, torch.randn(())
    with whole_unit(linear):
        inside, other = linear.weight.shape, model.alone.weight.ndim
        expected = linear.weight.clone()
    back = isinstance(model.inner, FullyShardedDataParallel), linear.weight.shape == outside
    return found == shapes, units, matrix_shape(linear), inside, other, back, expected, unit_of(nn.Linear(2, 2))


def test_a_module_knows_its_unit_and_the_whole_shapes():
    expected = Tied().inner[1].weight
    for shapes_fit, units, matrix, inside, other, back, weight, stranger in run_ranks(on_units, 2):
        assert shapes_fit
        assert units == [["Tied"], ["Embedding", "Linear", "Linear"], ["Sequential"], ["Linear", "Linear"]]
        assert matrix == inside == (16, 16)
        assert other == 1  # another unit stays as it was
        assert back == (True, True)
        assert torch.equal(weight, expected)
        assert stranger is None


def on_refused(rank, how):
    model = Tied()
    wrapped = sharded(model)
    if how == "not told of the ranks":
        return caught(calibrate, wrapped)
    if how == "tied":
        return caught(calibrate, wrapped, 2, targets=["re:last"])
    return caught(calibrate, model, 2)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("not told of the ranks", "the weight is sharded over ranks, and the session cannot reach them"),
        ("without its wrapper", "these parameters are sharded by a wrapper of FSDP1 that is not in the model: embed"),
        ("tied", "shares its weight with embed (tied); quantizing it would quantize both or untie them: last."),
    ],
)
def test_what_a_session_cannot_do_is_refused_on_every_rank(how, text):
    for error in run_ranks(on_refused, 2, how):
        assert text in error


def on_forward_after(rank):
    wrapped = sharded(Tied())
    x = torch.arange(10)
    calibrate(wrapped, 2)
    with torch.no_grad():
        before = wrapped(x)
    calibrate(wrapped, 2)
    wrapped(x).sum().backward()
    return before, dist.get_world_size()


def test_the_model_runs_and_trains_after_a_calibration_that_came_before_its_first_forward():
    with torch.no_grad():
        expected = Tied()(torch.arange(10))
    for outputs, _ in run_ranks(on_forward_after, 2):
        assert torch.equal(outputs, expected)


class Convolutions(nn.Module):
    """compressed-tensors cannot hold these two; the second's weight is stored transposed."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3)
        self.second = nn.ConvTranspose2d(8, 4, 3)
        generator = torch.Generator().manual_seed(9)
        for parameter in self.parameters():
            exact(parameter, generator)

    def forward(self, x):
        return self.second(self.first(x))


def calibrate_convolutions(model, collectives=None):
    x = torch.arange(2 * 36).view(2, 1, 6, 6).remainder(11) / 4
    options = {"targets": ["Conv2d", "ConvTranspose2d"], "observers": {"input": "static_minmax"}}
    with CalibrationSession(model, "INT8_STATIC", collectives=collectives, **options) as session:
        model(x)
    with torch.no_grad(), quantized(model):
        return session.result.qparams, model(x)


def on_convolutions(rank, folder):
    model = FullyShardedDataParallel(Convolutions(), use_orig_params=True, device_id=torch.device("cpu"))
    found = calibrate_convolutions(model, Collectives.of_group())
    export_checkpoint(model, folder)
    return found


def test_convolutions_are_calibrated_and_stored_small_too(tmp_path):
    model = Convolutions()
    expected, outputs = calibrate_convolutions(model)
    export_checkpoint(model, tmp_path / "one")
    for qparams, sharded_outputs in run_ranks(on_convolutions, 2, tmp_path / "many"):
        assert same(qparams, expected)
        assert torch.equal(sharded_outputs, outputs)
    one, many = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "many"))
    assert same(one, many)
    assert {value.dtype for name, value in one.items() if name.endswith(".weight")} == {torch.int8}


def on_inference_mode(rank, forward_before):
    wrapped, x = sharded(Tied()), torch.arange(10)
    with torch.inference_mode():  # as Trainer.validate does on GPUs, hooks included
        if forward_before:
            wrapped(x)
        result = calibrate(wrapped, 2)
        wrapped(x)
        again = calibrate(wrapped, 2)
    if not forward_before:  # torch's FSDP1 cannot train after a first forward in inference mode
        wrapped(x).sum().backward()
    return result.qparams, again.qparams


@pytest.mark.parametrize("forward_before", [False, True])
def test_units_are_gathered_in_inference_mode_too(forward_before):
    expected = calibrate(Tied()).qparams
    for qparams, again in run_ranks(on_inference_mode, 2, forward_before):
        assert same(qparams, expected)
        assert same(again, expected)


# ---------------------------------------------------------------------- experts


class Routed(nn.Module):
    """One layer of experts, of which one gets no token."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.block = StackedBlock()
        linearize_experts(self)
        for parameter in self.parameters():
            exact(parameter, torch.Generator().manual_seed(3))

    def forward(self, x):
        return self.block(x, torch.tensor([[0, 1]] * 5 + [[1, 2]] + [[0, 1]] * 2))


def calibrate_experts(model, collectives=None):
    options = {"observers": {"input": "static_minmax"}}
    with CalibrationSession(
        model, "INT8_STATIC", calibrate_all_experts=True, collectives=collectives, **options
    ) as session:
        model(torch.arange(8 * HIDDEN).view(2, 4, HIDDEN).remainder(17) / 4)
    # SiLU comes before down_proj, and rounds.
    return {name: v for name, v in session.result.qparams.items() if not name.endswith("down_proj.input_scale")}


def on_experts(rank, kind):
    policy = ModuleWrapPolicy({kind})
    model = FullyShardedDataParallel(
        Routed(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    return calibrate_experts(model, Collectives.of_group())


@pytest.mark.parametrize("kind", [StackedBlock, LinearExperts, nn.Linear])
def test_all_experts_are_calibrated_wherever_the_wrappers_stand(kind):
    expected = calibrate_experts(Routed())
    for qparams in run_ranks(on_experts, 2, kind):
        assert same(qparams, expected)
