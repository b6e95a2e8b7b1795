"""QuantizationAwareTraining on two ranks of DDP. Each `on_*` function runs on every rank, in a process of its own.

Two ranks that take turns at the samples see, in each step, what one device sees in a batch of twice the size. Weights
and data are random numbers in float64, so that two orders of addition differ by 1e-15 of a value, and compared with one
device are asymmetric formats: in symmetric ones the largest weight lies between two levels (absmax is at qmax + 0.5),
and the last bit says to which it is rounded.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_obs import QuantizationAwareTraining
from lightning_obs.model.module_qparams import read_qparams
from tests.support.lightning_package import Callback, MixedPrecision, ModelCheckpoint
from tests.support.lightning_ranks import WIDTH, Module, like_torchrun, same, samples, trainer
from tests.support.rank_processes import run_ranks

W4 = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 4, "symmetric": False}}
SYMMETRIC_W4 = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 4}}
INT8 = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    "input_activations": {"num_bits": 8, "strategy": "tensor", "symmetric": False, "observer": "static_minmax"},
}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X = randn(32, WIDTH)
X[:, -1] = torch.arange(32) % 3  # the expert


def qat(scheme=INT8, **options):
    return QuantizationAwareTraining(scheme, module="net", **options)


class Trained(Module):
    """Remembers its losses, its first gradients and its validation outputs."""

    def __init__(self, lr=1e-2):
        super().__init__(lr)
        self.double()
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(randn(*parameter.shape, seed=seed) / 2)
        self.losses, self.validated, self.gradients = [], [], None

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[0].argmax(-1) % 4)
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer):
        if self.gradients is None:
            self.gradients = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}

    def on_validation_epoch_start(self):
        self.validated = []

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.net(batch[0]).clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class WithoutExperts(Trained):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 4)).double()


def share(x, rank=0, ranks=1):
    """Batches of 4 over all ranks together."""
    return DataLoader(TensorDataset(x[rank::ranks]), batch_size=4 // ranks)


def fit(callback, module, *callbacks, rank=0, ranks=1, data=None, ckpt_path=None, **options):
    saves = any(isinstance(c, ModelCheckpoint) for c in callbacks)
    defaults = {"max_epochs": 2, "use_distributed_sampler": False, "enable_checkpointing": saves}
    with_trainer = trainer(callback, *callbacks, ranks=ranks, **{**defaults, **options})
    with_trainer.fit(
        module, share(X, rank, ranks) if data is None else data, share(X[:8], rank, ranks), ckpt_path=ckpt_path
    )
    return with_trainer


def qparams_of(module):
    return {f"{n}.{k}": v.clone() for n, m in module.named_modules() for k, v in read_qparams(m).items()}


def close(one, other, rtol=1e-9):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], rtol=rtol, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    return True


# ---------------------------------------------------------------------- the run of one device


OPTIONS = {
    "static": {"calibration_batches": 3},
    "observe val": {"calibration_batches": 3, "observe": "val"},
    "histogram": {"calibration_batches": 3, "observers": {"input": "histogram"}},
    "learned": {"calibration_batches": 3, "train": "all"},
    "distilled": {"calibration_batches": 3, "distill": 1.0},
    "weights": {"scheme": W4},
    "learned weights": {"scheme": W4, "train": "all"},
    "scales": {"scheme": W4, "train": "scales"},
}


def on_fit(rank, ranks, options, make=Trained):
    like_torchrun(rank, ranks)
    module, callback = make(), qat(**options)
    fit(callback, module, rank=rank, ranks=ranks)
    learned = callback.quantized_fit.training.learned
    scales = {} if learned is None else learned.state_dict()["log_factors"]
    return {
        "losses": module.losses, "gradients": module.gradients, "weights": module.state_dict(),
        "qparams": qparams_of(module), "scales": scales, "validated": torch.cat(module.validated),
    }  # fmt: skip


def on_device(options):
    module, callback = Trained(), qat(**options)
    fit(callback, module)
    return module


@pytest.mark.slow_but_first
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_ranks_train_as_one_device_and_end_alike(options):
    # The model is in float64, the factors of learned scales are in float32: their mean over ranks is rounded so.
    rtol = torch.finfo(torch.float32).eps if options.get("train") else 1e-9
    one = on_device(options)
    first, second = run_ranks(on_fit, 2, 2, options)
    assert same(first["weights"], second["weights"])
    assert same(first["qparams"], second["qparams"])
    assert same(first["scales"], second["scales"])
    assert close(first["gradients"], one.gradients)
    mean = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    torch.testing.assert_close(mean, one.losses, rtol=rtol, atol=0)
    assert close(first["weights"], one.state_dict(), rtol)
    assert close(first["qparams"], qparams_of(one), rtol)
    interleaved = torch.stack([first["validated"], second["validated"]], 1).flatten(0, 1)
    torch.testing.assert_close(interleaved, torch.cat(one.validated), rtol=rtol, atol=1e-12)


@pytest.mark.slow
def test_scales_are_trained_from_a_rounding_by_weighed_tokens_of_all_ranks():
    weighed = {"weight": {"name": "imatrix_mse", "weigh_tokens": True}}
    options = {"scheme": SYMMETRIC_W4, "train": "scales", "observers": weighed, "rounding": "gptq"}
    first, second = run_ranks(on_fit, 2, 2, {**options, "calibration_batches": 3}, WithoutExperts)
    assert same(first["qparams"], second["qparams"])
    assert same(first["scales"], second["scales"])
    assert all(factors.any() for factors in first["scales"].values())
    assert first["losses"][3:] != second["losses"][3:]


def on_two_halves(rank, ranks, halves):
    """The gradients at the first step, of one batch or of its halves."""
    if ranks > 1:
        like_torchrun(rank, ranks)
    found = []

    class Look(Callback):
        def on_before_optimizer_step(self, with_trainer, module, optimizer):
            found.append({str(i): p.grad.clone() for i, p in enumerate(optimizer.param_groups[0]["params"])})

    data = DataLoader(TensorDataset(X[:8][rank::ranks]), batch_size=8 // ranks // halves)
    callback = qat(W4, train="all")
    fit(callback, Trained(), Look(), rank=rank, ranks=ranks, data=data, max_steps=1, accumulate_grad_batches=halves)
    return found[0]


def test_gradients_of_learned_scales_are_the_mean_over_ranks_and_accumulated_batches():
    expected = on_two_halves(0, 1, 1)
    assert len(expected) == 15  # ten parameters, five scales
    expected = {name: grad.double() for name, grad in expected.items()}
    for grads in run_ranks(on_two_halves, 2, 2, 2):
        for name, grad in grads.items():
            tolerance = 1e-9 if grad.dtype == torch.float64 else 1e-5  # log factors are float32
            torch.testing.assert_close(grad.double(), expected[name], rtol=tolerance, atol=tolerance / 100)


def on_overflow(rank):
    """fp16 with a loss scale on a CPU; at the second step a scale's gradient is infinite on rank 1 alone."""
    like_torchrun(rank, 2)
    torch.manual_seed(0)
    module, callback, steps = Trained().float(), qat(calibration_batches=1, train="all"), []

    class Overflow(Callback):
        def on_train_batch_start(self, with_trainer, module, batch, batch_idx):
            if batch_idx == 1 and rank == 1:
                factor = callback.quantized_fit.training.learned.parameters[0]
                self.handle = factor.register_hook(lambda grad: grad * float("inf"))

        def on_train_batch_end(self, with_trainer, module, outputs, batch, batch_idx):
            steps.append(module.net.first.weight.detach().clone())
            if hasattr(self, "handle"):
                self.handle.remove()

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=16.0))
    data = DataLoader(TensorDataset(X.float()[rank::2]), batch_size=2)
    options = {"plugins": [plugin], "max_epochs": 1, "limit_val_batches": 0}
    fit(callback, module, Overflow(), rank=rank, ranks=2, data=data, **options)
    return steps, callback.quantized_fit.training.learned.state_dict()["log_factors"]


