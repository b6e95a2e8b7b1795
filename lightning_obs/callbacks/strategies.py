"""A Trainer's strategy: how its ranks communicate, and which data they share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.quantization import QuantizationStrategy
from torch import distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.lightning_package import class_of
from lightning_obs.errors import CalibrationError
from lightning_obs.observers import Observer
from lightning_obs.observers.statistic import merges_extremes_only
from lightning_obs.ranks.collectives import Collectives, Op, all_ranks_answer, gather_objects

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: strategies of packages that ``class_of`` does not look into, whose ranks may hold a part of the weights only
_THIRD_PACKAGES = ("ColossalAIStrategy",)


def collectives_of(trainer: Trainer) -> Collectives:
    """Return how this rank reduces and gathers over the others, through the Trainer's strategy.

    Called when a session is prepared, when a test starts, and for the checks and writes of ``export_to``. Before the
    Trainer's first run, which starts the ranks, the result is the collectives of one rank. The same holds for a
    strategy that has no ``world_size`` of its own.

    Raises:
        CalibrationError: a strategy whose ranks do not hold the whole model, end with the run, or have no process group
            of ``torch.distributed`` in which they could talk.
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
    # These derive from DDPStrategy, but a rank may hold a part of the weights only.
    shares_weights = class_of(strategy, "DeepSpeedStrategy", "XLAStrategy") or _is_named(strategy, _THIRD_PACKAGES)
    is_supported = class_of(strategy, "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")
    if shares_weights or not is_supported:
        raise CalibrationError(
            f"calibration under {type(strategy).__name__} is not supported",
            got=f"{trainer.world_size} ranks",
            expected="strategy 'ddp', FSDPStrategy, ModelParallelStrategy (FSDP2), or one device",
            remedy="calibrate with Trainer(strategy='ddp') or Trainer(devices=1).",
        )
    if not dist.is_initialized():
        if trainer.state.fn is None:
            return Collectives()
        raise CalibrationError(
            f"the ranks of {type(strategy).__name__} cannot reach each other, so each would find scales of its own",
            got=f"{trainer.world_size} ranks, and no process group of torch.distributed",
            expected="a strategy that calls torch.distributed.init_process_group in setup_environment",
            remedy="calibrate with Trainer(strategy='ddp') or Trainer(devices=1).",
        )

    def reduce(tensor: torch.Tensor, op: Op) -> torch.Tensor:
        """Reduce a tensor over all ranks, for the :class:`.Collectives`."""
        with all_ranks_answer():  # a collective that fails says that another rank did not answer
            return strategy.reduce(tensor, None, op)

    return Collectives(reduce, gather_objects, trainer.global_rank, strategy.root_device, trainer.world_size)


def _is_named(strategy: object, names: Collection[str]) -> bool:
    """Whether the class of a strategy, or a class that it inherits from, has one of these names."""
    return any(cls.__name__ in names for cls in type(strategy).__mro__)


def require_exact(trainer: Trainer, session: CalibrationSession) -> None:
    """Refuse statistics that tensor parallelism makes wrong: its ranks see the same data, or parts of its features.

    The smallest and the largest value over all ranks are those of the whole tensor, however it is shared. A sum counts
    shared data once for each rank, and is right for split features only if it is a sum over features.

    ``TrainerSession.prepare`` calls it in each run on several ranks, once it has the session. Other strategies than
    tensor parallelism pass.

    Raises:
        CalibrationError: an observer that keeps more than extremes, or several scales.
    """
    strategy = trainer.strategy
    if not class_of(strategy, "ModelParallelStrategy"):
        return
    if strategy.device_mesh["tensor_parallel"].size() == 1:
        return
    inexact = []
    for (name, base_name), observer in session.observers.items():
        is_exact = not observer.needs_inputs if base_name == "weight" else _keeps_extremes_only(observer)
        if not is_exact:
            inexact.append(f"{name} ({base_name}: {type(observer).__name__}, {observer.args.strategy})")
    if inexact:
        raise CalibrationError(
            "under tensor parallelism ranks share the data and split its features, so these statistics cannot be added",
            where=inexact,
            expected="static_minmax with one scale for the tensor, and weights' observers that need no inputs",
            remedy="observers={'input': 'static_minmax'}, or tensor_parallel_size=1.",
        )


def _keeps_extremes_only(observer: Observer) -> bool:
    """Whether an observer keeps the smallest and largest value of the whole tensor, and nothing else."""
    # With dynamic="local" (NVFP4) the scales of groups are computed as the model runs. What is observed is the range of
    # the whole tensor, for its one global scale.
    has_one_scale = observer.args.strategy == QuantizationStrategy.TENSOR or observer.args.dynamic == "local"
    return merges_extremes_only(observer) and has_one_scale


def average_gradients(trainer: Trainer, parameters: Sequence[torch.Tensor]) -> None:
    """Replace the gradients of parameters by their means over all ranks, in one collective.

    `QuantizationAwareTraining` calls it for learned scales in ``on_after_backward``, in a run on several ranks.

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
    """Return how many samples at the end of this rank's share another rank has, too.

    Asked by `ObservedBatches`, which leaves these samples out of a calibration. ``DistributedSampler`` starts its
    dataset again where the number of ranks does not divide it, so that all ranks have as many samples.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return 0
    unrepeated = range(sampler.rank, len(sampler.dataset), sampler.num_replicas)  # type: ignore[arg-type]
    return sampler.num_samples - len(unrepeated)


def samples_that_count(loader: DataLoader[Any], batch_idx: int) -> torch.Tensor | None:
    """Return which samples of a batch count, ``(batch,)``: False for a sample that another rank has, too.

    `ObservedBatches` calls it before each batch of a validation that calibrates on several ranks. None if all count:
    the loader repeats none, or its batches are not those of a ``BatchSampler`` of a fixed size, so that it is not known
    which samples a batch has.
    """
    repeated = repeated_samples(loader)
    batch_sampler = loader.batch_sampler
    if not repeated or type(batch_sampler) is not BatchSampler:
        return None
    total = len(loader.sampler)  # type: ignore[arg-type]
    start = batch_idx * batch_sampler.batch_size
    stop = min(total, start + batch_sampler.batch_size)
    return torch.arange(start, stop) < total - repeated
