"""Observe the experts of a layer together: on an accelerator, a launch for each expert costs more than its few tokens.

A segment is the rows of one expert in the tensor of all. An observer takes segments if its class writes
``measure_segments(observed, lengths)``, the statistics of several tensors that stand one below the other.
``calibration/expert_tokens.py`` keeps the inputs of a layer's experts until all have run, and observes them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_obs.numerics.qparams import flatten_for_calibration
from lightning_obs.observers.statistic import new_like, observing


def takes_segments(observer: Any) -> bool:
    """Whether an observer can be given to :func:`observe_segments`.

    Its class, or an ancestor, writes ``measure_segments``; and no subclass of that measures or observes otherwise.
    """
    cls: Any = type(observer)
    for ancestor in cls.__mro__:
        if "measure_segments" in vars(ancestor):
            measures_alike = cls.measure is ancestor.measure
            updates_alike = cls.update_statistics_from_observed is ancestor.update_statistics_from_observed
            return measures_alike and updates_alike
    return False


def observe_segments(
    observers: Sequence[Any], rows: torch.Tensor, lengths: Sequence[int], segment_of: Sequence[int]
) -> None:
    """Observe a segment of the rows with each of several observers of one kind: the experts of a layer.

    Segments are measured together and statistics combined together, in a number of operations that does not grow with
    the number of observers. The statistics are those of ``observer(segment)``, one after the other.

    Args:
        observers: each once.
        rows: activations ``(n, C)``, the segments one below the other.
        lengths: rows of each segment; one without rows changes nothing.
        segment_of: for each observer the index of the segment that it observes; several may observe the same.
    """
    first = observers[0]
    with observing(first):
        lengths_on_device = torch.tensor(lengths).to(rows.device, non_blocking=True)
        observed = flatten_for_calibration(rows, first.base_name, first.args)
        measured = first.measure_segments(observed, lengths_on_device)  # each statistic of all segments
        of_segments = list(zip(*measured, strict=True))  # all statistics of each segment
        fresh: list[Any] = []
        fresh_segments = []
        begun: list[Any] = []
        begun_segments = []
        for observer, segment in zip(observers, segment_of, strict=True):
            if not lengths[segment]:
                continue
            if observer.has_statistics:
                begun.append(observer)
                begun_segments.append(of_segments[segment])
            else:
                fresh.append(observer)
                fresh_segments.append(of_segments[segment])
        _combine_together(begun, begun_segments)
        _combine_together(fresh, fresh_segments)


def _combine_together(observers: Sequence[Any], segments: Sequence[Sequence[torch.Tensor]]) -> None:
    """Combine each observer's statistics with the statistics of its segment, all observers in one operation.

    Args:
        observers: of one kind; all have statistics, or none has.
        segments: for each observer, the statistics of its segment, in the order of the declaration.
    """
    if not observers:
        return
    names = [statistic.name for statistic in observers[0].statistics]
    together = new_like(observers[0])
    if observers[0].has_statistics:
        earlier = {}
        for name in names:
            earlier[name] = torch.stack([getattr(observer, name) for observer in observers])
        together.load_statistics(earlier)
    newest = zip(*segments, strict=True)  # each statistic of all segments
    together.combine([torch.stack(values) for values in newest])
    combined = [getattr(together, name) for name in names]
    for index, observer in enumerate(observers):
        observer.load_statistics({name: values[index] for name, values in zip(names, combined, strict=True)})
