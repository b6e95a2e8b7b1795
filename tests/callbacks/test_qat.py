"""QuantizationAwareTraining in Lightning's own loops: what training, validation, checkpoint and export see."""

import copy
import itertools

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    WeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationError, CalibrationWarning, QuantizationAwareTraining, load_checkpoint, quantized
from lightning_obs.modules import read_qparams

W4 = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 8}}
ASYMMETRIC = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel", "symmetric": False}}
W8 = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}


def trainer(*callbacks, **kwargs):
    options = {
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(callbacks=list(callbacks), **{**options, **kwargs})


def loader(seed=1, count=16):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=4)


class Regression(L.LightningModule):
    """A module of one's own, which remembers its losses and its validation outputs."""

    def __init__(self, lr=1e-2):
        super().__init__()
        self.net = self.build()
        self.lr = lr
        self.losses, self.validated = [], []

    def build(self):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def on_validation_epoch_start(self):
        self.validated = []

    def validation_step(self, batch, batch_idx):
        out = self(batch[0])
        self.validated.append(out.clone())
        self.log("val_loss", F.mse_loss(out, batch[1]))

    def test_step(self, batch, batch_idx):
        out = self(batch[0])
        self.validated.append(out)
        self.log("test_loss", F.mse_loss(out, batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Language(L.LightningModule):
    """Calls its model with keywords only, as transformers' users do."""

    def __init__(self, model):
        super().__init__()
        self.model = model.train()

    def training_step(self, batch, batch_idx):
        return self.model(**batch, labels=batch["input_ids"]).loss

    def on_validation_epoch_start(self):
        self.logits = []

    def validation_step(self, batch, batch_idx):
        out = self.model(**batch, labels=batch["input_ids"])
        self.logits.append(out.logits.clone())
        self.log("val_loss", out.loss.float())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def language_data(batches):
    return DataLoader(batches, batch_size=None)


def outputs(module, data=None):
    with torch.no_grad():
        return torch.cat([module(batch[0]) for batch in data or loader(seed=2)])


def left_behind(module):
    return [m for m in module.modules() if "forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks] or [
        name for name in ("training_step",) if name in vars(module)
    ]


# ---------------------------------------------------------------------- the checkpoint has the numbers


@pytest.mark.parametrize("scheme", ["INT8_STATIC", "FP8", "W4A16", "NVFP4", "W8A8"])
@pytest.mark.parametrize("observe", ["train", "val"])
def test_the_reloaded_checkpoint_gives_the_logits_of_the_last_validation(
    scheme, observe, tiny_llama, batches, tmp_path
):
    module = Language(tiny_llama(torch.bfloat16))
    callback = QuantizationAwareTraining(scheme, ignore=["lm_head"], observe=observe, calibration_batches=2)
    trainer(callback).fit(module, language_data(batches), language_data(batches))
    callback.export(tmp_path / "out")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        for batch, expected in zip(batches, module.logits, strict=True):
            assert torch.equal(reloaded(**batch).logits, expected)
    assert not left_behind(module)


@pytest.mark.parametrize("observe", ["train", "val", "none"])
@pytest.mark.parametrize("scheme", ["INT8_STATIC", W4])
def test_a_module_of_ones_own_reloads_with_the_outputs_of_the_last_validation(scheme, observe, tmp_path):
    module, callback = Regression(), QuantizationAwareTraining(scheme, observe=observe, calibration_batches=2)
    trainer(callback).fit(module, loader(), loader(seed=2))
    callback.export(tmp_path / "out")
    reloaded = load_checkpoint(Regression(), tmp_path / "out")
    assert torch.equal(outputs(reloaded), torch.cat(module.validated))
    with quantized(module):
        assert torch.equal(outputs(module), torch.cat(module.validated))


def test_learned_scales_are_exported(tmp_path):
    module, callback = Regression(), QuantizationAwareTraining("INT8_STATIC", learn_scales=True, calibration_batches=2)
    trainer(callback).fit(module, loader(), loader(seed=2))
    absmax = module.net[0].weight.abs().amax(1, keepdim=True) / 127.5
    assert not torch.allclose(module.net[0].weight_scale, absmax, rtol=1e-4)
    callback.export(tmp_path / "out")
    assert torch.equal(outputs(load_checkpoint(Regression(), tmp_path / "out")), torch.cat(module.validated))


def test_the_reloaded_checkpoint_gives_the_logits_under_autocast_too(tiny_llama, batches, tmp_path):
    module = Language(tiny_llama())
    callback = QuantizationAwareTraining("INT8_STATIC", ignore=["lm_head"], calibration_batches=2)
    trainer(callback, precision="bf16-mixed").fit(module, language_data(batches), language_data(batches))
    callback.export(tmp_path / "out")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for batch, expected in zip(batches, module.logits, strict=True):
            assert torch.equal(reloaded(**batch, labels=batch["input_ids"]).logits, expected)


def test_weights_trained_on_after_the_last_validation_are_not_exported(tmp_path):
    module, callback = Regression(), QuantizationAwareTraining("INT8_STATIC", calibration_batches=2)
    trainer(callback, max_epochs=3, check_val_every_n_epoch=2).fit(module, loader(), loader())
    with pytest.raises(CalibrationError, match=r"weights have changed since.*trainer\.validate"):
        callback.export(tmp_path / "out")
    trainer(callback).validate(module, loader(seed=2), verbose=False)
    callback.export(tmp_path / "out")
    assert torch.equal(outputs(load_checkpoint(Regression(), tmp_path / "out")), torch.cat(module.validated))


def test_a_model_whose_activations_were_never_calibrated_is_not_exported(tmp_path):
    callback = QuantizationAwareTraining("INT8_STATIC", start_epoch=5)
    trainer(callback).fit(Regression(), loader(), loader())
    with pytest.raises(CalibrationError, match="was not calibrated"):
        callback.export(tmp_path / "out")


# ---------------------------------------------------------------------- what training sees


class Watch(L.Callback):
    """What a batch of training and of validation gave, and which ranges were in force."""

    def __init__(self):
        self.scales, self.starts = [], []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.scales.append(read_qparams(pl_module.net[0]))

    def on_train_batch_start(self, trainer, pl_module, *_):
        self.starts.append(read_qparams(pl_module.net[0]))


def test_weights_are_quantized_at_the_first_step_and_activations_after_the_calibration_batches():
    module, watch = Regression(lr=0.0), Watch()
    callback = QuantizationAwareTraining("INT8_STATIC", calibration_batches=3)
    trainer(callback, watch, max_epochs=1, limit_val_batches=0).fit(module, loader(), loader())
    assert ["weight_scale" in s for s in watch.starts] == [True] * 4
    assert ["input_scale" in s for s in watch.starts] == [False, False, False, True]
    data = torch.cat([batch[0] for batch in loader()][:3])
    torch.testing.assert_close(watch.starts[3]["input_scale"], data.abs().max().reshape(1) / 127.5)
    with quantized(module):
        x, y = loader().dataset[12:]
        assert F.mse_loss(module(x), y).item() == module.losses[3]


def test_the_first_loss_is_that_of_quantized_weights_and_float_activations():
    module = Regression()
    weights_only = copy.deepcopy(module)
    trainer(QuantizationAwareTraining("INT8_STATIC"), max_steps=1, limit_val_batches=0).fit(module, loader(), loader())
    trainer(QuantizationAwareTraining(W8), max_steps=1, limit_val_batches=0).fit(weights_only, loader(), loader())
    assert module.losses == weights_only.losses
    assert (
        module.losses[0]
        != F.mse_loss(
            Regression.forward(copy.deepcopy(module), loader().dataset[:4][0]), loader().dataset[:4][1]
        ).item()
    )


@pytest.mark.parametrize("quantize", ["weights", "activations"])
def test_training_can_see_weights_or_activations_alone_and_validation_sees_all(quantize, tmp_path):
    module = Regression(lr=0.0)
    callback = QuantizationAwareTraining("INT8_STATIC", quantize=quantize, calibration_batches=4, observe="none")
    trainer(callback, max_epochs=2).fit(module, loader(), loader(seed=2))
    other = {"weights": "activations", "activations": "weights"}[quantize]
    with quantized(module):
        assert torch.equal(outputs(module), torch.cat(module.validated))
    for target in (module.net[0], module.net[2]):  # leave only what training saw
        setattr(target.quantization_scheme, "weights" if other == "weights" else "input_activations", None)
    with quantized(module), torch.no_grad():
        expected = [F.mse_loss(module(x), y).item() for x, y in loader()]
    assert module.losses[4:] == expected


@pytest.mark.parametrize("scheme", ["NVFP4", "INT8_STATIC", "W4A16"])
def test_no_parameter_of_a_language_model_is_without_a_gradient(scheme, tiny_llama, batches):
    without = []

    class Look(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            without.append([n for n, p in pl_module.named_parameters() if p.grad is None or not p.grad.any()])

    module = Language(tiny_llama(torch.bfloat16))
    callback = QuantizationAwareTraining(scheme, ignore=["lm_head"], calibration_batches=1)
    trainer(callback, Look(), max_epochs=1).fit(module, language_data(batches), language_data(batches))
    assert without == [[], [], []]


def test_nothing_is_quantized_before_the_start():
    module, watch = Regression(), Watch()
    plain = copy.deepcopy(module)
    callback = QuantizationAwareTraining("INT8_STATIC", start_epoch=1, calibration_batches=1)
    trainer(callback, watch, max_epochs=2).fit(module, loader(), loader(seed=2))
    trainer(max_epochs=2).fit(plain, loader(), loader(seed=2))
    assert module.losses[:4] == plain.losses[:4]
    assert module.losses[4] != plain.losses[4]
    assert ["weight_scale" in s for s in watch.scales] == [False] * 4 + [True] * 4


def test_the_start_can_be_a_step():
    watch = Watch()
    callback = QuantizationAwareTraining("INT8_STATIC", start_step=3, calibration_batches=2)
    trainer(callback, watch, max_epochs=2).fit(Regression(), loader(), loader(seed=2))
    assert ["weight_scale" in s for s in watch.scales] == [False] * 3 + [True] * 5


def test_every_validation_observes_the_weights_anew():
    module = Regression()
    trainer(QuantizationAwareTraining(W8)).fit(module, loader(), loader())
    expected = module.net[0].weight.detach().abs().amax(1, keepdim=True) / 127.5
    torch.testing.assert_close(module.net[0].weight_scale, expected)


def test_ranges_are_refreshed_from_training_batches_after_each_validation():
    module, watch = Regression(), Watch()
    trainer(QuantizationAwareTraining("INT8_STATIC", calibration_batches=2), watch, max_epochs=3).fit(
        module, loader(), loader(seed=2)
    )
    seen = [float(read["input_scale"]) if "input_scale" in read else None for read in watch.starts]
    assert seen[:2] == [None, None]
    data = [float(x.abs().max()) / 127.5 for x, _ in loader()]
    assert seen[2:] == pytest.approx([max(data[:2])] * 10)
    second = [float(s["weight_scale"].sum()) for s in watch.starts]
    assert len(set(second)) == 3  # once at the start, then at each validation but the last


@pytest.mark.parametrize("observe", ["val", "train", "none"])
def test_8507_validation_data_change_no_range_unless_asked_for(observe):
    """pytorch-lightning #8507: observers ran in validation and took its data for ranges."""
    ranges = []
    for scale in (1.0, 100.0):
        module, watch = Regression(lr=0.0), Watch()
        validation = DataLoader(TensorDataset(scale * torch.ones(4, 8), torch.ones(4, 2)), batch_size=4)
        callback = QuantizationAwareTraining("INT8_STATIC", observe=observe, calibration_batches=2)
        trainer(callback, watch, max_epochs=2).fit(module, loader(), validation)
        ranges.append([float(s.get("input_scale", 0)) for s in watch.scales])
    if observe == "val":
        assert ranges[0][:4] == ranges[1][:4]
        assert ranges[1][4:] == pytest.approx([100 / 127.5] * 4)
    else:
        assert ranges[0] == ranges[1]


def test_none_keeps_the_first_ranges():
    watch = Watch()
    data = [loader(seed) for seed in range(5)]

    class Growing(Regression):
        def forward(self, x):
            return super().forward(x * (1 + self.trainer.current_epoch))

    callback = QuantizationAwareTraining("INT8_STATIC", observe="none", calibration_batches=2)
    trainer(callback, watch, max_epochs=3).fit(Growing(), data[0], data[1])
    assert len({float(s["input_scale"]) for s in watch.starts[2:]}) == 1


def test_freeze_after_keeps_the_ranges_of_activations_and_not_those_of_weights():
    watch = Watch()

    class Growing(Regression):
        def forward(self, x):
            return super().forward(x * (1 + self.trainer.current_epoch))

    callback = QuantizationAwareTraining("INT8_STATIC", freeze_after=2, calibration_batches=1)
    trainer(callback, watch, max_epochs=4).fit(Growing(), loader(), loader())
    inputs = [float(s["input_scale"]) for s in watch.scales]
    assert inputs[0] * 2 == pytest.approx(inputs[4])
    assert set(inputs[4:]) == {inputs[4]}
    weights = [float(s["weight_scale"].sum()) for s in watch.scales]
    assert len(set(weights)) == 4


def test_the_sanity_check_can_calibrate_before_the_first_step():
    watch = Watch()
    callback = QuantizationAwareTraining("INT8_STATIC", sanity_check=True, observe="none")
    trainer(callback, watch, num_sanity_val_steps=2).fit(Regression(), loader(), loader(seed=2))
    data = torch.cat([batch[0] for batch in loader(seed=2)][:2])
    assert float(watch.starts[0]["input_scale"]) == pytest.approx(float(data.abs().max()) / 127.5)


def test_nothing_happens_in_the_sanity_check_unless_asked_for():
    module, plain = Regression(), {}

    class Look(L.Callback):
        def on_sanity_check_end(self, trainer, pl_module):
            plain["out"] = torch.cat(pl_module.validated)
            plain["expected"] = outputs(pl_module)[: len(plain["out"])]

    trainer(QuantizationAwareTraining("INT8_STATIC"), Look(), num_sanity_val_steps=2).fit(
        module, loader(), loader(seed=2)
    )
    assert torch.equal(plain["out"], plain["expected"])


def test_validate_before_fit_calibrates_and_fit_starts_with_its_ranges():
    module, watch = Regression(), Watch()
    callback = QuantizationAwareTraining("INT8_STATIC", observe="none", calibration_batches=0)
    trainer(callback).validate(module, loader(), verbose=False)
    scale = float(module.net[0].input_scale)
    trainer(callback, watch).fit(module, loader(), loader(seed=2))
    assert {float(s["input_scale"]) for s in watch.starts} == {scale}


def test_validate_after_fit_measures_the_quantized_model_and_changes_no_range():
    module, callback = Regression(), QuantizationAwareTraining("INT8_STATIC", observe="val", calibration_batches=1)
    trainer(callback).fit(module, loader(), loader(seed=2))
    before = {name: value.clone() for name, value in read_qparams(module.net[0]).items()}
    fitted = torch.cat(module.validated)
    trainer(callback).validate(module, loader(seed=2), verbose=False)
    assert torch.equal(torch.cat(module.validated), fitted)
    trainer(callback).validate(module, loader(seed=3), verbose=False)
    assert all(torch.equal(value, before[name]) for name, value in read_qparams(module.net[0]).items())
    assert not left_behind(module)


def test_activations_that_nothing_would_calibrate_are_refused_at_the_first_step():
    callback = QuantizationAwareTraining("INT8_STATIC", calibration_batches=0, observe="none")
    with pytest.raises(CalibrationError, match=r"nothing will ever calibrate.*calibration_batches"):
        trainer(callback).fit(Regression(), loader(), loader())


def test_a_validation_that_comes_before_the_last_calibration_batch_ends_the_calibration():
    module, callback = Regression(), QuantizationAwareTraining("INT8_STATIC", calibration_batches=100)
    trainer(callback, max_epochs=1).fit(module, loader(), loader(seed=2))
    assert callback.session.batches == 4
    with quantized(module):
        assert torch.equal(outputs(module), torch.cat(module.validated))


def test_observing_val_alone_the_first_validation_gives_the_first_ranges():
    module, watch = Regression(), Watch()
    callback = QuantizationAwareTraining("INT8_STATIC", observe="val", calibration_batches=0)
    trainer(callback, watch).fit(module, loader(), loader(seed=2))
    assert ["input_scale" in s for s in watch.starts] == [False] * 4 + [True] * 4


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
def test_a_precision_that_casts_the_weights_is_refused(precision):
    with pytest.raises(CalibrationError, match=rf"{precision}.*bf16-mixed.*dtype=torch.bfloat16"):
        trainer(QuantizationAwareTraining("INT8_STATIC"), precision=precision).fit(Regression(), loader(), loader())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quantize": "some"}, "quantize. Got 'some', expected 'all'"),
        ({"observe": "test"}, "observe. Got 'test'"),
        ({"calibration_batches": -1}, "calibration_batches. Got -1"),
        ({"distill": -0.5}, "distill. Got -0.5"),
        ({"teacher": nn.Linear(1, 1)}, "a teacher without distill"),
    ],
)
def test_wrong_options_are_refused_by_the_constructor(options, text):
    with pytest.raises(CalibrationError, match=text):
        QuantizationAwareTraining("INT8_STATIC", **options)


def test_padding_reaches_no_observer():
    x = torch.randn(4, 3, 8)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0]])
    x[mask == 0] = 1e6
    rows = [{"x": a, "attention_mask": m} for a, m in zip(x, mask, strict=True)]

    class Padded(Regression):
        def training_step(self, batch, batch_idx):
            return self(batch["x"]).square().mean()

    module = Padded()
    callback = QuantizationAwareTraining("INT8_STATIC", token_mask="attention_mask", calibration_batches=2)
    data = DataLoader(rows, batch_size=2)
    trainer(callback, max_epochs=1, limit_val_batches=0).fit(module, data, data)
    assert callback.result.input_ranges["net.0"] == (x[mask.bool()].min().item(), x[mask.bool()].max().item())


