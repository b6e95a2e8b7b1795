"""One page with the run's results and the loss of each layer: a single file, no network.

The judgement and its next steps are HTML. Pictures and table are drawn from the page's JSON when it is opened, rows a
screenful at a time, a layer's own view when it is opened: 5,000 layers are as quick as 50.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lightning_obs.errors import refuse
from lightning_obs.files.write import whole_file, write_text
from lightning_obs.numerics.histogram import linear_bins
from lightning_obs.report.cause import layer_losses, total_loss
from lightning_obs.report.earlier_run import LISTED, compared_with, read_earlier
from lightning_obs.report.facts import POOR_SQNR, Report, facts
from lightning_obs.report.judgement import Judgement, judge
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.numbers import finite, human_size
from lightning_obs.report.provenance import provenance
from lightning_obs.report.runs import compared_runs
from lightning_obs.report.summary import comparison
from lightning_obs.schemes.config import as_names

#: bars in the page's picture of a layer's input values
BINS = 64
_TEMPLATES = Path(__file__).parent / "templates"
#: facts that the closing summary alone shows, and facts with another name on the page
_LEFT_OUT = ("modules", "observers", "collectives")
_LABELS = {"batches": "calibration batches", "calibration": "calibration time"}


class Column(NamedTuple):
    """A column of the page's table; :data:`COLUMNS` has all of them, in the order of the table."""

    key: str  # of a layer's row (:func:`layer_row`): ``input_bits`` is ``LayerError.input.bits``
    title: str  # above it
    digits: int | None = None  # behind the point; None: four significant ones, or a text
    is_wide: bool = False  # left out on a phone
    smallest_first: bool = True  # how a first click sorts
    #: in a column that a user adds (CONTRIBUTING.md), what computes the cell from a layer's error, for the page, the
    #: CSV and the JSON; None, as in all columns below: rows have the key already
    value: Callable[[LayerError], Any] | None = None
    description: str = ""  # sentences in the legend under the table


COLUMNS = [
    Column("name", "layer"),
    Column(
        "sqnr",
        "SQNR [dB]",
        1,
        description="SQNR is the ratio of signal to quantization noise in a layer's output: about 6 dB per bit.",
    ),
    Column(
        "clipped",
        "clipped [%]",
        2,
        is_wide=True,
        smallest_first=False,
        description="Clipped is the share of input values beyond the chosen range.",
    ),
    Column("sqnr_change", "since the run before [dB]", 1),
    Column("weight_sqnr", "weight [dB]", 1, is_wide=True),
    Column("weight_bits", "weight [bit]", 2, is_wide=True),
    Column("input_sqnr", "input [dB]", 1, is_wide=True),
    Column("share", "share [%]", 1, smallest_first=False),
    Column("sensitivity", "sensitivity", smallest_first=False),
    Column("choice", "choice"),
]
#: Keys of a row that are left out of ``layers.csv``. Four are lists or dicts, which a cell cannot hold: the input's
#: ``histogram``, the ranges of output ``channels``, both ends of the input's ``grid``, and the layers that the output
#: ``feeds``. ``at``, the layer's place among the calibrated modules, only sorts the pictures of the page.
_ONLY_PAGE = ("histogram", "channels", "at", "grid", "feeds")


def write_report(folder: str | os.PathLike[str], report: Report, judgement: Judgement | None = None) -> Path:
    """Write ``report.html``, ``report.json`` and, if the report has layers, ``layers.csv``, each whole or not at all.

    The ``layers.csv`` of an earlier report is deleted if this one has no layers. Called by the callbacks' ``report()``
    and by the command line at the end of a run or of a comparison.

    Args:
        folder: made if it is not there.
        report: the facts.
        judgement: of the report, with commands; None: :func:`~lightning_obs.report.judgement.judge` makes it.

    Returns:
        The path of the page.

    Raises:
        CalibrationError: a point of the frontier without name, bits per weight or loss; the folder cannot be written.
    """
    keys = {"name", "bits_per_weight", "loss"}
    incomplete = []
    for number, point in enumerate(report.decisions.frontier):
        if not keys <= point.keys():
            incomplete.append(f"point {number}")
    refuse(incomplete, "a point of the frontier lacks something", expected="name, bits_per_weight, loss")
    folder = Path(folder)
    if judgement is None:
        judgement = judge(report, folder)
    data = _data(report, judgement)
    page = _page(report, data)
    write_text(folder / "report.html", page)
    write_text(folder / "report.json", as_json(data))
    table = folder / "layers.csv"
    if data["layers"]:
        rows = []
        for row in data["layers"]:
            csv_row = {key: value for key, value in row.items() if key not in _ONLY_PAGE}
            rows.append(csv_row)
        write_csv(table, rows)
    else:
        table.unlink(missing_ok=True)
    return folder / "report.html"


