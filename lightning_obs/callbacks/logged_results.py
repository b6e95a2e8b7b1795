"""Log a calibration to the Trainer's loggers: single numbers as metrics, and a table of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.lightning_package import class_of
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.page import layer_row, write_csv

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import Logger


def log_number(pl_module: LightningModule, name: str, value: float) -> None:
    """Log a number, as the maximum over ranks.

    Called at the end of a validation's epoch, for each number of a calibration (``Results.log_calibration``) and of the
    second pass (`QuantizedMetrics`). Most numbers are equal on all ranks. Times differ, and the longest counts.

    Args:
        pl_module: logs the number.
        name: the name of the metric.
        value: the number on this rank.
    """
    pl_module.log(name, torch.tensor(value), sync_dist=True, reduce_fx="max")


def log_layers(trainer: Trainer, prefix: str, session: CalibrationSession, errors: Sequence[LayerError]) -> None:
    """Give the table of all layers to each logger that takes a table; nothing happens on ranks other than 0.

    ``Results.log_calibration`` calls it at the end of a validation's epoch, after a calibration.

    TensorBoard gets a text and a histogram, the CSV logger a file beside its own, and a logger with ``log_table``
    (Weights & Biases) a table.

    Args:
        trainer: has the loggers.
        prefix: begins the names of what is logged: ``"quant"``, or with the scheme ``"quant/FP8"``.
        session: its observers' names become columns of the table.
        errors: the errors of the layers, each a row.
    """
    if not trainer.is_global_zero:
        return
    observers: dict[str, dict[str, Any]] = {}
    for (name, base_name), observer in session.observers.items():
        observers.setdefault(name, {})[f"{base_name}_observer"] = observer.args.observer
    rows = []
    for error in errors:
        rows.append({**layer_row(error), **observers.get(error.name, {})})
    for logger in trainer.loggers:
        _log_table(logger, prefix, rows, trainer.global_step)


def _log_table(logger: Logger, prefix: str, rows: list[dict[str, Any]], step: int) -> None:
    """Give the rows to one logger, in the form that its class takes (:func:`log_layers`).

    Args:
        logger: a logger of the Trainer.
        prefix: begins the names of what is logged.
        rows: a row for each layer.
        step: the Trainer's global step.
    """
    columns = _columns(rows)
    if class_of(logger, "TensorBoardLogger"):
        logger.experiment.add_text(f"{prefix}/layers", _markdown_table(columns, rows), step)
        ratios = [row["sqnr"] for row in rows if row["sqnr"] is not None]
        if ratios:
            logger.experiment.add_histogram(f"{prefix}/sqnr", torch.tensor(ratios), step)
    elif class_of(logger, "CSVLogger"):
        folder = Path(logger.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(folder / f"{prefix.replace('/', '_')}_layers_step{step}.csv", rows)
    elif hasattr(logger, "log_table") and rows:
        values = []
        for row in rows:
            values.append([row.get(column) for column in columns])
        logger.log_table(f"{prefix}/layers", columns, values, step=step)


def _columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The keys of all rows, in the order in which they first appear."""
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(row)
    return list(columns)


def _markdown_table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table, for TensorBoard."""
    lines = [" | ".join(columns), " | ".join(["---"] * len(columns))]
    for row in rows:
        cells = [str(row.get(column, "")) for column in columns]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)
