"""Lightning under the name that ``pytest --lightning=...`` has chosen: ``lightning`` or ``pytorch_lightning``.

The two packages hold the same classes twice. Tests of the callbacks import Lightning from this module only, so that
each of them runs under both names. The name is in the environment, which ranks and scripts that a test starts inherit.
"""

import operator
import os
import re
from functools import cache
from importlib import import_module

import pytest
from lightning_utilities.core.imports import compare_version

ENVIRONMENT = "LIGHTNING_OBS_TESTS_LIGHTNING"
NAMES = ("lightning", "pytorch_lightning")

#: the package with Trainer and LightningModule, as users import it
NAME = os.environ.get(ENVIRONMENT, NAMES[0])
#: the package with its folders
PYTORCH = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}[NAME]
FABRIC = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}[NAME]
#: the logger of its messages
MESSAGES = f"{PYTORCH}.utilities.rank_zero"

L = import_module(NAME)
callbacks = import_module(f"{PYTORCH}.callbacks")
loggers = import_module(f"{PYTORCH}.loggers")
strategies = import_module(f"{PYTORCH}.strategies")

Callback = L.Callback
EarlyStopping = callbacks.EarlyStopping
LearningRateFinder = callbacks.LearningRateFinder
ModelCheckpoint = callbacks.ModelCheckpoint
ModelPruning = callbacks.ModelPruning
#: None in Lightning 2.4 and 2.5; see needs_weight_averaging
WeightAveraging = getattr(callbacks, "WeightAveraging", None)

CSVLogger = loggers.CSVLogger
TensorBoardLogger = loggers.TensorBoardLogger

FSDPStrategy = strategies.FSDPStrategy
ModelParallelStrategy = strategies.ModelParallelStrategy

CombinedLoader = import_module(f"{PYTORCH}.utilities.combined_loader").CombinedLoader
LightningEnvironment = import_module(f"{FABRIC}.plugins.environments").LightningEnvironment
MixedPrecision = import_module(f"{PYTORCH}.plugins").MixedPrecision

#: Lightning 2.4 counts the batch after which a checkpoint was saved as not trained: a run that resumes in the middle of
#: an epoch leaves out the validation at its end, or repeats a batch, with or without this package's callbacks.
#: Lightning 2.5.0 mended it (its pull request 20379).
needs_exact_resumption = pytest.mark.skipif(
    compare_version(NAME, operator.lt, "2.5.0"),
    reason="Lightning 2.4 leaves out a validation after it resumes in an epoch",
)
needs_weight_averaging = pytest.mark.skipif(WeightAveraging is None, reason="WeightAveraging is of Lightning 2.6")


def under_the_chosen_name(code):
    """The code of a user, which imports ``lightning``, as a user of the chosen name writes it."""
    code = code.replace("import lightning as L", f"import {NAME} as L")
    code = code.replace("from lightning.pytorch", f"from {PYTORCH}")
    code = code.replace("from lightning.fabric", f"from {FABRIC}")
    roots = set(re.findall(r"^\s*(?:import|from) (lightning|pytorch_lightning|lightning_fabric)\b", code, re.MULTILINE))
    assert roots <= {NAME, FABRIC.partition(".")[0]}, f"the code imports {roots}"
    return code


# A Trainer reads the metadata of every installed package, which takes longer than the rest of its constructor.
registry = import_module(f"{FABRIC}.utilities.registry")
registry.entry_points = cache(registry.entry_points)