def test_a_weight_observer_that_wants_inputs_gets_them_before_weights_are_quantized():
    module, watch = Regression(), Watch()
    callback = QuantizationAwareTraining(W4, observers={"weight": "imatrix_mse"}, calibration_batches=2)
    trainer(callback, watch).fit(module, loader(), loader(seed=2))
    assert ["weight_scale" in s for s in watch.starts] == [False] * 2 + [True] * 6
    with quantized(module):
        assert torch.equal(outputs(module), torch.cat(module.validated))


def test_a_model_is_not_exported_before_its_activations_were_calibrated(tmp_path):
    callback = QuantizationAwareTraining("INT8_STATIC", calibration_batches=100)
    trainer(callback, max_epochs=1, limit_val_batches=0).fit(Regression(), loader(), loader())
    with pytest.raises(CalibrationError, match="activations were not calibrated yet"):
        callback.export(tmp_path / "out")


# ---------------------------------------------------------------------- learned scales and distillation


@pytest.mark.parametrize("scheme", ["INT8_STATIC", "FP8", W4])
def test_learned_scales_are_trained_and_stay_positive(scheme):
    module, watch = Regression(), Watch()
    callback = QuantizationAwareTraining(scheme, learn_scales=True, calibration_batches=1)
    trainer(callback, watch, max_epochs=3).fit(module, loader(), loader())
    first, last = watch.scales[1], read_qparams(module.net[0])
    assert first.keys() == last.keys()
    assert all((last[name] > 0).all() and not torch.equal(first[name], last[name]) for name in first)


