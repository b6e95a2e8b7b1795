"""QuantizationAwareTraining of attention states: q, k and v pass fake quantization, and gradients pass it back."""

import copy

import pytest
import torch
from compressed_tensors.quantization import forward_quantize
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_obs import CalibrationSession, QuantizationAwareTraining, quantized
from lightning_obs.fine_tuning.quantized_training import QuantizedTraining
from lightning_obs.model.module_qparams import read_qparams
from lightning_obs.numerics.fake_quantize import fake_quantize
from tests.callbacks.qat_modules import Language, from_step, language_data, quiet, trainer
from tests.support.attention_models import CASES, attention, cached_states, logits, traces
from tests.support.lightning_package import Callback, ModelCheckpoint, needs_exact_resumption
from tests.support.lightning_ranks import like_torchrun
from tests.support.rank_processes import run_ranks
from tests.support.tiny_model import save_tiny_llama
from tests.support.versions import checkpointing_of


def training(model, batches, scheme=None, **options):
    """A calibrated model that runs as in training."""
    session = CalibrationSession(model, scheme, **options)
    with torch.no_grad(), session:
        for batch in batches:
            model(**batch)
    found = QuantizedTraining(session)
    found.start()
    return found


# ---------------------------------------------------------------------- numbers


@pytest.mark.slow_but_first
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_logits_are_those_of_the_quantized_model(case, dtype, tiny_llama, batches):
    model = tiny_llama(dtype)
    before = traces(model)
    run = training(model, batches, **case)
    with quantized(model):
        expected = [logits(model, batch) for batch in batches]
    for options in ({}, {"use_cache": False}):
        assert all(torch.equal(logits(model, b, **options), e) for b, e in zip(batches, expected, strict=True))
    with run.unquantized():
        plain = logits(model, batches[0])
    run.stop()
    assert traces(model) == before
    assert torch.equal(plain, logits(model, batches[0]))
    assert not torch.equal(plain, expected[0])


def test_a_cache_that_is_filled_token_by_token_holds_quantized_states(tiny_llama, batches):
    model = tiny_llama()
    run = training(model, batches, kv_cache="FP8")
    ids = batches[0]["input_ids"]
    with torch.no_grad():
        cache = model(input_ids=ids[:, :8]).past_key_values
        for at in range(8, 16):
            cache = model(input_ids=ids[:, at : at + 1], past_key_values=cache).past_key_values
    module = model.model.layers[0].self_attn
    for name in ("k", "v"):
        held = getattr(cache.layers[0], {"k": "keys", "v": "values"}[name])
        again = forward_quantize(module, held, name, module.quantization_scheme.input_activations)
        assert torch.equal(held, again)
    run.stop()
    floats = cached_states(model, batches[:1])["k"][0]
    assert not torch.equal(floats, cache.layers[0].keys)


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize("kind", [{}, {"num_bits": 8, "type": "int"}], ids=["fp8", "int8"])
@pytest.mark.filterwarnings("ignore:vLLM 0.32 loads a kv cache in symmetric 8-bit float only")
def test_gradients_are_those_of_the_numerics_in_an_attention_function_of_ones_own(
    strategy, kind, tiny_llama, batches, monkeypatch
):
    """The same function inside transformers' own attention, where autograd differentiates it with everything else."""
    model = tiny_llama()
    twin = copy.deepcopy(model)
    run = training(model, batches[1:], attention(strategy, **kind))  # the first batch is clipped here and there
    ranges = {m.layer_idx: m for m in model.modules() if read_qparams(m)}
    args = ranges[0].quantization_scheme.input_activations
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def by_hand(module, q, k, v, *rest, **kwargs):
        scales = ranges[module.layer_idx]
        q, k, v = (
            fake_quantize(state, getattr(scales, f"{name}_scale"), None, args)
            for name, state in (("q", q), ("k", k), ("v", v))
        )
        return own(module, q, k, v, *rest, **kwargs)

    labels = batches[0]["input_ids"]
    model(**batches[0], labels=labels).loss.backward()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", by_hand)
    run.stop()
    twin(**batches[0], labels=labels).loss.backward()
    for (name, found), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert found.grad.any(), name
        assert torch.equal(found.grad, expected.grad), name


