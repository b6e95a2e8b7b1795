"""What the command line's data have in common: samples to calibrate, to train and to measure on."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_obs.errors import CalibrationError


@dataclass(frozen=True)
class DataOptions:
    """What to read, and how much of it; the keys that every config of the group ``data`` has.

    Attributes:
        path: of the samples; None: the default text.
        batches: to calibrate on.
        batch_size: samples per batch.
        tokens: of a sample; images have none.
        eval_batches: batches to measure on.
        eval_path: other samples to measure on, and then all of ``path`` is there to calibrate and train on. None: every
            second sample of ``path`` is held out.
        train_batches: batches to train on: others than those to calibrate on.
        num_workers: of the DataLoaders.

    Raises:
        CalibrationError: numbers that are not positive.
    """

    path: str | os.PathLike[str] | None = None
    batches: int = 16
    batch_size: int = 1
    tokens: int = 512
    eval_batches: int = 16
    eval_path: str | os.PathLike[str] | None = None
    train_batches: int = 0
    num_workers: int = 0

    def __post_init__(self) -> None:
        for name in ("batches", "batch_size", "tokens", "eval_batches"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CalibrationError(f"data.{name}", got=repr(value), expected="a positive whole number")


class CalibrationData(LightningDataModule, ABC):
    """Three sets of samples that have none in common: ``val_dataloader`` calibrates, ``test_dataloader`` is held out.

    Args:
        collate: makes a batch of samples; None: PyTorch's own.
        **options: of :class:`DataOptions`.

    Raises:
        CalibrationError: see :class:`DataOptions`; what cannot be read; fewer samples than asked for.
    """

    #: a kind of sample, in the plural
    unit: ClassVar[str]

    def __init__(self, collate: Callable[[list[Any]], Any] | None = None, **options: Any) -> None:
        super().__init__()
        asked = self.options = DataOptions(**options)
        self.collate = collate
        seen = self.read(asked.path, "data.path")
        if asked.eval_path is None:
            seen, held_out = seen[0::2], seen[1::2]
        else:
            held_out = self.read(asked.eval_path, "data.eval_path")
        samples = self._samples(seen, asked.batches + asked.train_batches, "calibration", "batches")
        calibrated = asked.batches * asked.batch_size
        self.calibration, self.training = samples[:calibrated], samples[calibrated:]
        self.held_out = self._samples(held_out, asked.eval_batches, "held-out", "eval_batches")

    @abstractmethod
    def read(self, path: Any, option: str) -> list[Any]:
        """The documents, rows or images that lie at ``path``, which errors call ``option``."""

    @abstractmethod
    def samples(self, found: list[Any], count: int) -> list[Any]:
        """Make ``count`` samples of what was read, or as many as it gives."""

    def _samples(self, found: list[Any], batches: int, what: str, option: str) -> list[Any]:
        count = batches * self.options.batch_size
        samples = self.samples(found, count)
        if len(samples) < count:
            raise CalibrationError(
                f"too few {what} {self.unit} (half of the data is held out, unless data.eval_path is given)",
                got=str(len(samples)),
                expected=str(count),
                remedy=f"more data, or a smaller data.{option}, data.batch_size or data.tokens.",
            )
        return samples

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
        asked = self.options
        return DataLoader(samples, asked.batch_size, shuffle, num_workers=asked.num_workers, collate_fn=self.collate)
