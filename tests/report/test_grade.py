"""The verdict of a run, from made-up numbers."""

import math

import pytest

from lightning_obs.report import grade
from lightning_obs.report.facts import Report
from lightning_obs.report.judgement import judge
from lightning_obs.report.predictions import Moved
from tests.support.markdown import page


def metrics(**values):
    return {"metrics": values}


SAME = Moved(0.01, 0.95, 9)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (metrics(perplexity=(10.0, 10.4)), "good"),
        (metrics(perplexity=(10.0, 12.0)), "usable"),
        (metrics(perplexity=(10.0, 14.0)), "broken"),
        (metrics(perplexity=(10.0, math.inf)), "broken"),
        (metrics(perplexity=(10.0, math.nan)), "broken"),
        (metrics(perplexity=(math.nan, math.nan)), "not graded"),
        (metrics(accuracy=(0.90, 0.895)), "good"),
        (metrics(accuracy=(0.90, 0.87)), "usable"),
        (metrics(accuracy=(0.90, 0.80)), "broken"),
        (metrics(accuracy=(0.90, 0.95)), "good"),
        (metrics(accuracy=(0.0, 0.5)), "not graded"),
        (metrics(val_MSE=(0.15, 0.13)), "good"),
        (metrics(val_mse=(1e-4, 1e-2)), "broken"),
        (metrics(val_mse=(0.0, 0.0)), "good"),
        (metrics(val_mse=(0.0, 0.1)), "broken"),
        (metrics(mine=(2.0, 3.0)) | {"higher_is_better": {"mine": False}}, "broken"),
        (metrics(mine=(2.0, 3.0)) | {"higher_is_better": {"mine": True}}, "good"),
        (metrics(power=(0.15, 0.13)), "not graded"),
        ({"moved": Moved(0.1, 0.95, 9)}, "usable"),
        ({"moved": Moved(0.01, 0.5, 9)}, "broken"),
        (metrics(perplexity=(10.0, 10.0)) | {"moved": Moved(0.1, 0.95, 9)}, "usable"),
        (metrics(power=(1.0, 9.0)) | {"moved": SAME}, "good"),
        ({}, "not measured"),
    ],
)
def test_a_run_is_as_good_as_its_worst_number(parts, expected):
    assert judge(Report.of("a run", **parts)).grade == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"power": (0.15, 0.15), "val_loss": (2.0, 3.0)}, "broken"),
        ({"power": (0.15, 0.05), "val_loss": (2.0, 2.01)}, "good"),
        ({"val_loss": (2.0, 2.01), "val_acc": (0.9, 0.5)}, "broken"),
        ({"val_loss": (2.0, 2.2), "val_acc": (0.9, 0.9), "val_ppl": (7.4, 7.4)}, "usable"),
    ],
)
def test_the_order_in_which_metrics_are_logged_changes_nothing(values, expected):
    backwards = dict(reversed(values.items()))
    first, second = (Report.of("a run", metrics=logged) for logged in (values, backwards))
    assert judge(first) == judge(second)
    assert judge(first).grade == expected
    assert first.row == second.row
    assert {number.label for number in judge(first).numbers} == values.keys()


@pytest.mark.parametrize("growth", [0.01, 0.04, 0.06, 0.2, 0.29, 0.31, 1.0, -0.5])
def test_a_loss_and_its_perplexity_have_one_grade(growth):
    loss = judge(Report.of("a run", metrics={"val_loss": (3.0, 3.0 + growth)}, moved=SAME))
    perplexity = judge(Report.of("a run", metrics={"val_ppl": (math.exp(3.0), math.exp(3.0 + growth))}, moved=SAME))
    assert loss.grade == perplexity.grade


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (-1.0, -0.99, "good"),
        (-1.0, -0.9, "usable"),
        (-1.0, -0.5, "broken"),
        (-0.1, 0.1, "usable"),
        (0.0, 0.02, "not graded"),
    ],
)
def test_a_loss_that_is_negative_or_zero_is_judged_by_its_difference(before, after, expected):
    assert judge(Report.of("a run", metrics={"val_loss": (before, after)})).grade == expected


@pytest.mark.parametrize(("before", "after"), [(1000.0, 1010.0), (1e-4, 1e-2)])
def test_a_loss_that_may_be_a_squared_error_is_not_graded_where_that_would_turn_the_verdict(before, after):
    report = Report.of("a run", metrics={"val_loss": (before, after)})
    assert judge(report).grade == "not graded"
    assert judge(report).headline == "Not graded: which values of val_loss are good is not known."
    assert judge(Report.of("a run", metrics={"val_loss": (before, after)}, moved=SAME)).grade in ("good", "broken")


def test_a_metric_of_unknown_direction_is_shown_without_better_or_worse():
    (number,) = judge(Report.of("a run", metrics={"power": (2.0, 3.0)})).numbers
    assert number == ("power", "2.000 \N{RIGHTWARDS ARROW} 3.000 (changed by +50.0 %)", "not graded")


TRAINED = {"was_trained": True}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (metrics(perplexity=(10.0, 10.0)) | {"moved": Moved(1.9, 0.246, 9)}, "broken"),
        (metrics(perplexity=(10.0, 10.0)) | {"moved": Moved(0.02, 0.8, 9)}, "usable"),
        (metrics(perplexity=(10.0, 10.1)) | {"moved": SAME, "calibrated": {"perplexity": 12.0}}, "good"),
        (metrics(perplexity=(10.0, 10.4)) | {"moved": SAME, "calibrated": {"perplexity": 10.2}}, "usable"),
        (metrics(perplexity=(10.0, 10.2)) | {"moved": SAME, "calibrated": {"perplexity": 10.2}}, "good"),
        (metrics(perplexity=(10.0, 99.0)) | {"moved": SAME, "calibrated": {"perplexity": 12.0}}, "broken"),
        (metrics(accuracy=(0.9, 0.895)) | {"calibrated": {"accuracy": 0.899}}, "usable"),
        (metrics(accuracy=(0.9, 0.899)) | {"calibrated": {"accuracy": 0.895}}, "good"),
        (metrics(power=(2.0, 3.0)) | {"calibrated": {"power": 2.5}}, "not graded"),
        (metrics(accuracy=(0.9, math.nan)) | {"calibrated": {"accuracy": math.nan}}, "broken"),
    ],
)
def test_after_training_the_predictions_count_and_so_does_the_calibrated_model(parts, expected):
    assert judge(Report.of("a run", **parts, **TRAINED)).grade == expected


@pytest.mark.parametrize("after", [10.4, 99.0, math.nan])
def test_a_model_that_training_made_worse_than_calibrated_is_said_to_be(after):
    report = Report.of("a run", metrics={"perplexity": (10.0, after)}, calibrated={"perplexity": 10.2}, **TRAINED)
    judgement = judge(report)
    assert judgement.headline.endswith("; training has made it worse than the calibration had left it.")
    (since,) = [number for number in judgement.numbers if number.label == "perplexity since calibration"]
    assert since.grade == "usable"
    assert since.value.startswith("10.20 \N{RIGHTWARDS ARROW} ")


def test_the_docs_give_the_limits_that_are_in_force():
    text = page("docs/guide/read_the_page.md")
    (good_nats, usable_nats), (good_top, usable_top), (good_kept, usable_kept) = grade.NATS, grade.AGREEMENT, grade.KEPT
    assert f"| {good_nats} | {usable_nats} |" in text
    assert f"| {good_top:.0%} | {usable_top:.0%} |".replace("%", " %") in text
    assert f"| {good_kept:.0%} | {usable_kept:.0%} |".replace("%", " %") in text