def test_learned_scales_join_the_optimizer_and_its_schedule():
    class Scheduled(Regression):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)]

    module = Scheduled()
    callback = QuantizationAwareTraining("INT8_STATIC", learn_scales=True, calibration_batches=1)
    tr = trainer(callback, gradient_clip_val=0.1, accumulate_grad_batches=2)
    tr.fit(module, loader(), loader())
    (group,) = tr.optimizers[0].param_groups
    assert len(group["params"]) == len(list(module.parameters())) + 4
    assert len(tr.optimizers[0].state) == len(group["params"])
    tr = trainer(callback)
    tr.fit(module, loader(), loader())  # once more: they join the new optimizer, once
    assert len(tr.optimizers[0].param_groups[0]["params"]) == len(list(module.parameters())) + 4


def test_a_scheme_without_a_scale_to_learn_is_refused(tiny_llama, batches):
    callback = QuantizationAwareTraining("NVFP4", ignore=["lm_head"], learn_scales=True)
    with pytest.raises(CalibrationError, match=r"no scale of this scheme can be learned.*learn_scales=False"):
        trainer(callback).fit(Language(tiny_llama(torch.bfloat16)), language_data(batches), language_data(batches))


class Classifier(Regression):
    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1].argmax(-1))
        self.losses.append(loss.item())
        return loss


