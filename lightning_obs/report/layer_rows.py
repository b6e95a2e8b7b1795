"""Layer errors as plain rows: for CSV files, loggers, JSON and the page."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.files.write import whole_file
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.numbers import finite

_TENSORS = ("weight", "input", "output")


def layer_row(error: LayerError) -> dict[str, Any]:
    """One layer, flat: ``{"name": ..., "sqnr": ..., "weight_sqnr": ..., "input_bits": ...}``; None is not known."""
    whole = {key: getattr(error, key) for key in ("name", "sqnr", "clipped", "low", "high")}
    parts = {kind: getattr(error, kind) for kind in _TENSORS}
    flat = {f"{kind}_{key}": value for kind, part in parts.items() if part for key, value in asdict(part).items()}
    return {key: finite(value) for key, value in (whole | flat).items()}


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
