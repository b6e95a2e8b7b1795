"""The table of what was tested with which releases: made of what runs leave, and whole on its page."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version

import pytest

from tests.compatibility import PACKAGES, renewed, row_of
from tests.support.markdown import ROOT, page
from tests.support.rank_processes import run_apart

RESULT = {
    "run": "fast", "Python": "3.12.1", "imports": "pytorch_lightning", "tests": [], "date": "2026-11-27",
    "torch": "2.13.0", "lightning": "2.6.6", "pytorch-lightning": "2.6.5", "transformers": "5.23.0",
    "compressed-tensors": "0.20.0", "passed": 1234, "skipped": 5, "failed": 1, "error": 2,
}  # fmt: skip
EMPTY = "before\n\n| run | Python |\n|---|---|\n\nafter\n"


def run_tests(file, result):
    """pytest's exit code."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.conftest", "-W", "ignore:Module already imported"]
    options += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "--confcutdir", str(ROOT)]
    return int(pytest.main([*options, "--result", str(result), str(file)]))


@pytest.mark.slow
def test_a_run_of_pytest_leaves_versions_and_outcomes(tmp_path):
    (tmp_path / "test_three.py").write_text(
        "import pytest\n\ndef test_a(): pass\n\ndef test_b(): pytest.skip()\n\ndef test_c(): assert False\n"
    )
    result = tmp_path / "results" / "fast.json"
    assert run_apart(run_tests, tmp_path / "test_three.py", result) == pytest.ExitCode.TESTS_FAILED
    left = json.loads(result.read_text())
    assert (left["run"], left["Python"]) == ("fast", platform.python_version())
    assert (left["passed"], left["skipped"], left["failed"], left["error"]) == (1, 1, 1, 0)
    assert left["tests"] == [str(tmp_path / "test_three.py")]
    assert {package: left[package] for package in PACKAGES} == {
        package: version(package).partition("+")[0] for package in PACKAGES
    }


def test_a_row_counts_errors_as_failures_and_marks_the_name_of_lightning():
    row = "| fast | 3.12.1 | 2.13.0 | 2.6.6 | **2.6.5** | 5.23.0 | 0.20.0 | all | 1,234 | 5 | 3 | 2026-11-27 |"
    assert row_of(RESULT) == row


def test_a_later_run_takes_the_place_of_its_row_and_others_stay():
    first = renewed(EMPTY, [RESULT, {**RESULT, "Python": "3.10.2"}, {**RESULT, "run": "oldest"}])
    second = renewed(first, [{**RESULT, "Python": "3.12.9", "passed": 7}])
    runs = [line.split("|")[1:3] for line in second.splitlines() if line.startswith("| ") and "run" not in line]
    assert [[cell.strip() for cell in cells] for cells in runs] == [
        ["fast", "3.10.2"],
        ["fast", "3.12.9"],
        ["oldest", "3.12.1"],
    ]
    assert "| 7 |" in second
    assert second.startswith("before\n\n| run |")
    assert second.endswith("|\n\nafter\n")


def test_the_page_can_be_renewed_and_its_rows_are_whole():
    text = page("docs/evidence/compatibility.md")
    assert renewed(text, []) == text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {row_of(RESULT).count("|")}


@pytest.mark.parametrize("target", ["fast", "nightly", "oldest"])
def test_a_target_of_the_nightly_matrix_leaves_a_result(target):
    rule = page("Makefile").partition(f"\n{target}: $(VENV)")[2] or page("Makefile").partition(f"\n{target}: .venv")[2]
    assert "$(call result," in rule.partition("\n\n")[0]
