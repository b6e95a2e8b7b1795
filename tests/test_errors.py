"""A warning points at the user's line, which here is a line of this file, however deep in the package it arises."""

import runpy
import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_obs import CalibrationCallback, CalibrationSession, CalibrationWarning


class Branches(nn.Module):
    """One of two layers is never called."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Branches()

    def validation_step(self, batch, batch_idx):
        self.net(batch)


def run_session(scheme, **options):
    model = Branches()
    with CalibrationSession(model, scheme, **options):
        model(torch.ones(2, 4))


def run_trainer(scheme, **options):
    trainer = Trainer(
        accelerator="cpu", callbacks=[CalibrationCallback(scheme, **options)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.validate(Module(), DataLoader(torch.ones(2, 4), batch_size=2), verbose=False)


CASES = {
    "left in full precision": ("INT8_STATIC", {"on_missing": "warn"}),
    "ignore matches no module": ("FP8_DYNAMIC", {"ignore": ["lm_head"]}),
    "needs no data": ("FP8_DYNAMIC", {}),
}


@pytest.mark.parametrize("message", CASES)
@pytest.mark.parametrize("run", [run_session, run_trainer])
def test_a_warning_points_at_the_users_line(run, message):
    scheme, options = CASES[message]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CalibrationWarning)
        run(scheme, **options)
    given = [w for w in caught if message in str(w.message)]
    assert {w.filename for w in given} == {__file__}
    assert all(w.lineno > run.__code__.co_firstlineno for w in given)


def test_a_script_of_the_users_is_named(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "from torch import nn\n"
        "from lightning_obs import CalibrationSession\n"
        "CalibrationSession(nn.Sequential(nn.Linear(16, 4)), 'FP8_DYNAMIC', ignore=['absent'])\n"
    )
    with pytest.warns(CalibrationWarning, match="ignore matches no module") as said:
        runpy.run_path(str(script), run_name="__main__")
    assert [(warning.filename, warning.lineno) for warning in said] == [(str(script), 3)]
