"""A run beside the run before: what got better, what worse, layer by layer."""

import json
from dataclasses import replace

import pytest

from lightning_obs import CalibrationCallback, CalibrationError
from lightning_obs.report.facts import OtherRuns
from lightning_obs.report.page import write_report
from tests.callbacks.calibration_modules import Plain, loader, trainer
from tests.report.runs import layer, run


def layers(**ratios):
    """Errors of layers by name and SQNR, the worst first."""
    errors = [layer(name, ratio) for name, ratio in ratios.items()]
    return sorted(errors, key=lambda error: error.sqnr)


def measured(perplexity, accuracy):
    """Metrics of a quantized model beside those of the original."""
    return {"perplexity": (14.0, perplexity), "acc": (0.9, accuracy)}


@pytest.fixture
def earlier(tmp_path):
    """The folder of a run of four layers."""
    report = run(
        errors=layers(a=20.0, b=20.0, c=20.0, gone=20.0), metrics={"perplexity": (14.0, 16.0), "acc": (0.9, 0.8)}
    )
    report.written.sizes = (1000, 500)
    write_report(tmp_path / "earlier", report)
    return tmp_path / "earlier"


def since(folder, tmp_path, **changes):
    """The part of ``report.json`` that compares a run with the earlier one."""
    report = run(
        errors=layers(a=22.5, b=18.0, c=20.05, new=9.0), metrics={"perplexity": (14.0, 15.0), "acc": (0.9, 0.7)}
    )
    report.written.sizes = (1000, 500)
    report = replace(report, other_runs=OtherRuns(against=folder), **changes)
    write_report(tmp_path / "now", report)
    return json.loads((tmp_path / "now" / "report.json").read_text())


def test_layers_are_better_worse_or_as_before_and_those_of_one_run_are_named(earlier, tmp_path):
    told = since(earlier, tmp_path)["earlier"]
    assert told["better"] == [{"name": "a", "before": 20.0, "now": 22.5, "change": 2.5}]
    assert told["worse"] == [{"name": "b", "before": 20.0, "now": 18.0, "change": -2.0}]
    assert (told["same"], told["added"], told["removed"]) == (1, ["new"], ["gone"])


def test_metrics_and_sizes_are_judged_by_their_direction(earlier, tmp_path):
    numbers = {number["label"]: number for number in since(earlier, tmp_path)["earlier"]["numbers"]}
    assert numbers["perplexity"] == {"label": "perplexity", "before": "16.00", "now": "15.00", "verdict": "better"}
    assert numbers["acc"]["verdict"] == "worse"
    assert numbers["size"]["verdict"] == "as before"


def test_the_table_of_layers_has_the_change(earlier, tmp_path):
    changes = {row["name"]: row.get("sqnr_change") for row in since(earlier / "report.json", tmp_path)["layers"]}
    assert changes == {"a": 2.5, "b": -2.0, "c": None, "new": None}
    assert "1 layers better" in (tmp_path / "now" / "report.html").read_text()


def test_the_callback_compares_with_an_earlier_report(tmp_path):
    for name, scheme, options in (("first", "INT8_STATIC", {}), ("second", "FP8", {"against": tmp_path / "first"})):
        callback = CalibrationCallback(scheme)
        trainer(callback).validate(Plain(), loader(), verbose=False)
        page = callback.report(tmp_path / name, next(iter(loader())), **options)
    told = json.loads(page.with_suffix(".json").read_text())["earlier"]
    assert len(told["better"]) + len(told["worse"]) + told["same"] > 0
    assert told["added"] == told["removed"] == []


def test_what_is_no_report_is_refused(tmp_path):
    (tmp_path / "report.json").write_text('{"title": "a"}')
    with pytest.raises(CalibrationError, match=r"report\.json cannot be read.*expected the report\.json that"):
        write_report(tmp_path / "out", replace(run(), other_runs=OtherRuns(against=tmp_path)))
    with pytest.raises(CalibrationError, match=r"nowhere.* does not exist"):
        write_report(tmp_path / "out", replace(run(), other_runs=OtherRuns(against=tmp_path / "nowhere")))
    assert not (tmp_path / "out").exists()
