"""What pyproject.toml asks for is what the package imports, and what `make oldest` installs."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from lightning_obs import CalibrationError, packages

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "lightning_obs").rglob("*.py"))
PROJECT = (ROOT / "pyproject.toml").read_text()
#: names under which packages are imported, where they are not the packages' own; of omegaconf, which Hydra brings
PACKAGES = {"hydra": "hydra-core", "omegaconf": "hydra-core", "onnx_ir": "onnxscript", "ml_dtypes": "onnx"}
#: what is imported at the top of a file by those alone who have the extra: the file is imported where it is used
FILES_OF_EXTRAS = {
    "cli": ("lightning_obs/app/",),
    "fast": (
        "lightning_obs/numerics/kernels/jit.py",
        "lightning_obs/numerics/kernels/loops.py",
        "lightning_obs/numerics/search/arithmetic.py",
    ),
    "onnx": ("lightning_obs/onnx/graph.py",),
}
#: it comes with torch's builds for CUDA; the file is imported on a GPU only
NOT_ASKED_FOR = {"triton"}


def requirements(key: str) -> list[Requirement]:
    """The requirements of a list in pyproject.toml (tomllib came with Python 3.11)."""
    listed = re.search(rf"^{key} = \[(.*?)\]\n(?=\n|[#\w])", PROJECT, flags=re.MULTILINE | re.DOTALL)[1]
    lines = [line.partition("#")[0] for line in listed.splitlines()]
    return [Requirement(text) for text in re.findall(r'"(.*?)"', "\n".join(lines))]


def asked_for(key: str) -> set[str]:
    return {requirement.name.lower().replace("-", "_") for requirement in requirements(key)}


def imports_at_the_top(file: Path) -> set[str]:
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module).partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"lightning_obs"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_a_file_imports_at_its_top_only_what_those_who_import_it_have(file):
    path = file.relative_to(ROOT).as_posix()
    allowed = asked_for("dependencies") | NOT_ASKED_FOR
    for extra, paths in FILES_OF_EXTRAS.items():
        if path.startswith(paths):
            allowed |= asked_for(extra)
    imported = {PACKAGES.get(name, name).replace("-", "_") for name in imports_at_the_top(file)}
    assert imported <= allowed


def test_nothing_is_asked_for_that_is_not_imported():
    imported: set[str] = set()
    for file in FILES:
        imported |= set(re.findall(r"^\s*(?:from|import) (\w+)", file.read_text(), flags=re.MULTILINE))
    assert asked_for("dependencies") <= imported


@pytest.mark.parametrize(("name", "extra"), packages.EXTRAS.items())
def test_the_extra_that_an_error_names_brings_the_package(name, extra):
    assert PACKAGES.get(name, name).replace("-", "_") in asked_for(extra)
    assert {extra} <= next(iter(requirements("all"))).extras


def test_the_oldest_releases_are_the_lower_bounds():
    """Of torch alone a newer one is installed, which the file says."""
    pins = dict(re.findall(r"^([\w-]+)==(.*)$", (ROOT / "constraints-oldest.txt").read_text(), flags=re.MULTILINE))
    lists = [requirements(key) for key in ("dependencies", "cli", "fast", "mixed", "onnx", "gguf")]
    for requirement in itertools.chain(*lists):
        oldest = Version(pins[requirement.name])
        bounds = [spec.version for spec in requirement.specifier if spec.operator == ">="]
        assert oldest in requirement.specifier
        if requirement.name != "torch":
            assert oldest.release[: len(Version(bounds[0]).release)] == Version(bounds[0]).release, requirement.name


@pytest.mark.parametrize("release", ["2.6.2", "2.6.3"])
def test_the_releases_of_lightning_that_steal_credentials_are_shut_out(release):
    lightning = next(r for r in requirements("dependencies") if r.name == "lightning")
    assert Version(release) not in lightning.specifier
    assert Version("2.4.0") in lightning.specifier
    assert Version("2.6.6") in lightning.specifier


def test_a_release_that_the_running_python_does_not_have_is_said(monkeypatch):
    monkeypatch.setattr(packages.platform, "python_version", lambda: "3.10.13")
    with pytest.raises(
        CalibrationError, match=r'pip install -U "torch>=99", under Python 3\.11 or newer: .* none for Python 3\.10\.13'
    ):
        packages.require_release("torch", "99", "a model of tomorrow", python="3.11")
    monkeypatch.setattr(packages.platform, "python_version", lambda: "3.11.7")
    with pytest.raises(CalibrationError, match=r'Remedy: pip install -U "torch>=99"$'):
        packages.require_release("torch", "99", "a model of tomorrow", python="3.11")
