"""Weights sharded by FSDP2. Each `on_*` function runs on every rank, in a process of its own."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_obs import CalibrationError, CalibrationSession, quantized
from lightning_obs.model.module_qparams import changed_since, checksums
from lightning_obs.observers import StaticMinMaxObserver
from lightning_obs.observers.mse import MemorylessMSEObserver
from lightning_obs.ranks.collectives import Collectives
from tests.support.rank_processes import run_ranks

GLOBAL = {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
STRATEGIES = {
    "channel": {"num_bits": 8, "strategy": "channel"},
    "channel4": {"num_bits": 4, "strategy": "channel", "symmetric": False},
    "group": {"num_bits": 4, "group_size": 8, "strategy": "group"},
    "tensor": {"num_bits": 8, "strategy": "tensor"},
    "block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [4, 8]},
    "tensor_group": {"num_bits": 4, "type": "float", "group_size": 16, **GLOBAL},
}
OBSERVERS = [
    "memoryless_minmax", "static_minmax", "minmax", "memoryless_mse", "mse", "nvfp4_expanded_mse", "imatrix_mse",
    "local_hessian", "hessian", "normal_observer",
]  # fmt: skip


class Layers(nn.Module):
    """Rows that ranks do not divide, fewer rows than ranks, and q, k, v, which share a global scale."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.odd = nn.Linear(32, 13)
        self.few = nn.Linear(32, 3)
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 24), nn.Linear(32, 8), nn.Linear(32, 8)
        self.plain = nn.Linear(32, 5)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                # A few large values: what a search gives up, and by how much, differs from row to row.
                parameter.copy_(torch.randn(parameter.shape, generator=generator).pow(3) * (1 + number % 3))
        self.to(dtype)

    def forward(self, x):
        outputs = [layer(x) for layer in (self.odd, self.few, self.q_proj, self.k_proj, self.v_proj)]
        outputs.append(self.plain(x.to(self.plain.weight.dtype)))  # it is no part of FSDP's mixed precision
        return torch.cat(outputs, -1)


def shard(model, **options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.odd, model.few, model.q_proj):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, ignored_params={*model.plain.parameters()}, **options)
    return model


def data():
    """Multiples of 1/4: their squares are added without rounding, in any order."""
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(-16, 17, (4, 32), generator=generator) / 4 for _ in range(4)]


def options(strategy, observer):
    return {
        "scheme": {"weights": {**STRATEGIES[strategy], "observer": observer}},
        "observers": {"weight": observer},
        "engines": "unchecked",
    }


def calibrate(model, inputs, collectives=None, **given):
    session = CalibrationSession(model, given.pop("scheme"), collectives=collectives, **given)
    with warnings.catch_warnings(), session:
        warnings.filterwarnings(
            "ignore", ".*fitted weights have larger errors"
        )  # 16 tokens, and weights are judged, too
        if session.needs_data:
            for x in inputs:
                model(x)
    return session.result.qparams


def same(one, other, context):
    assert one.keys() == other.keys(), context
    for name, value in one.items():
        assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), (context, name)
        assert torch.equal(value.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)), (
            context,
            name,
        )
    return True


def on_each(rank, ranks, cases, dtype):
    model = shard(Layers(dtype))
    results = {}
    for case in cases:
        inputs = [x.to(dtype) for x in data()[rank::ranks]]
        qparams = calibrate(model, inputs, Collectives.of_group(), **options(*case))
        assert all(type(value) is torch.Tensor for value in qparams.values())
        results[case] = qparams
    return results


#: each strategy with each observer
EVERY_PAIR = [
    (strategy, observer)
    for strategy in STRATEGIES
    for observer in OBSERVERS
    # It is memoryless_mse with so many candidates that it took half of this file's time; it is made for one format.
    if observer != "nvfp4_expanded_mse" or strategy in ("tensor_group", "tensor")
]
#: each observer with one strategy, each strategy with one observer or two
SOME_PAIRS = [
    (strategy, observer)
    for strategy, observer in EVERY_PAIR
    if ([*STRATEGIES].index(strategy) + OBSERVERS.index(observer)) % 6 == 4
]


