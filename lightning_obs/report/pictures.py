"""Pictures of a report, by matplotlib: as figures, and as SVG that takes the page's colours.

Figures are made without pyplot, which keeps every figure of a process and asks for a display.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from markupsafe import escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_obs.choice.mixed_precision import MixedPlan
from lightning_obs.errors import printable
from lightning_obs.report.facts import ScaleDrift

#: what the colours of a figure become in the page, which has a light and a dark form of each
_COLOURS = {"#010101": "var(--text)", "#020202": "var(--muted)", "#030303": "var(--accent)", "#040404": "var(--warn)"}
TEXT, MUTED, ACCENT, WARN = _COLOURS


def layers_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """SQNR [dB] of weights, inputs and outputs over all layers, worst first."""
    fig = Figure(figsize=(9, 3.2), layout="constrained")
    ax = fig.subplots()
    for key, marker in (("weight_sqnr", "."), ("input_sqnr", "x"), ("output_sqnr", "+")):
        at = [(i, row[key]) for i, row in enumerate(rows) if row.get(key) is not None]
        if at:
            ax.plot(*zip(*at, strict=True), marker, label=key.removesuffix("_sqnr"), markersize=5)
    ax.set(xlabel="layer, worst first", ylabel="SQNR [dB]")
    if ax.lines:
        ax.legend()
    ax.grid(alpha=0.3)
    return fig


def plot_frontier(
    plans: Sequence[MixedPlan], path: str | Path, *, uniform: Mapping[str, MixedPlan] | None = None
) -> Path:
    """Draw estimated loss against bits per weight into a file, uniform schemes beside the mixed plans, by name."""
    named = [*(("", plan) for plan in plans), *(uniform or {}).items()]
    frontier_figure([plan.row(name) for name, plan in named]).savefig(path)
    return Path(path)


def frontier_figure(points: Sequence[Mapping[str, Any]]) -> Figure:
    """Loss against bits per weight; points with a name carry it, and those that no other beats are joined."""
    fig, ax = _axes()
    ordered = sorted(points, key=lambda point: (point["bits_per_weight"], point["loss"]))
    best, front = float("inf"), []
    for point in ordered:
        if point["loss"] < best:
            best = point["loss"]
            front.append(point)
    ax.plot([p["bits_per_weight"] for p in front], [p["loss"] for p in front], color=ACCENT, linewidth=1.2, zorder=1)
    for point in ordered:
        _point(ax, point["bits_per_weight"], point["loss"], point["name"], ACCENT if point in front else MUTED)
    losses = [point["loss"] for point in points]
    scale = "log" if min(losses) > 0 and max(losses) > 30 * min(losses) else "linear"
    ax.set(xlabel="bits per weight", ylabel="loss", yscale=scale)
    ax.margins(x=0.14, y=0.12)
    return fig


def drift_figure(drift: ScaleDrift, shown: int = 6) -> Figure:
    """Scales over the steps of a run: the few that moved most in colour, all others grey."""
    fig, ax = _axes()
    whole = {name: history for name, history in drift.drifts.items() if len(history) == len(drift.steps)}
    order = sorted(whole, key=lambda name: -whole[name][-1])
    for name in order[shown:]:
        ax.plot(drift.steps, whole[name], color=MUTED, linewidth=0.5, alpha=0.35)
    for name in order[:shown]:
        ax.plot(drift.steps, whole[name], ".-", linewidth=1.3, label=_plain(name))
    if order:
        ax.legend(fontsize=7, labelcolor=TEXT, frameon=False)
    ax.set(xlabel="step", ylabel="|log2(scale / first)|")
    return fig


def comparison_figure(runs: Sequence[tuple[str, int, float]], metric: str) -> Figure:
    """A metric against size in MiB, a point for each run: its name, its bytes, and the metric."""
    fig, ax = _axes()
    for name, size, quality in runs:
        _point(ax, size / 2**20, quality, name, ACCENT)
    ax.set(xlabel="size [MiB]", ylabel=_plain(metric))
    ax.margins(x=0.2, y=0.15)
    return fig


def as_svg(figure: Figure, label: str) -> str:
    """The figure as an ``<svg>`` with a label: text stays text, colours are the page's, as wide as there is room."""
    out, label = StringIO(), printable(label)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for colour, name in _COLOURS.items():
        svg = svg.replace(colour, name)
    svg = re.sub(r'(?:width|height)="[^"]*pt"', "", svg, count=2)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)


def _plain(name: str) -> str:
    """A name as matplotlib has to be given it, which reads dollars as mathematics."""
    return printable(name).replace("$", r"\$")


def _point(ax: Axes, x: float, y: float, name: str, colour: str) -> None:
    ax.plot(x, y, "o", color=colour, markersize=5)
    ax.annotate(_plain(name), (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8, color=TEXT)


def _axes() -> tuple[Figure, Axes]:
    fig = Figure(figsize=(6.4, 3.4), layout="constrained")
    ax = fig.subplots()
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(MUTED)
    ax.tick_params(colors=TEXT, labelsize=8)
    ax.xaxis.label.set_color(TEXT)
    ax.yaxis.label.set_color(TEXT)
    ax.grid(color=MUTED, alpha=0.25, linewidth=0.6)
    return fig, ax
