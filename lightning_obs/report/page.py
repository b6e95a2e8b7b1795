"""One page that says what was done, how well, and which layer loses what: a single file, no network.

The page holds its data as JSON and draws the table from it when it is opened, a screenful of rows at a time: 5,000
layers are as quick as 50. Pictures of the whole run are matplotlib's; the histogram of a layer is drawn when it is
opened, from 64 numbers. The same data are written beside it, as ``report.json`` and ``layers.csv``.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lightning_obs.errors import refuse
from lightning_obs.files.write import whole_file, write_text
from lightning_obs.numerics.histogram import linear_bins
from lightning_obs.report.facts import POOR_SQNR, Report, facts
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.numbers import finite, human_size, moved_texts, number, quality_of
from lightning_obs.report.pictures import as_svg, comparison_figure, drift_figure, frontier_figure
from lightning_obs.schemes.config import as_names

BINS = 64
_TEMPLATES = Path(__file__).parent / "templates"
#: facts that the closing summary alone shows
_LEFT_OUT = ("observers", "collectives")


class Column(NamedTuple):
    """A column of the page's table."""

    key: str  # of a layer's row
    title: str  # above it
    digits: int | None = None  # behind the point; None: four significant ones, or a text
    is_wide: bool = False  # left out on a phone
    smallest_first: bool = True  # how a first click sorts
    value: Callable[[LayerError], Any] | None = None  # for a key that no row has otherwise; CSV and JSON get it too


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


def write_report(folder: str | os.PathLike[str], report: Report) -> Path:
    """Write ``report.html``, ``report.json`` and ``layers.csv``, each whole or not at all.

    Returns:
        The path of the page.

    Raises:
        CalibrationError: a point of the frontier without name, bits per weight or loss; the folder cannot be written.
    """
    keys = ("name", "bits_per_weight", "loss")
    lacking = [f"point {at}" for at, point in enumerate(report.frontier) if not all(key in point for key in keys)]
    refuse(lacking, "a point of the frontier lacks something", expected=", ".join(keys))
    folder, data = Path(folder), _data(report)
    write_text(folder / "report.html", _page(report, data))
    write_text(folder / "report.json", as_json(data))
    if data["layers"]:
        rows = [{k: v for k, v in row.items() if k != "histogram"} for row in data["layers"]]
        write_csv(folder / "layers.csv", rows)
    return folder / "report.html"


def as_json(data: Any) -> str:
    """JSON as the standard has it, which knows no NaN and no infinity: these are null."""
    return json.dumps(finite(data), indent=1, allow_nan=False) + "\n"


def layer_row(error: LayerError) -> dict[str, Any]:
    """One layer, flat: ``{"name": ..., "sqnr": ..., "weight_sqnr": ..., "input_bits": ...}``; None is not known."""
    whole = {key: getattr(error, key) for key in ("name", "sqnr", "clipped", "low", "high")}
    parts = {kind: getattr(error, kind) for kind in ("weight", "input", "output")}
    flat = {f"{kind}_{key}": value for kind, part in parts.items() if part for key, value in asdict(part).items()}
    own = {column.key: column.value(error) for column in COLUMNS if column.value is not None}
    return {key: finite(value) for key, value in (whole | flat | own).items()}


def write_csv(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows under the union of their keys, in the order in which these first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def text(value: Any) -> Any:  # a spreadsheet would take it for a formula
        return f"'{value}" if isinstance(value, str) and value[:1] in {*"=+-@\t\r"} else value

    with (
        whole_file(path) as partial,
        partial.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({key: text(value) for key, value in row.items()} for row in rows)


def _data(report: Report) -> dict[str, Any]:
    """All that the page shows as numbers, strings, lists and dicts."""
    known = {k: v for k, v in facts(report, "\N{RIGHTWARDS ARROW}").items() if k not in _LEFT_OUT}
    return {
        **report.extra,
        "title": report.title,
        # a percentage is not torn from its sign
        "summary": [{"label": k, "value": v.replace(" %)", "\N{NO-BREAK SPACE}%)")} for k, v in known.items()],
        "lines": as_names(report.lines),
        **({} if report.moved is None else asdict(report.moved)),
        "metrics": {name: list(pair) for name, pair in report.metrics.items()},
        "sensitivity_unit": report.sensitivity_unit,
        "layers": list(_layers(report)),
        "frontier": [dict(point) for point in report.frontier],
        "runs": [{**run, "quality": quality_of(run)._asdict(), "moved": moved_texts(run)} for run in report.runs],
        "drift": None if report.drift is None else {"steps": report.drift.steps, "drifts": report.drift.drifts},
    }


def _page(report: Report, data: Mapping[str, Any]) -> str:
    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"human_size": human_size, "number": number}
    pictures = [(title, as_svg(figure, title)) for title, figure in _figures(report)]
    units = {"sensitivity": f" [{report.sensitivity_unit}]"} if report.sensitivity_unit else {}
    columns = [(key, title + units.get(key, ""), *how) for key, title, *how, _ in COLUMNS]
    # The page needs no more digits than it shows.
    shown = {"layers": finite(data["layers"], digits=4), "shown": columns, "poor": POOR_SQNR}
    template = environment.get_template("report.html.j2")
    return template.render(data=data, pictures=pictures, shown=shown, poor=report.poor_layers)


def _layers(report: Report) -> Iterable[dict[str, Any]]:
    chosen = {} if report.result is None else report.result.chosen_input_ranges
    named = {error.name: layer_row(error) for error in report.errors}
    for name in dict.fromkeys([*named, *report.sensitivity, *report.choices]):
        row = named.get(name, {"name": name})
        if name in report.sensitivity:
            row["sensitivity"] = report.sensitivity[name]
        if name in report.choices:
            row["choice"] = report.choices[name]
        if name in chosen:
            row["chosen_low"], row["chosen_high"] = chosen[name]
        if name in report.counts and len(report.counts[name].values):
            low, high, numbers = linear_bins(report.counts[name], BINS)
            row["histogram"] = {"low": low, "high": high, "counts": numbers}
        yield row


def _figures(report: Report) -> Iterable[tuple[str, Any]]:
    points = [point for point in report.frontier if math.isfinite(point["loss"])]
    if points:
        yield "Loss against size", frontier_figure(points)
    if report.drift is not None and len(report.drift.steps) > 1:
        yield "Drift of the scales", drift_figure(report.drift)
    by_metric: dict[str, list[tuple[str, int, float]]] = {}
    for run in report.runs:
        name, _, after = quality_of(run)
        if name is not None and after is not None and math.isfinite(after) and run.get("size"):
            by_metric.setdefault(name, []).append((run["run"], run["size"], after))
    for metric, runs in by_metric.items():
        yield f"Runs: {metric} against size", comparison_figure(runs, metric)
