"""Models of the package timm. It is not a requirement of this package; where it is missing, the error says so."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from lightning_obs.app.imports import import_for
from lightning_obs.app.models.task_module import OneOutputPerSample
from lightning_obs.checkpoint.load import load_checkpoint
from lightning_obs.errors import CalibrationError


class TimmModel(OneOutputPerSample):
    """Wrap a model of timm for Lightning's fit, validate and test.

    Batches are ``{"images": (batch, channels, height, width)}``, with ``labels`` ``(batch,)`` where there are any.

    Args:
        name: timm's name of the architecture, with the weights' name behind a dot where there are several.
        path: a file of weights; the folder of a checkpoint that was exported from such a model; None: timm loads its
            own from the hub.
        num_classes: of the head; None: as the architecture has it.
        learning_rate: of AdamW, see :class:`~lightning_obs.app.models.task_module.TaskModule`.

    Raises:
        CalibrationError: timm is not installed; no such model; weights that do not fit.
    """

    def __init__(
        self,
        name: str,
        path: str | os.PathLike[str] | None = None,
        num_classes: int | None = None,
        learning_rate: float = 1e-4,
    ) -> None:
        timm = import_for("model=timm", "timm")
        exported = path is not None and Path(path).is_dir()
        weights = {} if path is None or exported else {"checkpoint_path": str(path)}
        classes = {} if num_classes is None else {"num_classes": num_classes}
        try:
            model = timm.create_model(name, pretrained=path is None, **weights, **classes).eval()
        except (RuntimeError, OSError, ValueError) as error:
            raise CalibrationError(
                f"timm cannot make model.name={name} with model.path={path}",
                got=str(error).strip().splitlines()[0][:300],
            ) from error
        if exported:
            load_checkpoint(model, Path(str(path)))
        super().__init__(model, model.num_classes or None, learning_rate)
        self.data_config = timm.data.resolve_model_data_config(model)

    @override
    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {"x": batch["images"]}

    @override
    def for_data(self) -> dict[str, Any]:
        return {"data_config": self.data_config, "classes": self.model.num_classes}

    @override
    def output(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = self(**batch)
        return output.flatten(1)
