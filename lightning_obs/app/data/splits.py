"""What the command line's data have in common: samples to calibrate, to train and to measure on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_obs.errors import CalibrationError


class CalibrationData(LightningDataModule):
    """Three sets of samples that have none in common; a constructor fills them.

    Args:
        batch_size: samples per batch.
        num_workers: of the DataLoaders.
        collate: makes a batch of samples; None: PyTorch's own.
    """

    calibration: Any
    training: Any
    held_out: Any

    def __init__(self, batch_size: int, num_workers: int, collate: Callable[[list[Any]], Any] | None = None) -> None:
        super().__init__()
        self.batch_size, self.num_workers, self.collate = batch_size, num_workers, collate

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        """Batches to train on, in another order each epoch."""
        return self._loader(self.training, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        """Batches to calibrate on."""
        return self._loader(self.calibration)

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        """Batches that calibration does not see."""
        return self._loader(self.held_out)

    def _loader(self, samples: Any, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            samples,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            shuffle=shuffle,
            collate_fn=self.collate,
        )


def require_positive(**sizes: object) -> None:
    """Refuse options of the group ``data`` that are no positive whole numbers.

    Raises:
        CalibrationError: which one.
    """
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CalibrationError(f"data.{name}", got=repr(value), expected="a positive whole number")
