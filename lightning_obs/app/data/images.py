"""Images of a folder, prepared as a model of timm wants them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate
from typing_extensions import override

from lightning_obs.app.console import say
from lightning_obs.app.data.splits import CalibrationData
from lightning_obs.app.imports import import_for
from lightning_obs.app.models.task_module import LABELS
from lightning_obs.errors import CalibrationError


class ImageData(CalibrationData):
    """Images of a folder, at any depth: batches ``{"images": (batch_size, channels, height, width)}``.

    One folder for each class, as many as the model has classes, are ``labels`` ``(batch_size,)``, in the order of their
    names. Otherwise images have no labels.

    Args:
        data_config: ``timm.data.resolve_model_data_config`` of the model.
        classes: how many the model knows.
        **options: of :class:`~lightning_obs.app.data.splits.DataOptions`.

    Raises:
        CalibrationError: see :class:`~lightning_obs.app.data.splits.CalibrationData`.
    """

    unit = "images"

    def __init__(self, data_config: Mapping[str, Any], classes: int = 0, **options: Any) -> None:
        self._data_config = data_config
        self._classes: list[dict[str, int]] = []
        self._generator = torch.Generator().manual_seed(0)
        super().__init__(**options)
        first, last = self._classes[0], self._classes[-1]
        labelled = first == last and len(first) == classes
        self.collate = partial(_batch, labelled)
        if not labelled:
            counts = f"{len(first)}/{len(last)} folders to calibrate/measure on"
            say(f"\N{MIDDLE DOT} images without labels: {counts}, {classes} classes")

    @override
    def read(self, path: Any, option: str) -> list[Any]:
        timm = import_for("model=timm", "timm")
        if not Path(path).is_dir():
            raise CalibrationError(f"{option}={path} is not a folder")
        try:
            images = timm.data.ImageDataset(str(path), transform=timm.data.create_transform(**self._data_config))
        except RuntimeError as error:
            raise CalibrationError(f"{option}={path} holds no images", got=str(error).splitlines()[0]) from error
        self._classes.append(images.reader.class_to_idx)
        return [(images, index) for index in range(len(images))]

    @override
    def samples(self, found: list[Any], count: int) -> list[Any]:
        order = torch.randperm(len(found), generator=self._generator)  # a folder is sorted by class
        return [found[index] for index in order[:count].tolist()]


def _batch(labelled: bool, samples: list[tuple[Any, int]]) -> dict[str, torch.Tensor]:
    """Load the images of a batch, in the process that collates it."""
    images, labels = default_collate([folder[index] for folder, index in samples])
    return {"images": images, **({LABELS: labels} if labelled else {})}