def test_what_was_clipped_has_no_gradient(tiny_llama, batches):
    model = tiny_llama()
    run = training(model, batches, kv_cache="FP8_HEAD")
    module = model.model.layers[0].self_attn
    module.v_scale = module.v_scale * torch.tensor([1.0, 1e-6]).reshape(2, 1, 1)  # all of the second head's values
    model(**batches[0], labels=batches[0]["input_ids"]).loss.backward()
    first, second = module.v_proj.weight.grad.chunk(2)
    assert first.abs().sum() > 0
    assert second.abs().sum() == 0
    run.stop()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(reentrant, tiny_llama, batches):
    model = tiny_llama().train()
    run = training(model, batches, attention())
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            checkpointing_of(model)({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(**batches[0], labels=batches[0]["input_ids"]).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    run.stop()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# ---------------------------------------------------------------------- fit


class Watch(Callback):
    """Scales of the first attention, after each training batch."""

    def __init__(self):
        self.scales = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.scales.append({k: v.clone() for k, v in read_qparams(pl_module.model.model.layers[0].self_attn).items()})


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("case", "observe"),
    [
        pytest.param(case, observe, id=f"{name}-{observe}", marks=[pytest.mark.nightly] * (number % 2 != at))
        for number, (name, case) in enumerate(CASES.items())
        for at, observe in enumerate(("train", "val"))
    ],
)
def test_the_reloaded_checkpoint_gives_the_logits_of_the_last_validation(case, observe, tiny_llama, batches, tmp_path):
    module = Language(tiny_llama(torch.bfloat16))
    before = traces(module.model)
    callback = QuantizationAwareTraining(**case, observe=observe, calibration_batches=2)
    trainer(callback).fit(module, language_data(batches), language_data(batches))
    assert traces(module.model) == before
    with torch.no_grad(), quantized(module.model):
        assert torch.equal(module.model.eval()(**batches[0]).logits, module.logits[0])
    callback.export(tmp_path / "out")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert all(torch.equal(logits(reloaded, b), e) for b, e in zip(batches, module.logits, strict=True))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("freeze_after", [None, 1])
@pytest.mark.parametrize("train", ["weights", "all"])
def test_states_are_observed_anew_after_each_validation(train, freeze_after, tiny_llama, batches):
    module, watch = Language(tiny_llama()), Watch()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)
    expected = cached_states(module.model, batches[:2])["k"][0].abs().amax((0, 2, 3)) / 448

    def double():
        with torch.no_grad():
            module.model.model.layers[0].self_attn.k_proj.weight.mul_(2 if module.current_epoch else 1)

    module.on_train_epoch_start = double
    scheme = attention("attn_head") | ({"W8A16": ["lm_head"]} if train == "all" else {})
    options = {"train": train, "freeze_after": freeze_after, "calibration_batches": 2}
    callback = QuantizationAwareTraining(scheme, **options)
    trainer(callback, watch).fit(module, language_data(batches), language_data(batches))
    assert [sorted(seen) for seen in watch.scales] == [[]] + [["k_scale", "q_scale", "v_scale"]] * 5
    found = [float((seen["k_scale"].flatten() / expected).mean()) for seen in watch.scales[1:]]
    assert found == pytest.approx([1, 1, 1, 2, 2] if freeze_after is None else [1] * 5)


@needs_exact_resumption
@pytest.mark.slow_but_first
@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(step, tiny_llama, batches, tmp_path):
    """From the middle of an observation (of states too), after an epoch, and from the middle of another."""
    options = {"kv_cache": "FP8_HEAD", "ignore": ["lm_head"], "calibration_batches": 2}
    saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    found = []
    for path in (None, tmp_path / f"step={step}.ckpt"):
        module, losses = Language(tiny_llama()), []

        class Look(Callback):
            def on_before_backward(self, trainer, pl_module, loss, losses=losses):
                losses.append(loss.item())

        data = from_step(2, batches, batch_size=None)
        data.skip = 0 if path is None else step % 3
        callbacks = [QuantizationAwareTraining("FP8", **options), Look(), *([saver] if path is None else [])]
        trainer(*callbacks).fit(module, data, language_data(batches), ckpt_path=path)
        found.append((losses, module.logits))
    assert found[0][0][step:] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.slow
@quiet
@pytest.mark.parametrize(
    "scheme", [pytest.param(None, id="kv", marks=pytest.mark.nightly), pytest.param(attention(), id="q, k, v")]
)
def test_a_compiled_model_trains_as_an_eager_one(scheme, tiny_llama, batches):
    losses = []
    for compiled in (False, True):
        module = Language(tiny_llama())
        del module.model.model.layers[1:]  # a second layer is traced as long again
        if compiled:
            module.model = torch.compile(module.model, backend="eager")

        class Look(Callback):
            def on_before_backward(self, trainer, pl_module, loss):
                losses.append(loss.item())

        callback = QuantizationAwareTraining(scheme, kv_cache=None if scheme else "FP8", calibration_batches=1)
        trainer(callback, Look()).fit(module, language_data(batches), language_data(batches))
    assert losses[:6] == losses[6:]


