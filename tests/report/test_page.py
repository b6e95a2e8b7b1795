"""The page's files: what is in each, and what is not."""

import csv
import json
import re
from dataclasses import replace
from typing import get_type_hints

import pytest

from lightning_obs import CalibrationError, CalibrationSession
from lightning_obs.errors import refuse
from lightning_obs.report import page as report_page
from lightning_obs.report.facts import Report, facts
from lightning_obs.report.judgement import judge
from lightning_obs.report.layer_errors import LayerError, known_layer_errors
from lightning_obs.report.metrics import TensorError
from lightning_obs.report.page import write_csv, write_report
from lightning_obs.report.summary import comparison_table, print_report, summary
from tests.report.pages import made_up
from tests.support.markdown import page


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
    assert first["sensitivity"] == report.decisions.sensitivity[first["name"]] == float(rows[0]["sensitivity"])
    assert first["choice"] == rows[0]["choice"] == report.decisions.choices[first["name"]]
    assert (first["chosen_low"], first["chosen_high"]) == (-3.5, 3.4)
    assert sum(first["histogram"]["counts"]) == 2003
    assert data["frontier"][1]["loss"] == 2.83
    assert data["drift"]["drifts"]["model.layers.0.self_attn.q_proj.weight_scale"] == [0, 1, 2, 3]


def test_what_is_not_known_is_not_on_the_page(tmp_path):
    text = write_report(tmp_path, Report.of("bare")).read_text()
    assert "<svg" not in text
    assert text.count("<h2>") == 1  # how the page was made
    assert not (tmp_path / "layers.csv").exists()


def test_a_sensitivity_without_errors_has_a_row_too(tmp_path):
    write_report(tmp_path, Report.of("plan", sensitivity={"fc": 0.5}, choices={"fc": "FP8", "head": "none"}))
    layers = json.loads((tmp_path / "report.json").read_text())["layers"]
    assert layers == [{"name": "fc", "sensitivity": 0.5, "choice": "FP8"}, {"name": "head", "choice": "none"}]


def test_losses_of_a_layer_without_errors_have_a_row_too(tmp_path):
    write_report(tmp_path, Report.of("plan", losses={"fc": 0.5}))
    layers = json.loads((tmp_path / "report.json").read_text())["layers"]
    assert layers == [{"name": "fc", "loss": 0.5}]


def test_a_report_without_layers_leaves_no_table_of_an_earlier_one(tmp_path):
    write_report(tmp_path, made_up(6))
    assert (tmp_path / "layers.csv").exists()
    write_report(tmp_path, Report.of("bare"))
    assert not (tmp_path / "layers.csv").exists()


def test_a_point_that_lacks_something_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(CalibrationError, match=r"lacks something: point 1.*bits_per_weight"):
        write_report(
            tmp_path / "out", made_up(6, frontier=[{"name": "a", "bits_per_weight": 4, "loss": 1}, {"name": "b"}])
        )
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- in a browser


def test_sensitivities_that_are_not_finite_leave_the_page_s_json_whole(tmp_path):
    report = made_up(6)
    first, second = (error.name for error in report.errors[:2])
    report.decisions.sensitivity = {**report.decisions.sensitivity, first: float("nan"), second: float("inf")}
    report.decisions.frontier = [
        *report.decisions.frontier,
        {"name": "lost", "bits_per_weight": 4.0, "loss": float("nan")},
    ]
    report.quality.metrics = {"perplexity": (14.8, float("inf"))}
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
    report.other_runs.runs = [{"run": evil, "metric": evil, evil: (None, 1.0), "size": 1, "worst_sqnr": 1.0}]
    print_report(summary(report))
    print_report(comparison_table(report.other_runs.runs))
    with pytest.raises(CalibrationError) as error:
        refuse([evil], "no data reached a module")
    printed = capsys.readouterr().out + str(error.value)
    assert "\x1b" not in printed
    assert printed.count("\\x1b[2J\\ud800") >= 3
    text = write_report(tmp_path, report).read_text()
    assert "<script>alert" not in text
    assert json.loads((tmp_path / "report.json").read_text())["layers"][0]["name"] == evil


