"""The docs as a site: it builds without a warning, its reference is whole, it asks nothing of the network."""

import os
import pkgutil
import re
import subprocess
import sys
from importlib import import_module

import pytest

import lightning_obs
from lightning_obs import observers
from lightning_obs.observers import Observer
from tests.observers.contract import BUILT_IN_NAMES
from tests.support.markdown import ROOT

griffe = pytest.importorskip("griffe", reason="the docs' packages are not installed: make docs")

PAGES = {path.relative_to(ROOT / "docs").as_posix(): path.read_text() for path in (ROOT / "docs").rglob("*.md")}
REFERENCE = {name for text in PAGES.values() for name in re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE)}
#: the page of observers has all of them by one line, which docs/site_hooks.py replaces
OBSERVERS = {f"lightning_obs.observers.{name}" for name in observers.__all__ if re.search(r"\wObserver$", name)}
REFERENCE |= OBSERVERS


def test_the_names_of_the_package_and_those_in_the_reference_are_the_same():
    public = {f"lightning_obs.{name}" for name in lightning_obs.__all__}
    modules = {f"lightning_obs.{module.name}" for module in pkgutil.iter_modules(lightning_obs.__path__)}
    assert {path for path in REFERENCE if path.count(".") == 1} - modules == public


@pytest.mark.parametrize("path", sorted(REFERENCE))
def test_a_name_in_the_reference_can_be_imported_and_is_not_private(path):
    module, _, name = path.rpartition(".")
    assert hasattr(import_module(module), name)
    assert "._" not in path


def test_every_name_that_the_docs_import_is_in_the_reference():
    shown = "\n".join([*PAGES.values(), (ROOT / "README.md").read_text()])
    imports = re.findall(r"^from (lightning_obs(?:[.](?!app)\w+)*) import (.+)$", shown, flags=re.MULTILINE)
    names = {(module, name) for module, names in imports for name in names.split(", ")}
    assert len(names) > 10
    known = {name.rsplit(".", 1)[-1] for name in REFERENCE}
    assert {name for _, name in names} <= known


def test_every_option_has_its_text_wherever_it_is_taken():
    hooks = griffe.load_extensions(str(ROOT / "docs" / "site_hooks.py"))
    package = griffe.load("lightning_obs", search_paths=[ROOT], extensions=hooks, docstring_parser="google")
    told = {}
    for path in REFERENCE:
        found = package[path.removeprefix("lightning_obs.")]
        function = found.members.get("__init__") if found.is_class else found
        if (
            function is not None
            and function.is_function
            and "on_missing" in [each.name for each in function.parameters]
        ):
            sections = found.docstring.parse(warnings=False, warn_unknown_params=False, warn_missing_types=False)
            texts = {
                each.name: each.description
                for part in sections
                if part.kind.value == "parameters"
                for each in part.value
            }
            told[path] = {each.name for each in function.parameters if not texts.get(each.name)} - {"self", "scheme"}
    assert len(told) > 7
    assert {path: lacking for path, lacking in told.items() if lacking} == {}


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_asks_nothing_of_the_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    built = {path.relative_to(tmp_path / "site").as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {page.removesuffix(".md") + ".html" for page in PAGES} <= set(built)
    html = "".join(built.values())
    shown = set(re.findall(r'id="(lightning_obs[.\w]+)"', built["reference/observers.html"]))
    assert shown >= OBSERVERS
    registered = {Observer.get_value_from_registry(name).__name__ for name in BUILT_IN_NAMES}
    assert {path.rsplit(".", 1)[-1] for path in shown} >= registered
    assert not re.findall(r"""<(?:script|img|iframe)[^>]+src="?(?:https?:)?//|<link[^>]+href="?(?:https?:)?//""", html)
    assert not re.findall(r"<p>[^<]*:(?:class|func|meth|attr|data):", html)  # roles in docstrings
    assert "<blockquote>" not in "".join(text for name, text in built.items() if name.startswith("reference/"))
