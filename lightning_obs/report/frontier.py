"""The frontier of a budget, bits per weight against estimated loss: as rows, as a table, as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_obs.choice.mixed_precision import MixedPlan


def frontier_rows(plans: Iterable[MixedPlan], uniform: Mapping[str, MixedPlan] | None = None) -> list[dict[str, Any]]:
    """The frontier as data: bits per weight, bytes, loss, and modules by scheme; uniform schemes have a name."""
    named = [*(("", plan) for plan in plans), *(uniform or {}).items()]
    return [
        {"name": name, "bits_per_weight": p.bits, "bytes": p.size, "loss": p.loss, "modules": p.counts}
        for name, p in named
    ]


def frontier_table(plans: Sequence[MixedPlan], *, title: str = "frontier") -> Table:
    """The frontier, one row each."""
    names = list(dict.fromkeys(name for plan in plans for name in plan.counts))
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for column in ("bits per weight", "size [MB]", "estimated loss", *(f"{name} modules" for name in names)):
        table.add_column(column, justify="right")
    for plan in plans:
        counts = (str(plan.counts.get(name, 0)) for name in names)
        table.add_row(f"{plan.bits:.3f}", f"{plan.size / 1e6:.1f}", f"{plan.loss:.4g}", *counts)
    return table


def plot_frontier(
    plans: Sequence[MixedPlan], path: str | Path, *, uniform: Mapping[str, MixedPlan] | None = None
) -> Path:
    """Draw estimated loss against bits per weight into a file, uniform schemes beside the mixed plans, by name."""
    from lightning_obs.report.pictures import frontier_figure  # matplotlib takes a second to import

    frontier_figure(frontier_rows(plans, uniform)).savefig(path)
    return Path(path)
