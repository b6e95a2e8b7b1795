"""The one number that judges a model, as reports and comparisons show it, before quantization and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def number(value: float, digits: int = 4) -> str:
    """A value with so many significant digits.

    >>> number(14.8), number(0.91304), number(1234.4), number(14.8, 5)
    ('14.80', '0.9130', '1234', '14.800')
    """
    return f"{value:#.{digits}g}".rstrip(".")


def precise(value: float) -> str:
    """A value to be compared with others: five significant digits."""
    return number(value, 5)


def change(before: float, after: float, arrow: str = "->") -> str:
    """From one value to another, with the difference in percent.

    >>> change(14.8, 15.19)
    '14.80 -> 15.19 (+2.6 %)'
    """
    percent = f" ({100 * (after / before - 1):+.1f} %)" if before else ""
    return f"{number(before)} {arrow} {number(after)}{percent}"


def quality_row(name: str, before: float | None, after: float | None) -> dict[str, Any]:
    """What a run's ``report.json`` holds of it.

    >>> quality_row("accuracy", 0.91, 0.9)
    {'metric': 'accuracy', 'accuracy': (0.91, 0.9)}
    """
    return {"metric": name, name: (before, after)}


def quality_of(row: Mapping[str, Any]) -> tuple[str | None, float | None, float | None]:
    """Name, before, after; None for what a row does not have. Rows of earlier versions have a perplexity only.

    >>> quality_of({"run": "a", "perplexity": [14.8, 15.2]})
    ('perplexity', 14.8, 15.2)
    """
    name = row.get("metric") or ("perplexity" if "perplexity" in row else None)
    before, after = (name and row.get(name)) or (None, None)
    return name, before, after
