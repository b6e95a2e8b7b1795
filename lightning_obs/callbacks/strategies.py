"""A Trainer's strategy: how ranks communicate, and where the model lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.quantization import QuantizationStrategy
from torch import distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.lightning_package import class_of
from lightning_obs.errors import CalibrationError
from lightning_obs.model.offload import stay_put
from lightning_obs.observers import Observer
from lightning_obs.observers.statistic import merges_extremes_only
from lightning_obs.ranks.collectives import Collectives, Op, all_ranks_answer, gather_objects

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def collectives_of(trainer: Trainer) -> Collectives:
    """How to talk to the other ranks, through the Trainer's strategy.

    Raises:
        CalibrationError: a strategy whose ranks do not hold the whole model, or end with the run.
    """
    strategy = trainer.strategy
    if trainer.world_size == 1:
        return Collectives()
    if getattr(strategy, "_start_method", "popen") != "popen":
        raise CalibrationError(
            "a calibration in processes that end with the run (ddp_spawn, ddp_fork, ddp_notebook) is lost with them",
            expected="strategy 'ddp', which runs the script once on each rank",
            remedy="Trainer(strategy='ddp'), or one device in a notebook.",
        )
    # These are subclasses of DDPStrategy, but a rank may hold a part of the weights only.
    holds_parts = class_of(strategy, "DeepSpeedStrategy", "XLAStrategy")
    supported = class_of(strategy, "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")
    if holds_parts or not supported:
        raise CalibrationError(
            f"calibration under {type(strategy).__name__} is not supported",
            got=f"{trainer.world_size} ranks",
            expected="strategy 'ddp', FSDPStrategy, ModelParallelStrategy (FSDP2), or one device",
            remedy="calibrate with Trainer(strategy='ddp') or Trainer(devices=1).",
        )
    if not dist.is_initialized():  # the Trainer has not started its ranks yet, so there is nobody to talk to
        return Collectives()

    def reduce(tensor: torch.Tensor, op: Op) -> torch.Tensor:
        with all_ranks_answer():
            return strategy.reduce(tensor, None, op)

    return Collectives(reduce, gather_objects, trainer.global_rank, strategy.root_device, trainer.world_size)


def leave_in_place(trainer: Trainer, pl_module: LightningModule) -> None:
    """Keep the Trainer from moving modules that accelerate or compressed-tensors has dispatched.

    It moves the model to its device before the run, and to the CPU when it tears down the strategy, its last act.
    """
    undo, own, teardown = stay_put(pl_module), vars(trainer.strategy), trainer.strategy.teardown

    def tear_down() -> None:
        own.pop("teardown", None)  # with two callbacks, the first has put its own there
        try:
            teardown()
        finally:
            undo()

    own["teardown"] = tear_down


def require_exact(trainer: Trainer, session: CalibrationSession) -> None:
    """Refuse statistics that cannot be reduced exactly where several ranks see the same data, or parts of its features.

    Under tensor parallelism, a smallest or largest value over all ranks is that of the whole tensor, however ranks
    share it. A sum counts shared data more than once, and split features only if it sums over features too.
    """
    strategy = trainer.strategy
    if not class_of(strategy, "ModelParallelStrategy") or trainer.world_size == 1:
        return
    if strategy.device_mesh["tensor_parallel"].size() == 1:
        return

    def is_extreme(observer: Observer) -> bool:
        one_scale = observer.args.strategy == QuantizationStrategy.TENSOR or observer.args.dynamic == "local"
        return merges_extremes_only(observer) and one_scale

    wrong = [
        f"{name} ({base_name}: {type(observer).__name__}, {observer.args.strategy})"
        for (name, base_name), observer in session.observers.items()
        if (observer.needs_inputs if base_name == "weight" else not is_extreme(observer))
    ]
    if wrong:
        raise CalibrationError(
            "under tensor parallelism ranks share the data and split its features, so these statistics cannot be added",
            where=wrong,
            expected="static_minmax with one scale for the tensor, and weights' observers that need no inputs",
            remedy="observers={'input': 'static_minmax'}, or tensor_parallel_size=1.",
        )


def average_gradients(trainer: Trainer, parameters: Sequence[torch.Tensor]) -> None:
    """Replace the gradients of parameters by their means over all ranks, in one collective.

    Args:
        trainer: its strategy reduces; every rank must call this.
        parameters: on one device, of one dtype; a parameter without a gradient counts as a gradient of zeros.
    """
    gradients = []
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients.append(gradient.reshape(-1))
    means = trainer.strategy.reduce(torch.cat(gradients), reduce_op="mean")
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, mean in zip(parameters, means.split(sizes), strict=True):
        parameter.grad = mean.reshape(parameter.shape).clone()


def repeated_samples(loader: Any) -> int:
    """How many samples at the end of this rank's share were added so that all ranks have as many.

    ``DistributedSampler`` starts its dataset again where the ranks do not divide it.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return 0
    own = range(sampler.rank, len(sampler.dataset), sampler.num_replicas)  # type: ignore[arg-type]
    return sampler.num_samples - len(own)


def repeated_in_batch(loader: DataLoader[Any], batch_idx: int) -> torch.Tensor | None:
    """Which samples of a batch count, ``(batch,)``, or None where none of the loader is repeated.

    A batch that does not come from a ``BatchSampler`` of a fixed size cannot be told; all of it counts.
    """
    repeated = repeated_samples(loader)
    batches = loader.batch_sampler
    if not repeated or type(batches) is not BatchSampler:
        return None
    total = len(loader.sampler)  # type: ignore[arg-type]
    at = torch.arange(batch_idx * batches.batch_size, min(total, (batch_idx + 1) * batches.batch_size))
    return at < total - repeated
