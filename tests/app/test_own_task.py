"""A task of one's own on the command line: the lines between the marks are all of it. CONTRIBUTING shows them."""

import re
from pathlib import Path

import pytest

from lightning_obs import CalibrationError
from lightning_obs.app.main import run
from tests.support.markdown import page

OWN_TASK = """\
from lightning_obs.app.console import say
from lightning_obs.app.from_config import load_module
from lightning_obs.app.tasks.task import Task
from lightning_obs.errors import CalibrationError


class CountWeights(Task):
    def check(self):
        self.module = load_module(self.config)
        if not list(self.module.parameters()):
            raise CalibrationError("the model has no weights")

    def run(self):
        self.weights = sum(parameter.numel() for parameter in self.module.parameters())
        say(f"{self.weights:,} weights")

    def row(self):
        return {"run": "count", "weights": self.weights}
"""


def test_a_task_of_the_command_line_is_a_class_of_25_lines(composed, tmp_path, monkeypatch, capsys):
    assert len(OWN_TASK.splitlines()) <= 25
    assert OWN_TASK in page("CONTRIBUTING.md")
    (tmp_path / "count_weights.py").write_text(OWN_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    row = run(composed("task._target_=count_weights.CountWeights"))
    assert row["run"] == "count"
    assert re.search(r"^[\d,]+ weights$", capsys.readouterr().out, re.MULTILINE)
    assert not Path(tmp_path, "run").exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [("nowhere.Task", "is not a class"), ("math.pi", "is not a class"), ("pathlib.Path", "is not a task.*subclass of")],
)
def test_what_is_no_task_is_named(composed, target, message):
    with pytest.raises(CalibrationError, match=f"task._target_={target} {message}"):
        run(composed(f"task._target_={target}"))
