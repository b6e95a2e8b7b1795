"""What a release is made of: the workflows of the forge, the sdist and the wheel."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile

import pytest
import yaml

import lightning_obs
from tests.support.markdown import ROOT, page

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = page("Makefile")
TARGETS = set(re.findall(r"^([\w-]+):", MAKEFILE, flags=re.MULTILINE))


def steps_of(workflow):
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        yield from job["steps"]


def classified_pythons():
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', page("pyproject.toml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_targets_of_the_makefile_and_nothing_else(workflow):
    commands = [step["run"] for step in steps_of(workflow) if "run" in step]
    actions = [step["uses"] for step in steps_of(workflow) if "uses" in step]
    assert commands or actions
    for command in commands:
        assert re.fullmatch(r"make [\w-]+", command), command
        assert command.removeprefix("make ") in TARGETS
    for action in actions:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[\w/.]+", action), action


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_where_no_job_asks_for_more(workflow):
    read = yaml.safe_load(workflow.read_text())
    assert read["permissions"] == {"contents": "read"}
    for name, job in read["jobs"].items():
        assert set(job.get("permissions", ())) <= ({"pages", "id-token"} if name == "publish" else set())


def test_there_is_a_workflow_for_tests_docs_and_releases():
    run = {path.name: [step.get("run") for step in steps_of(path)] for path in WORKFLOWS}
    assert {"make test", "make fast", "make nightly"} <= set(run["tests.yml"])
    assert "make docs" in run["docs.yml"]
    assert "make dist" in run["release.yml"]


def test_the_pythons_of_the_matrix_are_those_that_pyproject_names():
    matrix = yaml.safe_load(page(".github/workflows/tests.yml"))["jobs"]["fast"]["strategy"]["matrix"]["python"]
    assert matrix == classified_pythons()
    assert re.search(r"^PYTHONS \?= (.*)$", MAKEFILE, flags=re.MULTILINE)[1].split() == matrix
    assert f'requires-python = ">={matrix[0]}"' in page("pyproject.toml")


def test_the_hooks_before_a_commit_are_the_commands_of_make_lint():
    (local,) = yaml.safe_load(page(".pre-commit-config.yaml"))["repos"]
    assert local["repo"] == "local"  # so that no second list of versions is kept
    assert {hook["language"] for hook in local["hooks"]} == {"system"}
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)[1]
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in lint.splitlines()]
    assert [hook["entry"] for hook in local["hooks"]] == commands


def test_the_citation_has_what_its_format_asks_for_and_the_version_of_the_package():
    citation = yaml.safe_load(page("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == lightning_obs.__version__
    assert citation["license"] in page("pyproject.toml")


@pytest.mark.parametrize("name", ["bug", "wish"])
def test_an_issue_asks_for_what_was_printed(name):
    form = yaml.safe_load(page(f".github/ISSUE_TEMPLATE/{name}.yml"))
    assert {"name", "description", "body"} <= form.keys()
    fields = [part for part in form["body"] if part["type"] == "textarea"]
    assert any("printed" in part["attributes"]["label"] + part["attributes"]["description"] for part in fields)
    assert len({part["id"] for part in fields}) == len(fields)


def test_the_changelog_says_of_each_release_what_breaks_and_what_is_deprecated():
    releases = re.split(r"^## ", page("CHANGELOG.md"), flags=re.MULTILINE)[1:]
    assert releases[0].startswith(lightning_obs.__version__)
    for release in releases:
        headings = re.findall(r"^### (.*)$", release, flags=re.MULTILINE)
        assert headings[:2] == ["Breaking", "Deprecated"]


@pytest.fixture(scope="module")
def files_of_the_checkout():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a checkout: git cannot say which files are there")
    return {path for path in listed.stdout.splitlines() if (ROOT / path).exists()}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_the_sdist_has_every_file_of_the_checkout(distributions, files_of_the_checkout):
    with tarfile.open(distributions[0]) as archive:
        paths = {name.partition("/")[2] for name in archive.getnames()}
    assert paths == files_of_the_checkout | {"PKG-INFO"}


@pytest.mark.slow
def test_the_wheel_has_the_package_and_its_configs(distributions, files_of_the_checkout):
    with zipfile.ZipFile(distributions[1]) as archive:
        paths = {name for name in archive.namelist() if name.startswith("lightning_obs/")}
    package = {path for path in files_of_the_checkout if path.startswith("lightning_obs/")}
    configs = {f"lightning_obs/{path}" for path in files_of_the_checkout if path.startswith("configs/")}
    assert paths == package | configs
