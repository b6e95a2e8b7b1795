"""Images of a folder, prepared as a model of timm wants them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset, default_collate

from lightning_obs.app.console import say
from lightning_obs.app.data.splits import CalibrationData, require_positive
from lightning_obs.app.models.images import import_timm
from lightning_obs.app.models.task_module import LABELS
from lightning_obs.errors import CalibrationError


class ImageData(CalibrationData):
    """Images of a folder: ``val_dataloader`` to calibrate on, ``test_dataloader`` held out.

    One folder for each class, as many as the model has classes, are labels, in the order of their names. Otherwise
    images have no labels.

    Args:
        path: folder of images, at any depth.
        data_config: ``timm.data.resolve_model_data_config`` of the model.
        classes: how many the model knows.
        batches: calibration batches.
        batch_size: images per batch.
        eval_batches: batches to measure on.
        num_workers: of the DataLoaders.
        train_batches: batches to train on: other images of the half that is not held out.
        eval_path: another folder to measure on; None: every second image of ``path``.
        tokens: images have none; what ``speed=quick`` sets for texts.

    Raises:
        CalibrationError: numbers that are not positive; no such folder; fewer images than asked for.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        data_config: Mapping[str, Any],
        classes: int = 0,
        batches: int = 8,
        batch_size: int = 8,
        eval_batches: int = 8,
        num_workers: int = 0,
        train_batches: int = 0,
        eval_path: str | os.PathLike[str] | None = None,
        tokens: int | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers)
        require_positive(batches=batches, batch_size=batch_size, eval_batches=eval_batches)
        images = _folder(path, data_config, "data.path")
        others = images if eval_path is None else _folder(eval_path, data_config, "data.eval_path")
        half, held_out = range(len(images)), range(len(others))
        if eval_path is None:
            half, held_out = half[0::2], held_out[1::2]
        wanted, measured = (batches + train_batches) * batch_size, eval_batches * batch_size
        for what, have, need in (("calibration", len(half), wanted), ("held-out", len(held_out), measured)):
            if have < need:
                raise CalibrationError(
                    f"too few {what} images (every second one is held out, unless data.eval_path is given)",
                    got=str(have),
                    expected=str(need),
                    remedy="more images, or smaller data.batches, data.eval_batches, data.batch_size.",
                )
        folders = [images.reader.class_to_idx, others.reader.class_to_idx]
        self.labelled = folders[0] == folders[1] and len(folders[0]) == classes
        self.collate = _with_labels if self.labelled else _without_labels
        if not self.labelled:
            counts = "/".join(str(len(folder)) for folder in folders)
            say(f"\N{MIDDLE DOT} images without labels: {counts} folders to calibrate/measure on, {classes} classes")
        generator = torch.Generator().manual_seed(0)  # a folder is sorted by class
        chosen, measured_on = (
            [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()] for rows in (half, held_out)
        )
        self.calibration = Subset(images, chosen[: batches * batch_size])
        self.training = Subset(images, chosen[batches * batch_size : wanted])
        self.held_out = Subset(others, measured_on[:measured])


def _with_labels(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    images, labels = default_collate(samples)
    return {"images": images, LABELS: labels}


def _without_labels(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    return {"images": default_collate([image for image, _ in samples])}


def _folder(path: str | os.PathLike[str], data_config: Mapping[str, Any], option: str) -> Any:
    timm = import_timm()
    if not Path(path).is_dir():
        raise CalibrationError(f"{option}={path} is not a folder")
    try:
        return timm.data.ImageDataset(str(path), transform=timm.data.create_transform(**data_config))
    except RuntimeError as error:
        raise CalibrationError(f"{option}={path} holds no images", got=str(error).splitlines()[0]) from error
