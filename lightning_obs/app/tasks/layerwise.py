"""Calibrate a checkpoint from its files, one block in memory at a time; nothing is measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

from lightning.fabric import Fabric
from transformers import AutoTokenizer
from typing_extensions import override

from lightning_obs.app.job import check_data, make_data
from lightning_obs.app.tasks.weights import Weights
from lightning_obs.calibration.layerwise import BlockRuns, calibrate_layerwise
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.errors import refuse
from lightning_obs.files.read import naming
from lightning_obs.files.tensors import Progress
from lightning_obs.ranks.collectives import Collectives


class Layerwise(Weights):
    """:func:`~lightning_obs.calibrate_layerwise` of ``model.path`` on ``data``, to ``export.folder``."""

    asked: ClassVar[str] = "model.layerwise"

    @override
    def check(self) -> None:
        refuse(
            ["trainer.precision"] if self.config.trainer.precision is not None else [],
            "layer by layer a model runs in the dtype in which it was saved",
        )
        super().check()
        check_data(self.config)
        with naming(f"the tokenizer of model.path={self.source}", remedy="save one beside the model."):
            tokenizer = AutoTokenizer.from_pretrained(self.source)
        told = SimpleNamespace(for_data=lambda: {"tokenizer": tokenizer, "targets": False})
        self.data = make_data(self.config, told)

    @override
    def quantize(self, progress: Progress) -> CalibrationResult:
        config, how = self.config, self.config.trainer
        fabric = Fabric(accelerator=how.accelerator, devices=how.devices, strategy=how.strategy)
        fabric.launch()
        batches = list(self.data.val_dataloader())[fabric.global_rank :: fabric.world_size]
        return calibrate_layerwise(
            self.source,
            batches,
            self.options,
            config.export.folder,
            overwrite=config.export.overwrite,
            collectives=Collectives.of_group() if fabric.world_size > 1 else None,
            runs=BlockRuns(
                inputs="quantized" if config.model.layerwise == "quantized" else "full_precision",
                token_mask=config.token_mask,
                device=fabric.device,
                progress=progress,
            ),
        )
