"""Lightning has two names, and both packages hold the same classes."""

import subprocess
import sys

import pytest

from lightning_obs import CalibrationCallback
from lightning_obs.callbacks.lightning_package import class_of
from tests.callbacks.calibration_modules import OFF, Plain, loader
from tests.support.lightning_package import L, ModelCheckpoint

#: a process for each name; both have what takes long to import, and neither has a Lightning before its own
ONE_NAME = """
import os, sys
from importlib import import_module
import compressed_tensors, torch, transformers

OTHERS = {"lightning.pytorch": ["pytorch_lightning", "lightning_fabric"], "pytorch_lightning": ["lightning"]}

def foreign(others):
    return [module for module in sys.modules if module.partition(".")[0] in others]

def import_one(name):
    Trainer = import_module(name).Trainer
    from lightning_obs import CalibrationCallback
    assert not foreign(OTHERS[name]), foreign(OTHERS[name])
    run = Trainer(callbacks=CalibrationCallback("INT8_STATIC"), logger=False, enable_checkpointing=False)
    assert any(isinstance(callback, CalibrationCallback) for callback in run.callbacks)
    print(name, "alone", flush=True)

assert not foreign(["lightning", "pytorch_lightning", "lightning_fabric", "lightning_obs"])
for name in OTHERS:
    process = os.fork()
    if process == 0:
        import_one(name)
        sys.exit()
    os.waitpid(process, 0)
"""


@pytest.mark.slow
def test_the_name_that_the_program_uses_is_the_only_one_imported():
    """To import the other would redirect the messages of the first to its logger."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ONE_NAME], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.splitlines() == ["lightning.pytorch alone", "pytorch_lightning alone"], done.stderr


class Own(ModelCheckpoint):
    """A user's class."""


def test_a_class_is_known_by_its_name_in_either_package():
    assert class_of(Own(), "EarlyStopping", "ModelCheckpoint") is ModelCheckpoint
    assert class_of(Own(), "Own") is None
    assert class_of(Plain(), "LightningModule") is L.LightningModule
    foreign = type("ModelCheckpoint", (), {"__module__": "somebody.callbacks"})
    assert class_of(foreign(), "ModelCheckpoint") is None


def test_a_callback_may_be_given_outside_of_a_list():
    callback = CalibrationCallback("INT8_STATIC", show=False)
    run = L.Trainer(callbacks=callback, **OFF)
    run.validate(Plain(), loader(), verbose=False)
    assert callback.result is not None
