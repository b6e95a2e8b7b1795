"""The table of docs/evidence/compatibility.md: what each environment has installed, and how its tests ended.

    python -m tests.compatibility .venv .venv-py3.12 .venv-oldest

`make fast`, `make pythons`, `make oldest` and the tests under Lightning's other name run pytest with ``--result FILE``
(`tests/conftest.py`), a file in the folder ``results`` of their environment. This reads the files and renews their rows
of the table; rows of runs that left no file stay.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "compatibility.md"
PACKAGES = ("torch", "lightning", "pytorch-lightning", "transformers", "compressed-tensors")
OUTCOMES = ("passed", "skipped", "failed", "error")


def write_result(path: Path, reports: Mapping[str, list[Any]], lightning: str, arguments: list[str]) -> None:
    """Write what ran, on what, and how it ended. pytest calls this when all tests have ended.

    Args:
        path: of the JSON file; its name is that of the run.
        reports: of tests, by outcome, as pytest's terminal has them.
        lightning: the name under which the tests import Lightning.
        arguments: which tests ran, as pytest was told; empty: all.
    """
    result: dict[str, Any] = {
        "run": path.stem,
        "Python": platform.python_version(),
        "imports": lightning,
        "tests": arguments,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    for package in PACKAGES:
        result[package] = version(package).partition("+")[0]
    for outcome in OUTCOMES:
        result[outcome] = len(reports.get(outcome, []))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def row_of(result: Mapping[str, Any]) -> str:
    """The row of a run; the name that the tests imported Lightning under is in bold."""
    cells = [result["run"], result["Python"], result["torch"]]
    for package in ("lightning", "pytorch-lightning"):
        is_imported = package.replace("-", "_") == result["imports"]
        cells.append(f"**{result[package]}**" if is_imported else result[package])
    cells += [result["transformers"], result["compressed-tensors"]]
    cells.append(" ".join(result["tests"]) or "all")
    cells += [f"{result['passed']:,}", f"{result['skipped']:,}", f"{result['failed'] + result['error']:,}"]
    return f"| {' | '.join([*cells, result['date']])} |"


def renewed(page: str, results: Iterable[Mapping[str, Any]]) -> str:
    """The page with the rows of these results: in the place of a row of the same run and Python, or at the end."""
    lines = page.splitlines()
    in_table = [number for number, line in enumerate(lines) if line.startswith("|")]
    title, ruler, *numbers = in_table
    rows = {}
    for number in numbers:
        rows[_key(lines[number])] = lines[number]
    for result in results:
        row = row_of(result)
        rows[_key(row)] = row
    table = [lines[title], lines[ruler], *[rows[key] for key in sorted(rows)]]
    return "\n".join([*lines[:title], *table, *lines[in_table[-1] + 1 :]]) + "\n"


def _key(row: str) -> tuple[str, tuple[int, ...]]:
    """The run and the first two numbers of its Python, by which rows are told apart and sorted."""
    _, run, python, *_ = [cell.strip() for cell in row.split("|")]
    major, minor, *_ = python.split(".")
    return run, (int(major), int(minor))


def main() -> None:
    """Renew the page by the results in the environments that the command line names."""
    results = []
    for environment in sys.argv[1:]:
        for path in sorted(Path(environment, "results").glob("*.json")):
            results.append(json.loads(path.read_text()))
    PAGE.write_text(renewed(PAGE.read_text(), results))
    print(f"wrote {len(results)} rows of {PAGE}")


if __name__ == "__main__":
    main()
