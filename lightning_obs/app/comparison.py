"""Collect the runs of a ``--multirun`` and print one table of them."""

from __future__ import annotations

from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from typing_extensions import override

from lightning_obs.report.summary import comparison_table, print_report


class ComparisonTable(Callback):
    """Hydra callback: one row a run, printed when the last has ended."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    @override
    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Keep what :func:`lightning_obs.app.main.run` returned."""
        overrides = " ".join(str(item) for item in job_return.overrides or [])
        if job_return.status is JobStatus.COMPLETED and isinstance(job_return.return_value, dict):
            self.rows.append({**job_return.return_value, "run": overrides or job_return.return_value["run"]})
        else:
            self.rows.append({"run": f"{overrides} (failed)"})

    @override
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table."""
        if self.rows:
            print()
            print_report(comparison_table(self.rows))
