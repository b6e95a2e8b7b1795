"""Judge finished models: measure one, or put runs side by side, of a ``--multirun`` or by their ``report.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from typing_extensions import override

from lightning_obs.app.console import say
from lightning_obs.app.job import check_data, load_module, make_data, make_trainer, measure_quality, plain
from lightning_obs.app.models.samples import SIMILARITY
from lightning_obs.app.tasks.task import Task
from lightning_obs.errors import CalibrationError
from lightning_obs.files.read import naming, read_json
from lightning_obs.report.facts import Report
from lightning_obs.report.numbers import folder_size, human_size, number, quality_of
from lightning_obs.report.page import write_report
from lightning_obs.report.summary import comparison_table, print_report
from lightning_obs.schemes.config import as_names

#: columns of a comparison, beside the metric
_COMPARED = ("run", "size", "seconds", "worst_sqnr", "divergence", "agreement")


class Evaluate(Task):
    """Quality of ``model.path``, a checkpoint or any other model, on held-out data; nothing is calibrated."""

    @override
    def check(self) -> None:
        check_data(self.config)
        self.module = load_module(self.config)
        self.data = make_data(self.config, self.module)

    @override
    def run(self) -> None:
        path = self.config.model.get("path")
        say(f"· measuring {path or 'the default model'}")
        trainer = make_trainer(self.config)
        found = measure_quality(self.module, trainer, self.data)
        if found is None or found.name == SIMILARITY:
            raise CalibrationError(
                "nothing judges a single model on these data",
                got="test_step logs nothing" if found is None else "only its similarity to an unquantized model",
                remedy="data.label_field=<the field of the labels>; images: one folder for each class.",
            )
        run, size = str(path or "default model"), folder_size(path) if path and Path(path).is_dir() else None
        self.found = {"run": run, "metric": found.name, found.name: (None, found.value), "size": size}
        if trainer.is_global_zero:
            say(f"{found.name} {number(found.value, 5)}" + ("" if size is None else f"  size {human_size(size)}"))
            extra = {**self.found, "config": plain(self.config)}
            say(f"report {write_report(self.config.output_dir, Report(run, runs=[compared(self.found)], extra=extra))}")

    @override
    def row(self) -> dict[str, Any]:
        return self.found


class Compare(Task):
    """A table of ``runs``, and a page with quality against size."""

    @override
    def check(self) -> None:
        if not self.config.runs:
            raise CalibrationError("runs", got="none", remedy="task=compare runs=[<folder of a run>,<another>].")
        self.rows = [_row_of(Path(str(path))) for path in as_names(self.config.runs)]

    @override
    def run(self) -> None:
        _write_comparison(self.config.output_dir, self.rows)

    @override
    def row(self) -> dict[str, Any]:
        return {"run": "comparison", "runs": self.rows}


class ComparisonTable(Callback):
    """Hydra callback: one row a run of a ``--multirun``, shown when the last has ended; failed ones are named."""

    def __init__(self) -> None:
        self.jobs: list[tuple[list[str], Any]] = []

    @override
    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Keep the row that :func:`lightning_obs.app.main.run` returned, or the error that it raised."""
        if job_return.status is JobStatus.COMPLETED:
            self.jobs.append((list(map(str, job_return.overrides or ())), job_return.return_value))

    @override
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if not self.jobs:
            return
        common = set.intersection(*(set(overrides) for overrides, _ in self.jobs))
        rows, failures = [], []
        for overrides, found in self.jobs:
            name = " ".join(one for one in overrides if one not in common) or " ".join(overrides)
            if isinstance(found, Exception):
                failures.append(f"{name} failed: {found}")
                rows.append({"run": f"{name} (failed)"})
            else:
                rows.append({**found, "run": name or found["run"]})
        _write_comparison(config.hydra.sweep.dir, rows)
        for failure in failures:
            say(failure)


def _write_comparison(folder: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table, and write the page that shows it beside quality against size."""
    print()
    print_report(comparison_table([dict(row) for row in rows]))
    say(f"report {write_report(folder, Report('comparison', runs=[compared(row) for row in rows]))}")


def compared(row: Mapping[str, Any]) -> dict[str, Any]:
    """A run's row as a comparison shows it."""
    name, before, after = quality_of(row)
    quality = {} if name is None else {"metric": name, name: (before, after)}
    return {**{key: row.get(key) for key in _COMPARED}, **quality}


def _row_of(path: Path) -> dict[str, Any]:
    file = path / "report.json" if path.is_dir() else path
    expected = "runs=[<folder with the report.json that a run has written>]"
    found = read_json(file, expected=expected)
    with naming(file, expected=expected):
        row, run = compared(found), found["run"]
        _, before, after = quality_of(row)
        for value in (before, after, *(row[key] for key in _COMPARED[1:])):
            if value is not None and type(value) not in (int, float):
                raise TypeError(f"{value!r:.80} is not a number")
        if not all(isinstance(name, str) for name in (run, row.get("metric", ""))):
            raise TypeError("the run or its metric is not a name")
        return {**row, "run": f"{run} ({path.name if path.is_dir() else path.parent.name})"}
