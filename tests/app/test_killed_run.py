"""The command line's calibration, killed in the middle, goes on where it was."""

import shlex

import pytest

from tests.markdown import commands, page
from tests.offloaded import digests

#: a module that the command line imports: while ``armed`` exists, the fifth value that is observed is the last
MORTAL = """
from pathlib import Path
from lightning_obs import Observer
from lightning_obs.observers.histogram import HistogramObserver

seen = []

@Observer.register("mortal")
class Mortal(HistogramObserver):
    statistics = HistogramObserver.statistics

    def measure(self, observed):
        seen.append(self)
        with Path("observed").open("a") as file:
            file.write(".")
        if Path("armed").exists() and seen.count(self) == 5:
            raise MemoryError("killed")
        return super().measure(observed)
"""


@pytest.mark.slow
def test_the_command_of_the_page_goes_on_with_the_same_checkpoint(command_line, verified_here, tiny_folder, tmp_path):
    [command] = [line for line in commands(page("docs/large_models.md")) if "save_every" in line]
    command = command.replace("<folder>", str(tiny_folder)).replace("<saves>", "saves").replace("=16", "=2")
    (tmp_path / "mortal.py").write_text(MORTAL)
    words = [*shlex.split(command)[3:], "imports=[mortal]", "observer.name=mortal", "data.batches=7", "evaluate=false"]
    (tmp_path / "armed").touch()
    killed = command_line(*words, "export.folder=one")
    assert killed.returncode != 0
    assert "killed" in killed.stderr
    (tmp_path / "armed").unlink()
    (tmp_path / "observed").unlink()
    done = command_line(*words, "export.folder=one")
    assert done.returncode == 0, done.stderr
    remaining = (tmp_path / "observed").stat().st_size
    assert not (tmp_path / "saves").exists()
    (tmp_path / "observed").unlink()
    whole = command_line(*words, "export.folder=two")
    assert whole.returncode == 0, whole.stderr
    assert 0 < remaining < (tmp_path / "observed").stat().st_size
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
