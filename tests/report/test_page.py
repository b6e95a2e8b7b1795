"""The page: what is in its files, and that a browser shows, sorts, searches and opens it."""

import csv
import json
import re
import shutil
import subprocess
import time
from dataclasses import replace

import pytest

from lightning_obs import CalibrationError
from lightning_obs.errors import refuse
from lightning_obs.report import page as report_page
from lightning_obs.report.facts import Report, facts
from lightning_obs.report.page import write_csv, write_report
from lightning_obs.report.summary import comparison_table, print_report, summary
from tests.markdown import page
from tests.report.pages import made_up

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of 210 layers."""
    folder = tmp_path_factory.mktemp("page")
    started = time.process_time()
    write_report(folder, made_up(210))
    assert time.process_time() - started < 10
    return folder


def test_the_page_is_one_file_that_asks_for_nothing(folder):
    text = (folder / "report.html").read_text()
    assert len(text.encode()) < 3 * 2**20
    outside = re.findall(r"(?:src|href)=[\"']?([^\"'> ]+)|url\(([^)]*)\)|@import|fetch\(", text)
    assert all(one.startswith(("#", "data:")) for pair in outside for one in pair if one)
    assert "a &lt;model&gt;" in text
    assert "a <model>" not in text
    assert {path.name for path in folder.iterdir()} == {"report.html", "report.json", "layers.csv"}


def test_the_same_numbers_are_in_json_and_csv(folder):
    report, data = made_up(210), json.loads((folder / "report.json").read_text())
    with open(folder / "layers.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in data["layers"]] == [e.name for e in report.errors] == [row["name"] for row in rows]
    first = data["layers"][0]
    assert first["sqnr"] == report.errors[0].sqnr == float(rows[0]["sqnr"])
    assert first["sensitivity"] == report.sensitivity[first["name"]] == float(rows[0]["sensitivity"])
    assert first["choice"] == rows[0]["choice"] == report.choices[first["name"]]
    assert (first["chosen_low"], first["chosen_high"]) == (-3.5, 3.4)
    assert sum(first["histogram"]["counts"]) == 2003
    assert data["frontier"][1]["loss"] == 2.83
    assert data["drift"]["drifts"]["model.layers.0.self_attn.q_proj.weight_scale"] == [0, 1, 2, 3]


def test_what_is_not_known_is_not_on_the_page(tmp_path):
    text = write_report(tmp_path, Report("bare")).read_text()
    assert "<svg" not in text
    assert "<h2>" not in text
    assert not (tmp_path / "layers.csv").exists()


def test_a_sensitivity_without_errors_has_a_row_too(tmp_path):
    write_report(tmp_path, Report("plan", sensitivity={"fc": 0.5}, choices={"fc": "FP8", "head": "none"}))
    layers = json.loads((tmp_path / "report.json").read_text())["layers"]
    assert layers == [{"name": "fc", "sensitivity": 0.5, "choice": "FP8"}, {"name": "head", "choice": "none"}]


def test_a_point_that_lacks_something_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(CalibrationError, match=r"lacks something: point 1.*bits_per_weight"):
        write_report(
            tmp_path / "out", made_up(6, frontier=[{"name": "a", "bits_per_weight": 4, "loss": 1}, {"name": "b"}])
        )
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- in a browser

_SCRIPT = """
<script>
const $ = (query) => [...document.querySelectorAll(query)], said = {};
const names = () => $("tr.layer td:first-child").map((cell) => cell.textContent);
said.rows = $("tr.layer").length;
said.count = document.getElementById("count").textContent;
said.first = names()[0];
const header = (title) => $("thead th button").find((one) => one.textContent.startsWith(title));
header("sensitivity").click();
said.largest = names()[0];
said.sorted = header("sensitivity").parentElement.getAttribute("aria-sort");
header("sensitivity").click();
said.smallest = names()[0];
$("tr.layer")[0].querySelector("button").click();
said.bars = $("svg.histogram rect").length;
said.out = $("svg.histogram rect.out").length;
said.lines = $("svg.histogram line.chosen").length;
$("tr.layer")[0].querySelector("button").click();
said.closed = $("svg.histogram").length;
const search = document.getElementById("search");
search.value = "Q_PROJ 3"; search.dispatchEvent(new Event("input"));
said.found = names();
search.value = ""; search.dispatchEvent(new Event("input"));
const more = document.getElementById("more");
if (!more.hidden) more.click();
said.more = $("tr.layer").length;
said.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
said.ready = Math.round(performance.now());
said.pictures = $("figure svg").length;
document.body.replaceChildren(Object.assign(document.createElement("pre"), { textContent: JSON.stringify(said) }));
</script></body>"""


def opened(page, tmp_path, width=1280):
    """What the script found in the page, opened in Chromium."""
    # The window of a desktop's Chromium is 500 wide at least; a frame can be as narrow as a phone.
    (tmp_path / "page.html").write_text(page.read_text().replace("</body>", _SCRIPT))
    frame = '<body style="margin:0"><iframe id="f" src="page.html" style="width:{}px;height:2000px;border:0"></iframe>'
    frame += '<script>f.onload=()=>document.body.append(f.contentDocument.querySelector("pre"))</script></body>'
    (tmp_path / "frame.html").write_text(frame.format(width))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [
        "--allow-file-access-from-files",
        "--virtual-time-budget=20000",
        "--window-size=1300,2000",
        "--dump-dom",
    ]
    done = subprocess.run(
        [*command, f"file://{tmp_path / 'frame.html'}"], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r"<pre>(.*?)</pre>", done.stdout, flags=re.DOTALL)
    assert found, done.stdout[-500:]
    return json.loads(found[1])


in_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: install the system's package `chromium` to test the page in a browser"
)


@in_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_sorts_searches_and_opens(folder, tmp_path, width):
    report, found = made_up(210), opened(folder / "report.html", tmp_path, width)
    order = sorted(report.sensitivity, key=report.sensitivity.get)
    assert (found["rows"], found["count"], found["more"]) == (200, "210 of 210 layers", 210)
    assert (found["first"], found["largest"], found["smallest"]) == (report.errors[0].name, order[-1], order[0])
    assert found["sorted"] == "descending"
    assert (found["bars"], found["lines"], found["closed"]) == (64, 2, 0)
    assert 0 < found["out"] < 64
    assert sorted(found["found"]) == sorted(n for n in report.sensitivity if "q_proj" in n and "3" in n)
    assert found["pictures"] == 2
    assert found["wide"] <= 0  # nothing sticks out of the window, at the width of a phone either


@in_chromium
@pytest.mark.slow
def test_5000_layers_are_still_usable(tmp_path):
    page = write_report(tmp_path / "out", made_up(5000))
    found = opened(page, tmp_path)
    assert (found["rows"], found["more"], found["count"]) == (200, 400, "5,000 of 5,000 layers")
    assert found["ready"] < 5000
    assert page.stat().st_size < 10 * 2**20


def test_sensitivities_that_are_not_finite_leave_the_page_s_json_whole(tmp_path):
    report = made_up(6)
    first, second = (error.name for error in report.errors[:2])
    report.sensitivity = {**report.sensitivity, first: float("nan"), second: float("inf")}
    report.frontier = [*report.frontier, {"name": "lost", "bits_per_weight": 4.0, "loss": float("nan")}]
    report.metrics = {"perplexity": (14.8, float("inf"))}
    report.extra = {"worst_sqnr": float("nan")}

    def refused(name):
        raise ValueError(f"{name} is no JSON")

    text = write_report(tmp_path, report).read_text()
    shown = re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1)
    for whole in (shown, (tmp_path / "report.json").read_text()):
        layers = json.loads(whole, parse_constant=refused)["layers"]
        assert [layer["sensitivity"] for layer in layers[:2]] == [None, None]
        assert layers[2]["sensitivity"] > 0


def test_no_text_of_the_table_is_a_formula_in_a_spreadsheet(tmp_path):
    names = ["=1+1", "+1", "-1", "@x", "\t=1", "fc"]
    rows = [{"name": name, "low": -1.0} for name in names]
    write_csv(tmp_path / "layers.csv", rows)
    with open(tmp_path / "layers.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["name"] for row in found] == ["'=1+1", "'+1", "'-1", "'@x", "'\t=1", "fc"]
    assert {row["low"] for row in found} == {"-1.0"}


def test_names_are_text_on_the_page_and_steer_no_terminal(tmp_path, capsys):
    evil = '"><$script><script>alert(1)</script>\x1b[2J\ud800'
    report = made_up(1, drift=None, counts={}, sensitivity={}, choices={})
    report.errors = [replace(report.errors[0], name=evil)]
    report.runs = [{"run": evil, "metric": evil, evil: (None, 1.0), "size": 1, "worst_sqnr": 1.0}]
    print_report(summary(report))
    print_report(comparison_table(report.runs))
    with pytest.raises(CalibrationError) as error:
        refuse([evil], "no data reached a module")
    printed = capsys.readouterr().out + str(error.value)
    assert "\x1b" not in printed
    assert printed.count("\\x1b[2J\\ud800") >= 3
    text = write_report(tmp_path, report).read_text()
    assert "<script>alert" not in text
    assert json.loads((tmp_path / "report.json").read_text())["layers"][0]["name"] == evil


OWN_COLUMN = """\
from lightning_obs.report.page import COLUMNS, Column


