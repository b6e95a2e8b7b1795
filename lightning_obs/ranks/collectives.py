"""How one rank talks to the others: a reduction and a gather of objects, which are all that is ever needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import distributed as dist

from lightning_obs.errors import CalibrationError, require_no_failure, sendable

Op: TypeAlias = Literal["sum", "min"]


def _alone(tensor: torch.Tensor, op: Op) -> torch.Tensor:
    return tensor


def _only(thing: Any) -> list[Any]:
    return [thing]


@dataclass(frozen=True)
class Collectives:
    """How this rank talks to the others. The default is a single process, which talks to nobody.

    Attributes:
        reduce: ``(tensor, op) -> tensor`` over all ranks, op ``"sum"`` or ``"min"``; may work in place. Called with
            contiguous one-dimensional tensors of int32, int64 or float64, of the same shape on every rank. In
            Lightning: ``lambda tensor, op: trainer.strategy.reduce(tensor, reduce_op=op)``.
            Each rank must see different data, or sums count it twice: under tensor parallelism, reduce over the
            data-parallel group.
        gather_object: ``object -> list``: every rank's object, in the order of the ranks.
        rank: of this process, its place in that list.
        size: how many ranks there are.
        device: where reductions take place, and where statistics go that this rank lacked.
    """

    reduce: Callable[[torch.Tensor, Op], torch.Tensor] = _alone
    gather_object: Callable[[Any], list[Any]] = _only
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    size: int = 1

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> Collectives:
        """The collectives of ``torch.distributed``, over the ranks of a process group; by default over all."""
        if device is None:
            on_host = "gloo" in dist.get_backend(group)
            device = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())

        def reduce(tensor: torch.Tensor, op: Op) -> torch.Tensor:
            with all_ranks_answer():
                dist.all_reduce(tensor, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MIN, group=group)
            return tensor

        gather = partial(gather_objects, group=group)
        return cls(reduce, gather, dist.get_rank(group), device, dist.get_world_size(group))


def gather_objects(thing: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's object, in the order of the ranks."""
    objects: list[Any] = [None] * dist.get_world_size(group)
    with all_ranks_answer():
        dist.all_gather_object(objects, thing, group=group)
    return objects


@contextmanager
def all_ranks_answer() -> Iterator[None]:
    """Say, in place of a socket's error, that another rank has ended.

    Raises:
        CalibrationError: a collective in the ``with`` block failed or did not end within the group's time limit.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # of gloo, NCCL and the store alike
        raise CalibrationError(
            "another rank ended, or did not answer in time",
            got=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            remedy="look for the first error in the other ranks' output, then run again; nothing was written.",
        ) from error


@contextmanager
def on_all_ranks(collectives: Collectives) -> Iterator[None]:
    """Raise an error of one rank in the ``with`` block on all ranks, at its end. Every rank must enter the block."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # the others wait
        failure = error
    failures = collectives.gather_object(None if failure is None else sendable(failure))
    if failure is not None and not (len(failures) > 1 and isinstance(failure, CalibrationError)):
        raise failure
    require_no_failure(failures)
