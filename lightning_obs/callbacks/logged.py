"""What calibration tells the user's own loggers.

Numbers that a person plots, or monitors, go the way of every metric (``pl_module.log``). The whole table goes straight
to the loggers that take one, after the numbers, once per calibration, on rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.report.facts import ScaleDrift
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.layer_rows import aggregates, layer_row, write_csv
from lightning_obs.report.pictures import layers_figure


def log_numbers(
    pl_module: LightningModule,
    prefix: str,
    result: CalibrationResult | None,
    errors: Sequence[LayerError],
    drift: ScaleDrift,
) -> None:
    """Log ``quant/sqnr_min`` and the like; in ``on_validation_epoch_end``, alike on every rank."""
    numbers = aggregates(result, errors) | drift.numbers()
    for name, value in numbers.items():
        # The ranks have merged what they saw: the values are equal, except how long each took.
        pl_module.log(f"{prefix}/{name}", torch.tensor(value), sync_dist=name == "seconds")


def log_layers(trainer: Trainer, prefix: str, errors: Sequence[LayerError]) -> None:
    """The whole table: a figure and a histogram in TensorBoard, a CSV file beside the CSV logger's own, a table in
    loggers with ``log_table`` (Weights & Biases)."""
    if not trainer.is_global_zero:
        return
    rows, step = [layer_row(error) for error in errors], trainer.global_step
    ratios = torch.tensor([row["sqnr"] for row in rows if row["sqnr"] is not None])
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(f"{prefix}/layers", layers_figure(rows), step)
            if len(ratios):
                logger.experiment.add_histogram(f"{prefix}/sqnr", ratios, step)
        elif isinstance(logger, CSVLogger):
            folder = Path(logger.log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            write_csv(folder / f"{prefix.replace('/', '_')}_layers_step{step}.csv", rows)
        elif hasattr(logger, "log_table") and rows:
            columns = list(dict.fromkeys(key for row in rows for key in row))
            logger.log_table(
                f"{prefix}/layers", columns, [[row.get(key) for key in columns] for row in rows], step=step
            )
