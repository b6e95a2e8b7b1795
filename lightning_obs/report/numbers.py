"""Numbers as a person reads them; the one number that judges a model, before quantization and after."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def number(value: float, digits: int = 4) -> str:
    """A value with this many significant digits; reports and printed lines show metrics by it.

    >>> number(14.8), number(0.91304), number(1234.4), number(14.8, 5)
    ('14.80', '0.9130', '1234', '14.800')
    """
    return f"{value:#.{digits}g}".rstrip(".")


def relative_change(before: float, after: float) -> float | None:
    """The change as a share of the size of ``before``; None if ``before`` is zero. Texts of metrics show it in percent.

    >>> relative_change(2.0, 3.0), relative_change(-1.0, -0.9), relative_change(0.0, 1.0)
    (0.5, 0.09999999999999998, None)
    """
    if before:
        change = after - before
        return change / abs(before)
    return None


def quality_of(row: Mapping[str, Any]) -> tuple[str | None, float | None, float | None]:
    """The metric by which a run is judged: its name, its values before and after; None where not known.

    Called for each row of a comparison of runs, printed or on the page.

    >>> quality_of({"run": "a", "metric": "perplexity", "perplexity": [14.8, 15.2]})
    ('perplexity', 14.8, 15.2)
    """
    name = row.get("metric")
    before, after = (name and row.get(name)) or (None, None)
    return name, before, after


def moved_texts(row: Mapping[str, Any]) -> dict[str, str]:
    """The distance of a run's predictions from the original's as texts by title, as far as the run's row has it.

    Called for the facts of a run, and for each row of a comparison.

    >>> moved_texts({"run": "a", "divergence": 0.03125, "agreement": 0.93})
    {'KL [nats]': '0.03125', 'same top-1 [%]': '93.00'}
    """
    texts = {}
    divergence = row.get("divergence")
    if divergence is not None:
        texts["KL [nats]"] = number(divergence)
    agreement = row.get("agreement")
    if agreement is not None:
        texts["same top-1 [%]"] = f"{100 * agreement:.2f}"
    return texts


def human_size(size: float) -> str:
    """Bytes for a person to read, with three digits or more; for the sizes on the page and in printed lines.

    >>> human_size(538 * 2**20), human_size(1.29 * 2**20), human_size(1000), human_size(12.5 * 2**30)
    ('538 MiB', '1.29 MiB', '1000 B', '12.50 GiB')
    """
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1024:
            # three significant digits, counted after rounding
            digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
            return f"{size:.{digits}f} {unit}"
    return f"{size / 1024:.2f} GiB"


def percent(change: float) -> str:
    """A relative change in percent with its sign; a change that rounds to zero has none. For the texts of metrics.

    >>> percent(0.0264), percent(-0.0004)
    ('+2.6 %', '0.0 %')
    """
    text = f"{100 * change:+.1f}"
    return "0.0 %" if float(text) == 0 else f"{text} %"


def folder_size(folder: str | os.PathLike[str]) -> int:
    """Bytes of all files below a folder.

    The command line's tasks call it for the size of a checkpoint or of adapters.
    """
    size = 0
    for path in Path(folder).rglob("*"):
        if path.is_file():
            size += path.stat().st_size
    return size


def finite(value: Any, digits: int = 17) -> Any:
    """A value whose floats have this many significant digits, with None for NaN and infinity, also in dicts and lists.

    The page calls it for all that it writes as JSON: ``report.json``, and with 4 digits the data inside the page.

    >>> finite({"loss": [1.0, math.nan]})
    {'loss': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {key: finite(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item, digits) for item in value]
    if isinstance(value, float):
        if math.isfinite(value):
            return float(f"{value:.{digits}g}")
        return None
    return value