@pytest.mark.parametrize("teacher", [None, "frozen"])
def test_distillation_adds_the_weighted_divergence_to_the_loss(teacher):
    module, totals = Classifier(lr=0.0), []
    frozen = Classifier() if teacher else None

    class Look(L.Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            totals.append(loss.item())

    callback = QuantizationAwareTraining(W4, distill=3.0, teacher=frozen)
    trainer(callback, Look(), max_epochs=1).fit(module, loader(), loader())
    for (x, y), total in zip(loader(), totals, strict=True):
        with torch.no_grad():
            p = ((frozen or module)(x)).double().softmax(-1)
            with quantized(module):
                out = module(x)
            q = out.double().softmax(-1)
        expected = F.cross_entropy(out, y.argmax(-1)) + 3.0 * (p * (p / q).log()).sum(-1).mean()
        assert total == pytest.approx(float(expected), rel=1e-5)
    assert not left_behind(module)


def test_the_teacher_runs_in_evaluation_mode_without_gradient_and_unobserved():
    class Dropping(Classifier):
        def build(self):
            return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2))

    seen = []
    for distill in (0.0, 1.0):
        torch.manual_seed(0)
        module = Dropping(lr=0.0)
        callback = QuantizationAwareTraining("INT8_STATIC", distill=distill, calibration_batches=4)
        trainer(callback, max_epochs=1, limit_val_batches=0).fit(module, loader(), loader())
        assert all(m.training for m in module.net.modules())
        seen.append((module.losses, callback.result.measurements, module.net[1].num_batches_tracked.item()))
    assert seen[0] == seen[1]


def test_distillation_under_accumulation_is_the_gradient_of_the_mean():
    gradients = []
    for batch_size, accumulate in ((8, 1), (4, 2)):
        torch.manual_seed(0)
        module = Classifier(lr=0.0)
        data = DataLoader(loader().dataset, batch_size=batch_size)

        class Look(L.Callback):
            def on_before_optimizer_step(self, trainer, pl_module, optimizer):
                gradients.append(pl_module.net[0].weight.grad.clone())

        callback = QuantizationAwareTraining(W4, distill=2.0)
        trainer(callback, Look(), max_steps=1, accumulate_grad_batches=accumulate).fit(module, data, data)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_training_step_that_calls_another_module_is_told_how_to_name_it():
    class Around(Classifier):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1].argmax(-1))

    with pytest.raises(CalibrationError, match=r"did not call Around.*module="):
        trainer(QuantizationAwareTraining(W4, distill=1.0)).fit(Around(), loader(), loader())
    trainer(QuantizationAwareTraining(W4, distill=1.0, module="net")).fit(Around(), loader(), loader())


