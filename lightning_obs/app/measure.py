"""Tasks that calibrate nothing: measure a checkpoint, and put runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_obs.app.console import say
from lightning_obs.app.job import load_module, make_data, make_trainer, plain
from lightning_obs.app.quality import measure_quality
from lightning_obs.app.task_module import SIMILARITY
from lightning_obs.errors import CalibrationError
from lightning_obs.files.read import naming, read_json
from lightning_obs.report.page import Report, write_report
from lightning_obs.report.quality import precise, quality_of, quality_row
from lightning_obs.report.summary import comparison_table, folder_size, human_size, print_report
from lightning_obs.schemes.config import as_names

#: what a comparison shows of a run, beside its metric
_COMPARED = ("run", "size", "seconds", "worst_sqnr")


def evaluate_checkpoint(config: DictConfig) -> dict[str, Any]:
    """Quality of ``model.path`` on held-out data, as it is loaded; the row of a comparison.

    Raises:
        CalibrationError: nothing can be measured of this model on these data.
    """
    module = load_module(config)
    data = make_data(config, module)
    trainer = make_trainer(config)
    path = config.model.get("path")
    say(f"· measuring {path or 'the default model'}")
    found = measure_quality(module, trainer, data)
    if found is None or found.name == SIMILARITY:
        raise CalibrationError(
            "nothing judges the model by itself on these data",
            got="test_step logs nothing" if found is None else "only its similarity to an unquantized model",
            remedy="data.label_field=<the field of the labels>; images: one folder for each class.",
        )
    size = folder_size(path) if path and Path(path).is_dir() else None
    row = {"run": str(path or "default model"), **quality_row(found.name, None, found.value), "size": size}
    if trainer.is_global_zero:
        say(f"{found.name} {precise(found.value)}" + ("" if size is None else f"  size {human_size(size)}"))
        extra = {**row, "config": plain(config)}
        say(f"report {write_report(config.output_dir, Report(row['run'], runs=[_compared(row)], extra=extra))}")
    return row


def compare_runs(config: DictConfig) -> dict[str, Any]:
    """Print one table of the runs in ``config.runs``, and write the page.

    Raises:
        CalibrationError: no runs; a folder without a report.
    """
    if not config.runs:
        raise CalibrationError("runs", got="none", remedy="task=compare runs=[<folder of a run>,<another>].")
    rows = [_row_of(Path(str(path))) for path in as_names(config.runs)]
    say(f"report {write_comparison(config.output_dir, rows)}")
    return {"run": "comparison", "runs": rows}


def write_comparison(folder: str | Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Print the table of some runs, and write the page that shows it beside quality against size."""
    print()
    print_report(comparison_table([dict(row) for row in rows]))
    return write_report(folder, Report("comparison", runs=[_compared(row) for row in rows]))


def _row_of(path: Path) -> dict[str, Any]:
    file = path / "report.json" if path.is_dir() else path
    expected = "runs=[<folder with the report.json that a run has written>]"
    found = read_json(file, expected=expected)
    with naming(file, expected=expected):
        row, run = _compared(found), found["run"]
        _, before, after = quality_of(row)
        for value in (before, after, *(row[key] for key in _COMPARED[1:])):
            if value is not None and type(value) not in (int, float):
                raise TypeError(f"{value!r:.80} is no number")
        if not all(isinstance(name, str) for name in (run, row.get("metric", ""))):
            raise TypeError("the run or its metric is no name")
        return {**row, "run": f"{run} ({path.name if path.is_dir() else path.parent.name})"}


def _compared(row: Mapping[str, Any]) -> dict[str, Any]:
    name, before, after = quality_of(row)
    return {**{key: row.get(key) for key in _COMPARED}, **({} if name is None else quality_row(name, before, after))}
