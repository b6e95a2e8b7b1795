"""The files of the guide "Start" and of those that go on with it are written, and their commands run, in order.

On less data; what the pages show is printed.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path

import pytest

from tests.support.lightning_ranks import run_script_on_ranks
from tests.support.markdown import ROOT, blocks, page
from tests.support.tutorial import Tutorial

PAGE = "\n".join(page(f"docs/guide/{name}.md") for name in ("start", "further", "further_runs"))
LESS = {"max_epochs=6": "max_epochs=1", "max_epochs=3": "max_epochs=2", "max_epochs=5": "max_epochs=3"}
LESS |= {"count = min(len(prose), len(code)) // 64": "count = 101", "n_layers=2": "n_layers=1"}
TUTORIAL = Tutorial(PAGE, LESS, {"ranks.py": partial(run_script_on_ranks, 2)})
INSTALL = TUTORIAL.contents("bash")[0]


@pytest.mark.slow
def test_its_files_and_commands_run_in_order_and_print_what_it_shows(tmp_path, caplog):
    TUTORIAL.run(tmp_path, caplog, skip=1)
    assert len(TUTORIAL.contents("bash")) - 1 == PAGE.count("```text")
    assert (tmp_path / "report" / "report.html").is_file()


def test_no_file_of_it_is_left_unrun():
    assert not TUTORIAL.files_left_unrun()


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="there is nothing to clone")
@pytest.mark.parametrize("commands", [INSTALL, *blocks(page("docs/guide/install.md"), "bash")])
def test_its_commands_install_the_package(commands, tmp_path):
    """All but the download: pip is asked what it would install, without dependencies."""
    site = sysconfig.get_paths()["purelib"]  # pip and the build's backend, which an empty environment would download
    asked = {"PIP_DRY_RUN": "1", "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    asked |= {"PIP_IGNORE_INSTALLED": "1", "PYTHONPATH": site}
    # As in an environment that is activated: a system need not have a command that is called python.
    asked["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    script = commands.replace("<this repository>", shlex.quote(str(ROOT)))
    done = subprocess.run(
        ["bash", "-e"], input=script, cwd=tmp_path, env={**os.environ, **asked}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Would install lightning-obs-" in done.stdout
    if commands == INSTALL:
        assert (tmp_path / "my_project" / ".venv" / "bin" / "python").exists()
