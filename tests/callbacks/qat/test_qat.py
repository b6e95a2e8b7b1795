"""QuantizationAwareTraining in Lightning's own loops: what training, validation, checkpoint and export see."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationError, CalibrationWarning, QuantizationAwareTraining, load_checkpoint, quantized
from lightning_obs.model.module_qparams import read_qparams
from tests.callbacks.qat_modules import (
    W4,
    W8,
    Language,
    Regression,
    Watch,
    language_data,
    left_behind,
    loader,
    outputs,
    trainer,
)
from tests.support.lightning_package import L, callbacks

# ---------------------------------------------------------------------- the checkpoint has the numbers


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("scheme", "observe"),
    [
        ("INT8_STATIC", "train"),
        ("INT8_STATIC", "val"),
        ("FP8", "val"),
        ("W4A16", "train"),
        ("NVFP4", "val"),
        ("W8A8", "train"),
        *(pytest.param(scheme, "train", marks=pytest.mark.nightly) for scheme in ("FP8", "NVFP4")),
        *(pytest.param(scheme, "val", marks=pytest.mark.nightly) for scheme in ("W4A16", "W8A8")),
    ],
)
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


@pytest.mark.slow_but_first
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
    module, callback = Regression(), QuantizationAwareTraining("INT8_STATIC", train="all", calibration_batches=2)
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


def test_weights_trained_on_after_the_last_validation_are_exported_as_a_validation_would_measure_them(tmp_path):
    module, callback = Regression(), QuantizationAwareTraining("INT8_STATIC", calibration_batches=2)
    trainer(callback, max_epochs=3, check_val_every_n_epoch=2).fit(module, loader(), loader())
    callback.export(tmp_path / "out")
    trainer(callback).validate(module, loader(seed=2), verbose=False)
    assert torch.equal(outputs(load_checkpoint(Regression(), tmp_path / "out")), torch.cat(module.validated))


def test_a_model_whose_activations_were_never_calibrated_is_not_exported(tmp_path):
    callback = QuantizationAwareTraining("INT8_STATIC", start_epoch=2)  # of two: 0 and 1
    with pytest.warns(
        CalibrationWarning, match="nothing was quantized in this fit.*before start_epoch .* after 8 steps"
    ):
        trainer(callback).fit(Regression(), loader(), loader())
    with pytest.raises(CalibrationError, match="nothing was calibrated yet"):
        callback.export(tmp_path / "out")


def test_a_second_callback_for_the_same_modules_is_refused():
    callbacks = [QuantizationAwareTraining("INT8_STATIC"), QuantizationAwareTraining("W8A8", ignore=["net.0"])]
    with pytest.raises(CalibrationError, match=r"another QuantizationAwareTraining .* these modules: net\.2\. Remedy"):
        trainer(*callbacks).fit(Regression(), loader(), loader())


class Freeze(callbacks.BaseFinetuning):
    """Trains the last layer alone."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        pass


def test_callbacks_that_freeze_layers_go_with_weights_and_not_with_scales():
    callback = QuantizationAwareTraining("INT8_STATIC", train="all", calibration_batches=2)
    with pytest.raises(CalibrationError, match=r"train='all' puts scales .*: Freeze\. Remedy: train='weights'"):
        trainer(callback, Freeze()).fit(Regression(), loader(), loader())
    module = Regression()
    before = module.net[0].weight.clone()
    callback = QuantizationAwareTraining("INT8_STATIC", calibration_batches=2)
    trainer(callback, Freeze()).fit(module, loader(), loader())
    assert torch.equal(module.net[0].weight, before)
    assert callback.result.modules == ["net.0", "net.2"]


def test_callbacks_with_modules_of_their_own_train_side_by_side():
    first = QuantizationAwareTraining("INT8_STATIC", ignore=["net.2"], calibration_batches=2)
    second = QuantizationAwareTraining("W8A8", ignore=["net.0"])
    module = Regression()
    trainer(first, second).fit(module, loader(), loader())
    assert (first.result.modules, second.result.modules) == (["net.0"], ["net.2"])
    expected = torch.cat(module.validated[-4:])
    with torch.no_grad(), quantized(module):
        torch.testing.assert_close(torch.cat([module(x) for x, _ in loader()]), expected)


# ---------------------------------------------------------------------- what training sees


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


@pytest.mark.slow_but_first
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


def test_every_validation_observes_the_weights_anew_that_are_refreshed():
    module = Regression()
    trainer(QuantizationAwareTraining(W8, refresh_weights=True)).fit(module, loader(), loader())
    expected = module.net[0].weight.detach().abs().amax(1, keepdim=True) / 127.5
    torch.testing.assert_close(module.net[0].weight_scale, expected)


def test_ranges_are_refreshed_from_training_batches_after_each_validation():
    module, watch = Regression(), Watch()
    callback = QuantizationAwareTraining("INT8_STATIC", calibration_batches=2, refresh_weights=True)
    trainer(callback, watch, max_epochs=3).fit(module, loader(), loader(seed=2))
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

    callback = QuantizationAwareTraining("INT8_STATIC", freeze_after=2, calibration_batches=1, refresh_weights=True)
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


@pytest.mark.parametrize("calibration_batches", [0, 2])
def test_validate_before_fit_calibrates_and_fit_starts_with_its_ranges(calibration_batches):
    module, watch = Regression(), Watch()
    callback = QuantizationAwareTraining("INT8_STATIC", observe="none", calibration_batches=calibration_batches)
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
        ({"distill": "onyl"}, "distill. Got 'onyl', expected zero or more, or 'only'"),
        ({"teacher": nn.Linear(1, 1)}, "a teacher without distill"),
        ({"teacher": "first", "distill": 1.0}, "teacher. Got 'first', expected 'original'"),
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
