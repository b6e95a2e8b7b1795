"""What a Trainer's strategy says about the other ranks."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_obs.errors import CalibrationError
from lightning_obs.sync import Collectives, Op, all_ranks_answer


def collectives_of(trainer: Trainer) -> Collectives:
    """How to talk to the other ranks, through the Trainer's strategy.

    Raises:
        CalibrationError: a strategy whose ranks do not hold the whole model.
    """
    strategy = trainer.strategy
    if trainer.world_size == 1 or isinstance(strategy, SingleDeviceStrategy):
        return Collectives()
    if not isinstance(strategy, DDPStrategy):
        raise CalibrationError(
            f"calibration under {type(strategy).__name__} is not supported",
            got=f"{trainer.world_size} ranks",
            expected="strategy 'ddp', or one device",
            remedy="calibrate with Trainer(strategy='ddp') or Trainer(devices=1).",
        )

    def reduce(tensor: torch.Tensor, op: Op) -> torch.Tensor:
        with all_ranks_answer():
            reduced = strategy.reduce(tensor, reduce_op=op)
        assert isinstance(reduced, torch.Tensor)
        return reduced

    def gather_object(thing: Any) -> list[Any]:
        found: list[Any] = [None] * trainer.world_size
        with all_ranks_answer():
            dist.all_gather_object(found, thing)
        return found

    return Collectives(reduce, gather_object, trainer.global_rank, strategy.root_device)


def repeated_samples(loader: Any) -> int:
    """How many samples at the end of this rank's share were added so that all ranks have as many.

    ``DistributedSampler`` starts its dataset again where the ranks do not divide it.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return 0
    size = len(sampler.dataset)  # type: ignore[arg-type]
    return sum(sampler.rank + i * sampler.num_replicas >= size for i in range(sampler.num_samples))


def repeated_in_batch(loader: DataLoader[Any], batch_idx: int) -> torch.Tensor | None:
    """Which samples of a batch count, ``(batch,)``, or None for all of them.

    A batch that does not come from a ``BatchSampler`` of a fixed size cannot be told; all of it counts.
    """
    repeated = repeated_samples(loader)
    batches = loader.batch_sampler
    if not repeated or type(batches) is not BatchSampler:
        return None
    total = len(loader.sampler)  # type: ignore[arg-type]
    at = torch.arange(batch_idx * batches.batch_size, min(total, (batch_idx + 1) * batches.batch_size))
    counts = at < total - repeated
    return None if bool(counts.all()) else counts
