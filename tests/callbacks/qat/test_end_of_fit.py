"""The end of a fit through quantization: what was trained can be exported, whether or not a validation came last."""

import copy

import pytest
import torch

from lightning_obs import CalibrationError, QuantizationAwareTraining, load_checkpoint, quantized
from tests.callbacks.qat_modules import W4, Regression, from_step, loader, outputs, trainer
from tests.support.lightning_package import WeightAveraging, needs_weight_averaging

SCHEMES = {
    "weights": {"scheme": W4},
    "dynamic": {"scheme": "W8A8"},
    "static": {"scheme": "INT8_STATIC", "calibration_batches": 2},
    "learned": {"scheme": "INT8_STATIC", "calibration_batches": 2, "train": "all"},
    "observing again": {"scheme": "INT8_STATIC", "calibration_batches": 3},
    "distilled": {"scheme": W4, "distill": 1.0},
}


def stopped(callback, module=None, **options):
    """A module that was trained for some steps, and not validated after the last of them."""
    module = Regression() if module is None else module
    run = trainer(callback, **{"max_steps": 3, **options})
    run.fit(module, loader(), loader(seed=2))
    return module, run


@pytest.mark.slow_but_first
@pytest.mark.parametrize("options", SCHEMES.values(), ids=SCHEMES)
def test_a_fit_that_ends_inside_an_epoch_exports_what_it_trained(options, tmp_path):
    callback = QuantizationAwareTraining(**options)
    steps = 5 if options.get("calibration_batches") == 3 else 3  # the first of them observes, after a validation
    module, _ = stopped(callback, max_steps=steps)
    callback.export(tmp_path / "checkpoint")
    with quantized(module):
        trained = outputs(module)
    loaded = Regression()
    load_checkpoint(loaded, tmp_path / "checkpoint")
    assert torch.equal(outputs(loaded), trained)
    validated = copy.deepcopy(module)
    trainer(callback).validate(module, loader(seed=2), verbose=False)
    callback.export(tmp_path / "validated")
    load_checkpoint(validated, tmp_path / "validated")
    if steps == 3:  # else the validation ends an observation
        assert torch.equal(outputs(validated), trained)


def test_scales_that_were_trained_are_exported_without_a_validation(tmp_path):
    callback = QuantizationAwareTraining("INT8_STATIC", train="all", calibration_batches=1)
    module, _ = stopped(callback, Regression(lr=0.1), limit_val_batches=0)
    trained = callback.quantized_fit.training.learned.values()
    assert trained
    for name, scale in trained.items():
        path, _, key = name.rpartition(".")
        assert torch.equal(getattr(module.get_submodule(path), key), scale.reshape(-1, *scale.shape[1:]))


@pytest.mark.parametrize("options", [{}, {"observe": "val", "calibration_batches": 0}], ids=["train", "val"])
def test_a_fit_that_ends_before_it_knows_its_activations_is_refused_until_it_is_validated(options, tmp_path):
    callback = QuantizationAwareTraining("INT8_STATIC", **options)
    module, _ = stopped(callback)
    with pytest.raises(CalibrationError, match=r"activations were not calibrated yet.*trainer\.validate"):
        callback.export(tmp_path / "checkpoint")
    trainer(callback).validate(module, loader(seed=2), verbose=False)
    callback.export(tmp_path / "checkpoint")
    with quantized(module):
        trained = outputs(module)
    loaded = Regression()
    load_checkpoint(loaded, tmp_path / "checkpoint")
    assert torch.equal(outputs(loaded), trained)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("options", SCHEMES.values(), ids=SCHEMES)
def test_a_checkpoint_that_is_saved_after_fit_resumes_as_if_it_had_not_stopped(options, tmp_path):
    whole, parts = Regression(), Regression()
    parts.load_state_dict(whole.state_dict())
    stopped(QuantizationAwareTraining(**options), whole, max_steps=7, max_epochs=4)
    steps = 5 if options.get("calibration_batches") == 3 else 3
    _, run = stopped(QuantizationAwareTraining(**options), parts, max_steps=steps, max_epochs=4)
    run.save_checkpoint(tmp_path / "c.ckpt")
    resumed = Regression()
    data = from_step(steps % 4, loader().dataset, batch_size=4)
    again = trainer(QuantizationAwareTraining(**options), max_steps=7, max_epochs=4)
    again.fit(resumed, data, loader(seed=2), ckpt_path=tmp_path / "c.ckpt")
    assert parts.losses + resumed.losses == whole.losses


def test_weights_that_change_after_fit_are_refused(tmp_path):
    callback = QuantizationAwareTraining(W4)
    module, _ = stopped(callback)
    module.net[0].weight.data += 1
    with pytest.raises(CalibrationError, match=r"have changed since.*net\.0\.weight"):
        callback.export(tmp_path / "checkpoint")


@needs_weight_averaging
@pytest.mark.parametrize("order", ["averaging first", "averaging last"])
def test_averaged_weights_are_never_exported_with_the_ranges_of_others(order, tmp_path):
    module = Regression(lr=0.1)
    callback = QuantizationAwareTraining(W4)
    callbacks = [callback, WeightAveraging()]
    if order == "averaging first":
        callbacks.reverse()
    trainer(*callbacks, max_steps=3).fit(module, loader(), loader(seed=2))
    if order == "averaging last":
        with pytest.raises(CalibrationError, match=r"have changed since.*trainer\.validate"):
            callback.export(tmp_path / "refused")
        trainer(callback).validate(module, loader(seed=2), verbose=False)
    callback.export(tmp_path / "checkpoint")
    with quantized(module):
        averaged = outputs(module)
    loaded = Regression()
    load_checkpoint(loaded, tmp_path / "checkpoint")
    assert torch.equal(outputs(loaded), averaged)
