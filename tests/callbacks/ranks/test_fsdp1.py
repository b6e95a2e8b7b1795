"""CalibrationCallback under FSDPStrategy (FSDP1). Each `on_*` function runs on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from lightning_obs import CalibrationError, load_checkpoint
from lightning_obs.observers.mse import MemorylessMSEObserver
from tests.callbacks.ranks.fsdp1_modules import (
    Block,
    Blocks,
    Module,
    alone,
    fsdp1_trainer,
    one_policy,
    policies,
    run,
    same_files,
)
from tests.support.lightning_ranks import Module as Experts
from tests.support.lightning_ranks import Net, calibration, like_torchrun, loader, same, samples, trainer
from tests.support.rank_processes import run_ranks

# The outputs of the last block are rounded so coarsely that its successor, `few`, reads zeros.
pytestmark = pytest.mark.filterwarnings("ignore:all inputs of these modules were zero")

# ---------------------------------------------------------------------- the qparams of one device

OBSERVERS = [
    {"input": "histogram", "weight": "memoryless_mse"},
    {"input": "static_minmax", "weight": "memoryless_minmax"},
    {"input": "static_minmax", "weight": "imatrix_mse"},
]


def on_calibrate(rank, ranks, policy, entry, cases, folder, how):
    like_torchrun(rank, ranks)
    found = []
    for number, options in enumerate(cases):
        callback = calibration(**options)
        run(fsdp1_trainer(callback, policy=policy, ranks=ranks, **how), Module(), entry)
        callback.export(folder / str(number))
        found.append(callback.result)
    return [(result.qparams, result.modules, result.plan.fused, result.collectives) for result in found]


@pytest.mark.slow_but_first
@policies
@pytest.mark.parametrize("entry", ["validate", pytest.param("fit", marks=pytest.mark.nightly)])
def test_fsdp1_gives_the_qparams_and_the_checkpoint_of_one_device(policy, entry, tmp_path):
    expected = [alone(tmp_path / "one" / str(number), **options) for number, options in enumerate(OBSERVERS)]
    results = run_ranks(on_calibrate, 2, 2, policy, entry, OBSERVERS, tmp_path / "many", {})
    for number, qparams in enumerate(expected):
        assert all(same(of_rank[number][0], qparams) and of_rank[number][3] <= 6 for of_rank in results)
        assert same_files(tmp_path / "one" / str(number), tmp_path / "many" / str(number))
    load_checkpoint(Blocks(), tmp_path / "many" / "0")


STATIC = {"num_bits": 8, "strategy": "tensor"}
SCHEMES = {
    "channel": {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": STATIC},
    "group": {"weights": {"num_bits": 4, "group_size": 8, "symmetric": False}, "input_activations": STATIC},
    "tensor": {"weights": {"num_bits": 8, "strategy": "tensor"}, "input_activations": STATIC},
    "block": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [4, 8]},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    },
    "NVFP4": "NVFP4",
}


@one_policy
def test_every_strategy_of_weights_gives_the_qparams_of_one_device(policy, tmp_path):
    """q, k and v share a global scale in NVFP4: that they are found under their names is seen there."""
    observers = dict.fromkeys(SCHEMES, "memoryless_minmax") | dict.fromkeys(("group", "block"), "memoryless_mse")
    cases = [
        {"scheme": SCHEMES[name], "input": "static_minmax", "weight": weight, "engines": "unchecked"}
        for name, weight in [*observers.items(), ("NVFP4", "memoryless_mse")]
    ]
    expected = [alone(tmp_path / "one" / str(number), **options) for number, options in enumerate(cases)]
    results = run_ranks(on_calibrate, 2, 2, policy, "validate", cases, tmp_path / "many", {})
    groups = [[f"blocks.{block}.{name}_proj" for name in "qkv"] for block in range(2)]
    for number, qparams in enumerate(expected):
        assert all(same(of_rank[number][0], qparams) and of_rank[number][2] == groups for of_rank in results)
        assert same_files(tmp_path / "one" / str(number), tmp_path / "many" / str(number))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("sharding", ["SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy")
def test_other_sharding_strategies_give_the_qparams_of_one_device(sharding, tmp_path):
    expected = alone(tmp_path / "one", **OBSERVERS[0])
    for entry in ("validate", "fit"):
        for found in run_ranks(
            on_calibrate, 2, 2, {Block}, entry, OBSERVERS[:1], tmp_path / entry, {"sharding_strategy": sharding}
        ):
            assert same(found[0][0], expected)
        assert same_files(tmp_path / "one", tmp_path / entry / "0")


@pytest.mark.slow
@one_policy
def test_four_ranks_give_the_qparams_of_one_device(policy, tmp_path):
    expected = [alone(**options) for options in OBSERVERS]
    for found in run_ranks(on_calibrate, 4, 4, policy, "validate", OBSERVERS, tmp_path / "many", {}):
        assert all(same(result[0], qparams) for result, qparams in zip(found, expected, strict=True))


def on_mixed_precision(rank):
    like_torchrun(rank, 2)
    callback = calibration()
    with_trainer = fsdp1_trainer(callback, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    module = Module()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + 2**-12)  # bfloat16 would lose this
    run(with_trainer, module)
    return callback.result.qparams["blocks.0.out.weight_scale"]


def test_in_mixed_precision_the_weights_in_full_precision_are_observed():
    expected = Blocks().blocks[0].out.weight.detach() * (1 + 2**-12)
    for scale in run_ranks(on_mixed_precision, 2):
        assert torch.equal(scale, expected.abs().amax(1, keepdim=True) / 127.5)


# ---------------------------------------------------------------------- names


def on_names(rank, options):
    like_torchrun(rank, 2)
    callback = calibration(**options)
    with_trainer = fsdp1_trainer(callback, activation_checkpointing_policy={Block})
    module = Module()
    try:
        run(with_trainer, module, "fit")
    except CalibrationError as error:
        return str(error)
    return callback.result.modules, [name for name, _ in module.named_modules()]


def test_patterns_mean_the_names_of_the_model_without_wrappers():
    options = {"targets": ["re:blocks\\.\\d\\.(q_proj|out)", "few"], "ignore": ["blocks.1.out"]}
    for modules, wrapped in run_ranks(on_names, 2, options):
        assert modules == ["blocks.0.q_proj", "blocks.0.out", "blocks.1.q_proj", "few"]
        assert "net.blocks.0._fsdp_wrapped_module._checkpoint_wrapped_module.q_proj" in wrapped  # as they were


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": {"weights": {"num_bits": 4, "group_size": 24}, "input_activations": STATIC}},
        {"ignore": ["blocks.0.q_proj"], "targets": ["blocks.0.q_proj"]},
        {"targets": ["blocks.7"]},
    ],
    ids=["group size", "nothing left", "no match"],
)
def test_what_is_wrong_is_the_error_of_one_device(options):
    with pytest.raises(CalibrationError) as expected:
        alone(**options)
    for error in run_ranks(on_names, 2, options):
        assert error == str(expected.value)


# ---------------------------------------------------------------------- one unit at a time


def on_memory(rank, policy):
    like_torchrun(rank, 2)
    module, most, searched = Module(), [], []
    measure = MemorylessMSEObserver.measure

    def measuring(self, observed):
        whole = {}
        for name, layer in module.net.named_modules():
            if isinstance(layer, nn.Linear) and layer.weight.ndim == 2:
                unit = name.rpartition("_fsdp_wrapped_module")[0]
                whole.setdefault(unit, []).append(layer.weight.numel())
        most.append((len(whole), max(map(sum, whole.values()))))
        searched.append(observed.numel())
        return measure(self, observed)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MemorylessMSEObserver, "measure", measuring)
        run(fsdp1_trainer(calibration(weight="memoryless_mse"), policy=policy), module)
    after = [layer.weight.ndim for layer in module.net.modules() if isinstance(layer, nn.Linear)]
    return most, sum(searched), after


@pytest.mark.parametrize(
    ("policy", "elements"), [({nn.Linear}, 32 * 16), ({Block}, 4 * 32 * 16)], ids=["Linear", "Block"]
)
def test_while_a_weight_is_searched_no_more_than_one_unit_is_whole(policy, elements):
    results = run_ranks(on_memory, 2, policy)
    total = 2 * 4 * 512 + 32 * 3
    assert sum(searched for _, searched, _ in results) == total
    for most, searched, after in results:
        assert max(units for units, _ in most) == 1
        assert max(numel for _, numel in most) == elements
        assert searched <= 0.55 * total
        assert set(after) == {1}


# ---------------------------------------------------------------------- experts


def on_experts(rank):
    like_torchrun(rank, 2)
    callback, module = calibration(), Experts(logs=False)
    x = samples(16, experts=(0, 1, 2, 1))  # even samples, those of rank 0, never reach expert 1
    fsdp1_trainer(callback, policy={Net}).validate(module, loader(x), verbose=False)
    return callback.result.qparams, callback.result.expert_tokens


def test_an_expert_that_only_one_rank_reaches_is_calibrated_on_both():
    callback = calibration()
    trainer(callback).validate(Experts(logs=False), loader(samples(16, experts=(0, 1, 2, 1)), 3), verbose=False)
    for qparams, tokens in run_ranks(on_experts, 2):
        assert same(qparams, callback.result.qparams)
        assert tokens == callback.result.expert_tokens == {"experts": [4, 8, 4]}
