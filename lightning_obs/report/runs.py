"""Finished runs side by side: which of them are the best of their size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_obs.report.logged_metrics import metric_kind
from lightning_obs.report.numbers import quality_of

#: the entries of a run that come from its own page; None where it has none
_UNKNOWN = {"grade": None, "headline": None, "original_size": None, "page": None}


def compared_runs(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a comparison with the entries that the page draws; called when a page with other runs is written.

    Args:
        runs: rows as :func:`~lightning_obs.report.summary.comparison_table` takes them.

    Returns:
        Each row with ``quality``, its metric with the values before and after, and ``is_best``: no run measured by the
        same metric is at most as large and at least as good, and better in one of the two.
    """
    rows = []
    for run in runs:
        rows.append({**_UNKNOWN, **run, "quality": quality_of(run)})
    for row in rows:
        row["is_best"] = _is_best(row, rows)
    return rows


def _is_best(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no other run is better than this one in size or quality, and not worse in the other."""
    metric, _, value = row["quality"]
    size = row.get("size")
    kind = metric_kind(metric or "", row.get("higher_is_better"))
    if value is None or not size or kind == "unknown":
        return False
    sign = 1.0 if kind == "score" else -1.0
    for other in rows:
        other_metric, _, other_value = other["quality"]
        other_size = other.get("size")
        if other_metric != metric or other_value is None or not other_size:
            continue
        gain = sign * (other_value - value)
        if other_size <= size and gain >= 0 and (other_size < size or gain > 0):
            return False
    return True
