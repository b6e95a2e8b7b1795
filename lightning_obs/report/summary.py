"""The closing summary: results, their quality, the files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lightning_obs.choice.mixed_precision import MixedPlan
from lightning_obs.errors import name_list, printable
from lightning_obs.report.facts import POOR_SQNR, Report, facts
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.numbers import human_size, moved_texts, number, quality_of, relative_change
from lightning_obs.schemes.config import as_names


def summary(report: Report, worst: int = 5) -> RenderableType:
    """The closing report of a calibration with its ``worst`` worst layers, for :func:`print_report`."""
    result = report.result
    assert result is not None
    known = facts(report)
    parts: list[RenderableType] = [_text(f"{result.scheme} · {result.line(' · ')}", style="bold")]
    if report.errors:
        parts.append(layer_table(report.errors[:worst]))
    poor, experts = report.poor_layers, known.pop("experts", "")
    lines = {
        f"{len(poor)} layers below {POOR_SQNR:.0f} dB (and fused with them) cost most: {name_list(poor, 30)}": poor,
        f"left in full precision, no data reached them: {name_list(result.skipped)}": result.skipped,
        experts: experts,
        f"with the activations' range of their siblings: {name_list(result.fallback)}": result.fallback,
        "  ".join(f"{name} {text}" for name, text in known.items()): known,
    }
    shown = [line for line, is_known in lines.items() if is_known]
    return Group(*parts, *map(_text, [*shown, *as_names(report.lines)]))


def layer_table(errors: Sequence[LayerError]) -> Table:
    """Layers with their error, one row each. Columns without values are left out."""
    titles = ("worst layers", "SQNR [dB]", "clipped [%]", "input range", "weight SQNR [dB]", "bits in use")
    rows = []
    for error in errors:
        read, weight = error.input, error.weight
        seen = "" if read is None or read.low is None else f"[{read.low:.4g}, {read.high:.4g}]"
        sqnr, bits = (None, None) if weight is None else (weight.sqnr, weight.bits)
        numbers = [_known(sqnr, ".1f"), _known(bits, ".2f")]
        rows.append([error.name, _known(error.sqnr, ".1f"), _known(error.clipped, ".2f"), seen, *numbers])
    measured = any(error.output is not None for error in errors) or all(error.weight is None for error in errors)
    known = range(4) if measured else [at for at in range(6) if at == 0 or any(row[at] for row in rows)]
    return _table([titles[at] for at in known], [[row[at] for at in known] for row in rows])


def comparison(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Titles and texts of several runs side by side.

    Each has its name, the metric and its change, how far the predictions are from the original's where a run knows
    that, size, seconds, and the worst layer.
    """
    names = {quality_of(row)[0] for row in rows} - {None}
    moved = dict.fromkeys(title for row in rows for title in moved_texts(row))
    cells = []
    for row in rows:
        name, before, after = quality_of(row)
        shown = "" if after is None else number(after, 5)
        metric = f"{name} {shown}" if shown and len(names) > 1 else shown
        share = None if before is None or after is None else relative_change(before, after)
        change = "" if share is None else f"{100 * share:+.2f}"
        size = "" if row.get("size") is None else human_size(row["size"])
        seconds, worst = (_known(row.get(key), ".1f") for key in ("seconds", "worst_sqnr"))
        further = [moved_texts(row).get(title, "") for title in moved]
        cells.append([str(row.get("run", "")), metric, change, *further, size, seconds, worst])
    title = str(*names) if len(names) == 1 else "metric"
    return ["run", title, "change [%]", *moved, "size", "calibration [s]", "worst SQNR [dB]"], cells


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Several runs side by side."""
    return _table(*comparison(rows), title="comparison", header_style="bold")


def frontier_table(plans: Sequence[MixedPlan], *, title: str = "frontier") -> Table:
    """The frontier, one row each."""
    names = list(dict.fromkeys(name for plan in plans for name in plan.counts))
    titles = ["bits per weight", "size [MB]", "estimated loss", *(f"{name} modules" for name in names)]
    rows = [
        [f"{plan.bits:.3f}", f"{plan.size / 1e6:.1f}", f"{plan.loss:.4g}", *(str(plan.counts.get(n, 0)) for n in names)]
        for plan in plans
    ]
    return _table(titles, rows, names=0, title=title)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1, **style: Any) -> Table:
    """A table whose first ``names`` columns hold names, the others numbers. All of it is text, never markup."""
    table = Table(title_justify="left", box=None, pad_edge=False, **{"header_style": "dim", **style})
    for at, title in enumerate(titles):
        table.add_column(_text(title), justify="left" if at < names else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def _text(text: str, style: str = "") -> Text:
    """A text that cannot steer the terminal, no matter which names are in it."""
    return Text(printable(text), style)


def _known(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else format(value, form)


def print_report(report: RenderableType) -> None:
    """Print to the terminal, at a width that cuts no column of a table, wherever output goes."""
    console = Console()
    wanted = Measurement.get(console, console.options.update(width=1000), report).maximum
    Console(width=max(console.width, wanted), highlight=False, soft_wrap=True).print(report)
