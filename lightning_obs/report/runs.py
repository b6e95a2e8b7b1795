"""Finished runs side by side: which of them are the best of their size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_obs.report.logged_metrics import metric_kind
from lightning_obs.report.numbers import quality_of

#: the entries of a row that the command line reads from the ``report.json`` of a run (``app/tasks/compare.py``); None
#: in a row without them
_UNKNOWN = {"grade": None, "headline": None, "original_size": None, "page": None}


def compared_runs(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a comparison with the entries that the page draws; called when a page with other runs is written.

    Args:
        runs: rows as :func:`~lightning_obs.report.summary.comparison_table` takes them. The command line's comparison
            adds ``grade``, ``headline``, ``original_size`` [bytes] and ``page``, a path, from the ``report.json`` of
            each run (``app/tasks/compare.py``). A row may have ``higher_is_better``, the direction of its metric; else
            the direction follows from the metric's name.

    Returns:
        Each row with ``quality``, its metric with the values before and after; with None for those four entries if it
        lacks them; and with ``is_best``: no run measured by the same metric is at most as large and at least as good,
        and better in one of the two.
    """
    rows = []
    for run in runs:
        rows.append({**_UNKNOWN, **run, "quality": quality_of(run)})
    for row in rows:
        row["is_best"] = _is_best(row, rows)
    return rows


def _is_best(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no other run is better than this one in size or quality, and not worse in the other.

    False for a run without a size, without a finite value of its metric, or of whose metric nobody knows whether more
    is better. :func:`compared_runs` calls it for each of its rows.
    """
    metric, _, value = row["quality"]
    size = row.get("size")
    kind = metric_kind(metric or "", row.get("higher_is_better"))
    if value is None or not math.isfinite(value) or not size or kind == "unknown":
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
