"""The notebooks run, on less data, and print what they show."""

import json
import re

import pytest

from tests.support.markdown import ROOT
from tests.support.notebooks import NOTEBOOKS, run_in_one_kernel
from tests.support.tiny_model import save_tiny_llama

#: what makes each small
LESS = {
    "fine_tuning": {"max_epochs=8": "max_epochs=1"},
    "images": {"max_epochs=4": "max_epochs=1", "images[:1200], labels[:1200]": "images[:256], labels[:256]"},
    "language_model": {
        "default_model_folder()": "'tiny'",
        "256": "32",
        "topics.topics.values()": "[topics.topics['types']]",
    },
    "own_project": {"max_epochs=8": "max_epochs=1"},
}
FIRST_CELLS = {path.stem: json.loads(path.read_text())["cells"][0]["source"] for path in NOTEBOOKS}
TITLES = {name: "".join(source).partition("\n")[0] for name, source in FIRST_CELLS.items()}


def _code(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _shape(cell):
    """The lines that a cell printed, without numbers and without the rows of layers, which differ on less data.

    Of a cell that generates text, whether it printed any.
    """
    if ".generate(" in "".join(cell["source"]):
        return bool(cell["outputs"])
    text = "".join("".join(output["text"]) for output in cell["outputs"])
    lines = [line for line in text.splitlines() if not re.match(r"(?:net|model)[.]\S+  ", line)]
    return [" ".join(re.sub(r"-?\d[\d.,]*", "0", line).split()) for line in lines]


def test_every_notebook_is_tested_and_in_the_menu():
    assert {path.stem for path in NOTEBOOKS} == LESS.keys()
    menu = re.findall(r'^ +- "?(.+?)"?: notebooks/(\w+)[.]md$', (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert {stem: f"# {name}" for name, stem in menu} == TITLES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_was_run_from_top_to_bottom(path):
    notebook = json.loads(path.read_text())
    cells = _code(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert {output["output_type"] for cell in cells for output in cell["outputs"]} == {"stream"}
    assert sum(len("".join(cell["source"]).split()) for cell in notebook["cells"]) < 500


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """All notebooks after their run."""
    pytest.importorskip("nbclient", reason="Jupyter's packages are not installed: make test")
    folder = tmp_path_factory.mktemp("notebooks")
    for path in NOTEBOOKS:
        (folder / path.stem).mkdir()
    save_tiny_llama(folder / "language_model" / "tiny")
    return run_in_one_kernel(NOTEBOOKS, folder, LESS)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_shows(path, made):
    shown = json.loads(path.read_text())
    assert [_shape(cell) for cell in _code(made[path.stem])] == [_shape(cell) for cell in _code(shown)]
