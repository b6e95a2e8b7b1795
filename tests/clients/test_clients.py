"""The clients are run by ``make clients``; here they are short, and the table has a place for each."""

import ast
import json
import sys

import pytest
import torch

from tests.clients import run
from tests.clients.row import COLUMNS, MARK, Row, _difference

CLIENTS = run.clients()
#: the packages that issue and docs promise
PACKAGES = [
    "chemprop", "darts", "diffusers", "hydra_template", "lightly", "litgpt", "neuralforecast", "pytorch_forecasting",
    "pytorch_tabular", "scvi", "segmentation_models", "timm",
]  # fmt: skip


def test_every_package_has_a_client():
    assert [name.removesuffix("_client") for name in CLIENTS] == PACKAGES


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_is_short_and_takes_every_step(client):
    text = (run.FOLDER / f"{client}.py").read_text()
    assert len(text.splitlines()) <= 60
    called = {
        node.func.attr for node in ast.walk(ast.parse(text)) if isinstance(getattr(node, "func", None), ast.Attribute)
    }
    assert {"fit", "export", "reload", "qat"} <= called
    assert "resume" in called or "refused" in called


def test_a_row_fails_where_the_loaded_model_differs():
    row = Row("a client")
    row.reload([torch.ones(2)], [torch.ones(2)], [torch.zeros(2)])
    with pytest.raises(AssertionError, match="differs by 1"):
        row.reload(torch.ones(2), torch.zeros(2))
    with pytest.raises(AssertionError, match="the outputs of the original"):
        row.reload(torch.ones(2), torch.ones(2), torch.ones(2))
    assert _difference({"a": torch.ones(2), "b": [torch.zeros(1)]}, {"b": [torch.ones(1)], "a": torch.ones(2)}) == 1


def test_a_client_that_fails_or_never_ends_fails_the_table(tmp_path, monkeypatch, capsys):
    first = MARK + json.dumps(["name", "fit", "4 steps"])
    for program in (
        f"print({first!r}); raise SystemExit(3)",
        f"print({first!r}, flush=True); import time; time.sleep(60)",
    ):
        monkeypatch.setattr(run, "LAUNCH", program)
        monkeypatch.setattr(run, "LIMIT", 2)
        monkeypatch.setattr(sys, "argv", ["run", "some_client"])
        assert run.main() == 1
        assert f"| name | 4 steps | {' | '.join(['**failed**'] * (len(COLUMNS) - 1))} |" in capsys.readouterr().out


def test_a_client_that_takes_every_step_passes(monkeypatch, capsys):
    lines = [MARK + json.dumps(["name", column, "well"]) for column in COLUMNS]
    monkeypatch.setattr(run, "LAUNCH", f"print({chr(10).join(lines)!r})")
    monkeypatch.setattr(sys, "argv", ["run", "some_client"])
    assert run.main() == 0
    assert f"| name | {' | '.join(['well'] * len(COLUMNS))} |" in capsys.readouterr().out
