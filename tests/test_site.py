"""The docs as a site: it builds without a warning, its reference is whole, it asks nothing of the network."""

import os
import re
import subprocess
import sys

import pytest

import lightning_obs
from tests.markdown import ROOT

PAGES = {path.relative_to(ROOT / "docs").as_posix(): path.read_text() for path in (ROOT / "docs").rglob("*.md")}
REFERENCE = {name for text in PAGES.values() for name in re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE)}


def test_every_public_name_is_in_the_reference():
    assert {f"lightning_obs.{name}" for name in lightning_obs.__all__} <= REFERENCE


def test_every_name_that_the_docs_import_is_in_the_reference():
    shown = "\n".join([*PAGES.values(), (ROOT / "README.md").read_text()])
    imports = re.findall(r"^from (lightning_obs(?:[.](?!app)\w+)*) import (.+)$", shown, flags=re.MULTILINE)
    names = {(module, name) for module, names in imports for name in names.split(", ")}
    assert len(names) > 10
    known = {name.rsplit(".", 1)[-1] for name in REFERENCE}
    assert {name for _, name in names} <= known


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_asks_nothing_of_the_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    built = {path.relative_to(tmp_path / "site").as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {page.removesuffix(".md") + ".html" for page in PAGES} <= set(built)
    html = "".join(built.values())
    assert not re.findall(r"""<(?:script|img|iframe)[^>]+src="?(?:https?:)?//|<link[^>]+href="?(?:https?:)?//""", html)
    assert not re.findall(r"<p>[^<]*:(?:class|func|meth|attr|data):", html)  # roles in docstrings
    assert "<blockquote>" not in "".join(text for name, text in built.items() if name.startswith("reference/"))
