"""Models and data of the package timm: images, convolutions.

timm is not a requirement of this package; where it is missing, the error says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset, default_collate
from typing_extensions import override

from lightning_obs.app.console import say
from lightning_obs.app.data import CalibrationData, require_positive
from lightning_obs.app.task_module import LABELS, OneOutputPerSample
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
        learning_rate: of AdamW, see :class:`~lightning_obs.app.task_module.TaskModule`.

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
        model, self.data_config = _create(name, path, num_classes)
        super().__init__(model.num_classes or None, learning_rate)  # type: ignore[arg-type]
        self.model = model

    @override
    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The images, by the name of timm's argument."""
        return {"x": batch["images"]}

    @override
    def for_data(self) -> dict[str, Any]:
        """How the model wants its images, and how many classes it knows."""
        return {"data_config": self.data_config, "classes": self.model.num_classes}

    @override
    def output(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits ``(batch, classes)``, or features."""
        output: torch.Tensor = self(**batch)
        return output.flatten(1)


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


def _timm() -> Any:
    try:
        import timm
        import timm.data
    except (ImportError, RuntimeError) as error:  # the latter from a torchvision that is built for another torch
        raise CalibrationError(
            "model=timm needs the package timm, which cannot be imported", got=str(error), remedy="pip install timm"
        ) from error
    return timm


def _create(name: str, path: str | os.PathLike[str] | None, num_classes: int | None) -> tuple[nn.Module, Any]:
    timm = _timm()
    exported = path is not None and Path(path).is_dir()
    weights = {} if path is None or exported else {"checkpoint_path": str(path)}
    classes = {} if num_classes is None else {"num_classes": num_classes}
    try:
        model: nn.Module = timm.create_model(name, pretrained=path is None, **weights, **classes).eval()
    except (RuntimeError, OSError, ValueError) as error:
        raise CalibrationError(
            f"timm cannot make model.name={name} with model.path={path}", got=str(error).strip().splitlines()[0][:300]
        ) from error
    if exported:
        load_checkpoint(model, Path(str(path)))
    return model, timm.data.resolve_model_data_config(model)


def _folder(path: str | os.PathLike[str], data_config: Mapping[str, Any], option: str) -> Any:
    timm = _timm()
    if not Path(path).is_dir():
        raise CalibrationError(f"{option}={path} is no folder")
    try:
        return timm.data.ImageDataset(str(path), transform=timm.data.create_transform(**data_config))
    except RuntimeError as error:
        raise CalibrationError(f"{option}={path} holds no images", got=str(error).splitlines()[0]) from error
