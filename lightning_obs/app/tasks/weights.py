"""Quantize the weights of a checkpoint from its files; no model is loaded and no data is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from torch import distributed as dist
from typing_extensions import override

from lightning_obs.app.checkpoint import closing_lines
from lightning_obs.app.console import bytes_written, say
from lightning_obs.app.job import make_options
from lightning_obs.app.models.pretrained import default_model_folder
from lightning_obs.app.tasks.task import Task
from lightning_obs.calibration.checkpoint_weights import quantize_checkpoint
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.errors import CalibrationError
from lightning_obs.files.tensors import Progress
from lightning_obs.files.write import require_free
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.report.numbers import folder_size


class Weights(Task):
    """:func:`~lightning_obs.quantize_checkpoint` of ``model.path``, to ``export.folder``."""

    asked: ClassVar[str] = "task=weights"
    result: CalibrationResult

    @override
    def check(self) -> None:
        self.options = make_options(self.config)
        if not self.config.export.folder:
            raise CalibrationError(
                f"{self.asked} writes a checkpoint", where=["export.folder"], got="none", remedy="name one."
            )
        require_free(Path(self.config.export.folder), self.config.export.overwrite)

    @override
    def run(self) -> None:
        wanted, source = self.config.export, self.source
        with bytes_written(f"quantizing {source.name} to {self.options.label}") as progress:
            self.result = self.quantize(progress)
        say(
            f"{self.result.scheme} · {len(self.result.modules):,} modules · {self.result.seconds:.1f} s · "
            f"{folder_size(source) / 1e6:,.1f} MB -> {folder_size(Path(wanted.folder)) / 1e6:,.1f} MB"
        )
        for line in closing_lines(wanted.folder, self.result.engines):
            say(line)

    @property
    def source(self) -> Path:
        """The folder of the checkpoint to quantize."""
        path = self.config.model.get("path")
        return default_model_folder() if path is None else Path(path)

    def quantize(self, progress: Progress) -> CalibrationResult:
        """Write the checkpoint."""
        wanted = self.config.export
        workers: int | Collectives = self.config.task.workers
        if dist.is_torchelastic_launched():
            if workers != 1:
                raise CalibrationError("torchrun has started the workers", got=f"task.workers={workers}")
            dist.init_process_group("gloo")
            workers = Collectives.of_group()
        how = {"overwrite": wanted.overwrite, "max_shard_size": wanted.max_shard_size, "workers": workers}
        return quantize_checkpoint(self.source, wanted.folder, self.options, **how, progress=progress)

    @override
    def row(self) -> dict[str, Any]:
        size = folder_size(Path(self.config.export.folder))
        return {"run": self.result.scheme, "size": size, "seconds": self.result.seconds}
