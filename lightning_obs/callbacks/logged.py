"""What calibration tells the user's own loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.layer_rows import layer_row, write_csv
from lightning_obs.report.pictures import layers_figure


def log_results(
    trainer: Trainer,
    pl_module: LightningModule,
    prefix: str,
    numbers: Mapping[str, float],
    errors: Sequence[LayerError],
) -> None:
    """Log numbers (``quant/sqnr_min``) as every metric, on every rank; on rank 0 then the whole table of layers.

    The table is a figure and a histogram in TensorBoard, a CSV file beside the CSV logger's own, and a table in loggers
    with ``log_table`` (Weights & Biases).
    """
    for name, value in numbers.items():
        # The ranks have merged what they saw: the values are equal, except how long each took.
        pl_module.log(f"{prefix}/{name}", torch.tensor(value), sync_dist=name == "seconds")
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
            values = [[row.get(key) for key in columns] for row in rows]
            logger.log_table(f"{prefix}/layers", columns, values, step=step)
