"""Layer errors as plain rows: for CSV files, loggers, JSON and the page."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple

from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.files.write import whole_file
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.numbers import finite


class Column(NamedTuple):
    """A column of the page's table.

    Attributes:
        key: of a layer's row.
        title: above it.
        digits: behind the point; None: four significant ones, or a text.
        is_wide: left out on a phone.
        smallest_first: how a first click sorts.
        value: of a layer, for a key that the row does not have otherwise; CSV and JSON get it too.
    """

    key: str
    title: str
    digits: int | None = None
    is_wide: bool = False
    smallest_first: bool = True
    value: Callable[[LayerError], Any] | None = None


COLUMNS = [
    Column("name", "layer"),
    Column("sqnr", "SQNR [dB]", 1),
    Column("clipped", "clipped [%]", 2, is_wide=True, smallest_first=False),
    Column("weight_sqnr", "weight [dB]", 1, is_wide=True),
    Column("weight_bits", "weight [bit]", 2, is_wide=True),
    Column("input_sqnr", "input [dB]", 1, is_wide=True),
    Column("sensitivity", "sensitivity", smallest_first=False),
    Column("choice", "choice"),
]


def layer_row(error: LayerError) -> dict[str, Any]:
    """One layer, flat: ``{"name": ..., "sqnr": ..., "weight_sqnr": ..., "input_bits": ...}``; None is not known."""
    whole = {key: getattr(error, key) for key in ("name", "sqnr", "clipped", "low", "high")}
    parts = {kind: getattr(error, kind) for kind in ("weight", "input", "output")}
    flat = {f"{kind}_{key}": value for kind, part in parts.items() if part for key, value in asdict(part).items()}
    own = {column.key: column.value(error) for column in COLUMNS if column.value is not None}
    return {key: finite(value) for key, value in (whole | flat | own).items()}


def write_csv(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows under the union of their keys, in the order in which these first appear.

    A text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with (
        whole_file(path) as partial,
        partial.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({key: _no_formula(value) for key, value in row.items()} for row in rows)


def _no_formula(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in {*"=+-@\t\r"} else value


def aggregates(result: CalibrationResult | None, errors: Sequence[LayerError]) -> dict[str, float]:
    """What a logger plots over time: the least and the median SQNR [dB], the largest clipped share [%] of an input,
    tokens of the least and of the median expert, and how long calibration took [s].

    >>> aggregates(None, [LayerError("a", 20.0, None, 0.0, 1.0), LayerError("b", 30.0, 0.5, 0.0, 1.0)])
    {'sqnr_min': 20.0, 'sqnr_median': 25.0, 'clipped_max': 0.5}
    """
    found: dict[str, float] = {}
    ratios = [error.sqnr for error in errors if math.isfinite(error.sqnr)]
    if ratios:
        found |= {"sqnr_min": min(ratios), "sqnr_median": median(ratios)}
    clipped = [error.clipped for error in errors if error.clipped is not None]
    if clipped:
        found["clipped_max"] = max(clipped)
    if result is None:
        return found
    tokens = [count for layer in result.expert_tokens.values() for count in layer]
    if any(tokens):
        found |= {"expert_tokens_min": float(min(tokens)), "expert_tokens_median": float(median(tokens))}
    return found | {"seconds": result.seconds}