def test_distillation_under_manual_optimization_is_refused():
    module = Classifier()
    module.automatic_optimization = False
    with pytest.raises(CalibrationError, match="distill needs automatic optimization"):
        trainer(QuantizationAwareTraining(W4, distill=1.0)).fit(module, loader(), loader())


def test_distillation_of_a_language_model_leaves_padding_out(tiny_llama, batches):
    rows = [{**b, "attention_mask": torch.ones_like(b["input_ids"])} for b in batches]
    for row in rows:
        row["attention_mask"][:, 10:] = 0
    totals = []

    class Look(L.Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            totals.append(loss.item())

    class Zero(Language):
        def training_step(self, batch, batch_idx):
            return 0.0 * super().training_step(batch, batch_idx)

    module = Zero(tiny_llama())
    callback = QuantizationAwareTraining("W4A16", ignore=["lm_head"], distill=1.0, token_mask="attention_mask")
    trainer(callback, Look(), max_steps=1).fit(module, language_data(rows), language_data(rows))
    model, row = tiny_llama(), rows[0]
    with torch.no_grad():
        p = model(**row).logits.double().log_softmax(-1)[:, :10]
    check = QuantizationAwareTraining("W4A16", ignore=["lm_head"])
    with check.prepare(trainer(), Language(model)):
        pass
    with torch.no_grad(), quantized(model):
        q = model(**row).logits.double().log_softmax(-1)[:, :10]
    assert totals[0] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)


# ---------------------------------------------------------------------- resume


OPTIONS = {
    "static": {"scheme": "INT8_STATIC", "calibration_batches": 3},
    "val": {"scheme": "INT8_STATIC", "calibration_batches": 2, "observe": "val"},
    "frozen": {"scheme": "INT8_STATIC", "calibration_batches": 2, "freeze_after": 1},
    "histogram": {"scheme": "INT8_STATIC", "calibration_batches": 3, "observers": {"input": "histogram"}},
    "moving": {"scheme": "INT8_STATIC", "calibration_batches": 3, "observers": {"input": "mse"}},
    "learned": {"scheme": "INT8_STATIC", "calibration_batches": 2, "learn_scales": True},
    "learned weights": {"scheme": W4, "learn_scales": True},
    "learned asymmetric": {"scheme": ASYMMETRIC, "learn_scales": True},
    "imatrix": {"scheme": W4, "calibration_batches": 2, "observers": {"weight": "imatrix_mse"}},
    "distilled": {"scheme": W4, "distill": 1.0},
}


