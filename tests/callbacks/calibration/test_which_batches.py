"""Which validations, loaders and batches CalibrationCallback observes, and what it says where there are none."""

import pytest
import torch

from lightning_obs import CalibrationCallback, CalibrationError
from lightning_obs.errors import CalibrationWarning
from tests.callbacks.calibration_modules import Plain, hooks_on, loader, trainer
from tests.support.lightning_package import L


class Several(Plain):
    """Reads several loaders."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self(batch[0])


def ranges(*loaders, count=16):
    data = torch.cat([batch[0] for each in loaders for batch in each])[:count]
    return data.min().item(), data.max().item()


def test_max_batches_are_the_first_ones():
    callback = CalibrationCallback("INT8_STATIC", max_batches=2)
    trainer(callback).validate(Plain(), loader(), verbose=False)
    assert callback.result.batches == 2
    assert callback.result.input_ranges["net.0"] == ranges(loader(), count=8) != ranges(loader())


@pytest.mark.parametrize("wanted", [[1], 1, ["val"], "val"])
def test_only_the_loaders_that_are_named_are_observed(wanted):
    callback = CalibrationCallback("INT8_STATIC", dataloaders=wanted)
    loaders = {"a": loader(1), "val": loader(2)}
    by_name = wanted in ("val", ["val"])
    trainer(callback).validate(Several(), loaders if by_name else list(loaders.values()), verbose=False)
    assert callback.result.batches == 4
    assert callback.result.input_ranges["net.0"] == ranges(loader(2))


@pytest.mark.parametrize("wanted", [[2], ["c"], []])
def test_a_loader_that_is_not_there_is_named(wanted):
    module = Several()
    with pytest.raises(CalibrationError, match=r"expected some of the 2 validation loaders: \[0, 1\]"):
        trainer(CalibrationCallback("INT8_STATIC", dataloaders=wanted)).validate(
            module, [loader(1), loader(2)], verbose=False
        )
    assert not hooks_on(module)


def test_every_n_epochs_counts_as_a_checkpoint_does():
    epochs = []

    class Look(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            if callback.result is not None and callback.result not in epochs:
                epochs.append(callback.result)
                when.append(trainer.current_epoch)

    when, callback = [], CalibrationCallback("INT8_STATIC", every_n_epochs=2)
    trainer(callback, Look(), max_epochs=4).fit(Plain(), loader(), loader())
    assert when == [1, 3]


def test_a_later_calibration_observes_again_after_the_batches_it_looked_away_from():
    module, callback = Plain(), CalibrationCallback("INT8_STATIC", max_batches=1)
    run = trainer(callback)
    for _ in range(2):
        run.validate(module, loader(), verbose=False)
        assert callback.result.batches == 1


@pytest.mark.parametrize("name", ["every_n_epochs", "max_batches"])
def test_a_number_below_one_is_refused(name):
    with pytest.raises(CalibrationError, match=rf"{name}. Got 0, expected a whole number, one or more"):
        CalibrationCallback("INT8_STATIC", **{name: 0})


# ---------------------------------------------------------------------- nothing to observe


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_a_fit_that_will_not_validate_is_told_before_it_starts():
    with pytest.warns(CalibrationWarning) as said:
        trainer(CalibrationCallback("INT8_STATIC"), max_epochs=1).fit(Plain(), loader())
    texts = [str(w.message) for w in said if w.category is CalibrationWarning]
    assert len(texts) == 1
    assert "this Trainer will not validate" in texts[0]


@pytest.mark.parametrize(
    ("entry", "options", "callback", "text"),
    [
        ("validate", {"limit_val_batches": 0}, {}, "the validation has ended and nothing was calibrated"),
        ("fit", {"check_val_every_n_epoch": 5}, {}, "the fit has ended and nothing was calibrated"),
        ("fit", {}, {"every_n_epochs": 3}, "in an epoch that 3 divides"),
    ],
)
def test_a_run_without_validation_batches_is_told(entry, options, callback, text):
    run = trainer(CalibrationCallback("INT8_STATIC", **callback), max_epochs=1, num_sanity_val_steps=0, **options)
    module, data = Plain(), {"validate": (loader(),), "fit": (loader(), loader())}[entry]
    with pytest.warns(CalibrationWarning, match=text):
        getattr(run, entry)(module, *data)
