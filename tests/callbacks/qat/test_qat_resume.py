"""Stop and go on: checkpoints in the middle of fine-tuning, and one callback in several runs."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_obs import CalibrationError, QuantizationAwareTraining
from lightning_obs.files.sealed import sealed
from tests.callbacks.qat_modules import (
    ASYMMETRIC,
    NVFP4_SMALL,
    W4,
    Classifier,
    Regression,
    Watch,
    from_step,
    left_behind,
    loader,
    outputs,
    trainer,
)
from tests.support.lightning_package import L, ModelCheckpoint, needs_exact_resumption

# ---------------------------------------------------------------------- resume


OPTIONS = {
    "static": {"scheme": "INT8_STATIC", "calibration_batches": 3},
    "val": {"scheme": "INT8_STATIC", "calibration_batches": 2, "observe": "val"},
    "frozen": {"scheme": "INT8_STATIC", "calibration_batches": 2, "freeze_after": 1},
    "histogram": {"scheme": "INT8_STATIC", "calibration_batches": 3, "observers": {"input": "histogram"}},
    "moving": {"scheme": "INT8_STATIC", "calibration_batches": 3, "observers": {"input": "mse"}},
    "learned": {"scheme": "INT8_STATIC", "calibration_batches": 2, "train": "all"},
    "learned weights": {"scheme": W4, "train": "all"},
    "learned asymmetric": {"scheme": ASYMMETRIC, "train": "all"},
    "scales": {"scheme": NVFP4_SMALL, "train": "scales"},
    "scales of inputs": {"scheme": "INT8_STATIC", "calibration_batches": 3, "train": "scales"},
    "scales, rounded": {"scheme": NVFP4_SMALL, "calibration_batches": 3, "train": "scales", "rounding": "gptq"},
    "imatrix": {"scheme": W4, "calibration_batches": 2, "observers": {"weight": "imatrix_mse"}},
    "hessian": {
        "scheme": W4,
        "calibration_batches": 2,
        "train": "all",
        "observers": {"weight": {"name": "hessian", "signed": True}},
    },
    "distilled": {"scheme": W4, "distill": 1.0},
}


#: where a run is stopped; each option in the middle of an epoch, and some everywhere
STOPS = ("middle", "epoch", "before validation")
EVERYWHERE = {"static", "learned", "scales"}


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("options", "at"),
    [
        pytest.param(
            options,
            at,
            id=f"{name}-{at}",
            marks=[pytest.mark.nightly] * (at != STOPS[0] and name not in EVERYWHERE)
            + [needs_exact_resumption] * (at != "epoch"),
        )
        for name, options in OPTIONS.items()
        for at in STOPS
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
    trainer(QuantizationAwareTraining(**options), saver, max_epochs=3).fit(whole, loader(), loader(seed=2))
    step = 6 if at == "middle" else 8
    tr = trainer(QuantizationAwareTraining(**options), max_epochs=3)
    data = from_step(2, loader().dataset, batch_size=4) if at == "middle" else loader()
    tr.fit(fresh, data, loader(seed=2), ckpt_path=tmp_path / f"step={step}.ckpt")
    assert fresh.losses == whole.losses[step:]
    for (name, value), other in zip(whole.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(value, other), name
    assert torch.equal(torch.cat(whole.validated), torch.cat(fresh.validated))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # Lightning's, of the other scheme's state
@pytest.mark.parametrize(
    ("saved", "resumed", "got"),
    [
        (("INT8_STATIC", "all"), (W4, "all"), "scheme INT8_STATIC with train='all'"),
        (("INT8_STATIC", "all"), ("INT8_STATIC", "weights"), "scheme INT8_STATIC with train='all'"),
        (("INT8_STATIC", "weights"), ("INT8_STATIC", "all"), "scheme INT8_STATIC with train='weights'"),
        (None, ("INT8_STATIC", "all"), "a fit without QuantizationAwareTraining"),
    ],
)
def test_a_fit_that_learns_other_scales_than_its_checkpoint_says_which_those_are(saved, resumed, got, tmp_path):
    callbacks = [] if saved is None else [QuantizationAwareTraining(saved[0], train=saved[1], calibration_batches=1)]
    earlier = trainer(*callbacks)
    earlier.fit(Regression(), loader(), loader())
    earlier.save_checkpoint(tmp_path / "last.ckpt")
    module = Regression()
    other = QuantizationAwareTraining(resumed[0], train=resumed[1], calibration_batches=1)
    with pytest.raises(CalibrationError, match=rf"Got a checkpoint of {got}.*Remedy: resume with") as error:
        trainer(other, max_epochs=3).fit(module, loader(), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert "module.load_state_dict(torch.load(path)['state_dict'])" in str(error.value)
    module.load_state_dict(torch.load(tmp_path / "last.ckpt")["state_dict"])
    trainer(other).fit(module, loader(), loader())
    assert other.session.has_written


def test_an_optimizer_that_differs_for_another_reason_has_torchs_own_error(tmp_path):
    options = {"scheme": "INT8_STATIC", "train": "all", "calibration_batches": 1}
    earlier = trainer(QuantizationAwareTraining(**options))
    earlier.fit(Regression(), loader(), loader())
    earlier.save_checkpoint(tmp_path / "last.ckpt")
    module = Regression()
    module.configure_optimizers = lambda: torch.optim.SGD(module.net[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        trainer(QuantizationAwareTraining(**options), max_epochs=3).fit(
            module, loader(), loader(), ckpt_path=tmp_path / "last.ckpt"
        )


def test_a_checkpoint_loads_strictly_without_the_callback(tmp_path):
    module = Regression()
    callback = QuantizationAwareTraining("INT8_STATIC", train="all", calibration_batches=1)
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

    callback = QuantizationAwareTraining("INT8_STATIC", train="all", calibration_batches=1)
    trainer(callback, Look()).fit(Regression(), loader(), loader())


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
        data = from_step(2, loader().dataset, batch_size=4)
        trainer(next_one, max_steps=4, limit_val_batches=0).fit(resumed, data, loader(), ckpt_path=tmp_path / "c.ckpt")
        assert parts.losses + resumed.losses == whole.losses
        assert torch.equal(resumed.net[2].input_scale, whole.net[2].input_scale)


@pytest.mark.parametrize("train", ["weights", "all"])
def test_a_callback_can_train_one_model_after_another(train, tmp_path):
    def make():
        return QuantizationAwareTraining("INT8_STATIC", calibration_batches=2, train=train)

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
    plain = torch.cat([Regression.forward(module, x) for x, _ in loader(seed=2)]).detach()
    assert torch.equal(outputs(module), plain)


def test_an_observer_whose_statistics_no_checkpoint_can_hold_is_named(own_registry, tmp_path):
    from lightning_obs import Observer

    @Observer.register("odd")
    class Odd(Observer):
        def update_statistics_from_observed(self, observed):
            self.min_vals, self.max_vals = observed.amin((0, -1)), observed.amax((0, -1))
            self.seen = object()

    callback = QuantizationAwareTraining("INT8_STATIC", observers={"input": "odd"}, calibration_batches=100)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    with pytest.raises(CalibrationError, match=r"statistics that cannot be saved.*net\.0 \(input: seen\)"):
        trainer(callback, saver).fit(Regression(), loader(), loader())


@pytest.mark.slow_but_first
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_validate_and_test_under_inference_mode_leave_nothing_that_training_cannot_use(options):
    module, callback = Classifier(), QuantizationAwareTraining(**options)
    for _ in range(2):
        trainer(callback).validate(module, loader(), verbose=False)
        trainer(callback).test(module, loader(), verbose=False)
        trainer(callback, max_epochs=2).fit(module, loader(), loader(seed=2))
    values = [v for m in module.modules() for v in vars(m).values() if isinstance(v, torch.Tensor)]
    assert not any(value.is_inference() for value in values)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s["training"].update(batches=3), "the saved calibration has changed since it was saved"),
        (lambda s: s["training"].update(phase="none of them"), "training cannot be read.*ValueError"),
        (lambda s: s.update(training=[1]), "training cannot be read.*TypeError"),
        (lambda s: s["training"].update(learned={}), "training cannot be read.*KeyError"),
        (lambda s: s["training"]["learned"]["log_factors"].update({"net.0.weight": torch.zeros(1)}), "other shapes"),
        (lambda s: s["training"].update(statistics={"net.0.input": {"forward": 1}}), "no such statistic: forward"),
        (lambda s: s["qparams"].update({"net.0.weight_scale": torch.ones(1)}), "does not fit: net.0.weight_scale has"),
    ],
    ids=["other values", "phase", "no dict", "no factors", "shape", "method", "qparams"],
)
def test_a_damaged_state_is_named_and_the_model_stays_what_it_was(damage, message):
    options = {"scheme": "INT8_STATIC", "train": "all", "calibration_batches": 1}
    trained, other, module = QuantizationAwareTraining(**options), QuantizationAwareTraining(**options), Regression()
    trainer(trained).fit(Regression(), loader(), loader())
    state = copy.deepcopy(trained.state_dict())
    damage(state)
    if "since it was saved" not in message:
        state = sealed(state)
    before = set(vars(module.net[0]))

    def resume():
        other.load_state_dict(state)
        trainer(other).validate(module, loader(), verbose=False)

    with pytest.raises(CalibrationError, match=message):
        resume()
    assert set(vars(module.net[0])) == before
