"""Quantize a checkpoint from its files: its weights alone, or layer by layer on data; no whole model is loaded."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

from lightning.fabric import Fabric
from torch import distributed as dist
from transformers import AutoTokenizer
from typing_extensions import override

from lightning_obs.app.checkpoint import closing_lines
from lightning_obs.app.console import bytes_done, say
from lightning_obs.app.from_config import check_data, make_data, make_options
from lightning_obs.app.models.pretrained import READ_CODE, default_model_folder, positions_of
from lightning_obs.app.tasks.task import Task
from lightning_obs.app.typed_words import refuse_idle_ignore
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.files.read import naming
from lightning_obs.files.tensors import Progress
from lightning_obs.files.write import require_free
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.report.numbers import folder_size
from lightning_obs.streaming.checkpoint_weights import quantize_checkpoint
from lightning_obs.streaming.layerwise import BlockRuns, calibrate_layerwise
from lightning_obs.streaming.meta_model import custom_code_named
from lightning_obs.streaming.source import CheckpointSource


class Weights(Task):
    """``task=weights``: quantize the weights of ``model.path`` from file to file, without data.

    It calls :func:`~lightning_obs.quantize_checkpoint`, which writes the checkpoint to ``export.folder``. Like every
    task, it is made by ``make_task`` with the composed config, which is its attribute ``config`` (:class:`.Task`).

    Attributes:
        option: the option of the command line by which a user chooses the task, for errors.
        options: the options of calibration, from the config; set by :meth:`check`.
        positions: the longest text that the model takes, in tokens, if it is known; set by :meth:`check`.
        result: the result of the calibration; set by :meth:`run`.
    """

    option: ClassVar[str] = "task=weights"
    result: CalibrationResult

    @override
    def check(self) -> None:
        """Refuse wrong options, a folder that exists, a path that is no checkpoint, an ``ignore`` without a match.

        ``main.run`` calls it first.
        """
        self.options = make_options(self.config)
        export = self.config.export
        if not export.folder:
            raise CalibrationError(
                f"{self.option} writes a checkpoint", where=["export.folder"], got="none", remedy="name one."
            )
        require_free(Path(export.folder), export.overwrite)
        if not self.source.is_dir():
            expected = "a folder with config.json and safetensors files"
            raise CalibrationError(f"model.path={self.source} does not exist", expected=expected)
        source = CheckpointSource(self.source)
        with closing(source.reader):
            refuse_idle_ignore(self.config, source.model)
        self.positions = positions_of(source.model.config)

    @override
    def run(self) -> None:
        """Write the checkpoint, and print its size and the engines that load it.

        ``main.run`` calls it after :meth:`check`. With ``weight_observer=lattice`` a line also says how many weights
        lie on a grid of quantized numbers already (``result.grids``, which other observers leave empty).
        """
        folder = Path(self.config.export.folder)
        with bytes_done(f"quantizing {self.source.name} to {self.options.label}") as progress:
            self.result = self.quantize(progress)
        result = self.result
        megabytes_before = folder_size(self.source) / 1e6
        megabytes_after = folder_size(folder) / 1e6
        say(
            f"{result.scheme} · {len(result.modules):,} modules · {result.seconds:.1f} s · "
            f"{megabytes_before:,.1f} MB -> {megabytes_after:,.1f} MB · "
            f"left in float: {result.facts()['left in float']}"
        )
        if result.grids:
            say(result.facts()["grids"])
        for line in closing_lines(self.config.export.folder, result.plan.engines):
            say(line)

    @property
    def source(self) -> Path:
        """The folder of the checkpoint to quantize, for all other methods: ``model.path``, or the default model's."""
        path = self.config.model.get("path")
        return default_model_folder() if path is None else Path(path)

    def quantize(self, progress: Progress) -> CalibrationResult:
        """Write the checkpoint; :meth:`run` calls this.

        The work is shared by ``task.workers`` processes that are started here, or by those that torchrun has started.

        Args:
            progress: called for each tensor that is written.
        """
        export = self.config.export
        workers: int | Collectives = self.config.task.workers
        if dist.is_torchelastic_launched():
            if workers != 1:
                raise CalibrationError("torchrun has started the workers", got=f"task.workers={workers}")
            dist.init_process_group("gloo")
            workers = Collectives.of_group()
        return quantize_checkpoint(
            self.source,
            export.folder,
            self.options,
            overwrite=export.overwrite,
            max_shard_size=export.max_shard_size,
            workers=workers,
            progress=progress,
        )

    @override
    def row(self) -> dict[str, Any]:
        """The checkpoint's size, and the duration of the calibration.

        ``main.run`` calls it last, for the table of a ``--multirun``.
        """
        size = folder_size(Path(self.config.export.folder))
        return {"run": self.result.scheme, "size": size, "seconds": self.result.seconds}


class Layerwise(Weights):
    """``task=calibrate model.layerwise=true``: calibrate ``model.path`` on ``data``, holding one layer at a time.

    It calls :func:`~lightning_obs.calibrate_layerwise`, which writes the checkpoint to ``export.folder``. A layer reads
    the outputs of the layers before it in full precision; with ``model.layerwise=quantized`` it reads the outputs of
    these layers once they are quantized.

    Attributes:
        data: the data to calibrate on.
    """

    option: ClassVar[str] = "model.layerwise"

    @override
    def check(self) -> None:
        """Refuse ``trainer.precision``, what :class:`Weights` refuses, and a missing tokenizer; read the data.

        ``main.run`` calls it first.
        """
        refuse(
            ["trainer.precision"] if self.config.trainer.precision is not None else [],
            "layer by layer a model runs in the dtype in which it was saved",
        )
        super().check()
        check_data(self.config)
        subject = f"the tokenizer of model.path={self.source}"
        with naming(subject, remedy="save one beside the model."), custom_code_named(subject, READ_CODE):
            trusted = bool(self.config.model.get("trust_remote_code"))
            tokenizer = AutoTokenizer.from_pretrained(self.source, trust_remote_code=trusted)
        self.data = make_data(self.config, {"tokenizer": tokenizer, "positions": self.positions})

    @override
    def quantize(self, progress: Progress) -> CalibrationResult:
        """Calibrate on this rank's share of the batches and write the checkpoint; :meth:`run` calls this.

        Fabric starts the processes that ``trainer.devices`` asks for, without a Trainer.

        Args:
            progress: called for each tensor that is written.
        """
        config = self.config
        trainer = config.trainer
        fabric = Fabric(accelerator=trainer.accelerator, devices=trainer.devices, strategy=trainer.strategy)
        fabric.launch()
        batches = list(self.data.val_dataloader())
        runs = BlockRuns(
            inputs="quantized" if config.model.layerwise == "quantized" else "full_precision",
            token_mask=config.token_mask,
            device=fabric.device,
            progress=progress,
        )
        return calibrate_layerwise(
            self.source,
            batches[fabric.global_rank :: fabric.world_size],
            self.options,
            config.export.folder,
            overwrite=config.export.overwrite,
            collectives=Collectives.of_group() if fabric.world_size > 1 else None,
            runs=runs,
        )