def test_a_step_that_overflows_on_one_rank_is_left_out_on_all():
    (first, factors), (second, others) = run_ranks(on_overflow, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert [torch.equal(a, b) for a, b in itertools.pairwise(first)] == [True] + [False] * 6
    assert same(factors, others)


def on_first_ranges(rank, ranks, observer):
    if ranks > 1:
        like_torchrun(rank, ranks)
    module = Module()  # float32, of numbers that no addition rounds
    callback = qat("INT8_STATIC", quantize="activations", calibration_batches=3, observers={"input": observer})
    x = samples(16, experts=(0, 1, 2))
    with_trainer = trainer(callback, ranks=ranks, max_epochs=1, limit_val_batches=0, use_distributed_sampler=False)
    with_trainer.fit(module, share(x, rank, ranks), share(x, rank, ranks))
    return qparams_of(module), callback.result.ranks


@pytest.mark.parametrize("observer", ["static_minmax", "histogram"])
def test_the_first_ranges_have_the_bits_of_one_device(observer):
    expected, _ = on_first_ranges(0, 1, observer)
    assert len(expected) == 10
    for qparams, ranks in run_ranks(on_first_ranges, 2, 2, observer):
        assert ranks == 2
        assert same(qparams, expected)


# ---------------------------------------------------------------------- what ranks do not share


def on_odd_experts(rank, ranks, x):
    if ranks > 1:
        like_torchrun(rank, ranks)
    module, callback = Trained(), qat(calibration_batches=3)
    fit(callback, module, rank=rank, ranks=ranks, data=share(x, rank, ranks))
    return qparams_of(module), module.state_dict()


def test_an_expert_that_only_rank_1_reaches_is_quantized_and_trained_alike():
    x = X.clone()
    x[:, -1] = torch.tensor([0, 1, 0, 2]).repeat(8)  # even samples, those of rank 0, never reach experts 1 and 2
    expected, weights = on_odd_experts(0, 1, x)
    results = run_ranks(on_odd_experts, 2, 2, x)
    assert same(results[0][0], results[1][0])
    assert close(results[0][0], expected)
    assert close(results[0][1], weights)


class Stream(IterableDataset):
    """Lightning refuses a rank whose loader has length 0; a stream has no length."""

    def __init__(self, x):
        self.x = x

    def __iter__(self):
        return iter([(row,) for row in self.x])


def on_unequal_validation(rank, parts, observe):
    ranks = len(parts)
    if ranks > 1:
        like_torchrun(rank, ranks)
    module, callback = Trained(), qat(observe=observe, calibration_batches=3)
    with_trainer = trainer(callback, ranks=ranks, max_epochs=2, use_distributed_sampler=False)
    with_trainer.fit(module, share(X, rank, ranks), DataLoader(Stream(X[parts[rank]]), batch_size=2))
    with_trainer.validate(module, DataLoader(Stream(X[parts[rank]]), batch_size=2), verbose=False)
    return qparams_of(module), module.state_dict()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("observe", ["train", "val"])
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3, 4, 5, 6], [7]], [[], [0, 7, 2, 5, 4, 3, 6, 1]]])
def test_ranks_may_have_unequal_numbers_of_validation_batches_or_none(parts, observe):
    expected, weights = on_unequal_validation(0, [sorted(itertools.chain(*parts))], observe)
    results = run_ranks(on_unequal_validation, 2, parts, observe, timeout=30)
    assert same(results[0][0], results[1][0])
    assert close(results[0][0], expected)
    assert close(results[0][1], weights)
