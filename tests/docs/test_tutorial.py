"""The files of the guide "Start" and of those that go on with it are written, and their commands run, in order.

On less data; what the pages show is printed.
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig

import pytest

from tests.support.in_process import run_script
from tests.support.lightning_package import MESSAGES, under_the_chosen_name
from tests.support.markdown import ROOT, blocks, page

PAGE = "\n".join(page(f"docs/guide/{name}.md") for name in ("start", "further", "further_runs"))
#: (language, content) of every block, in order
BLOCKS = re.findall(r"```(python|bash|text)\n(.*?)```", PAGE, flags=re.DOTALL)
INSTALL, *RUNS = (content for language, content in BLOCKS if language == "bash")
#: what makes the tutorial's project small
LESS = {"max_epochs=6": "max_epochs=1", "max_epochs=3": "max_epochs=2", "max_epochs=5": "max_epochs=3"}
LESS |= {"count = min(len(prose), len(code)) // 64": "count = 101"}
NEW_PROCESS = {"ranks.py"}  # of Lightning's launcher


def written(code, folder):
    """The file that a block of Python is."""
    code = under_the_chosen_name(code)
    name = re.match(r"# (\w+[.]py)\n", code)[1]
    for text, less in LESS.items():
        code = code.replace(text, less)
    (folder / name).write_text(code)
    return name


def run(name, folder):
    if name in NEW_PROCESS:
        script = [sys.executable, "-W", "ignore", name]
        done = subprocess.run(script, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    else:
        done = run_script(folder / name, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def shape(text):
    """The lines without their numbers, names of layers and widths of columns, which differ on less data."""
    text = re.sub(r"transformer[.][\w.]+", "layer", text)
    text = re.sub(r"\b1 batch\b", "1 batches", text)
    lines = (re.sub(r"-?\d[\d.,]*", "0", line) for line in text.splitlines())
    return [" ".join(line.split()) for line in lines]


@pytest.mark.slow
def test_its_files_and_commands_run_in_order_and_print_what_it_shows(tmp_path, caplog):
    ran, printed = [], ""
    for language, content in BLOCKS[1:]:
        if language == "python":
            written(content, tmp_path)
        elif language == "bash":
            python, name = shlex.split(content)
            assert python == "python"
            caplog.clear()
            with caplog.at_level("INFO", logger=MESSAGES):
                printed = run(name, tmp_path)
            printed += "\n" + "\n".join(record.message for record in caplog.records)
            ran.append(name)
        else:
            missing = [line for line in shape(content) if line not in shape(printed)]
            assert not missing, f"{ran[-1]} printed\n{printed}"
    assert len(ran) == len(RUNS) == PAGE.count("```text")
    assert (tmp_path / "report" / "report.html").is_file()


def test_no_file_of_it_is_left_unrun():
    files = {re.match(r"# (\w+)[.]py\n", code)[1] for code in blocks(PAGE, "python")}
    imported = set(re.findall(r"^from (\w+) import", "\n".join(blocks(PAGE, "python")), flags=re.MULTILINE))
    assert files - {shlex.split(command)[1].removesuffix(".py") for command in RUNS} == files & imported


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="there is nothing to clone")
@pytest.mark.parametrize("commands", [INSTALL, *blocks(page("docs/guide/install.md"), "bash")])
def test_its_commands_install_the_package(commands, tmp_path):
    """All but the download: pip is asked what it would install, without dependencies."""
    site = sysconfig.get_paths()["purelib"]  # pip and the build's backend, which an empty environment would download
    asked = {"PIP_DRY_RUN": "1", "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    asked |= {"PIP_IGNORE_INSTALLED": "1", "PYTHONPATH": site}
    script = commands.replace("<this repository>", shlex.quote(str(ROOT)))
    done = subprocess.run(
        ["bash", "-e"], input=script, cwd=tmp_path, env={**os.environ, **asked}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Would install lightning-obs-" in done.stdout
    if commands == INSTALL:
        assert (tmp_path / "my_project" / ".venv" / "bin" / "python").exists()
