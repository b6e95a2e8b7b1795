"""The pages of docs/gallery: the lines of a client that are its own, and what it printed when it was run.

A page is written by hand, but for its blocks between two comments. ``<!-- shown: file -->`` has a file's import of
lightning_obs and the lines between ``# gallery: begin`` and ``# gallery: end``, but for calls of ``row``, and all of a
file without such lines;
``<!-- printed -->`` has the lines of the callbacks, ``<!-- rows -->`` what came of each step. A fast test compares the
first with the file, and the last with docs/evidence/clients.md.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping
from datetime import date
from importlib import metadata
from pathlib import Path
from textwrap import dedent

from tests.clients.row import COLUMNS, LAYERS, MARK

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "evidence" / "clients.md"
BEGIN, END = "# gallery: begin", "# gallery: end"
#: how the page names the columns of the table
STEPS = {
    "fit": "trained",
    "quantized metric": "metric in float -> quantized",
    "export": "exported",
    "reload": "outputs of the loaded model",
    "QAT": "trained through the quantization",
    "resume": "resumed from its checkpoint",
}
#: lines of the callbacks
OURS = re.compile(r".*: (?:calibrating|calibrated|ranges of activations) |wrote ")
#: colours and movements of a terminal
CONTROL = re.compile("\N{ESCAPE}\\[[?\\d;]*[A-Za-z]")
#: the folder of a row, which has another name in each run
FOLDER = re.compile(r"\S*/clients-\w+/")


def page(client: str) -> Path:
    """The page of a client."""
    return ROOT / "docs" / "gallery" / f"{client.removesuffix('_client')}.md"


def shown(text: str) -> str:
    """The lines of a file that its page shows."""
    if BEGIN not in text:
        return text
    pieces = re.findall(r"^from lightning_obs import .*\n", text, flags=re.MULTILINE)
    pieces += re.findall(rf"^ *{BEGIN}\n(.*?)^ *{END}\n", text, flags=re.MULTILINE | re.DOTALL)
    without_rows = [re.sub(r"^ *row[.].*\n", "", dedent(piece), flags=re.MULTILINE) for piece in pieces]
    return "\n".join(piece.strip("\n") + "\n" for piece in without_rows)


def printed(output: str) -> list[str]:
    """What the callbacks printed, up to the fit through the quantization; the table of the first model's layers."""
    lines: list[str] = []
    of_table = 0
    for line in CONTROL.sub("", output).replace("\r", "\n").splitlines():
        if line.startswith(MARK) and '"QAT"' in line:
            break
        if line.startswith("worst layers"):
            of_table = 1 + LAYERS
        if line.startswith(MARK):
            of_table = 0
        if of_table or OURS.match(line):
            lines.append(FOLDER.sub("", line.rstrip()))
            of_table = max(of_table - 1, 0)
    return list(dict.fromkeys(lines))


def steps(rows: Mapping[str, Mapping[str, str]]) -> str:
    """The rows of a client's models as a table, a column for each model."""
    names = [name.partition(" ")[2] or name for name in rows]
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for column in COLUMNS:
        entries = [re.sub(r", [\d.]+ s$", "", row[column]) for row in rows.values()]
        lines.append(f"| {STEPS[column]} | {' | '.join(entries)} |")
    return "\n".join(lines) + "\n"


def fill(text: str, kind: str, content: Callable[[str], str]) -> str:
    """A page with the blocks of one kind filled anew: ``content`` of what stands behind the kind."""
    block = rf"(<!-- {kind}:? ?(\S*?) ?-->\n).*?(<!-- end -->)"
    return re.sub(block, lambda found: f"{found[1]}{content(found[2])}{found[3]}", text, flags=re.DOTALL)


def code(path: str) -> str:
    """The block of a file of the repository."""
    language = {".py": "python", ".yaml": "yaml"}[Path(path).suffix]
    return f"```{language}\n{shown((ROOT / path).read_text())}```\n"


def write(client: str, rows: Mapping[str, Mapping[str, str]], output: str) -> None:
    """Fill the blocks of a client's page, and replace its rows in the table of all clients."""
    versions = [f"Python {platform.python_version()}"]
    for package in (next(iter(rows)).partition(" ")[0], "torch", "lightning"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue  # the template is no package
    command = f".venv-clients/bin/python -m tests.clients.run --gallery {client}"
    made = f"\nPrinted on {date.today()} by `{command}`: {', '.join(versions)}.\n"
    text = fill(page(client).read_text(), "shown", code)
    text = fill(text, "printed", lambda _: "```text\n" + "\n".join(printed(output)) + "\n```\n")
    page(client).write_text(fill(text, "rows", lambda _: steps(rows) + made))
    table = TABLE.read_text()
    for name, entries in rows.items():
        cells = [re.sub(r", [\d.]+ s$", "", entries[column]) for column in COLUMNS]
        line = f"| {' | '.join([name, *cells])} |"
        table = re.sub(rf"^\| {re.escape(name)} \|.*$", lambda _, line=line: line, table, flags=re.MULTILINE)
    TABLE.write_text(table)