def test_no_parameter_is_without_a_gradient_once_states_are_quantized(tiny_llama, batches):
    without = []

    class Look(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            without.append([n for n, p in pl_module.named_parameters() if p.grad is None or not p.grad.any()])

    callback = QuantizationAwareTraining(attention(), calibration_batches=1)
    trainer(callback, Look()).fit(Language(tiny_llama()), language_data(batches), language_data(batches))
    assert without == [[]] * 6


def test_a_switched_off_module_stays_switched_off(tiny_llama, batches):
    model = tiny_llama()
    plain = logits(model, batches[0])
    session = CalibrationSession(model, attention())
    with torch.no_grad(), session:
        model(**batches[0])
    for module in session.plan.targets:
        module.module.quantization_enabled = False
    run = QuantizedTraining(session)
    run.start()
    assert torch.equal(logits(model, batches[0]), plain)
    run.stop()


def test_the_observer_sees_a_state_before_it_is_quantized(tiny_llama, batches):
    model = tiny_llama()
    states = cached_states(model, batches)
    run = training(model, batches[:1], kv_cache="FP8", observers={"k": "static_minmax"})
    module = model.model.layers[0].self_attn
    module.k_scale = module.k_scale / 100  # what is quantized is clipped to a hundredth
    run.observe_training()
    with torch.no_grad():
        for batch in batches:
            model(**batch)
            run.end_training_batch(len(batches))
    torch.testing.assert_close(module.k_scale, states["k"][0].abs().max().reshape(1) / 448)
    run.stop()


def test_an_exception_leaves_the_model_as_it_was(tiny_llama, batches):
    module = Language(tiny_llama())
    before = traces(module.model)

    class Fail(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("stop")

    callback = QuantizationAwareTraining(None, kv_cache="FP8", calibration_batches=2)
    with pytest.raises(RuntimeError, match="stop"):
        trainer(callback, Fail()).fit(module, language_data(batches), language_data(batches))
    assert traces(module.model) == before


def test_the_teacher_runs_with_states_in_full_precision(tiny_llama, batches):
    module, totals = Language(tiny_llama()), []
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)

    class Look(Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            totals.append(loss.item())

    class Zero(Language):
        def training_step(self, batch, batch_idx):
            return 0.0 * super().training_step(batch, batch_idx)

    module.__class__ = Zero
    callback = QuantizationAwareTraining(None, kv_cache="FP8", distill=1.0, calibration_batches=2)
    trainer(callback, Look(), max_epochs=1).fit(module, language_data(batches), language_data(batches))
    p = logits(module.model, batches[2]).double().log_softmax(-1)
    with quantized(module.model):
        q = logits(module.model, batches[2]).double().log_softmax(-1)
    assert totals[:2] == [0.0, 0.0]
    assert totals[2] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)


# ---------------------------------------------------------------------- several ranks


def on_states(rank, ranks, folder, out):
    if ranks > 1:
        like_torchrun(rank, ranks)
    module = Language(AutoModelForCausalLM.from_pretrained(folder))
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1e-3)
    ids = torch.randint(3, 200, (8, 16), generator=torch.Generator().manual_seed(0))[rank::ranks]
    data = language_data([{"input_ids": rows} for rows in ids.split(4 // ranks)])
    callback = QuantizationAwareTraining("FP8", kv_cache="FP8_HEAD", ignore=["lm_head"], calibration_batches=1)
    options = {"devices": ranks, "strategy": "ddp"} if ranks > 1 else {}
    with_trainer = trainer(callback, use_distributed_sampler=False, **options)
    with_trainer.fit(module, data, data)
    callback.export(out)
    with_trainer.strategy.barrier()
    reloaded = AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        again = [reloaded(**batch).logits for batch in data]
    assert all(torch.equal(one, other) for one, other in zip(again, module.logits, strict=True))
    return read_qparams(module.model.model.layers[0].self_attn)


def test_two_ranks_quantize_states_alike(tmp_path):
    folder = save_tiny_llama(tmp_path / "tiny")
    expected = on_states(0, 1, folder, tmp_path / "one")
    assert sorted(expected) == ["k_scale", "v_scale"]
    first, second = run_ranks(on_states, 2, 2, folder, tmp_path / "two")
    assert first.keys() == second.keys() == expected.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name])
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=0)
