r"""Calibrate an image classifier of timm (pip install timm), its convolutions too, judged by its accuracy.

Run it in the folder of this file, or of your copy. The folder of images has one folder for each class, in the model's
order of classes:

    python -m lightning_obs \
        ~model +model._target_=timm_images.TimmModel +model.name=resnet18.a1_in1k \
        ~data +data._target_=timm_images.ImageFolder +data.path=<folder of images> \
        module=model ignore=[] scheme=int8_static_asym scheme.targets=[Linear,Conv2d]

``+model.path=weights.safetensors`` takes weights of your own in place of timm's from the hub, and ``+model.path=`` with
the folder of an exported checkpoint loads that: ``task=evaluate`` then measures it.
"""

from pathlib import Path
from typing import Any

import lightning as L
import timm
import torch
from torch.utils.data import DataLoader, Subset
from torchmetrics.classification import MulticlassAccuracy

from lightning_obs import load_checkpoint

Batch = list[torch.Tensor]


class TimmModel(L.LightningModule):
    """A model of timm with a head for classes.

    Args:
        name: timm's name of the architecture, with the name of the weights behind a dot where it has several.
        path: a file of weights, or the folder of an exported checkpoint; None: timm loads its own from the hub.
        num_classes: of the head; None: as the architecture has it.
    """

    def __init__(self, name: str, path: str | None = None, num_classes: int | None = None) -> None:
        super().__init__()
        options: dict[str, Any] = {"pretrained": path is None}
        if num_classes is not None:
            options["num_classes"] = num_classes
        is_exported = path is not None and Path(path).is_dir()
        if path is not None and not is_exported:
            options["checkpoint_path"] = path
        self.model = timm.create_model(name, **options)
        if is_exported:
            load_checkpoint(self.model, path)
        self.model.eval()
        self.accuracy = MulticlassAccuracy(self.model.num_classes, average="micro")

    def for_data(self) -> dict[str, Any]:
        """Arguments for the constructor of the data: how the model wants its images."""
        return {"data_config": timm.data.resolve_model_data_config(self.model)}

    def model_inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Arguments of ``self.model`` for a batch."""
        return {"x": batch[0]}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.model(batch[0])  # calibration observes this call

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.accuracy.update(self.model(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)


class ImageFolder(L.LightningDataModule):
    """Images of a folder with one folder for each class. Every second image is held out, in a fixed random order.

    Batches are ``[images (batch, channels, height, width), labels (batch,)]``.

    Args:
        data_config: size and normalization of the model's images.
        path: the folder of images.
        batch_size: images in a batch.
    """

    def __init__(self, data_config: dict[str, Any], path: str, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size
        images = timm.data.ImageDataset(path, transform=timm.data.create_transform(**data_config))
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
        self.calibration = Subset(images, order[0::2])
        self.held_out = Subset(images, order[1::2])

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.calibration, self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, self.batch_size)
