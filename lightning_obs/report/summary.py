"""The closing summary: results, their quality, the files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.choice.mixed_precision import MixedPlan
from lightning_obs.errors import name_list, printable
from lightning_obs.report.facts import POOR_SQNR, Report, facts
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.metrics import TensorError
from lightning_obs.report.numbers import human_size, moved_texts, number, quality_of, relative_change
from lightning_obs.schemes.config import as_names

#: characters of a line that no table needs; rich measures a table only within a width
_WIDEST = 1000
#: poor layers that are named: more than in other lines, because they are what to look at next
_POOR_SHOWN = 30


def summary(report: Report, worst: int = 5) -> RenderableType:
    """The closing report of a calibration, with as many of its worst layers as ``worst`` says.

    First the scheme and the facts of the calibration on one line (modules, observers, batches, seconds), then the table
    of the worst layers (``report.errors`` has the worst first), then :func:`_lines`.

    ``publish_report`` of the command line prints it at the end of a run (:func:`print_report`).
    """
    result = report.result
    assert result is not None
    parts: list[RenderableType] = [_text(f"{result.scheme} · {result.line(' · ')}", style="bold")]
    if report.errors:
        parts.append(layer_table(report.errors[:worst]))
    for line in _lines(report, result):
        parts.append(_text(line))
    return Group(*parts)


def _lines(report: Report, result: CalibrationResult) -> list[str]:
    """The lines below the table of layers, for :func:`summary`.

    The poor layers; the modules without data; the experts' tokens; the modules that borrowed the range of others; the
    facts of the run; and the lines of ``report.lines``, which may be a single string: one line.
    """
    lines: list[str] = []
    poor = report.poor_layers
    if poor:
        names = name_list(poor, _POOR_SHOWN)
        lines.append(f"{len(poor)} layers below {POOR_SQNR:.0f} dB (and fused with them) cost most: {names}")
    if result.skipped:
        lines.append(f"left in full precision, no data reached them: {name_list(result.skipped)}")
    texts = facts(report)
    experts = texts.pop("experts", "")
    if experts:
        lines.append(experts)
    if result.fallback:
        lines.append(f"with the activations' range of their siblings: {name_list(result.fallback)}")
    if texts:
        named_texts = [f"{name} {text}" for name, text in texts.items()]
        lines.append("  ".join(named_texts))
    return [*lines, *as_names(report.lines)]


def layer_table(errors: Sequence[LayerError]) -> Table:
    """Layers with their error, one row each.

    The columns are name, SQNR, clipped share and input range. If no output was measured, but errors of weights are
    known, these columns may be empty; so the columns are then the name, and of all others those that have a value. Rows
    without any value are left out; if no row has a value, all are shown.

    A callback prints it after a calibration (``Results.show_calibration``), and :func:`summary` holds it.
    """
    titles = ("worst layers", "SQNR [dB]", "clipped [%]", "input range", "weight SQNR [dB]", "bits in use")
    all_rows = [_layer_cells(error) for error in errors]
    rows = [cells for cells in all_rows if any(cells[1:])] or all_rows
    has_outputs = any(error.output is not None for error in errors)
    has_weights = any(error.weight is not None for error in errors)
    columns = [0, 1, 2, 3]
    if has_weights and not has_outputs:
        columns = [0]
        for column in range(1, len(titles)):
            cells = [row[column] for row in rows]
            if any(cells):
                columns.append(column)
    shown_titles = [titles[column] for column in columns]
    shown_rows = []
    for row in rows:
        cells = [row[column] for column in columns]
        shown_rows.append(cells)
    return _table(shown_titles, shown_rows)


def _layer_cells(error: LayerError) -> list[str]:
    """A cell for each title of :func:`layer_table`; empty where a number is not known."""
    input_range = ""
    if error.input is not None and error.input.low is not None:
        input_range = f"[{error.input.low:.4g}, {error.input.high:.4g}]"
    weight = TensorError() if error.weight is None else error.weight
    return [
        error.name,
        _number_or_empty(error.sqnr, ".1f"),
        _number_or_empty(error.clipped, ".2f"),
        input_range,
        _number_or_empty(weight.sqnr, ".1f"),
        _number_or_empty(weight.bits, ".2f"),
    ]


def comparison(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Titles and texts of several runs side by side, for the page and for :func:`comparison_table`.

    Each run has its name, the metric and its change, how far the predictions are from the original's where a run knows
    that, size, seconds, and the worst layer.
    """
    metric_names: set[str] = set()
    moved_titles: dict[str, None] = {}
    for row in rows:
        metric_name, _, _ = quality_of(row)
        if metric_name is not None:
            metric_names.add(metric_name)
        moved_titles |= dict.fromkeys(moved_texts(row))
    cells = []
    for row in rows:
        moved = moved_texts(row)
        size = row.get("size")
        row_cells = [str(row.get("run", ""))]
        row_cells += _quality_cells(row, named=len(metric_names) > 1)
        for title in moved_titles:
            row_cells.append(moved.get(title, ""))
        row_cells.append("" if size is None else human_size(size))
        row_cells.append(_number_or_empty(row.get("seconds"), ".1f"))
        row_cells.append(_number_or_empty(row.get("worst_sqnr"), ".1f"))
        cells.append(row_cells)
    metric_title = str(*metric_names) if len(metric_names) == 1 else "metric"
    titles = ["run", metric_title, "change [%]", *moved_titles, "size", "calibration [s]", "worst SQNR [dB]"]
    return titles, cells


