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


class Stretch:
    """What this rank does alone between two collectives: an error waits for the ranks' next agreement.

    The other ranks enter the next collective whatever happens here, so this rank must enter it, too. A ``with`` block
    keeps the first error in :attr:`failure`; after it, give that to the next collective, or :meth:`agree`. A single
    process has nobody to wait for: there the block raises the error at once.

    Args:
        collectives: of this rank.
        failure: an error of this rank that no agreement has raised yet.
    """

    def __init__(self, collectives: Collectives, failure: Exception | None = None) -> None:
        self._collectives = collectives
        self.failure = failure

    def __enter__(self) -> Stretch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> bool:
        if not isinstance(error, Exception) or self._collectives.size == 1:
            return False
        self.keep(error)
        return True

    def keep(self, error: Exception) -> None:
        """Keep an error, unless there is an earlier one."""
        if self.failure is None:
            self.failure = error

    def agree(self) -> None:
        """Raise the first failure of any rank on all ranks. Every rank must call this; it is one collective.

        Raises:
            CalibrationError: the same on every rank; it names the rank that failed.
        """
        failures = self._collectives.gather_object(None if self.failure is None else sendable(self.failure))
        try:
            require_no_failure(failures)
        except CalibrationError as error:
            raise error from self.failure


@contextmanager
def on_all_ranks(collectives: Collectives) -> Iterator[None]:
    """Raise an error of one rank in the ``with`` block on all ranks, at its end. Every rank must enter the block."""
    stretch = Stretch(collectives)
    with stretch:
        yield
    stretch.agree()
