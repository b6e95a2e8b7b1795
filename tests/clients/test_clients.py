"""The clients are run by ``make clients``; here they are short, and the table has a place for each."""

import ast
import json
import re
import sys

import pytest
import torch

from tests.clients import gallery, run
from tests.clients.row import COLUMNS, MARK, Row, _difference

CLIENTS = run.clients()
#: the packages that issue and docs promise
PACKAGES = [
    "chemprop", "darts", "diffusers", "hydra_template", "lightly", "litgpt", "neuralforecast", "pytorch_forecasting",
    "pytorch_tabular", "scvi", "segmentation_models", "timm",
]  # fmt: skip


def test_every_package_has_a_client():
    assert [name.removesuffix("_client") for name in CLIENTS] == PACKAGES


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_is_short_and_takes_every_step(client):
    text = (run.FOLDER / f"{client}.py").read_text()
    of_a_user = [
        line for line in text.splitlines() if not line.strip().startswith((gallery.BEGIN, gallery.END, "row."))
    ]
    assert len(of_a_user) <= 60
    called = {
        node.func.attr for node in ast.walk(ast.parse(text)) if isinstance(getattr(node, "func", None), ast.Attribute)
    }
    assert {"fit", "export", "reload", "qat"} <= called
    assert "resume" in called or "refused" in called


def test_a_row_fails_where_the_loaded_model_differs():
    row = Row("a client")
    row.reload([torch.ones(2)], [torch.ones(2)], [torch.zeros(2)])
    with pytest.raises(AssertionError, match="differs by 1"):
        row.reload(torch.ones(2), torch.zeros(2))
    with pytest.raises(AssertionError, match="the outputs of the original"):
        row.reload(torch.ones(2), torch.ones(2), torch.ones(2))
    assert _difference({"a": torch.ones(2), "b": [torch.zeros(1)]}, {"b": [torch.ones(1)], "a": torch.ones(2)}) == 1


def test_a_client_that_fails_or_never_ends_fails_the_table(tmp_path, monkeypatch, capsys):
    first = MARK + json.dumps(["name", "fit", "4 steps"])
    for program in (
        f"print({first!r}); raise SystemExit(3)",
        f"print({first!r}, flush=True); import time; time.sleep(60)",
    ):
        monkeypatch.setattr(run, "LAUNCH", program)
        monkeypatch.setattr(run, "LIMIT", 2)
        monkeypatch.setattr(sys, "argv", ["run", "some_client"])
        assert run.main() == 1
        assert f"| name | 4 steps | {' | '.join(['**failed**'] * (len(COLUMNS) - 1))} |" in capsys.readouterr().out


def test_a_client_that_takes_every_step_passes(monkeypatch, capsys):
    lines = [MARK + json.dumps(["name", column, "well"]) for column in COLUMNS]
    monkeypatch.setattr(run, "LAUNCH", f"print({chr(10).join(lines)!r})")
    monkeypatch.setattr(sys, "argv", ["run", "some_client"])
    assert run.main() == 0
    assert f"| name | {' | '.join(['well'] * len(COLUMNS))} |" in capsys.readouterr().out


# ---------------------------------------------------------------------- docs/gallery


@pytest.mark.parametrize("client", CLIENTS)
def test_a_page_of_the_gallery_shows_the_client_s_own_lines(client):
    text = gallery.page(client).read_text()
    assert gallery.fill(text, "shown", gallery.code) == text
    assert f"<!-- shown: tests/clients/{client}.py -->\n```python\n" in text
    assert f"`.venv-clients/bin/python -m tests.clients.run --gallery {client}`" in text


@pytest.mark.parametrize("client", CLIENTS)
def test_a_page_of_the_gallery_says_of_each_step_what_the_table_says(client):
    text = gallery.page(client).read_text()
    models = re.search(r"^\| \| (.*) \|$", text, flags=re.MULTILINE)[1].split(" | ")
    steps = [re.search(rf"^\| {name} \| (.*) \|$", text, flags=re.MULTILINE)[1] for name in gallery.STEPS.values()]
    by_model = zip(*[line.split(" | ") for line in steps], strict=True)
    table = gallery.TABLE.read_text()
    for model, entries in zip(models, by_model, strict=True):
        assert f"{model} | {' | '.join(entries)} |\n" in table


def test_the_index_of_the_gallery_and_the_menu_have_each_page():
    index = (gallery.ROOT / "docs" / "gallery" / "index.md").read_text()
    menu = (gallery.ROOT / "mkdocs.yml").read_text()
    for package in PACKAGES:
        assert f"]({package}.md)" in index
        assert f": gallery/{package}.md\n" in menu
    commands = re.findall(r"-m tests[.]clients[.]run --gallery (\w+)", index)
    assert commands
    assert set(commands) <= set(CLIENTS)


def test_a_page_is_filled_with_a_run_s_lines_and_the_rest_of_it_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "TABLE", tmp_path / "clients.md")
    monkeypatch.setattr(gallery, "page", lambda _: tmp_path / "page.md")
    gallery.TABLE.write_text("before\n| torch A | old |\n| other | old |\n")
    blocks = [f"<!-- {kind} -->\nold\n<!-- end -->\n" for kind in ("printed", "rows")]
    (tmp_path / "page.md").write_text("# By hand\n" + "by hand\n".join(blocks))
    mark = f"{MARK}{json.dumps(['torch A', 'fit', '4 steps'])}"
    printed = [
        "GPU available",
        "W8A8: calibrated 2 modules",
        mark,
        "worst layers  SQNR",
        "\x1b[2mfirst\x1b[0m  1.0",
        mark,
    ]
    printed += ["wrote /tmp/clients-a1/int8", "not ours"]
    printed += [f"{MARK}{json.dumps(['torch A', 'QAT', 'well'])}", "W8A8: calibrated 3 modules"]
    row = dict.fromkeys(COLUMNS, "well") | {"fit": "4 steps, 1.5 s"}
    gallery.write("torch_client", {"torch A": row}, "\n".join(printed))
    text = (tmp_path / "page.md").read_text()
    lines = ["W8A8: calibrated 2 modules", "worst layers  SQNR", "first  1.0", "wrote int8"]
    assert text.startswith("\n".join(["# By hand", "<!-- printed -->", "```text", *lines, "```\n"]))
    assert "| | A |\n|---|---|\n| trained | 4 steps |\n| metric in float -> quantized | well |\n" in text
    assert text.count("by hand") == 1
    assert "old" not in text
    assert gallery.TABLE.read_text() == f"before\n| torch A | 4 steps | {' | '.join(['well'] * 5)} |\n| other | old |\n"


def test_the_lines_of_row_are_not_shown():
    marked = [
        gallery.BEGIN,
        "b = 1",
        "row.fit(b)",
        gallery.END,
        "c",
        f"    {gallery.BEGIN}",
        "    d",
        f"    {gallery.END}",
    ]
    text = "\n".join(["import a", "from lightning_obs import b", *marked, ""])
    assert gallery.shown(text) == "from lightning_obs import b\n\nb = 1\n\nd\n"
    assert gallery.shown("key: value\n") == "key: value\n"
