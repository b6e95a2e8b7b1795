"""Observe the inputs of all experts of a layer together.

On an accelerator, one launch for each expert would cost more time than its few tokens. ``calibration/expert_tokens.py``
keeps the inputs of a layer's experts until all have run, concatenates them, and calls :func:`observe_segments`. A
*segment* is the rows (tokens) of one expert in the concatenated tensor. An observer can be used so if its class has a
method ``measure_segments(observed, lengths)``, which returns the statistics of each segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_obs.numerics.qparams import flatten_for_calibration
from lightning_obs.observers.statistic import new_like, observing


def takes_segments(observer: Any) -> bool:
    """Whether an observer can be passed to :func:`observe_segments`; asked before an expert's input is kept for it.

    True if its class has ``measure_segments``, and no class below the one that writes this method overrides
    ``measure`` or ``update_statistics_from_observed``.
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
    """Let several observers of one kind, of the experts of a layer, each observe its segment of the rows.

    The result is that of calling ``observer(segment)`` for each observer. But all segments are measured together and
    all statistics combined together, so the number of operations does not grow with the number of observers. Called by
    ``calibration/expert_tokens.py`` once all experts of a layer have run.

    Args:
        observers: different observers of one kind.
        rows: the concatenated segments, activations ``(n, C)``.
        lengths: number of rows of each segment; an empty segment changes nothing.
        segment_of: for each observer, the index of its segment; several observers may have the same segment.
    """
    first = observers[0]
    with observing(first):
        lengths_on_device = torch.tensor(lengths).to(rows.device, non_blocking=True)
        observed = flatten_for_calibration(rows, first.base_name, first.args)
        measured = first.measure_segments(observed, lengths_on_device)  # for each statistic, a row for each segment
        of_segments = list(zip(*measured, strict=True))  # for each segment, all its statistics
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
    """Combine each observer's statistics with the statistics of its segment, for all observers in one operation.

    The statistics of all observers are stacked, and one temporary observer combines the stacks.

    Args:
        observers: observers of one kind; either all or none of them have statistics.
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
    newest = zip(*segments, strict=True)  # for each statistic, that of all segments
    together.combine([torch.stack(values) for values in newest])
    combined = [getattr(together, name) for name in names]
    for index, observer in enumerate(observers):
        observer.load_statistics({name: values[index] for name, values in zip(names, combined, strict=True)})
