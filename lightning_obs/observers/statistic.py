"""A statistic is declared once: its name, and how two of them become one.

From the declaration follow, and are written nowhere else: how batches are combined, how ranks are reduced, what
``reset`` forgets, what is looked at for NaN, what a checkpoint holds, and how the rows of a weight come together.

A statistic that was not observed yet is not there, which stands for its identity: combining and reducing leave it out.
Its shape and dtype are those of the first tensor observed, so ranks agree on them (:mod:`lightning_obs.ranks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

_OPS = {"sum": "SUM", "mean": "AVG", "min": "MIN", "max": "MAX"}


class Statistic(NamedTuple):
    """The declaration of one statistic: an attribute of an observer.

    Attributes:
        name: of the attribute.
        reduction: of batches and of ranks. ``sum``, ``min``, ``max``; ``mean``: over ranks (of batches the newest,
            unless the observer combines them itself); ``keep``: the newest batch, the lowest rank that has it.
        rows: how a weight is cut by rows. None: it has to be observed whole. ``min`` or ``max``: parts that share a
            scale reduce so. ``apart``: each scale needs all of its rows in one part.
        of_inputs: gathered of the inputs of the module whose weight is observed.
    """

    name: str
    reduction: str = "keep"
    rows: str | None = None
    of_inputs: bool = False

    def combine(self, old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        """The statistic of two batches, in memory of its own; ``old`` is None before the first."""
        if old is None or self.reduction in ("keep", "mean"):
            return new.clone()  # observers that read one tensor share ``new``, and a reduction may be made in place
        if self.reduction == "sum":
            return old + new
        return torch.minimum(old, new) if self.reduction == "min" else torch.maximum(old, new)

    def is_exact(self, value: Any) -> bool:
        """Whether the reduction has the same bits whoever adds ``value`` to the others, in whatever order."""
        counts = isinstance(value, torch.Tensor) and not value.is_floating_point()
        return self.reduction in ("min", "max") or (self.reduction == "sum" and counts)


def to_sync_dict(statistics: Iterable[Statistic]) -> dict[str, Any]:
    """A declaration as the ecosystem's guide writes it: ``{name: torch.distributed.ReduceOp}``."""
    return {s.name: getattr(dist.ReduceOp, _OPS[s.reduction]) for s in statistics if s.reduction in _OPS}


def of_sync_dict(declared: Mapping[str, Any]) -> tuple[Statistic, ...]:
    """Read an ``_act_sync_dict``. A reduction that is not known keeps its own name, for the error.

    >>> of_sync_dict({"total": dist.ReduceOp.SUM, "high": "max"})[1].reduction
    'max'
    """
    return tuple(Statistic(name, _reduction(given)) for name, given in declared.items())


def _reduction(given: Any) -> str:
    for reduction, op in _OPS.items():
        if given.upper() in (reduction.upper(), op) if isinstance(given, str) else given == getattr(dist.ReduceOp, op):
            return reduction
    return str(given)


def all_finite(values: Iterable[Any]) -> bool:
    """Whether no tensor among ``values`` holds NaN or infinity: one question for each dtype and device."""
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            alike.setdefault((value.dtype, value.device), []).append(value.reshape(-1))
    # NaN where a value is not finite, else zero: two operations, not five
    return not any(bool((wide - wide).any()) for wide in (_wide(torch.cat(parts)) for parts in alike.values()))


def describe_nonfinite(statistics: Mapping[str, Any]) -> str | None:
    """Say how many values of which statistic are NaN or infinite; None if all are finite."""
    if all_finite(statistics.values()):
        return None
    counted = {
        name: (int((~torch.isfinite(_wide(value))).sum()), value.numel())
        for name, value in statistics.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    return ", ".join(f"{bad} of {n} {name.lstrip('_')} not finite" for name, (bad, n) in counted.items() if bad)


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.itemsize == 1 else value  # torch does not subtract float8
