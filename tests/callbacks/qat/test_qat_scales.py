"""train="scales": weights are frozen, and block scales learn to give the unquantized model's predictions."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationError, CalibrationWarning, QuantizationAwareTraining
from lightning_obs.model.module_qparams import read_qparams
from tests.callbacks.qat_modules import (
    NVFP4_SMALL,
    W4,
    Classifier,
    Language,
    language_data,
    left_behind,
    loader,
    trainer,
)
from tests.support.lightning_package import L

SIGNED = {"observers": {"weight": {"name": "memoryless_mse", "signed": True}}}
GPTQ = {"rounding": "gptq"}
W4A16 = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 16}}


def qat(scheme=NVFP4_SMALL, **options):
    return QuantizationAwareTraining(scheme, train="scales", **options)


def linears(module):
    return {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in name}


def qparams_of(module):
    return {f"{n}.{k}": v.clone() for n, m in linears(module).items() for k, v in read_qparams(m).items()}


class Fast(Language):
    """Trains what a Lightning user expects to be trainable, fast enough that scales leave their float8."""

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("scheme", "options"),
    [("NVFP4", {}), ("NVFP4A16", {}), ("NVFP4A16", GPTQ), (W4A16, {}), (W4A16, SIGNED), (W4A16, SIGNED | GPTQ)],
    ids=["NVFP4", "NVFP4A16", "NVFP4A16 rounded", "W4A16", "W4A16 signed", "W4A16 signed, rounded"],
)
def test_scales_are_trained_and_reloaded_and_nothing_else_changes(scheme, options, tiny_llama, batches, tmp_path):
    module = Fast(tiny_llama(torch.bfloat16))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    callback = qat(scheme, ignore=["lm_head"], calibration_batches=1, **options)
    tr = trainer(callback, max_epochs=4)
    tr.validate(module, language_data(batches), verbose=False)
    calibrated = qparams_of(module)
    tr.fit(module, language_data(batches), language_data(batches))
    tuned = qparams_of(module)

    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert not left_behind(module)
    assert all(p.requires_grad and p.grad is None for p in module.parameters())
    changed = {name for name, value in calibrated.items() if not torch.equal(value, tuned[name])}
    assert changed == {f"{name}.weight_scale" for name in linears(module)}
    for name in changed:
        scale = tuned[name].float()
        assert torch.equal(scale.sign(), calibrated[name].float().sign())
        if scheme != W4A16:
            assert torch.equal(scale.to(torch.float8_e4m3fn).float(), scale)

    callback.export(tmp_path / "out")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        for batch, expected in zip(batches, module.logits, strict=True):
            assert torch.equal(reloaded(**batch).logits, expected)


def test_the_optimizer_keeps_the_scales_alone():
    class Split(Classifier):
        def configure_optimizers(self):
            first, second = self.net[0], self.net[2]
            groups = [{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.5}]
            optimizer = torch.optim.AdamW(groups, lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)]

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            assert all(not p.requires_grad and p.grad is None for p in pl_module.parameters())

    module, callback = Split(), qat(W4)
    tr = trainer(callback, Look(), gradient_clip_val=1.0)
    tr.fit(module, loader(), loader())
    (optimizer,) = tr.optimizers
    first, second = (group["params"] for group in optimizer.param_groups)
    assert [id(p) for p in first] == [id(p) for p in callback.quantized_fit.training.learned.parameters]
    assert second == []
    assert optimizer.state.keys() == {*first}


def test_the_divergence_from_the_unquantized_model_is_the_whole_loss_and_falls():
    losses, divergences = [], []

    class Look(L.Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            losses.append(loss.item())

        def on_train_batch_end(self, trainer, *_):
            divergences.append(trainer.callback_metrics["quant/distillation"].item())

    torch.manual_seed(0)
    module = Classifier(lr=0.02)
    trainer(qat(log=True), Look(), max_epochs=30, logger=True).fit(module, loader(), loader())
    assert losses == divergences
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])


def test_weights_are_observed_once_though_their_observer_wants_inputs():
    module = Classifier(lr=0.05)
    callback = qat(W4, observers={"weight": "imatrix_mse"}, calibration_batches=2)
    counted = []
    tr = trainer(callback, max_epochs=3)
    tr.fit(module, loader(), loader())  # nothing is quantized in the first two steps
    counted.append(callback.result.batches)
    learned = callback.quantized_fit.training.learned
    assert counted == [2]
    assert learned.has_changed
    assert torch.equal(module.net[0].weight_scale, learned.values()["net.0.weight_scale"])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_first_batches_give_the_weighed_rounding_that_their_validation_gives(precision, tiny_llama, batches):
    options = {"observers": {"weight": {"name": "imatrix_mse", "weigh_tokens": True}}, "ignore": ["lm_head"]}
    found = []
    for fits in (False, True):
        callback = qat(W4A16, rounding="gptq", calibration_batches=len(batches), **options)
        tr = trainer(callback, max_steps=len(batches) + 1, limit_val_batches=float(not fits), precision=precision)
        module, data = Fast(tiny_llama()), language_data(batches)
        tr.fit(module, data, data) if fits else tr.validate(module, data, verbose=False)
        found.append(callback.result.qparams)
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_batch_norms_and_dropout_are_frozen_and_train_again_afterwards():
    class Normed(Classifier):
        def build(self):
            return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2))

    module = Normed(lr=0.05)
    trainer(qat(module="net")).fit(module, loader(), loader())
    assert module.net[1].num_batches_tracked == 0
    assert all(m.training for m in module.modules())


def test_an_exception_leaves_the_weights_trainable():
    class Broken(Classifier):
        def on_train_batch_end(self, *_):
            raise RuntimeError("of the user")

    module = Broken()
    with pytest.raises(RuntimeError, match="of the user"):
        trainer(qat()).fit(module, loader(), loader())
    assert all(p.requires_grad for p in module.parameters())
    assert not left_behind(module)


def test_scales_that_do_not_change_are_said():
    with pytest.warns(CalibrationWarning, match=r"no scale has changed in 4 steps; raise the learning rate"):
        trainer(qat(), max_epochs=1).fit(Classifier(lr=1e-6), loader(), loader())


def test_what_cannot_be_trained_is_refused(tiny_llama, batches):
    of_mx = qat("MXFP4A16", ignore=["lm_head"], engines="unchecked")
    with pytest.raises(CalibrationError, match=r"no scale of this scheme can be learned.*powers of two \(MX\)"):
        trainer(of_mx).fit(Fast(tiny_llama(torch.bfloat16)), language_data(batches), language_data(batches))
    with pytest.raises(CalibrationError, match=r"train\. Got 'ranges', expected 'weights', 'scales', 'all'"):
        QuantizationAwareTraining(W4, train="ranges")
    with pytest.raises(CalibrationError, match=r"learns from the unquantized model\. Got distill=0"):
        qat(distill=0)
    with pytest.raises(CalibrationError, match=r"training the weights undoes their rounding.*train='scales'"):
        QuantizationAwareTraining(W4, rounding="gptq")
    frozen = Classifier().requires_grad_(False)
    with pytest.raises(CalibrationError, match=r"every parameter is frozen.*leave requires_grad on"):
        trainer(qat()).fit(frozen, loader(), loader())