def as_json(data: Any) -> str:
    """JSON as the standard has it, which knows no NaN and no infinity: these are null.

    Called for ``report.json``, and by the command line for ``plan.json``.
    """
    return json.dumps(finite(data), indent=1, allow_nan=False) + "\n"


def layer_row(error: LayerError) -> dict[str, Any]:
    """One layer, flat: ``{"name": ..., "sqnr": ..., "weight_sqnr": ..., "input_bits": ...}``; None is not known.

    The page calls it for the rows of its table and ``layers.csv``, a callback for the table that it gives to loggers.
    """
    row: dict[str, Any] = {"name": error.name, "sqnr": error.sqnr, "clipped": error.clipped, "feeds": error.feeds}
    for base_name in ("weight", "input", "output"):
        tensor_error = getattr(error, base_name)
        if tensor_error is not None:
            for key, value in asdict(tensor_error).items():
                row[f"{base_name}_{key}"] = value
    for column in COLUMNS:
        if column.value is not None:
            row[column.key] = column.value(error)
    return {key: finite(value) for key, value in row.items()}


def write_csv(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows under the union of their keys, in the order in which these first appear.

    Called for the report's ``layers.csv``, and by the callbacks for a table in the folder of Lightning's ``CSVLogger``.
    """
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(row)
    with (
        whole_file(path) as partial,
        partial.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        for row in rows:
            cells = {key: _csv_cell(value) for key, value in row.items()}
            writer.writerow(cells)


def _csv_cell(value: Any) -> Any:
    """A value in a cell; a text that a spreadsheet would compute as a formula begins with a quote."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value


def _data(report: Report, judgement: Judgement) -> dict[str, Any]:
    """All that the page shows as numbers, strings, lists and dicts: the content of ``report.json``.

    ``ignore`` has the names that a later run can leave out, too: those of this run, and its poor layers.
    """
    ignored = [] if report.options is None else report.options.config.ignore or []
    data: dict[str, Any] = {
        "ignore": list(dict.fromkeys([*ignored, *report.poor_layers])),
        **report.row,
        **report.extra,
    }
    data["title"] = report.title
    data["kinds"] = report.written.kinds
    data["metrics"] = report.quality.metrics
    data["curves"] = report.quality.curves
    data["sensitivity_unit"] = report.decisions.sensitivity_unit
    data["frontier"] = report.decisions.frontier
    data["scores"] = report.decisions.scores
    data["scored"] = report.decisions.scored
    data["judgement"] = asdict(judgement)
    data["judgement"]["numbers"] = [number._asdict() for number in judgement.numbers]
    data["sizes"] = report.written.sizes
    data["provenance"] = {**provenance(report.options, report.result), **report.provenance}
    data["summary"] = _summary(report, judgement)
    data["lines"] = as_names(report.lines)  # a list, also of a string, which is one line
    data["engines"] = {}
    if report.result is not None:
        for name, verdict in report.result.plan.engines.items():
            data["engines"][name] = asdict(verdict)
    data["layers"] = list(_layers(report))
    data["runs"] = compared_runs(report.other_runs.runs)
    data["drift"] = None
    if report.drift is not None:
        data["drift"] = {"steps": report.drift.steps, "drifts": report.drift.drifts}
    data["earlier"] = None
    if report.other_runs.against is not None:
        data["earlier"] = compared_with(read_earlier(report.other_runs.against), data, report.quality.kind_of)
        _add_changes(data)
    return data


def _add_changes(data: dict[str, Any]) -> None:
    """Add the change of each layer's SQNR since the earlier run [dB] to its row."""
    rows = {row["name"]: row for row in data["layers"]}
    earlier = data["earlier"]
    for change in [*earlier["better"], *earlier["worse"]]:
        rows[change["name"]]["sqnr_change"] = change["change"]


def _summary(report: Report, judgement: Judgement) -> list[dict[str, str]]:
    """The facts that the page lists below the judgement, but for the numbers that the judgement shows.

    Returns:
        ``[{"label": ..., "value": ...}]``, for the page and ``report.json``.
    """
    texts: dict[str, str] = {}
    if report.result is not None:
        texts |= report.result.facts()
    texts |= facts(report, "\N{RIGHTWARDS ARROW}")
    omitted = set(_LEFT_OUT)
    for number in judgement.numbers:
        omitted.add(number.label)
    entries: list[dict[str, str]] = []
    for name, text in texts.items():
        if name not in omitted:
            unbroken = text.replace(" %)", "\N{NO-BREAK SPACE}%)")  # a number stays with its percent sign
            label = _LABELS.get(name, name)
            entries.append({"label": label, "value": unbroken})
    return entries


@cache
def _environment() -> Environment:
    """The templates, which Jinja compiles when the first page of a process is written. Called by :func:`_page`."""
    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined)
    environment.filters["parts"] = _parts
    return environment


