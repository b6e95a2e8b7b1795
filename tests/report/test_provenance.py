"""Every page says where it comes from."""

import json
import subprocess
from importlib.metadata import version

import pytest
from lightning.pytorch import seed_everything

from lightning_obs.report.facts import Report
from lightning_obs.report.page import write_report
from tests.report.runs import run


def made(folder, report):
    """The provenance in ``report.json``, whose every text is on the page, too."""
    page = write_report(folder, report).read_text().replace("<wbr>", "").replace("&#39;", "'")
    provenance = json.loads((folder / "report.json").read_text())["provenance"]
    assert all(text in page for text in provenance.values())
    return provenance


def test_a_page_has_date_options_data_seed_and_versions(tmp_path, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    facts = made(tmp_path, run())
    assert facts["options"] == "CalibrationOptions('INT8_STATIC', ignore=['lm_head'])"
    assert facts["data"] == "2 batches"
    assert facts["seed"] == "none was set by seed_everything"
    assert facts["date"].endswith("UTC")
    for package in ("torch", "lightning", "transformers", "compressed-tensors"):
        assert f"{package} {version(package)}" in facts["versions"]


def test_the_seed_is_that_of_seed_everything(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that it is put back
    seed_everything(7, verbose=False)
    assert made(tmp_path, run())["seed"] == "7"


def test_what_the_caller_knows_stands_beside_it_or_in_its_place(tmp_path):
    facts = made(tmp_path, Report("a", provenance={"command": "make page", "data": "the validation set of 2026"}))
    assert (facts["command"], facts["data"]) == ("make page", "the validation set of 2026")
    assert "options" not in facts


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_page_names_the_commit_of_the_folder_and_whether_files_differ_from_it(tmp_path, monkeypatch, is_changed):
    monkeypatch.chdir(tmp_path)
    name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "model.py").write_text("a = 1\n")
    for command in (["init", "-q"], ["add", "model.py"], [*name, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], check=True, timeout=60)
    if is_changed:
        (tmp_path / "model.py").write_text("a = 2\n")
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=60)
    expected = head.stdout.strip() + (" and changes that are in no commit" if is_changed else "")
    assert made(tmp_path / "page", run())["commit"] == expected


def test_outside_of_a_repository_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "commit" not in made(tmp_path, run())