def on_one_device(cases, dtype):
    return {case: calibrate(Layers(dtype), [x.to(dtype) for x in data()], **options(*case)) for case in cases}


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("ranks", "dtype", "cases"),
    [
        pytest.param(4, torch.bfloat16, SOME_PAIRS, id="4 bfloat16"),
        pytest.param(2, torch.float32, EVERY_PAIR, id="2 float32"),
        pytest.param(2, torch.bfloat16, EVERY_PAIR, id="2 bfloat16", marks=pytest.mark.nightly),
        pytest.param(4, torch.float32, EVERY_PAIR, id="4 float32", marks=pytest.mark.nightly),
    ],
)
def test_sharded_weights_get_the_scales_of_one_device(ranks, dtype, cases):
    expected = on_one_device(cases, dtype)
    for results in run_ranks(on_each, ranks, ranks, list(expected), dtype, timeout=120):
        for case, qparams in results.items():
            assert same(qparams, expected[case], case)


def on_counting(rank):
    model = fully_shard(nn.Sequential(nn.Linear(32, 65), nn.Linear(32, 33), nn.Linear(32, 33)))
    searched, measure = [], MemorylessMSEObserver.measure

    def counting(self, observed):
        searched.append(observed.numel())
        return measure(self, observed)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MemorylessMSEObserver, "measure", counting)
        calibrate(model, [], Collectives.of_group(), **options("group", "memoryless_mse"))
    return sum(searched)


def test_each_rank_searches_at_most_its_share_of_the_elements():
    searched = run_ranks(on_counting, 2)
    assert sum(searched) == 32 * (65 + 33 + 33)
    assert max(searched) <= 0.55 * sum(searched)


# ---------------------------------------------------------------------- what else looks at weights


def weight_checksums(model):
    return checksums([(layer, "weight") for layer in model.children()])


def on_checksums(rank, dtype):
    model = shard(Layers(dtype), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    calibrate(model, [], Collectives.of_group(), **options("channel", "memoryless_minmax"))
    sums = weight_checksums(model)
    with torch.no_grad():
        model(data()[0])  # leaves the outermost module gathered, in bfloat16
    unchanged = changed_since(model)
    if rank == 1:
        with torch.no_grad():
            model.odd.weight.to_local()[-1, -1] += 1
    return sums, unchanged, changed_since(model)


def test_the_checksum_is_of_the_whole_weight_and_a_change_on_one_rank_is_seen_by_all():
    expected = weight_checksums(Layers())
    for sums, unchanged, changed in run_ranks(on_checksums, 2, torch.float32):
        assert sums == expected
        assert unchanged == []
        assert changed == ["odd.weight"]


def on_quantized(rank):
    model = shard(Layers())
    calibrate(model, [], Collectives.of_group(), **options("channel", "memoryless_mse"))
    with torch.no_grad(), quantized(model):
        return model(data()[0])


def test_quantized_runs_with_gathered_weights_and_whole_scales():
    model = Layers()
    calibrate(model, [], **options("channel", "memoryless_mse"))
    with torch.no_grad(), quantized(model):
        expected = model(data()[0])
    for output in run_ranks(on_quantized, 2):
        assert torch.equal(output, expected)


def on_session_without_collectives(rank):
    try:
        calibrate(shard(Layers()), [], **options("channel", "memoryless_minmax"))
    except CalibrationError as error:
        return str(error)


def test_a_session_that_was_not_told_of_the_ranks_refuses_sharded_weights():
    for error in run_ranks(on_session_without_collectives, 2):
        assert "the weight is sharded over ranks, and the session cannot reach them: odd" in error


def on_failing(rank, observer):
    model = shard(Layers())
    if rank == 1:
        with torch.no_grad():
            model.odd.weight.to_local()[0, 0] = float("nan")
    try:
        calibrate(model, [], Collectives.of_group(), **options("channel", observer))
    except CalibrationError as error:
        return str(error)


@pytest.mark.parametrize("observer", ["memoryless_minmax", "memoryless_mse", "normal_observer"])
def test_nan_in_one_ranks_rows_is_the_same_error_on_all(observer):
    errors = run_ranks(on_failing, 2, observer)
    assert len(set(errors)) == 1
    assert "not finite: odd (weight" in errors[0]


def on_failing_alone(rank):
    """Rank 1 fails between the reduction of activations and the search of weights, some of which are gathered."""
    model = shard(Layers())

    def failing(self):
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(StaticMinMaxObserver, "get_qparams", failing)
        try:
            calibrate(
                model,
                data(),
                Collectives.of_group(),
                scheme="INT8_STATIC",
                observers={"weight": "normal_observer", "input": "static_minmax"},
            )
        except CalibrationError as error:
            return str(error)


def test_a_failure_of_one_rank_before_weights_are_gathered_is_the_same_error_on_all():
    errors = run_ranks(on_failing_alone, 2)
    assert len(set(errors)) == 1
    assert errors[0].startswith("rank 1: MemoryError: no room: odd (input)")
