"""How many files of the package one Linear enters from a batch to its checkpoint: a reader has to open them all.

These are ceilings. Lower one where a change makes it possible; raise none.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_obs
from lightning_obs import CalibrationSession, export_checkpoint

ROOT = str(Path(lightning_obs.__file__).parent)
MOST = {"hook": 4, "hook, new tensor": 7, "finalize": 14, "export": 12, "hook, finalize, export": 21}


def files_entered(function, *args):
    found = set()

    def see(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT) and frame.f_code.co_name != "<module>":
            found.add(file.removeprefix(ROOT))

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        function(*args)
    finally:
        sys.setprofile(before)
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    x = torch.randn(4, 16)
    with CalibrationSession(nn.Linear(16, 8), "INT8_STATIC") as session:  # imports and compiles
        session.model(x)
    folder = tmp_path_factory.mktemp("path")
    export_checkpoint(session.model, folder / "first")
    model = nn.Sequential(nn.Linear(16, 8))
    session = CalibrationSession(model, "INT8_STATIC")
    session.attach()
    model(x)
    hooks = {"hook": files_entered(model, x), "hook, new tensor": files_entered(model, x + 1)}
    session.detach()
    finalize = files_entered(session.finalize)
    export = files_entered(export_checkpoint, model, folder / "second")
    return {
        **hooks,
        "finalize": finalize,
        "export": export,
        "hook, finalize, export": hooks["hook"] | finalize | export,
    }


@pytest.mark.parametrize("step", MOST)
def test_a_value_passes_few_files(path, step):
    assert len(path[step]) <= MOST[step], sorted(path[step])