def span(error):
    return error.high - error.low


COLUMNS.append(Column("span", "span of the inputs", 2, smallest_first=False, value=span))
"""


def test_a_column_of_the_page_is_added_in_ten_lines(tmp_path, monkeypatch):
    assert len(OWN_COLUMN.splitlines()) <= 10
    assert OWN_COLUMN in page("CONTRIBUTING.md")
    monkeypatch.setattr(report_page, "COLUMNS", list(report_page.COLUMNS))
    exec(OWN_COLUMN, {})
    report = made_up(6)
    text = write_report(tmp_path, report).read_text()
    shown = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))
    assert shown["shown"][-1] == ["span", "span of the inputs", 2, False, False]
    spans = [error.high - error.low for error in report.errors]
    assert [layer["span"] for layer in shown["layers"]] == pytest.approx(spans, rel=1e-3)
    with open(tmp_path / "layers.csv") as file:
        assert [float(row["span"]) for row in csv.DictReader(file)] == spans


def test_the_experts_that_got_no_token_are_named():
    report = made_up(1)
    report.result.expert_tokens = {"mlp.experts": [5, 0, 7]}
    assert facts(report)["experts"] == "tokens per expert: 0 to 7, median 5; 1 of 3 experts got none: mlp.experts.1"
    assert facts(report)["perplexity"] == "14.80 -> 33.01 (+123.0 %)"
