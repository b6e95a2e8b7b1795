"""Every command in the README and in the guides "The command line" and "Where will it run?" runs, on a tiny model.

What a command loads back or measures of the file that it wrote is tested where that is the subject: in
tests/app/test_main.py and test_file_export.py. The README's first command does all that a user's does.
"""

import re
import shlex
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.app.test_cli import ON_RANKS
from tests.support.gguf_base import write_base
from tests.support.in_process import run_command_line
from tests.support.markdown import ROOT, commands, page
from tests.support.tiny_model import save_tiny_llama

README = page("README.md")
DOCS = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = commands(README)
PAGES = (page("docs/guide/command_line.md"), page("docs/guide/where_it_runs.md"))
APPLICATION = [c for c in (*COMMANDS, *(c for text in PAGES for c in commands(text))) if not c.startswith("make")]
APPLICATION.remove(ON_RANKS)  # tests/app/test_cli.py runs it
#: without those that differ from another one in the order of their words, or in the name of the file
DISTINCT = {
    frozenset(word for word in shlex.split(command) if not word.startswith("export.file=")): command
    for command in reversed(APPLICATION)
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_llama(
        tmp_path_factory.mktemp("tiny"), layers=1
    )  # torch takes seconds to trace each layer for ONNX


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"paragraph {i} " * 30 for i in range(8)))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("command", [*reversed(DISTINCT.values())])
def test_the_command_runs(command, tiny, text, tmp_path):
    command = command.replace("<folder or hub name>", str(tiny)).replace("<text, jsonl or dataset folder>", str(text))
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "lightning_obs"]
    own = [word for word in words[3:] if not word.startswith("--")]
    flags = [word for word in words[3:] if word.startswith("--")]
    if "export.base=model-f16.gguf" in own:  # of the same model; scales of GGUF are in float16
        model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
        write_base(model, tmp_path / "model-f16.gguf", torch.float16)
    new_process = not own
    small = ["trainer.enable_progress_bar=false", "data.tokens=16", "data.eval_batches=1"]
    small += [] if "data.batches" in command else ["data.batches=1"]
    small += [] if "model.path" in command else [f"model.path={tiny}"]
    small += ["export.measure=false"] if "export=onnx" in own else []
    if new_process:
        line = [sys.executable, "-W", "ignore", "-m", "lightning_obs", *flags, *own, *small]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    else:
        done = run_command_line(*flags, *own, *small, *([] if flags else ["export.verify=false"]), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    if new_process and not flags:
        assert "lightning_obs not imported): largest difference of logits 0.0" in done.stdout


def test_every_make_target_that_is_named_is_there():
    named = {c.split()[1] for c in COMMANDS if c.startswith("make")}
    named |= set(re.findall(r"`make (\w+)`", README + "".join(path.read_text() for path in DOCS)))
    assert {"demo", "test", "parity"} <= named
    assert named <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_ci_runs_the_readmes_test_command():
    assert "make test" in COMMANDS
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("make test")


def test_every_link_to_a_file_leads_somewhere():
    for path in [ROOT / "README.md", *DOCS]:
        for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name}: {link}"


def test_no_placeholder_is_left():
    assert "<!--" not in README


def test_what_a_command_printed_stands_behind_it():
    """A paragraph that names a benchmark and ends in a colon is followed by what it printed."""
    command = r"`(?:python benchmarks/\w+/\w+[.]py[^`]*|make (?:parity|demo|engines))`[^`]*?:\n\s*(.)"
    promised = [first for page in (README, *(path.read_text() for path in DOCS)) for first in re.findall(command, page)]
    assert len(promised) > 9
    assert set(promised) <= {"|", "`"}


def test_each_number_of_the_readme_stands_beside_its_command_and_its_page():
    numbers = README.partition("## Numbers")[2].partition("\n## ")[0]
    rows = [row.split("|") for row in numbers.splitlines() if row.startswith("|")][2:]
    assert 0 < len(rows) <= 5
    for _, what, measured, command, _ in rows:
        assert re.search(r"\d", measured)
        (page_of_evidence,) = re.findall(r"\]\((docs/evidence/\w+[.]md)\)", what)
        named = re.search(r"`(?:python (benchmarks/\S+)[^`]*|make \w+)`", command)
        assert (named[1] or named[0].strip("`")).removesuffix(" ") in page(page_of_evidence)
