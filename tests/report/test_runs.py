"""Runs side by side: the best of their size."""

import math

import pytest

from lightning_obs.report.facts import Report
from lightning_obs.report.runs import compared_runs


def best(*runs, metric="perplexity"):
    """Whether each run, given as its size and its metric, is the best of its size."""
    rows = [{"run": "a", "metric": metric, metric: (14.0, value), "size": size} for size, value in runs]
    return [row["is_best"] for row in compared_runs(rows)]


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        ("perplexity", (16.0, 15.0, 17.0), [True, True, False]),
        ("accuracy", (0.7, 0.9, 0.8), [True, True, False]),
        ("power", (1.0, 2.0, 3.0), [False, False, False]),  # nobody knows whether more is better
    ],
)
def test_a_larger_run_is_the_best_of_its_size_only_if_it_is_better(metric, values, expected):
    assert best(*zip((100, 200, 300), values, strict=True), metric=metric) == expected


@pytest.mark.parametrize(("direction", "expected"), [(True, [True, True, False]), (False, [True, False, False])])
def test_the_row_of_a_report_has_the_direction_of_its_metric(direction, expected):
    rows = []
    for size, power in ((100, 2.0), (200, 3.0), (300, 2.5)):
        report = Report.of("a", metrics={"power": (4.0, power)}, higher_is_better={"power": direction}, sizes=(1, size))
        rows.append(report.row)
    assert [row["is_best"] for row in compared_runs(rows)] == expected


def test_equal_runs_are_both_the_best_and_a_worse_one_of_that_size_is_not():
    assert best((100, 15.0), (100, 15.0), (100, 15.1)) == [True, True, False]


def test_runs_without_a_size_or_a_metric_are_not_judged():
    assert best((None, 15.0), (100, None), (200, 16.0)) == [False, False, True]


def test_a_run_whose_metric_is_not_finite_is_never_the_best():
    assert best((100, math.nan), (100, math.inf), (200, 16.0)) == [False, False, True]