@pytest.mark.parametrize(
    ("options", "at"),
    [
        pytest.param(options, at, id=f"{name}-{at}")
        for name, options in OPTIONS.items()
        for at in ("epoch", "middle", "before validation")
        if (name, at) != ("val", "before validation")  # Lightning leaves that validation out, and so its data
    ],
)
def test_6457_8485_a_resumed_run_has_the_losses_of_an_uninterrupted_one(options, at, tmp_path):
    """pytorch-lightning #6457 and #8485: a checkpoint of the callback could not be resumed from."""
    saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    if at == "epoch":
        saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, save_on_train_epoch_end=False)
    whole = Classifier()
    fresh = copy.deepcopy(whole)
    trainer(QuantizationAwareTraining(**options), saver, max_epochs=4).fit(whole, loader(), loader(seed=2))
    step = 6 if at == "middle" else 8
    tr = trainer(QuantizationAwareTraining(**options), max_epochs=4)
    data = FromTheMiddle(loader().dataset, batch_size=4) if at == "middle" else loader()
    tr.fit(fresh, data, loader(seed=2), ckpt_path=tmp_path / f"step={step}.ckpt")
    assert fresh.losses == whole.losses[step:]
    for (name, value), other in zip(whole.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(value, other), name
    assert torch.equal(torch.cat(whole.validated), torch.cat(fresh.validated))


class FromTheMiddle(DataLoader):
    """Starts at its third batch once, as a loader does that Lightning can restore."""

    skip = 2

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def __iter__(self):
        skip, self.skip = self.skip, 0
        return itertools.islice(super().__iter__(), skip, None)


def test_a_checkpoint_loads_strictly_without_the_callback(tmp_path):
    module = Regression()
    callback = QuantizationAwareTraining("INT8_STATIC", learn_scales=True, calibration_batches=1)
    tr = trainer(callback)
    tr.fit(module, loader(), loader())
    tr.save_checkpoint(tmp_path / "c.ckpt")
    state = torch.load(tmp_path / "c.ckpt", weights_only=True)
    assert state["state_dict"].keys() == Regression().state_dict().keys()
    loaded = Regression.load_from_checkpoint(tmp_path / "c.ckpt", strict=True)
    assert torch.equal(loaded.net[0].weight, module.net[0].weight)


def test_the_modules_state_dict_is_the_same_while_training():
    class Look(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            assert pl_module.state_dict().keys() == Regression().state_dict().keys()
            assert dict(pl_module.named_parameters()).keys() == dict(Regression().named_parameters()).keys()

    callback = QuantizationAwareTraining("INT8_STATIC", learn_scales=True, calibration_batches=1)
    trainer(callback, Look()).fit(Regression(), loader(), loader())


# ---------------------------------------------------------------------- beside the rest of Lightning


@pytest.mark.parametrize("entry", ["test", "predict", "validate"])
def test_12896_a_checkpoint_is_tested_by_a_fresh_trainer(entry, tmp_path):
    """pytorch-lightning #12896: Trainer.test(ckpt_path=...) failed beside the callback."""
    module, saver = Regression(), ModelCheckpoint(tmp_path, filename="best", monitor="val_loss")
    options = {"scheme": "INT8_STATIC", "calibration_batches": 2, "learn_scales": True}
    trainer(QuantizationAwareTraining(**options), saver, max_epochs=1).fit(module, loader(), loader(seed=2))
    fresh = Regression()
    tr = trainer(QuantizationAwareTraining(**options))
    found = getattr(tr, entry)(fresh, loader(seed=2), ckpt_path=tmp_path / "best.ckpt")
    assert torch.equal(torch.cat(found if entry == "predict" else fresh.validated), torch.cat(module.validated))
    assert not left_behind(fresh)


def test_the_best_checkpoint_tests_with_the_metric_that_it_was_saved_for(tmp_path):
    module, saver = Regression(lr=0.1), ModelCheckpoint(tmp_path, monitor="val_loss")
    tr = trainer(QuantizationAwareTraining("INT8_STATIC", calibration_batches=2), saver, max_epochs=4)
    tr.fit(module, loader(), loader(seed=2))
    (metrics,) = tr.test(module, loader(seed=2), ckpt_path="best", verbose=False)
    assert metrics["test_loss"] == saver.best_model_score.item()


def test_testing_what_was_never_calibrated_says_so():
    module = Regression()
    with pytest.warns(CalibrationWarning, match="nothing was calibrated, the model runs in full precision"):
        found = trainer(QuantizationAwareTraining("INT8_STATIC")).predict(module, loader(seed=2))
    assert torch.equal(torch.cat(found), outputs(module))


def test_15862_7926_a_forward_with_keyword_arguments_is_trained():
    """pytorch-lightning #15862 and #7926: the callback's forward took no keyword arguments."""

    class Keywords(Regression):
        def build(self):
            return nn.ModuleDict({"a": nn.Linear(8, 16), "b": nn.Conv1d(1, 1, 3, padding=1), "c": nn.Linear(16, 2)})

        def forward(self, *, x, gain=1.0):
            hidden = self.net["b"](input=self.net["a"](input=x).unsqueeze(1)).squeeze(1)
            return self.net["c"](input=hidden.relu() * gain)

        def training_step(self, batch, batch_idx):
            return F.mse_loss(self(x=batch[0], gain=2.0), batch[1])

        def validation_step(self, batch, batch_idx):
            self(x=batch[0])

    module = Keywords()
    before = copy.deepcopy(module)
    scheme = {
        "targets": ["Linear", "Conv1d"],
        "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "strategy": "tensor"},
    }
    trainer(QuantizationAwareTraining(scheme, calibration_batches=1)).fit(module, loader(), loader())
    assert not any(torch.equal(p, q) for p, q in zip(module.parameters(), before.parameters(), strict=True))


@pytest.mark.parametrize("order", ["before", "after"])
def test_11047_pruning_beside_it_trains_masked_quantized_weights(order, tmp_path):
    """pytorch-lightning #11047: the callback and ModelPruning could not run in one Trainer."""
    module = Regression()
    pruning = ModelPruning("l1_unstructured", parameters_to_prune=[(module.net[0], "weight")], amount=0.5)
    callback = QuantizationAwareTraining("INT8_STATIC", calibration_batches=2)
    callbacks = [callback, pruning] if order == "before" else [pruning, callback]
    saver = ModelCheckpoint(tmp_path, filename="last")
    trainer(*callbacks, saver, max_epochs=3).fit(module, loader(), loader(seed=2))
    assert not prune.is_pruned(module)
    assert (module.net[0].weight == 0).float().mean() >= 0.5
    trainer(callback).validate(module, loader(seed=2), verbose=False)
    callback.export(tmp_path / "out")
    reloaded = load_checkpoint(Regression(), tmp_path / "out")
    assert torch.equal(outputs(reloaded), torch.cat(module.validated))
    assert torch.equal(reloaded.net[0].weight == 0, module.net[0].weight.abs() < module.net[0].weight_scale / 2)
    Regression.load_from_checkpoint(tmp_path / "last.ckpt", strict=True)


@pytest.mark.parametrize("order", ["before", "after"])
def test_averaged_weights_are_validated_and_exported_with_their_own_ranges(order, tmp_path):
    module = Regression(lr=0.1)
    callback = QuantizationAwareTraining("INT8_STATIC", calibration_batches=2)
    callbacks = [callback, WeightAveraging()] if order == "before" else [WeightAveraging(), callback]
    trainer(*callbacks, max_epochs=2).fit(module, loader(), loader(seed=2))
    absmax = module.net[0].weight.detach().abs().amax(1, keepdim=True)
    torch.testing.assert_close(module.net[0].weight_scale, absmax / 127.5)
    callback.export(tmp_path / "out")
    assert torch.equal(outputs(load_checkpoint(Regression(), tmp_path / "out")), torch.cat(module.validated))


def test_after_a_validation_of_averaged_weights_training_has_the_ranges_of_its_own():
    module, watch = Regression(lr=0.1), Watch()

    class Look(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 0:
                weight = pl_module.net[0].weight.detach()
                torch.testing.assert_close(pl_module.net[0].weight_scale, weight.abs().amax(1, keepdim=True) / 127.5)

    trainer(QuantizationAwareTraining(W8), Look(), watch, WeightAveraging(), max_epochs=3).fit(
        module, loader(), loader(seed=2)
    )


def test_early_stopping_ends_it_with_nothing_left_behind(tmp_path):
    module, callback = Regression(lr=0.0), QuantizationAwareTraining("INT8_STATIC", calibration_batches=1)
    tr = trainer(callback, EarlyStopping("val_loss", patience=1), max_epochs=9)
    tr.fit(module, loader(), loader(seed=2))
    assert tr.current_epoch < 9
    assert not left_behind(module)
    callback.export(tmp_path / "out")


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("learn_scales", [False, True])
def test_the_learning_rate_finder_leaves_ranges_and_scales_as_they_were(order, learn_scales, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module, watch = Regression(), Watch()
    callback = QuantizationAwareTraining("INT8_STATIC", learn_scales=learn_scales, calibration_batches=2)
    finder = LearningRateFinder(num_training_steps=8, update_attr=False)
    callbacks = [callback, finder] if order == "before" else [finder, callback]
    data = DataLoader(loader(count=64).dataset, batch_size=4)
    trainer(*callbacks, watch, enable_checkpointing=True).fit(module, data, loader(seed=2))
    assert finder.optimal_lr is not None
    with torch.no_grad():
        first = Regression()
        first.load_state_dict(module.state_dict())
    assert ["input_scale" in s for s in watch.starts[:3]] == [False, False, True]
    assert not left_behind(module)


def test_gradient_accumulation_is_the_gradient_of_the_mean():
    gradients = []
    for batch_size, accumulate in ((8, 1), (4, 2)):
        torch.manual_seed(0)
        module = Regression(lr=0.0)
        data = DataLoader(loader().dataset, batch_size=batch_size)

        class Look(L.Callback):
            def on_before_optimizer_step(self, trainer, pl_module, optimizer):
                gradients.append(pl_module.net[0].weight.grad.clone())

        trainer(QuantizationAwareTraining(W4), Look(), max_steps=1, accumulate_grad_batches=accumulate).fit(
            module, data, data
        )
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(reentrant):
    class Checkpointed(Regression):
        def forward(self, x):
            if not self.training:
                return super().forward(x)
            return checkpoint(self.net, x.requires_grad_(), use_reentrant=reentrant)

    runs = []
    for kind in (Regression, Checkpointed):
        torch.manual_seed(0)
        module = kind()
        callback = QuantizationAwareTraining(
            "INT8_STATIC", calibration_batches=2, observers={"input": "minmax"}, learn_scales=True
        )
        trainer(callback).fit(module, loader(), loader(seed=2))
        runs.append((module.losses, read_qparams(module.net[2])))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())


def test_transformers_own_gradient_checkpointing_changes_nothing(tiny_llama, batches):
    losses = []
    for checkpointing in (False, True):
        model = tiny_llama()
        if checkpointing:
            model.activation_checkpointing_enable()

        class Look(L.Callback):
            def on_before_backward(self, trainer, pl_module, loss):
                losses.append(loss.item())

        callback = QuantizationAwareTraining("INT8_STATIC", ignore=["lm_head"], calibration_batches=1)
        trainer(callback, Look()).fit(Language(model), language_data(batches), language_data(batches))
    assert losses[:6] == losses[6:]


def quiet(test):
    """What torch.compile says once about compressed-tensors and about any autograd function."""
    test = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")(test)
    return pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")(test)


@quiet
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("scheme", ["INT8_STATIC", W4])
def test_a_compiled_model_trains_as_an_eager_one(called_before, scheme, tmp_path):
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = Regression()
        if compiled:
            module.net = torch.compile(module.net, backend="eager")
            if called_before:
                module(torch.randn(4, 8)).sum().backward()
                module.zero_grad()
        callback = QuantizationAwareTraining(scheme, calibration_batches=2, module="net")
        trainer(callback).fit(module, loader(), loader(seed=2))
        callback.export(tmp_path / str(compiled))
        runs.append((module.losses, torch.cat(module.validated)))
        with torch.no_grad():  # afterwards it is the float model again
            assert torch.equal(module(loader().dataset[:4][0]), Regression.forward(module, loader().dataset[:4][0]))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])


@quiet
def test_a_module_compiled_in_place_is_quantized():
    class Net(nn.Module):  # torch does not compile a Sequential in place
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 2)

        def forward(self, x):
            return self.b(self.a(x).relu())

    class Compiled(Regression):
        def build(self):
            return Net()

    module, plain = Compiled(), Compiled()
    plain.load_state_dict(module.state_dict())
    module.net.compile(backend="eager")
    module(torch.randn(4, 8)).sum().backward()
    module.zero_grad()
    for one in (module, plain):
        trainer(QuantizationAwareTraining(W4)).fit(one, loader(), loader(seed=2))
    assert module.losses == plain.losses