def _quality_cells(row: Mapping[str, Any], named: bool) -> list[str]:
    """The metric of a run, with its name where runs have different ones, and its change in percent."""
    name, before, after = quality_of(row)
    if after is None:
        return ["", ""]
    metric = number(after, 5)
    if named:
        metric = f"{name} {metric}"
    change = None if before is None else relative_change(before, after)
    return [metric, "" if change is None else f"{100 * change:+.2f}"]


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Several runs side by side.

    The command line prints it where it compares runs.

    Args:
        rows: a dict for each run: ``run``, its name; ``metric``, the name of its metric, and under that name the values
            before and after; ``size`` [bytes], ``seconds``, ``worst_sqnr``, ``divergence`` and ``agreement``, if known.
    """
    return _table(*comparison(rows), title="comparison", header_style="bold")


def frontier_table(plans: Sequence[MixedPlan], *, title: str = "frontier") -> Table:
    """Plans of mixed schemes, one row each; printed by the command line's search for a plan."""
    scheme_names: dict[str, None] = {}
    for plan in plans:
        scheme_names |= dict.fromkeys(plan.counts)
    titles = ["bits per weight", "size [MB]", "estimated loss"]
    for name in scheme_names:
        titles.append(f"{name} modules")
    rows = []
    for plan in plans:
        row = [f"{plan.bits:.3f}", f"{plan.size / 1e6:.1f}", f"{plan.loss:.4g}"]
        for name in scheme_names:
            row.append(str(plan.counts.get(name, 0)))
        rows.append(row)
    return _table(titles, rows, names=0, title=title)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1, **style: Any) -> Table:
    """A table whose first ``names`` columns hold names, the others numbers. All of it is text, never markup."""
    table = Table(title_justify="left", box=None, pad_edge=False, **{"header_style": "dim", **style})
    for number_of_column, title in enumerate(titles):
        justify: Any = "left" if number_of_column < names else "right"
        table.add_column(_text(title), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def _text(text: str, style: str = "") -> Text:
    """A text that cannot steer the terminal, no matter which names are in it."""
    return Text(printable(text), style)


def _number_or_empty(value: float | None, form: str) -> str:
    """A number formatted by ``form``; empty for None and NaN."""
    if value is None or math.isnan(value):
        return ""
    return format(value, form)


def print_report(renderable: RenderableType) -> None:
    """Print to the terminal, at a width that cuts no column of a table, wherever output goes.

    Called for closing reports, comparisons of runs, and the tables of tasks that choose.

    Args:
        renderable: what rich can print: a table, or a group of texts and tables.
    """
    terminal = Console()
    wide_options = terminal.options.update(width=_WIDEST)
    whole_width = Measurement.get(terminal, wide_options, renderable).maximum
    width = max(terminal.width, whole_width)
    console = Console(width=width, highlight=False, soft_wrap=True)
    console.print(renderable)
