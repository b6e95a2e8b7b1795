"""The objects of a run that calibrates: model, data, callback, Trainers. A task holds one :class:`Job`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from omegaconf import DictConfig
from torch import nn

from lightning_obs.app.from_config import check_data, facts_for_data, load_module, make_data, make_module, make_trainer
from lightning_obs.app.typed_words import refuse_idle_ignore
from lightning_obs.callbacks.session_callback import SessionCallback
from lightning_obs.callbacks.trainer_session import find_module
from lightning_obs.checkpoint.load import load_checkpoint
from lightning_obs.files.tensors import deal_to_files
from lightning_obs.files.write import require_free
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.model.offload import device_of
from lightning_obs.model.weight import in_shards

#: arguments that replace those of ``model`` when an exported checkpoint is loaded: it is loaded as its users will load
#: it, in the dtype of its files and unpacked, so that its outputs can equal the calibrated model's; and it has no
#: adapters, since it holds the sum of weights and adapters
_OF_A_CHECKPOINT = {"dtype": "auto", "keep_packed": False, "lora": None, "adapters": None}


class Job:
    """Model, data, callback and Trainer of a run that calibrates.

    ``Calibrate`` makes one in its constructor. :meth:`use` sets callback and Trainer, :meth:`load` model and data.

    Args:
        config: the composed config.

    Attributes:
        callback: calibrates the model.
        trainer: the Trainer that runs the callback.
        module: the LightningModule around the model.
        model: the module that is calibrated, ``module`` itself or one inside it (``config.module``).
        data: the data to calibrate on, to train on and to measure on.
        folder: folder of the checkpoint to write; None: no checkpoint is written.
        file: path of an ONNX, program or GGUF file to write; None: no such file is written.
    """

    callback: SessionCallback
    trainer: Trainer
    module: LightningModule
    model: nn.Module
    data: LightningDataModule

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        self.folder = Path(config.export.folder) if config.export.folder else None
        self.file = Path(config.export.file) if config.export.get("file") else None

    def use(self, callback: SessionCallback) -> None:
        """Let this callback calibrate, in a new Trainer.

        ``Calibrate.check`` calls this; a task that chooses calls it again in ``choose``, with the chosen options.
        """
        self.callback = callback
        self.trainer = make_trainer(self.config, callback)

    def load(self) -> None:
        """Load model and data, after checks of the folder to write to and the files to read.

        ``Calibrate.check`` calls this.

        Raises:
            CalibrationError: a folder that exists; data or a model that cannot be read; a typed ``ignore`` that matches
                nothing.
        """
        config = self.config
        if self.folder is not None:
            require_free(self.folder, config.export.overwrite)
            deal_to_files({}, config.export.max_shard_size)  # raises for a size that cannot be read
        check_data(config)
        self.module = load_module(config)
        self.data = make_data(config, facts_for_data(self.module))
        _, self.model = find_module(self.module, config.module)
        refuse_idle_ignore(config, self.model)

    def inputs(self, batch: Any) -> dict[str, Any]:
        """Return the keyword arguments of ``model`` for a batch, on the model's device.

        Called where a run forwards batches without a Trainer: by :meth:`first_inputs`, and for the sample that a
        reloaded checkpoint is compared on. The arguments are the result of
        ``module.model_inputs(batch)``, or the batch if the module has no such method.
        """
        if hasattr(self.module, "model_inputs"):
            inputs = dict(self.module.model_inputs(batch))
        else:
            inputs = dict(batch)
            if is_transformers_model(self.model):
                inputs["use_cache"] = False
        return move_data_to_device(inputs, device_of(self.model))

    def first_inputs(self, loader: Iterable[Any], batches: int | None = None) -> list[dict[str, Any]]:
        """The model's keyword arguments for the first batches of a loader; the model is moved to its device before.

        Tasks call it for steps that run the model without a Trainer: timing, layer errors, choosing, the example of an
        exported file.

        Args:
            loader: a loader of batches.
            batches: how many; None: all.
        """
        self.to_device()
        return [self.inputs(batch) for batch in islice(loader, batches)]

    def to_device(self) -> None:
        """Move the model to the device of the Trainer.

        :meth:`first_inputs` calls it before the model runs without a Trainer, and ``Calibrate.calibrate`` for a
        calibration without batches.

        Between its loops a Trainer leaves the model on the CPU. Sharded models stay where they are.
        """
        if not any(in_shards(module) for module in self.module.modules()):
            self.module.to(self.trainer.strategy.root_device)

    def load_again(self, folder: Path) -> tuple[LightningModule, nn.Module]:
        """Load the exported checkpoint as a user would, into a new LightningModule.

        ``app/checkpoint.py`` compares its output with the calibrated model's; ``Finetune`` measures its quality. A
        model of transformers is loaded from the folder. Any other module is made as at the beginning of the run, and
        :func:`load_checkpoint` loads the folder into it.

        Returns:
            The LightningModule, and the model inside it.
        """
        if is_transformers_model(self.model):
            arguments = {key: value for key, value in _OF_A_CHECKPOINT.items() if key in self.config.model}
            module = make_module(self.config, path=str(folder), **arguments)
            return module, find_module(module, self.config.module)[1]
        module = make_module(self.config)
        model = find_module(module, self.config.module)[1]
        load_checkpoint(model, folder)
        return module, model

    def batches(self, name: str) -> int:
        """Return how many of the ``data.<name>`` batches each device gets in a loop of Lightning; 0 without such a key.

        ``passes`` of a task calls it to estimate the duration of a run, and ``Finetune.check_task`` to refuse a run
        without training batches.
        """
        return math.ceil(int(self.config.data.get(name) or 0) / self.trainer.world_size)