def _page(report: Report, data: Mapping[str, Any]) -> str:
    """The text of ``report.html``: the template with the data as HTML, and once more as JSON for the page's script.

    The JSON, ``shown``, is the data with rounded numbers and with further values for the script: the table's columns,
    the SQNR below which a layer is poor, the measure by which layers are compared (``lost``: "noise" or "estimated
    loss"), the names of the modules in each fused set, and the bytes of the quantized model. Called by
    :func:`write_report`.
    """
    titles = {"share": f"share of the {report.lost} [%]"}
    unit = report.decisions.sensitivity_unit
    if unit:
        titles["sensitivity"] = f"sensitivity [{unit}]"
    columns = []
    for column in COLUMNS:
        title = titles.get(column.key, column.title)
        columns.append((column.key, title, column.digits, column.is_wide, column.smallest_first))
    legend = " ".join(column.description for column in COLUMNS if column.description)
    # The page needs no more digits than it shows.
    shown = finite(data, digits=4)
    shown["shown"] = columns
    shown["poor"] = POOR_SQNR
    shown["lost"] = report.lost
    shown["fused"] = [] if report.result is None else report.result.plan.fused
    shown["size"] = None
    if report.written.sizes is not None:
        _, shown["size"] = report.written.sizes  # bytes before and after quantization
    template = _environment().get_template("report.html.j2")
    return template.render(
        data=data,
        report=report,
        shown=shown,
        legend=legend,
        comparison=comparison,
        human_size=human_size,
        listed=LISTED,
    )


def _parts(text: str) -> list[str]:
    """A text of names and paths, cut where a line may end: behind a dot, a slash or an equals sign, before a letter.

    It is not cut behind a digit and a dot: an index and what it counts stay together (``0.mlp``). The page's template
    calls it, as the filter ``parts``.

    >>> _parts("model.layers/0 at 1.5 dB"), _parts("layers.0.mlp")
    (['model.', 'layers/0 at 1.5 dB'], ['layers.0.mlp'])
    """
    return re.split(r"(?<=[./=])(?<![0-9][.])(?=[^\W\d])", text)


def _layers(report: Report) -> Iterable[dict[str, Any]]:
    """A row of the page's data for each layer that has an error, facts, or numbers of a decision.

    A row is :func:`layer_row` with the layer's facts, its loss, a histogram of its input, ``at``, its place among the
    calibrated modules, and ``chosen_low`` and ``chosen_high``, the range that its observer chose for its input; each
    only where it is known. Called by :func:`_data`.
    """
    rows: dict[str, dict[str, Any]] = {}
    for error in report.errors:
        rows[error.name] = layer_row(error)
    decisions = report.decisions
    for name in [*report.layers, *decisions.sensitivity, *decisions.losses, *decisions.choices]:
        rows.setdefault(name, {"name": name})
    _add_losses(rows, report)
    for name, layer in report.layers.items():
        rows[name] |= asdict(layer)
    for name, support in report.counts.items():
        if name in rows and len(support.values):
            low, high, numbers = linear_bins(support, BINS)
            rows[name]["histogram"] = {"low": low, "high": high, "counts": numbers}
    if report.result is not None:
        for number, name in enumerate(report.result.modules):
            if name in rows:
                rows[name]["at"] = number
        for name, (low, high) in report.result.chosen_input_ranges.items():
            if name in rows:
                rows[name]["chosen_low"] = low
                rows[name]["chosen_high"] = high
    return rows.values()


def _add_losses(rows: Mapping[str, dict[str, Any]], report: Report) -> None:
    """Add each layer's share of the loss, and the numbers of a plan of mixed schemes, to its row.

    Called by :func:`_layers`, which has made a row for each layer that is named here.
    """
    losses = layer_losses(report)
    total = total_loss(losses)
    if total:
        for layer in losses:
            row = rows[layer.name]
            row["share"] = 100 * layer.loss / total
            row["by_input"] = layer.input
    values_by_key = {
        "sensitivity": report.decisions.sensitivity,
        "loss": report.decisions.losses,
        "choice": report.decisions.choices,
    }
    for key, values in values_by_key.items():
        for name, value in values.items():
            rows[name][key] = value