def test_bf16_mixed_trains_float32_weights():
    module = Regression()
    callback = QuantizationAwareTraining("INT8_STATIC", learn_scales=True, calibration_batches=1)
    trainer(callback, precision="bf16-mixed", max_epochs=20).fit(module, loader(), loader(seed=2))
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert sum(module.losses[-4:]) < sum(module.losses[:4]) / 2


def test_fp16_with_a_loss_scale_trains_float32_weights():
    module = Regression()
    callback = QuantizationAwareTraining("INT8_STATIC", learn_scales=True, calibration_batches=1)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    trainer(callback, plugins=[plugin], max_epochs=20).fit(module, loader(), loader(seed=2))
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert sum(module.losses[-4:]) < sum(module.losses[:4]) / 2


def test_asked_for_fp16_on_a_cpu_lightning_takes_bf16_and_says_so():
    module = Regression()
    callback = QuantizationAwareTraining("INT8_STATIC", calibration_batches=1)
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU. Using `precision='bf16-mixed'`"):
        with_trainer = trainer(callback, precision="16-mixed")
    with_trainer.fit(module, loader(), loader(seed=2))
    assert with_trainer.precision == "bf16-mixed"
    assert len(module.losses) == 8


def norm(parameters):
    return torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm().item()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_are_clipped_to_the_norm_over_weights_and_learned_scales(precision):
    before, after, scales = [], [], []

    class Look(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            before.append(norm(optimizer.param_groups[0]["params"]))

        def on_train_batch_end(self, trainer, pl_module, *_):
            (group,) = trainer.optimizers[0].param_groups
            after.append(norm(group["params"]))
            scales.append(norm(group["params"][-4:]))

    callback = QuantizationAwareTraining("INT8_STATIC", learn_scales=True, calibration_batches=1)
    trainer(callback, Look(), precision=precision, gradient_clip_val=1e-2).fit(Regression(), loader(), loader(seed=2))
    assert min(before) > 2e-2
    assert after == pytest.approx([1e-2] * 8, rel=1e-3)
    assert min(scales) > 0


def test_gradients_are_clipped_by_value_learned_scales_too():
    largest = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            (group,) = trainer.optimizers[0].param_groups
            largest.append(max(p.grad.abs().max().item() for p in group["params"][-2:]))

    callback = QuantizationAwareTraining(W4, learn_scales=True)
    options = {"gradient_clip_val": 1e-5, "gradient_clip_algorithm": "value"}
    trainer(callback, Look(), **options).fit(Regression(), loader(), loader(seed=2))
    assert largest == pytest.approx([1e-5] * 8)


@pytest.mark.parametrize("where", ["training_step", "validation_step"])
def test_an_exception_leaves_the_float_model(where):
    module = Regression()

    def fail(batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError("stop")
        return module(batch[0]).mean()

    setattr(module, where, fail)
    with pytest.raises(RuntimeError, match="stop"):
        trainer(QuantizationAwareTraining("INT8_STATIC", distill=1.0)).fit(module, loader(), loader())
    assert getattr(module, where) is fail
    delattr(module, where)
    assert not left_behind(module)
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_two_validations_an_epoch_each_refresh_the_weights():
    watch = Watch()
    trainer(QuantizationAwareTraining(W8), watch, max_epochs=1, val_check_interval=0.5).fit(
        Regression(), loader(), loader()
    )
    assert [float(s["weight_scale"].sum()) == float(watch.starts[0]["weight_scale"].sum()) for s in watch.starts] == [
        True,
        True,
        False,
        False,
    ]


def test_frozen_weights_stay_and_others_are_trained():
    module = Regression()
    module.net[0].requires_grad_(False)
    before = copy.deepcopy(module)
    trainer(QuantizationAwareTraining("INT8_STATIC", calibration_batches=1)).fit(module, loader(), loader())
    assert torch.equal(module.net[0].weight, before.net[0].weight)
    assert not torch.equal(module.net[2].weight, before.net[2].weight)


def test_manual_optimization_works():
    class Manual(Regression):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    module = Manual()
    trainer(QuantizationAwareTraining("INT8_STATIC", learn_scales=True, calibration_batches=1)).fit(
        module, loader(), loader()
    )
    assert module.losses[-1] < module.losses[0]


# ---------------------------------------------------------------------- one callback, several runs


def test_an_observation_that_the_end_of_fit_interrupts_goes_on_in_the_next_fit(tmp_path):
    whole, parts = Regression(), Regression()
    parts.load_state_dict(whole.state_dict())
    trainer(QuantizationAwareTraining("INT8_STATIC", calibration_batches=3), max_steps=4, limit_val_batches=0).fit(
        whole, loader(), loader()
    )
    callback = QuantizationAwareTraining("INT8_STATIC", calibration_batches=3)
    first = trainer(callback, max_steps=2, limit_val_batches=0)
    first.fit(parts, loader(), loader())
    assert not left_behind(parts)
    first.save_checkpoint(tmp_path / "c.ckpt")
    wild = DataLoader(TensorDataset(torch.full((4, 8), 1e3), torch.zeros(4, 2)))
    trainer(callback).test(parts, wild, verbose=False)
    assert callback.session.observers["net.0", "input"].max_vals < 10  # observed by nobody
    for next_one in (callback, QuantizationAwareTraining("INT8_STATIC", calibration_batches=3)):
        resumed = Regression()
        data = FromTheMiddle(loader().dataset, batch_size=4)
        trainer(next_one, max_steps=4, limit_val_batches=0).fit(resumed, data, loader(), ckpt_path=tmp_path / "c.ckpt")
        assert parts.losses + resumed.losses == whole.losses
        assert torch.equal(resumed.net[2].input_scale, whole.net[2].input_scale)


@pytest.mark.parametrize("learn_scales", [False, True])
def test_a_callback_can_train_one_model_after_another(learn_scales, tmp_path):
    def make():
        return QuantizationAwareTraining("INT8_STATIC", calibration_batches=2, learn_scales=learn_scales)

    again = make()
    trainer(again).fit(Regression(), loader(seed=5), loader(seed=6))
    for_two = Regression()
    for_one = copy.deepcopy(for_two)
    trainer(again).fit(for_two, loader(), loader(seed=2))
    trainer(make()).fit(for_one, loader(), loader(seed=2))
    assert for_two.losses == for_one.losses
    assert torch.equal(torch.cat(for_two.validated), torch.cat(for_one.validated))


def test_a_callback_can_go_on_with_its_model():
    module, callback = Regression(), QuantizationAwareTraining("INT8_STATIC", calibration_batches=2)
    watch = Watch()
    trainer(callback).fit(module, loader(), loader(seed=2))
    trainer(callback, watch).fit(module, loader(), loader(seed=2))
    assert all("input_scale" in read for read in watch.starts)
    assert not left_behind(module)
    assert torch.equal(outputs(module), Regression.forward(module, torch.cat([x for x, _ in loader(seed=2)])).detach())


def test_an_observer_whose_statistics_no_checkpoint_can_hold_is_named(own_registry, tmp_path):
    from lightning_obs import Observer

    @Observer.register("odd")
    class Odd(Observer):
        def update_statistics_from_observed(self, observed):
            self.min_vals, self.max_vals = observed.amin((0, -1)), observed.amax((0, -1))
            self.seen = object()

    callback = QuantizationAwareTraining("INT8_STATIC", observers={"input": "odd"}, calibration_batches=100)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    with pytest.raises(CalibrationError, match=r"Odd keeps statistics that cannot be saved.*net\.0 \(input\): seen"):
        trainer(callback, saver).fit(Regression(), loader(), loader())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_validate_and_test_under_inference_mode_leave_nothing_that_training_cannot_use(options):
    module, callback = Classifier(), QuantizationAwareTraining(**options)
    for _ in range(2):
        trainer(callback).validate(module, loader(), verbose=False)
        trainer(callback).test(module, loader(), verbose=False)
        trainer(callback, max_epochs=1).fit(module, loader(), loader(seed=2))
    values = [v for m in module.modules() for v in vars(m).values() if isinstance(v, torch.Tensor)]
    assert not any(value.is_inference() for value in values)
