"""Communication between ranks: to reduce tensors, to gather objects, and to raise one rank's failure on all ranks.

A callback makes a :class:`Collectives` from Lightning's strategy (``callbacks/strategies.py``), other callers from
``torch.distributed``. The object is passed to all code that runs on several ranks. A *collective* is a call that every
rank must make: a rank that makes it waits for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import distributed as dist

from lightning_obs.errors import CalibrationError, require_no_failure, sendable

#: operation of a reduction over ranks
Op: TypeAlias = Literal["sum", "min"]


def _reduce_alone(tensor: torch.Tensor, op: Op) -> torch.Tensor:
    """The reduction of a single process: the tensor itself."""
    return tensor


def _gather_alone(value: Any) -> list[Any]:
    """The gather of a single process: a list of its object."""
    return [value]


@dataclass(frozen=True)
class Collectives:
    """The collectives of this rank. The default is that of a single process.

    Sessions, exports and the functions that quantize from files to files (``quantize_checkpoint``,
    ``calibrate_layerwise``) are given one when they start.

    Attributes:
        reduce: ``(tensor, op) -> tensor``, over all ranks, with op ``"sum"`` or ``"min"``; it may work in place.
            Tensors are contiguous, of one dimension, of int32, int64 or float64, and of the same shape on every rank.
            In Lightning: ``lambda tensor, op: trainer.strategy.reduce(tensor, reduce_op=op)``.
            Each rank must have different data, or sums count them twice: under tensor parallelism, reduce over the
            data-parallel group.
        gather_object: ``object -> list``: the objects of all ranks, in the order of the ranks.
        rank: the index of this process in that list.
        device: the device of the tensors that are reduced, and of statistics that this rank gets from other ranks only.
        size: the number of ranks.
    """

    reduce: Callable[[torch.Tensor, Op], torch.Tensor] = _reduce_alone
    gather_object: Callable[[Any], list[Any]] = _gather_alone
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    size: int = 1

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> Collectives:
        """The collectives of ``torch.distributed``, for work without a Trainer.

        Called by ``app/tasks/weights.py`` for ``quantize_checkpoint`` and ``calibrate_layerwise``, by
        ``export_checkpoint`` for a model that FSDP2 shards, and by users for a ``CalibrationSession``.

        Args:
            group: the ranks; default: all ranks.
            device: the device of reduced tensors; default: the CPU with gloo, else the current CUDA device.
        """
        if device is None:
            is_on_host = "gloo" in dist.get_backend(group)
            device = torch.device("cpu") if is_on_host else torch.device("cuda", torch.cuda.current_device())
        operations = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN}

        def reduce(tensor: torch.Tensor, op: Op) -> torch.Tensor:
            with all_ranks_answer():
                dist.all_reduce(tensor, operations[op], group=group)
            return tensor

        gather = partial(gather_objects, group=group)
        return cls(reduce, gather, dist.get_rank(group), device, dist.get_world_size(group))


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather a picklable ``value`` of each rank; returns the values of all ranks, in their order. A collective.

    ``Collectives.gather_object`` is this function, with torch.distributed (:meth:`Collectives.of_group`) and under
    Lightning (``callbacks/strategies.py``).
    """
    objects: list[Any] = [None] * dist.get_world_size(group)
    with all_ranks_answer():
        dist.all_gather_object(objects, value, group=group)
    return objects


@contextmanager
def all_ranks_answer() -> Iterator[None]:
    """A context around a collective that turns its failure into an error that points at the other ranks.

    Entered for each collective: in this file, in ``callbacks/strategies.py``, where sharded weights are gathered
    (``model/weight.py``), and where checksums are added up (``model/module_qparams.py``). An error that says that
    memory ran out is raised as it is.

    Raises:
        CalibrationError: the collective failed or did not end within the group's time limit.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # of gloo, NCCL and the store alike
        first_line = str(error).strip().partition("\n")[0]
        raise CalibrationError(
            "another rank ended, or did not answer in time",
            got=first_line or type(error).__name__,
            remedy="look for the first error in the other ranks' output, then run again; nothing was written.",
        ) from error


class Stretch:
    """Work of this rank alone between two collectives, whose errors are kept until all ranks can raise them.

    The other ranks enter the next collective whatever happens here, so this rank must enter it, too. A ``with`` block
    of the object keeps the first error in :attr:`failure`. After the block, pass the failure on with the next
    collective, or call :meth:`agree`. In a single process no other rank waits, so the block raises the error at once.
    Finalize, ``calibration/saved_state.py``, ``ranks/sync.py`` and :func:`on_all_ranks` make these objects.

    Args:
        collectives: the collectives of this rank.
        failure: an earlier error of this rank that has not been raised yet.

    Attributes:
        failure: the first error; None if there is none.
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
        """Keep an error for :meth:`agree`, unless an earlier error is kept.

        Called when a ``with`` block of the object fails, and by ``ranks/reduction.py`` and the searches of weights for
        an error that they caught or got from :func:`.share_weights`.
        """
        if self.failure is None:
            self.failure = error

    def agree(self) -> None:
        """Raise the first failure of any rank on all ranks, if there is one. It is a collective.

        Called when the work between two collectives is done: by finalize, ``calibration/saved_state.py`` and
        :func:`on_all_ranks`.

        Raises:
            CalibrationError: the same on every rank; it names the rank that failed.
        """
        failure = None if self.failure is None else sendable(self.failure)
        failures = self._collectives.gather_object(failure)
        try:
            require_no_failure(failures)
        except CalibrationError as error:
            raise error from self.failure


@contextmanager
def on_all_ranks(collectives: Collectives) -> Iterator[None]:
    """A context that all ranks enter: an error of one rank in the block is raised on all ranks at its end.

    Entered around work between collectives: by exports (``checkpoint/``, ``callbacks/export_at_end.py``), by stepwise
    calibration, and by runs from files to files (``streaming/``).
    """
    stretch = Stretch(collectives)
    with stretch:
        yield
    stretch.agree()
