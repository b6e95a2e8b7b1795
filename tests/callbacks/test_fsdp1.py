"""CalibrationCallback under FSDPStrategy (FSDP1). Each `on_*` function runs on every rank.

Lightning and torch refuse FSDP1 on CPUs; `OnCPU` runs it there all the same, for these tests only.
"""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.fabric.strategies.fsdp import _setup_activation_checkpointing
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    StateDictType,
)
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lightning_obs import CalibrationCallback, CalibrationError, QuantizationAwareTraining, load_checkpoint, quantized
from lightning_obs.model.qparams import read_qparams, trained_since
from lightning_obs.model.sharding import without_wrappers
from lightning_obs.observers import Observer
from lightning_obs.observers.min_max import MemorylessMinMaxObserver
from lightning_obs.observers.mse import MemorylessMSEObserver
from tests.lightning_ranks import Module as Experts
from tests.lightning_ranks import Net, calibration, exact, like_torchrun, loader, samples, trainer
from tests.ranks import run_ranks
from tests.tiny_model import save_tiny_llama


class OnCPU(FSDPStrategy):
    """FSDP1 on CPUs. Full checkpoints are not moved to the host there: they are on it, and torch would free them."""

    def _setup_model(self, model):
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            return model
        options = {"cpu_offload": self.cpu_offload, "sharding_strategy": self.sharding_strategy, **self.kwargs}
        wrapped = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), mixed_precision=self.mixed_precision_config, **options
        )
        _setup_activation_checkpointing(wrapped, self._activation_checkpointing_kwargs)
        return wrapped

    def _full(self):
        options = {"offload_to_cpu": False, "rank0_only": False}
        configs = FullStateDictConfig(**options), FullOptimStateDictConfig(**options)
        return FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, *configs)

    def lightning_module_state_dict(self):
        if self._state_dict_type == "sharded":
            return super().lightning_module_state_dict()
        with self._full():
            return self.model.state_dict()

    def optimizer_state(self, optimizer):
        if self._state_dict_type == "sharded":
            return super().optimizer_state(optimizer)
        with self._full():
            return FullyShardedDataParallel.optim_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer))

    def load_checkpoint(self, path, weights_only=None):
        if self._state_dict_type == "sharded":
            return super().load_checkpoint(path, weights_only)
        checkpoint = torch.load(path, weights_only=False)
        with self._full():
            self.model.load_state_dict(checkpoint.pop("state_dict"))
            for optimizer, state in zip(self.optimizers, checkpoint.pop("optimizer_states"), strict=False):
                state = FullyShardedDataParallel.optim_state_dict_to_load(self.model, optimizer, state)
                optimizer.load_state_dict(state)
        return checkpoint


class Scale(nn.Module):
    """As in a norm: parameters that are not quantized. A norm itself would round."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x * self.weight


class Block(nn.Module):
    """q, k and v share a global scale in NVFP4."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(32, 16)
        self.scale = Scale()
        self.out = nn.Linear(16, 32, bias=False)

    def forward(self, x):
        x = self.out(self.scale(self.q_proj(x) + self.k_proj(x) - self.v_proj(x)))
        return x + ((x / 64).round().clamp(-16, 16) / 4 - x).detach()  # few bits, so that the next block is exact too


