"""The notebooks of ``examples/notebooks``: they run in a kernel of Jupyter, and keep what they print.

python -m tests.support.notebooks    # runs all and writes their outputs: make notebooks
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.markdown import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
#: lines of other packages, and those that are there while a loop is compiled
NOT_OURS = re.compile(
    "(?:GPU|TPU) available|\N{ELECTRIC LIGHT BULB} Tip|Seed set|`Trainer[.]|[WIE]\\d{4} "
    "|[\\w ]+:  *\\d+%|.*compiling a loop"
)
#: colours and movements of a terminal
CONTROL = re.compile("\N{ESCAPE}\\[[?\\d;]*[A-Za-z]")


def run(path: Path, folder: Path) -> Any:
    """Run a notebook in a kernel of its own; its file stays as it is.

    Args:
        path: the file.
        folder: the kernel works in it.

    Returns:
        The notebook. Each cell that printed has one output, without the lines of other packages.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    _execute(notebook, folder)
    return notebook


def run_in_one_kernel(paths: Sequence[Path], folder: Path, less: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Run notebooks one after the other, each without the names of the others, so that packages are imported once.

    Args:
        paths: the files.
        folder: has a folder for each, in which it runs.
        less: what makes each small, by its name: texts in its code, and what stands in their place.

    Returns:
        The notebooks, by name, as of :func:`run`.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    import nbformat

    notebooks = {path.stem: nbformat.read(path, as_version=4) for path in paths}
    together = nbformat.v4.new_notebook()
    for name, notebook in notebooks.items():
        for cell in notebook.cells:
            for text, in_its_place in less[name].items():
                cell.source = cell.source.replace(text, in_its_place)
        together.cells.append(nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {folder / name}"))
        together.cells.extend(notebook.cells)
    _execute(together, folder)
    return notebooks


def _execute(notebook: Any, folder: Path) -> None:
    """Run the cells of a notebook in a new kernel, and put into each what it printed."""
    import nbformat
    from nbclient import NotebookClient

    surroundings = {**os.environ, "PYTHONWARNINGS": "ignore"}
    surroundings["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    NotebookClient(notebook, resources={"metadata": {"path": str(folder)}}).execute(env=surroundings)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            lines = _lines(cell.outputs)
            cell.metadata = nbformat.NotebookNode()  # when it ran
            text = "\n".join(lines) + "\n"
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)] if lines else []


def _lines(outputs: list[Any]) -> list[str]:
    """What was printed on both channels and shown, as text."""
    texts = [output.text if output.output_type == "stream" else output.data["text/plain"] for output in outputs]
    lines = CONTROL.sub("", "\n".join(texts)).replace("\r", "\n").splitlines()
    return [line.rstrip() for line in lines if line.strip() and not NOT_OURS.match(line)]


def main() -> None:
    """Run all notebooks, or those that are named, and write their outputs into their files."""
    import nbformat

    names = sys.argv[1:]
    for path in NOTEBOOKS:
        if not names or path.stem in names:
            nbformat.write(run(path, path.parent), path)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
