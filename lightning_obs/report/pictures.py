"""Figures by matplotlib, for TensorBoard and files; the page draws its own.

They are made without pyplot, which keeps every figure of a process and asks for a display.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lightning_obs.choice.mixed_precision import MixedPlan
from lightning_obs.errors import printable


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
    fig = Figure(figsize=(6.4, 3.4), layout="constrained")
    ax = fig.subplots()
    best, front = float("inf"), []
    for point in sorted(points, key=lambda point: (point["bits_per_weight"], point["loss"])):
        if point["loss"] < best:
            best = point["loss"]
            front.append(point)
    ax.plot([p["bits_per_weight"] for p in front], [p["loss"] for p in front], "-o", markersize=4)
    for point in points:
        at = point["bits_per_weight"], point["loss"]
        ax.plot(*at, "o", color="C0" if point in front else "grey", markersize=5)
        name = printable(point["name"]).replace("$", r"\$")  # dollars are mathematics
        ax.annotate(name, at, xytext=(5, 4), textcoords="offset points", fontsize=8)
    losses = [point["loss"] for point in points]
    scale = "log" if min(losses) > 0 and max(losses) > 30 * min(losses) else "linear"
    ax.set(xlabel="bits per weight", ylabel="loss", yscale=scale)
    ax.margins(x=0.14, y=0.12)
    ax.grid(alpha=0.3)
    return fig
