"""Measure a tensor once for all modules that read it: q, k and v; gate and up; sessions that watch the same calls.

Observers of one kind (class, tensor, ``args`` and hyperparameters) measure the same statistics in a tensor. Those that
have seen the same tensors before hold the same statistic objects, and combining gives them the same object again: one
histogram is added up and kept for q, k and v.

The functions here are called by the hooks (``calibration/hooks.py``) at each forward. The hooks keep the dict
``measured`` in a :class:`ReadCache`, for as long as modules read the same tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from lightning_obs.numerics.qparams import flatten_for_calibration
from lightning_obs.observers.observer import Observer, combine_declared
from lightning_obs.observers.statistic import declared_statistics, observing

#: ids of an observer's statistics
Identities: TypeAlias = tuple[int, ...]


@dataclass
class ReadCache:
    """Cache for modules that read one tensor in turn (q, k, v): its unmasked tokens, and its statistics.

    Attributes:
        tensor: a weak reference to the tensor that was read last; None: no tensor was read yet.
        stamp: changes whenever the content of the tensor may have changed.
        tokens: its tokens that count; None: they were not selected yet.
        measured: its statistics, by kind of observer.
    """

    tensor: Callable[[], torch.Tensor | None] | None = None
    stamp: Hashable = None
    tokens: torch.Tensor | None = None
    measured: dict[Hashable, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is empty: a weak reference cannot be copied."""
        return vars(ReadCache())

    def forget(self) -> None:
        """Forget the tensor and its statistics."""
        vars(self).update(vars(ReadCache()))

    def read(self, tensor: torch.Tensor, stamp: Hashable) -> None:
        """Begin with a tensor, unless it is the one that was read last and it has not changed."""
        is_last = self.tensor is not None and self.tensor() is tensor
        if not is_last or self.stamp != stamp:
            vars(self).update(vars(ReadCache(weakref.ref(tensor), stamp)))


class Measurement(NamedTuple):
    """The statistics of one tensor for one kind of observer.

    Attributes:
        statistics: in the order in which the kind declares them.
        combined: by the identities of the statistics before this tensor, these statistics (kept, because an id is only
            unique while its object is alive) and the statistics with this tensor, by name.
    """

    statistics: Sequence[torch.Tensor]
    combined: dict[Identities, tuple[list[Any], dict[str, Any]]]


def observe_shared(observer: Observer, value: torch.Tensor, measured: dict[Hashable, Any]) -> None:
    """Observe an activation that other modules read, too; a hook calls this in place of ``observer(value)``.

    Args:
        observer: any; a class that writes ``update_statistics_from_observed`` observes by itself.
        value: the tensor; an empty one changes nothing.
        measured: by kind of observer, the measurements of ``value`` so far; added to.
    """
    observes_itself = type(observer).update_statistics_from_observed is not Observer.update_statistics_from_observed
    if observes_itself or not value.numel():
        observer(value)
        return

    def measure() -> Sequence[torch.Tensor]:
        return observer.measure(flatten_for_calibration(value, observer.base_name, observer.args))

    _combine_shared(observer, observer.kind, measure, measured, of_inputs=False)


def observe_inputs_shared(observer: Observer, value: torch.Tensor, measured: dict[Hashable, Any]) -> None:
    """Observe a module's input ``(..., C)`` for the observer of its weight; other modules read the tensor, too.

    A hook calls this in place of ``observer.observe_inputs(value)``.

    Args:
        observer: of a weight, with ``needs_inputs``; a class that writes ``observe_inputs`` observes by itself.
        value: the input; an empty one changes nothing.
        measured: as of :func:`observe_shared`.
    """
    observes_itself = type(observer).observe_inputs is not Observer.observe_inputs
    if observes_itself or not hasattr(observer, "measure_inputs") or not value.numel():
        observer.observe_inputs(value)
        return

    def measure() -> Sequence[torch.Tensor]:
        return observer.measure_inputs(value)

    _combine_shared(observer, _kind_of_inputs(observer), measure, measured, of_inputs=True)


def _kind_of_inputs(observer: Observer) -> Hashable:
    """A key that is equal for observers whose ``measure_inputs`` gives the same for an input.

    A class that declares ``_inputs_by`` beside its ``measure_inputs`` says that this method reads these fields of
    ``args``, and no hyperparameter. Observers that weigh tokens are given other values, so they have another key.
    """
    measuring_class = next(cls for cls in type(observer).__mro__ if "measure_inputs" in vars(cls))
    fields = vars(measuring_class).get("_inputs_by")
    if fields is None:
        return "inputs", observer.kind
    values = [str(getattr(observer.args, field)) for field in fields]
    return "inputs", measuring_class, getattr(observer, "weigh_tokens", False), *values


def _combine_shared(
    observer: Observer,
    kind: Hashable,
    measure: Callable[[], Sequence[torch.Tensor]],
    measured: dict[Hashable, Any],
    of_inputs: bool,
) -> None:
    """Combine an observer's statistics with a tensor's, once for all observers that hold the same statistics.

    Args:
        observer: gets the combined statistics.
        kind: equal for observers that measure the same in the tensor.
        measure: computes the statistics of the tensor; called for the first observer of a kind.
        measured: by kind, the measurements of the tensor so far; added to.
        of_inputs: the tensor is an input of the module whose weight is observed.
    """
    with observing(observer):
        if kind not in measured:
            measured[kind] = Measurement(measure(), {})
        measurement: Measurement = measured[kind]
        names = []
        for statistic in declared_statistics(observer):
            if statistic.of_inputs == of_inputs:
                names.append(statistic.name)
        attributes = observer.__dict__
        earlier = [attributes.get(name) for name in names]
        identities = tuple(map(id, earlier))
        if identities not in measurement.combined or not observer._declares_all:
            if of_inputs:
                combine_declared(observer, measurement.statistics, of_inputs)
            else:
                observer.combine(measurement.statistics)
            together = {name: attributes[name] for name in names if name in attributes}
            measurement.combined[identities] = earlier, together
        _, together = measurement.combined[identities]
        attributes.update(together)
