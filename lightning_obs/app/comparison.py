"""Collect the runs of a ``--multirun``; print one table of them, and write one page."""

from __future__ import annotations

from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from typing_extensions import override

from lightning_obs.app.tasks.compare import write_comparison


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
        """Print the table, and write the page into the folder of the sweep."""
        if self.rows:
            print(f"report {write_comparison(config.hydra.sweep.dir, self.rows)}")
