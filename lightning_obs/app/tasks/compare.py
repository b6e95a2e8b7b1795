"""Judge finished models: measure one model, or compare runs by their ``report.json`` or after a ``--multirun``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from lightning_obs.app.console import say
from lightning_obs.app.from_config import check_data, facts_for_data, load_module, make_data, make_trainer, plain
from lightning_obs.app.quality import measure_quality
from lightning_obs.app.run_report import run_provenance
from lightning_obs.app.tasks.task import Task
from lightning_obs.app.typed_words import folders_of_configs
from lightning_obs.app.words import in_words
from lightning_obs.errors import CalibrationError
from lightning_obs.files.read import naming, read_json
from lightning_obs.report.facts import Report
from lightning_obs.report.numbers import folder_size, human_size, number, quality_of
from lightning_obs.report.page import write_report
from lightning_obs.report.summary import comparison_table, print_report
from lightning_obs.schemes.config import as_names

#: columns of a comparison that hold a number, beside the metric
_NUMBERS = ("size", "seconds", "worst_sqnr", "divergence", "agreement")
#: entries that a comparison takes from a run's own page
_OF_PAGE = ("grade", "headline", "original_size", "page")


class Evaluate(Task):
    """``task=evaluate``: measure the quality of ``model.path``, a checkpoint or any other model; nothing is calibrated.

    Attributes:
        module: the LightningModule around the model.
        data: the data to measure on.
        report_row: the quality and the size, for a comparison.
    """

    @override
    def check(self) -> None:
        """Check that the data can be read, load the model, read the data; ``main.run`` calls it first."""
        check_data(self.config)
        self.module = load_module(self.config)
        self.data = make_data(self.config, facts_for_data(self.module))

    @override
    def run(self) -> None:
        """Measure on the held-out data; on rank 0, print the result and write a report of this one model.

        ``main.run`` calls it after :meth:`check`.
        """
        path = self.config.model.get("path")
        say(f"· measuring {path or 'the default model'}")
        trainer = make_trainer(self.config)
        quality = measure_quality(self.module, trainer, self.data)
        if quality is None:
            raise CalibrationError(
                "nothing judges a model whose test_step logs nothing",
                got=type(self.module).__name__,
                remedy="log a metric in test_step: self.log(name, value).",
            )
        size = folder_size(path) if path and Path(path).is_dir() else None
        label = str(path or "default model")
        self.report_row = {
            "run": label,
            "metric": quality.name,
            quality.name: (None, quality.value),
            "higher_is_better": quality.higher_is_better,
            "size": size,
        }
        if trainer.is_global_zero:
            shown_size = "" if size is None else f"  size {human_size(size)}"
            say(f"{quality.name} {number(quality.value, 5)}{shown_size}")
            report = Report.of(label, runs=[compared(self.report_row)], provenance=run_provenance(self.config))
            report.extra = {**self.report_row, "config": plain(self.config)}
            say(f"report {write_report(self.config.output_dir, report)}")

    @override
    def row(self) -> dict[str, Any]:
        """The model's quality and size; ``main.run`` calls it last, for the table of a ``--multirun``."""
        return self.report_row


class Compare(Task):
    """``task=compare``: print a table of the finished runs in ``runs``, and write a page with quality against size.

    Attributes:
        rows: the row of each run, which :meth:`check` reads from its report.
    """

    @override
    def check(self) -> None:
        """Read the reports of the runs, and refuse a config without ``runs``; ``main.run`` calls it first."""
        if not self.config.runs:
            raise CalibrationError("runs", got="none", remedy="task=compare runs=[<folder of a run>,<another>].")
        self.rows = [_row_of_report(Path(str(path))) for path in as_names(self.config.runs)]

    @override
    def run(self) -> None:
        """Print the table and write the page; ``main.run`` calls it after :meth:`check`."""
        _write_comparison(self.config.output_dir, self.rows, run_provenance(self.config, has_data=False))

    @override
    def row(self) -> dict[str, Any]:
        """The rows of all runs, under ``runs``; ``main.run`` calls it last."""
        return {"run": "comparison", "runs": self.rows}


