"""What a person reads at the end: what was done, how well, where it is."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

from compressed_tensors.quantization import QuantizationConfig
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.errors import name_list, printable
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.quality import change, precise, quality_of

#: below this [dB] more than 3 % of a typical token's output energy is quantization noise
POOR_SQNR = 15.0


def poor_layers(
    errors: Sequence[LayerError], threshold: float = POOR_SQNR, fused: Sequence[Sequence[str]] = ()
) -> list[str]:
    """The layers to try in ``ignore``: those whose per-token SQNR [dB] is below ``threshold``, worst first.

    Modules that must share a scheme (q, k, v; gate, up: ``fused``, as in ``result.fused``) are named together.
    """
    poor = dict.fromkeys(error.name for error in errors if error.sqnr < threshold)
    for members in fused:
        if any(name in poor for name in members):
            poor.update(dict.fromkeys(members))
    return list(poor)


def summary(
    result: CalibrationResult,
    errors: Sequence[LayerError] = (),
    *,
    metrics: Mapping[str, tuple[float, float]] | None = None,
    sizes: tuple[int, int] | None = None,
    lines: Iterable[str] = (),
    worst: int = 5,
) -> RenderableType:
    """The closing report of a run, for ``rich.print``.

    Args:
        result: of the calibration.
        errors: from :func:`~lightning_obs.report.layer_errors.measure_layer_errors`, worst first.
        metrics: by name, before and after, ``{"perplexity": (14.80, 15.19)}``.
        sizes: bytes on disk before and after.
        lines: further lines (paths).
        worst: how many layers to show.
    """
    parts: list[RenderableType] = [
        Text(
            f"{result.scheme} · {len(result.modules)} modules · {result.observers} observers · "
            f"{result.batches} batches{_ranks(result)} · {result.seconds:.1f} s",
            style="bold",
        )
    ]
    if errors:
        parts.append(layer_table(errors[:worst]))
    poor = poor_layers(errors, fused=result.fused)
    if poor:
        parts.append(
            Text(f"{len(poor)} layers below {POOR_SQNR:.0f} dB (and fused with them) cost most: {name_list(poor, 30)}")
        )
    if result.skipped:
        parts.append(Text(f"left in full precision, no data reached them: {name_list(result.skipped)}"))
    if any(sum(counts) for counts in result.expert_tokens.values()):
        parts.append(Text(expert_line(result)))
    if result.fallback:
        parts.append(Text(f"with the activations' range of their siblings: {name_list(result.fallback)}"))
    facts = [f"{name} {change(before, after)}" for name, (before, after) in (metrics or {}).items()]
    if sizes is not None:
        facts.append(f"size {human_size(sizes[0])} -> {human_size(sizes[1])}")
    if facts:
        parts.append(Text("  ".join(facts)))
    parts += [Text(line) for line in lines]
    return Group(*parts)


def better_inputs(config: QuantizationConfig, errors: Sequence[LayerError]) -> str | None:
    """What to try where static integer inputs without a zero point leave layers poor; measured in README.md.

    >>> from lightning_obs.schemes.config import resolve_config
    >>> poor = LayerError("down_proj", sqnr=4.0, clipped=0.0, low=-1.0, high=1.0)
    >>> better_inputs(resolve_config("INT8_STATIC"), [poor])
    'int8 inputs with a zero point, their range found by `histogram`, may lose less: scheme=int8_static_asym'
    >>> better_inputs(resolve_config("INT8_STATIC_ASYM"), [poor])
    """
    inputs = [scheme.input_activations for scheme in config.config_groups.values()]
    static = [args for args in inputs if args is not None and args.type == "int" and args.dynamic is False]
    if not poor_layers(errors) or not any(args.num_bits == 8 and args.symmetric for args in static):
        return None
    return "int8 inputs with a zero point, their range found by `histogram`, may lose less: scheme=int8_static_asym"


def _ranks(result: CalibrationResult) -> str:
    return f" x {result.ranks} ranks · {result.collectives} collectives" if result.ranks > 1 else ""


def expert_line(result: CalibrationResult) -> str:
    """How many tokens the router sent to the experts, and which got none.

    >>> empty = dict(scheme="FP8", modules=[], observers=0, batches=1, measurements=0, seconds=0.0, qparams={})
    >>> expert_line(CalibrationResult(**empty, expert_tokens={"mlp.experts": [5, 0, 7]}))
    'tokens per expert: 0 to 7, median 5; 1 of 3 experts got none: mlp.experts.1'
    """
    counts = sorted(count for layer in result.expert_tokens.values() for count in layer)
    line = f"tokens per expert: {counts[0]} to {counts[-1]}, median {median_low(counts)}"
    none = [f"{name}.{i}" for name, layer in result.expert_tokens.items() for i, count in enumerate(layer) if not count]
    return f"{line}; {len(none)} of {len(counts)} experts got none: {name_list(none)}" if none else line


def layer_table(errors: Sequence[LayerError]) -> Table:
    """Layers with their error, one row each. Columns of which nothing is known are left out."""
    columns: dict[str, Callable[[LayerError], str]] = {
        "SQNR [dB]": lambda error: _number(error.sqnr, ".1f"),
        "clipped [%]": lambda error: _number(error.clipped, ".2f"),
        "input range": lambda error: "" if math.isnan(error.low) else f"[{error.low:.4g}, {error.high:.4g}]",
        "weight SQNR [dB]": lambda error: "" if error.weight is None else _number(error.weight.sqnr, ".1f"),
        "bits in use": lambda error: "" if error.weight is None else _number(error.weight.bits, ".2f"),
    }
    measured = any(error.output is not None for error in errors) or all(error.weight is None for error in errors)
    last = 3 if measured else 5
    cells = {title: [cell(error) for error in errors] for title, cell in list(columns.items())[:last]}
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("worst layers", overflow="fold")
    shown = {title: column for title, column in cells.items() if measured or any(column)}
    for title in shown:
        table.add_column(Text(title), justify="right")
    for error, *row in zip(errors, *shown.values(), strict=True):
        table.add_row(*map(Text, (error.name, *row)))
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else format(value, form)


def comparison_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Several runs side by side. Each row: overrides, its metric (before, after), size, seconds, worst layer."""
    table = Table(title="comparison", title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    names = {name for name, _, _ in map(quality_of, rows) if name is not None}
    for title in (
        next(iter(names)) if len(names) == 1 else "metric",
        "change [%]",
        "size",
        "calibration [s]",
        "worst SQNR [dB]",
    ):
        table.add_column(Text(title), justify="right")
    for row in rows:
        name, before, after = quality_of(row)
        shown = "" if after is None else precise(after)
        table.add_row(
            Text(str(row.get("run", ""))),
            shown if len(names) < 2 or not shown else f"{name} {shown}",
            "" if after is None or not before else f"{100 * (after / before - 1):+.2f}",
            "" if row.get("size") is None else human_size(row["size"]),
            "" if row.get("seconds") is None else f"{row['seconds']:.1f}",
            "" if row.get("worst_sqnr") is None else f"{row['worst_sqnr']:.1f}",
        )
    return table


def human_size(size: float) -> str:
    """Bytes for a person to read.

    >>> human_size(538 * 2**20)
    '538 MiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def folder_size(folder: str | os.PathLike[str]) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def print_report(report: RenderableType) -> None:
    """Print to the terminal, at a width that does not wrap module names when output is piped."""
    console = Console()
    Console(width=max(console.width, 100), highlight=False, soft_wrap=True).print(_Printable(report))


@dataclass(frozen=True)
class _Printable:
    """A renderable whose text cannot steer the terminal, whatever the names in it are."""

    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.inner, options):
            yield Segment(text if control else printable(text), style, control)
