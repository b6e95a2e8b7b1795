"""Measure a model, or a checkpoint that a run has written, on held-out data; nothing is calibrated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_obs.app.console import say
from lightning_obs.app.job import load_module, make_data, make_trainer, measure_quality, plain
from lightning_obs.app.models.task_module import SIMILARITY
from lightning_obs.app.tasks.compare import compared
from lightning_obs.app.tasks.task import Task
from lightning_obs.errors import CalibrationError
from lightning_obs.report.facts import Report
from lightning_obs.report.numbers import folder_size, human_size, number, quality_row
from lightning_obs.report.page import write_report


class Evaluate(Task):
    """Quality of ``model.path``, as it is loaded."""

    @override
    def check(self) -> None:
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
                "nothing judges the model by itself on these data",
                got="test_step logs nothing" if found is None else "only its similarity to an unquantized model",
                remedy="data.label_field=<the field of the labels>; images: one folder for each class.",
            )
        run, size = str(path or "default model"), folder_size(path) if path and Path(path).is_dir() else None
        self.found = {"run": run, **quality_row(found.name, None, found.value), "size": size}
        if trainer.is_global_zero:
            say(f"{found.name} {number(found.value, 5)}" + ("" if size is None else f"  size {human_size(size)}"))
            extra = {**self.found, "config": plain(self.config)}
            say(f"report {write_report(self.config.output_dir, Report(run, runs=[compared(self.found)], extra=extra))}")

    @override
    def row(self) -> dict[str, Any]:
        return self.found
