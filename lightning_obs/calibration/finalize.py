"""Give every rank the statistics of all activations, and the ranges of all weights.

The order matters: the ranks agree on what was observed, then each searches its share of the weights, then all get all
ranges. A rank that fails on the way goes on with the collectives, so that none is left waiting, and all raise alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from lightning_obs.calibration.missing_data import observe_without_inputs
from lightning_obs.calibration.weights import Weights
from lightning_obs.distributed.sync import Collectives, Synced, sync_statistics
from lightning_obs.errors import CalibrationError
from lightning_obs.observers import Key, Observer
from lightning_obs.schemes.target import Target


class Coverage(NamedTuple):
    """What no data reached: modules that are left out, and stand-ins for observers that borrow their ranges."""

    skipped: set[str]
    borrowed: dict[Key, Observer]


class Merged(NamedTuple):
    """What became of all ranks' statistics."""

    synced: Synced
    coverage: Coverage
    expert_tokens: dict[str, list[int]]
    collectives: int


def merge_ranks(
    observers: Mapping[Key, Observer],
    told: Mapping[Key, Observer],
    weighted: Sequence[Target],
    collectives: Collectives,
    cover: Callable[[Synced], Coverage],
    *,
    require_inputs: bool = True,
    note: Mapping[str, Sequence[int]] | None = None,
) -> Merged:
    """Make the ranks' statistics one, then observe the weights, shared out over ranks. Every rank must call this.

    Args:
        observers: of the session, by module name and base name.
        told: those whose statistics are made one now.
        weighted: the modules whose weights are observed.
        collectives: how to talk to the other ranks.
        cover: finds what no data reached, when the ranks have agreed. What it raises is raised on all.
        require_inputs: off: a weight's observer may go without the inputs that it needs.
        note: tokens of each expert on this rank.

    Raises:
        CalibrationError: on every rank alike.
    """
    held = Weights({}, {}, collectives)
    failure: CalibrationError | None = None
    try:
        _require_materialized(weighted)
        held = Weights({(t.name, "weight"): t.module for t in weighted}, observers, collectives)
    except CalibrationError as error:
        failure = error
    for key in held.modules:
        observers[key].reset(keep=observers[key].input_statistics)
    synced = sync_statistics(told, collectives, weights=held.sizes, failure=failure, note=dict(note or {}))
    coverage = Coverage(set(), {})
    try:
        coverage = cover(synced)
    except CalibrationError as error:
        failure = error

    def observe(key: Key, observer: Observer, rows: torch.Tensor) -> None:
        if key in coverage.borrowed or not require_inputs:  # it was allowed to do without, or has them from before
            observe_without_inputs(observer, rows)
        else:
            observer(rows)

    keys = [key for key in held.modules if key[0] not in coverage.skipped]
    number = synced.collectives + held.observe(keys, synced.owners, failure, observe)
    return Merged(synced, coverage, _add_up(synced.notes), number)


def _add_up(counts: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Tokens of each expert, over all ranks."""
    names = dict.fromkeys(name for of_rank in counts for name in of_rank)
    return {name: [sum(each) for each in zip(*(c[name] for c in counts if name in c), strict=True)] for name in names}


def _require_materialized(targets: Sequence[Target]) -> None:
    missing = [t.name for t in targets if t.module.weight.is_meta]
    if missing:
        raise CalibrationError("the weight is not materialized (meta device)", where=missing, remedy="load it first.")