class ComparisonTable(Callback):
    """Compares the runs of a ``--multirun``, failed ones included.

    It is a callback of Hydra, which makes it because ``configs/config.yaml`` names it.
    """

    def __init__(self) -> None:
        #: of each run, its overrides, the row or the error that it ended with, and the folder of its report
        self.runs: list[tuple[list[str], Any, str]] = []

    @override
    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Keep the row that :func:`lightning_obs.app.main.run` returned, or the error that it raised.

        Hydra calls it after each run of a ``--multirun``, and after a single run. In a ``--multirun`` a failed run
        also counts as completed, since ``__main__`` returns its error as its value.
        """
        if job_return.status is JobStatus.COMPLETED:
            overrides = [str(override) for override in job_return.overrides or ()]
            self.runs.append((overrides, job_return.return_value, str(config.output_dir)))

    @override
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table, with runs named by the overrides in which they differ, and the errors below the table.

        Hydra calls it after the last run of a ``--multirun``.
        """
        if not self.runs:
            return
        shared_overrides = set(self.runs[0][0])
        for overrides, _, _ in self.runs:
            shared_overrides &= set(overrides)
        rows = []
        failures = []
        for overrides, outcome, folder in self.runs:
            name = " ".join(word for word in overrides if word not in shared_overrides) or " ".join(overrides)
            if isinstance(outcome, Exception):
                failures.append(f"{name} failed: {in_words(str(outcome))}")
                rows.append({"run": f"{name} (failed)"})
            else:
                rows.append({**outcome, **_facts_of_report(Path(folder)), "run": name or outcome["run"]})
        _write_comparison(config.hydra.sweep.dir, rows, {"command": _multirun_command(config)})
        for failure in failures:
            say(failure)


def _multirun_command(config: DictConfig) -> str:
    """The command of a ``--multirun``, made of what Hydra keeps: the folder of ``--config-dir``, and the overrides."""
    words = folders_of_configs(config.hydra.runtime.config_sources)
    overrides: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)  # ${...} as it was typed
    words += [str(word) for word in overrides]
    return shlex.join(["python", "-m", "lightning_obs", "--multirun", *words])


def _facts_of_report(folder: Path) -> dict[str, Any]:
    """The entries that a comparison takes from a run's page (``_OF_PAGE``); empty if the run has written no page."""
    file = folder / "report.json"
    if not file.exists():
        return {}
    report = read_json(file, expected="the report.json that the run has written")
    return _facts_of_page(report, folder)


def _facts_of_page(report: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The verdict of a run, the size of the original model, and the path of the run's page, from ``report.json``."""
    judgement = report.get("judgement") or {}
    before, _ = report.get("sizes") or (None, None)
    return {
        "grade": judgement.get("grade"),
        "headline": judgement.get("headline"),
        "original_size": before,
        "page": str((folder / "report.html").resolve()),
    }


def _write_comparison(folder: str, rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, str]) -> None:
    """Print the table, and write a page with the table and a picture of quality against size.

    Args:
        folder: the folder of the page.
        rows: the row of each run.
        provenance: where the results come from, by label.
    """
    print()
    print_report(comparison_table([dict(row) for row in rows]))
    runs = []
    for row in rows:
        run = compared(row)
        if run["page"] is not None:
            run["page"] = Path(os.path.relpath(run["page"], Path(folder).resolve())).as_posix()
        runs.append(run)
    report = Report.of("comparison", runs=runs, provenance=provenance)
    say(f"report {write_report(folder, report)}")


def compared(row: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce a run's row, or its ``report.json``, to the columns of a comparison.

    Called for each run of a comparison, and by tasks that report on one model (``evaluate``, ``lora``).

    Returns:
        ``run``, the numbers that every run may have, the verdict, the page and the size of the original model (each
        None if it is not known). If a quality was measured, also ``metric``, under the metric's name the values before
        and after quantization, and ``higher_is_better``, the metric's direction (None: it follows from the name).
    """
    columns = {"run": row.get("run")}
    for name in (*_NUMBERS, *_OF_PAGE):
        columns[name] = row.get(name)
    metric, original, quantized = quality_of(row)
    if metric is not None:
        columns["metric"] = metric
        columns[metric] = (original, quantized)
        columns["higher_is_better"] = row.get("higher_is_better")
    return columns


def _row_of_report(path: Path) -> dict[str, Any]:
    """Read the row of a finished run for a comparison.

    Args:
        path: its ``report.json``, or the folder that holds it.

    Raises:
        CalibrationError: no such file, or one that no run has written.
    """
    folder = path if path.is_dir() else path.parent
    file = path / "report.json" if path.is_dir() else path
    expected = "runs=[<folder with the report.json that a run has written>]"
    report = read_json(file, expected=expected)
    with naming(file, expected=expected):
        row = compared({**report, **_facts_of_page(report, folder)})
        if row.get("metric") is None and report.get("runs"):
            remedy = f"runs=[{folder}/0,{folder}/1], the folders of its runs."
            raise CalibrationError(f"{file} is the comparison of several runs", expected=expected, remedy=remedy)
        run_name = report["run"]
        metric, *qualities = quality_of(row)
        for value in (*qualities, *(row[name] for name in _NUMBERS)):
            if value is not None and type(value) not in (int, float):
                raise TypeError(f"{value!r:.80} is not a number")
        if not isinstance(run_name, str) or not isinstance(metric or "", str):
            raise TypeError("the run or its metric is not a name")
        if row.get("higher_is_better") not in (None, True, False):
            raise TypeError("the direction of the metric is neither true nor false")
        return {**row, "run": f"{run_name} ({folder.name})"}