OWN_COLUMN = """\
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.page import COLUMNS, Column


def span(error: LayerError) -> float | None:
    \"\"\"The cell stays empty where inputs are not quantized, or were not seen.\"\"\"
    seen = error.input
    return None if seen is None or seen.low is None or seen.high is None else seen.high - seen.low


COLUMNS.append(Column("span", "span", 2, smallest_first=False, value=span, description="Span is that of the inputs."))
"""


@pytest.fixture
def own_column(monkeypatch):
    monkeypatch.setattr(report_page, "COLUMNS", list(report_page.COLUMNS))
    namespace = {}
    exec(OWN_COLUMN, namespace)
    return namespace["span"]


def test_a_column_of_the_page_is_added_in_a_dozen_lines(own_column, tmp_path):
    assert len(OWN_COLUMN.splitlines()) <= 12
    assert OWN_COLUMN in page("CONTRIBUTING.md")
    assert get_type_hints(own_column) == {"error": LayerError, "return": float | None}
    report = made_up(6)
    text = write_report(tmp_path, report).read_text()
    shown = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))
    assert shown["shown"][-1] == ["span", "span", 2, False, False]
    assert "Clipped is the share of input values beyond the chosen range. " in text
    assert " Span is that of the inputs. A layer" in text
    spans = [error.input.high - error.input.low for error in report.errors]
    assert [layer["span"] for layer in shown["layers"]] == pytest.approx(spans, rel=1e-3)
    with open(tmp_path / "layers.csv") as file:
        assert [float(row["span"]) for row in csv.DictReader(file)] == spans


def test_a_column_of_a_users_own_is_empty_where_its_number_is_not_known(own_column, mlp, tmp_path):
    with CalibrationSession(mlp, "W8A8", ignore=["fc2"]):
        pass
    errors = known_layer_errors(mlp, {})  # no data were run
    assert [error.input for error in errors] == [None]
    errors.append(LayerError("unseen", input=TensorError()))
    write_report(tmp_path, Report.of("weights alone", errors=errors))
    layers = json.loads((tmp_path / "report.json").read_text())["layers"]
    assert [layer["span"] for layer in layers] == [None, None]


def test_a_step_is_shown_as_python_and_as_the_command_that_the_program_of_the_run_added(tmp_path):
    report = made_up(6, choices={}, sensitivity={}, frontier=[])
    judgement = judge(report, tmp_path)
    assert judgement.steps
    text = write_report(tmp_path / "python", report).read_text()
    assert 'data-as="command"' not in text
    first = replace(judgement.steps[0], command="my program --again")
    text = write_report(tmp_path / "both", report, replace(judgement, steps=[first])).read_text()
    assert 'data-as="command"' in text
    assert "my program --again" in text
    (step,) = json.loads((tmp_path / "both" / "report.json").read_text())["judgement"]["steps"]
    assert step["command"] == "my program --again"
    assert step["python"] == first.python


def test_metrics_in_json_page_and_summary_are_the_same_in_whatever_order_they_were_logged(tmp_path, capsys):
    for order in (("power", "val_loss"), ("val_loss", "power")):
        values = {"power": (0.15, 0.13), "val_loss": (2.0, 2.2)}
        report = made_up(6, metrics={name: values[name] for name in order})
        text = write_report(tmp_path, report).read_text()
        data = json.loads((tmp_path / "report.json").read_text())
        print_report(summary(report))
        printed = capsys.readouterr().out
        assert data["metric"] == "val_loss"
        assert [number["label"] for number in data["judgement"]["numbers"]] == ["val_loss", "power"]
        for name in order:
            value = facts(report)[name]
            assert f"{name} {value}" in printed
            assert value.replace("->", "\N{RIGHTWARDS ARROW}") in text


def test_the_experts_that_got_no_token_are_named():
    report = made_up(1)
    report.result.expert_tokens = {"mlp.experts": [5, 0, 7]}
    assert facts(report)["experts"] == "tokens per expert: 0 to 7, median 5; 1 of 3 experts got none: mlp.experts.1"
    assert facts(report)["perplexity"] == "14.80 -> 33.01 (+123.0 %)"