class Blocks(nn.Module):
    """Flat shards of two ranks end inside of rows here, and some hold nothing of a weight."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.few = nn.Linear(32, 3)
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            exact(parameter, generator)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.few(x)


class Module(L.LightningModule):
    def __init__(self, lr=0.0):
        super().__init__()
        self.net, self.lr = Blocks(), lr

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0)


def data(count=12):
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-16, 17, (count, 32), generator=generator) / 4


POLICIES = {"every Linear": {nn.Linear}, "whole blocks": {Block}, "no policy": None}
policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def fsdp1_trainer(*callbacks, policy=frozenset({Block}), ranks=2, max_epochs=1, **options):
    strategy = OnCPU(auto_wrap_policy=None if policy is None else set(policy), **options)
    return trainer(*callbacks, ranks=ranks, strategy=strategy, max_epochs=max_epochs)


def run(with_trainer, module, entry="validate"):
    if entry == "validate":
        with_trainer.validate(module, loader(data()), verbose=False)
    else:
        with_trainer.fit(module, loader(data(8)), loader(data()))


def alone(folder=None, **options):
    """Qparams of one device that sees all samples; in ``folder`` its checkpoint."""
    callback = calibration(**options)
    trainer(callback).validate(Module(), loader(data(), 3), verbose=False)
    if folder is not None:
        callback.export(folder)
    return callback.result.qparams


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
        assert torch.equal(value.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)), name
    return True


def same_files(one, other):
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


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
    return [(result.qparams, result.modules, result.fused, result.collectives) for result in found]


@policies
@pytest.mark.parametrize("entry", ["validate", "fit"])
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


@policies
def test_every_strategy_of_weights_gives_the_qparams_of_one_device(policy, tmp_path):
    """q, k and v share a global scale in NVFP4: that they are found under their names is seen there."""
    cases = [
        {"scheme": scheme, "input": "static_minmax", "weight": weight, "reload": "unchecked"}
        for scheme in SCHEMES.values()
        for weight in ("memoryless_minmax", "memoryless_mse")
    ]
    expected = [alone(tmp_path / "one" / str(number), **options) for number, options in enumerate(cases)]
    results = run_ranks(on_calibrate, 2, 2, policy, "validate", cases, tmp_path / "many", {})
    groups = [[f"blocks.{block}.{name}_proj" for name in "qkv"] for block in range(2)]
    for number, qparams in enumerate(expected):
        assert all(same(of_rank[number][0], qparams) and of_rank[number][2] == groups for of_rank in results)
        assert same_files(tmp_path / "one" / str(number), tmp_path / "many" / str(number))


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
@policies
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


# ---------------------------------------------------------------------- faults


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
    fresh = trained_since(module.net)
    with FullyShardedDataParallel.summon_full_params(with_trainer.strategy.model):
        module.net.blocks[1].out.weight.data[-1, -1] += 1
    try:
        callback.export(folder)
    except CalibrationError as error:
        return fresh, trained_since(module.net), str(error)


def test_a_weight_that_changed_since_is_refused_at_export_on_every_rank(tmp_path):
    for fresh, changed, error in run_ranks(on_stale, 2, tmp_path / "out", timeout=30):
        assert fresh == []
        assert changed == ["blocks.1.out"]
        assert "1 weights have changed since they were calibrated: blocks.1.out." in error
    assert not (tmp_path / "out").exists()


def on_refused(rank, how):
    like_torchrun(rank, 2)
    callback, module, entry = calibration(), Module(), "validate"
    if how == "learn_scales":
        how, entry = {}, "fit"
        callback = QuantizationAwareTraining("INT8_STATIC", module="net", learn_scales=True)
    elif how == "adapters":
        how, peft = {}, pytest.importorskip("peft")
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["few"]), module.net)
    try:
        run(fsdp1_trainer(callback, **how), module, entry)
    except CalibrationError as error:
        return str(error)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"use_orig_params": False}, "Remedy: FSDPStrategy(use_orig_params=True)"),
        ({"cpu_offload": True}, "Remedy: FSDPStrategy(cpu_offload=False), or FSDP2: ModelParallelStrategy."),
        ("learn_scales", "learn_scales is not supported with sharded weights (FSDP)"),
        ("adapters", "adapters beside weights that FSDP1 shards are not supported: few."),
    ],
    ids=["use_orig_params", "cpu_offload", "learn_scales", "adapters"],
)
def test_what_is_not_supported_is_refused_on_every_rank_with_what_to_do(how, text):
    if how == "adapters":
        pytest.importorskip("peft")
    for error in run_ranks(on_refused, 2, how, timeout=30):
        assert text in error


# ---------------------------------------------------------------------- the quantized model


def on_quantized(rank):
    like_torchrun(rank, 2)
    callback, module = calibration(), Module()
    with_trainer = fsdp1_trainer(callback)
    run(with_trainer, module)
    with torch.no_grad(), quantized(module.net):
        return with_trainer.strategy.model(data(5))


def test_quantized_runs_through_the_wrapper_with_the_outputs_of_one_device():
    module = Module()
    trainer(calibration()).validate(module, loader(data()), verbose=False)
    with torch.no_grad(), quantized(module.net):
        expected = module(data(5))
    for outputs in run_ranks(on_quantized, 2):
        assert torch.equal(outputs, expected)


def on_training(rank, strategy, weight, folder):
    like_torchrun(rank, 2)
    observers = {"input": "static_minmax", "weight": weight}
    callback = QuantizationAwareTraining("INT8_STATIC", module="net", observers=observers)
    options = {"ranks": 2, "max_epochs": 3}
    with_trainer = fsdp1_trainer(callback, **options) if strategy == "fsdp1" else trainer(callback, **options)
    with_trainer.fit(Module(lr=1e-2), loader(data(16)), loader(data()))
    callback.export(folder / strategy)
    return callback.result.qparams


@pytest.mark.parametrize("weight", ["memoryless_minmax", "memoryless_mse"])
def test_training_quantized_ends_with_the_weights_and_scales_of_ddp(weight, tmp_path):
    results = [run_ranks(on_training, 2, strategy, weight, tmp_path) for strategy in ("ddp", "fsdp1")]
    assert all(same(qparams, results[0][0]) for of_strategy in results for qparams in of_strategy)
    assert same_files(tmp_path / "ddp", tmp_path / "fsdp1")


# ---------------------------------------------------------------------- transformers


class Llama(L.LightningModule):
    """Tied embeddings, which the outermost unit holds, as it does the last norm."""

    def __init__(self, folder):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder)

    def validation_step(self, batch, batch_idx):
        self.model(input_ids=batch)


def calibrate_llama(folder, out, ranks):
    options = {"kv_cache": "FP8", "observers": {"input": "static_minmax"}}
    callback = CalibrationCallback("FP8", ignore=["lm_head"], **options)
    options = {"policy": {LlamaDecoderLayer}, "ranks": ranks}
    with_trainer = fsdp1_trainer(callback, **options) if ranks > 1 else trainer(callback)
    ids = torch.randint(3, 200, (1, 16), generator=torch.Generator().manual_seed(0)).repeat(4, 1)
    with_trainer.validate(Llama(folder), DataLoader(ids, batch_size=2), verbose=False)
    callback.export(out)


def on_llama(rank, folder, out):
    like_torchrun(rank, 2)
    calibrate_llama(folder, out, 2)


def test_a_transformers_model_is_exported_as_one_device_exports_it(tmp_path):
    folder = save_tiny_llama(tmp_path / "tiny")
    calibrate_llama(folder, tmp_path / "one", 1)
    run_ranks(on_llama, 2, folder, tmp_path / "many")
    assert same_files(tmp_path / "one", tmp_path / "many")
    AutoModelForCausalLM.from_pretrained(tmp_path / "many")


# ---------------------------------------------------------------------- resume


def on_resume(rank, ranks, path, kind, entry):
    like_torchrun(rank, ranks)
    seen = {}

    class Look(Callback):
        def on_train_start(self, with_trainer, module):
            with without_wrappers(module.net):
                found = [(f"{n}.{k}", v) for n, m in module.net.named_modules() for k, v in read_qparams(m).items()]
            seen["before"] = {name: value.cpu().clone() for name, value in found}

        on_test_start = on_train_start

    callback, module = calibration(), Module(lr=1e-2)
    resumed = Path(path).exists()
    options = {"max_epochs": 2 if resumed else 1}
    if ranks > 1:
        with_trainer = fsdp1_trainer(callback, Look(), ranks=ranks, state_dict_type=kind, **options)
    else:
        with_trainer = trainer(callback, Look(), **options)
    if entry == "test":
        with_trainer.test(module, loader(data()), ckpt_path=path, verbose=False)
        return seen["before"]
    with_trainer.fit(module, loader(data(8)), loader(data()), ckpt_path=path if resumed else None)
    if resumed:
        return seen["before"]
    with_trainer.save_checkpoint(path)
    return callback.result.qparams


@pytest.mark.parametrize(
    ("kind", "then", "entries"),
    [
        ("full", 2, ["fit", "test"]),
        ("full", 1, ["test"]),
        ("sharded", 2, ["fit", "test"]),
        pytest.param("full", 4, ["fit"], marks=pytest.mark.slow),
        pytest.param("sharded", 4, ["fit"], marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_two_ranks_resumes_with_the_same_qparams(kind, then, entries, tmp_path):
    """On one device only to test: Lightning names the optimizer's state there by number, FSDP1 by parameter."""
    path = str(tmp_path / "last.ckpt")
    written = run_ranks(on_resume, 2, 2, path, kind, "fit")
    assert same(*written)
    assert len(written[0]) == 18
    for entry in entries:
        for before in run_ranks(on_resume, then, then, path, kind, entry):
            assert same(before, written[0])


def test_a_full_checkpoint_loads_strictly_without_the_callback(tmp_path):
    path = str(tmp_path / "last.ckpt")
    run_ranks(on_resume, 2, 2, path, "full", "fit")
    state = torch.load(path, weights_only=True)
    assert Module().load_state_dict(state["state_dict"], strict=True)


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
