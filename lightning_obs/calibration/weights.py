"""Observe weights that lie on several ranks, and give every rank the whole weight's ranges.

Method. FSDP2 shares out rows. A scale of a channel, a group or a block depends on its own rows only, so each rank
observes the rows that it holds, with an observer of their own, and sends the ranges: no weight travels. Ranges of one
scale that several ranks found (a whole tensor, a block across the edge of two shards) are joined by minimum and
maximum, where the observer is an extreme. Whether it can be so is asked of the observer (``for_rows``, ``join``).

A search for the least error stops when some candidates in a row improved no scale *of the whole tensor*. A shard cannot
know that, so it visits all candidates, and sends beside the ranges which of them improved any of its rows. From all
shards' notes each rank derives where one device would have stopped; if a later candidate was better for some scale, the
shards search once more, that far. So the range found is one device's (``agree``).

What cannot be decided row by row (a search over a whole tensor or over a block across two shards, a histogram, an
observer of the user's) sees the whole weight, on one rank: weights are gathered one at a time, in an order that is the
same on all ranks, one for each rank before they all search. A rank never holds more than two whole weights.

The flat shards of FSDP1 end anywhere in a row, so all of them are gathered, a unit at a time. In one turn as many units
as there are ranks are gathered one after the other; each rank copies the weights that it is to search, all search, and
the last of these units stays whole until then. So a rank never holds more than one unit and its share of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

import torch
from torch import nn

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.model.kinds import kind_of, to_matrix
from lightning_obs.model.sharding import by_unit, groups_of_shards, rows_of_ranks, unit_of, whole_tensor, whole_unit
from lightning_obs.model.weight import matrix_shape, rows_here
from lightning_obs.observers import Key, Observer
from lightning_obs.observers.rows import rows_per_scale
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.ranks.sync import share_weights

#: first row and row after the last, on one rank
Rows: TypeAlias = tuple[int, int]
#: ``(key, observer, weight or rows of it)``
Observe: TypeAlias = Callable[[Key, Observer, torch.Tensor], object]


def rows_by_rank(observer: Observer, module: nn.Module, collectives: Collectives) -> list[Rows] | None:
    """The rows that each rank observes by itself; None if the weight has to be seen whole. Alike on all ranks.

    Args:
        observer: of the module's weight.
        module: its weight is sharded.
        collectives: the ranks.
    """
    rows = rows_of_ranks(module.weight)
    if rows is None or kind_of(module).rows or len(rows) != collectives.size:
        return None
    apart = all(observer.for_rows(start) is not None for start, stop in rows if start < stop)
    return rows if apart else None


class Weights:
    """The weights of a calibration, as this rank holds them.

    Args:
        modules: whose weights are observed.
        observers: of these weights.
        collectives: how to talk to the other ranks.

    Raises:
        CalibrationError: a weight has no data, or lies on ranks that ``collectives`` does not reach.
    """

    def __init__(
        self, modules: Mapping[Key, nn.Module], observers: Mapping[Key, Observer], collectives: Collectives
    ) -> None:
        self.modules, self.observers, self.collectives = modules, observers, collectives
        refuse(
            [name for (name, _), module in modules.items() if module.weight.is_meta],
            "the weight is not materialized (meta device)",
            remedy="load it first.",
        )
        sharded = {key: module for key, module in modules.items() if groups_of_shards(module)}
        refuse(
            [name for name, _ in sharded] if collectives.size == 1 else [],
            "the weight is sharded over ranks, and the session was not told of them",
            remedy="CalibrationSession(..., collectives=Collectives.of_group()), on every rank.",
        )
        rows = {key: rows_by_rank(observers[key], module, collectives) for key, module in sharded.items()}
        self._rows = {key: of_ranks for key, of_ranks in rows.items() if of_ranks is not None}
        self._gathered = [key for key, of_ranks in rows.items() if of_ranks is None]

    @property
    def sizes(self) -> dict[Key, int]:
        """Elements of each weight that one rank observes whole: these are shared out."""
        shapes = {key: matrix_shape(module) for key, module in self.modules.items() if key not in self._rows}
        return {key: 0 if shape is None else shape.numel() for key, shape in shapes.items()}

    def observe(
        self, keys: Sequence[Key], owners: Mapping[Key, int], failure: Exception | None, observe: Observe
    ) -> int:
        """Let the observers of ``keys`` observe their weights, shared out over ranks. All end with all ranges.

        Args:
            keys: the same on every rank.
            owners: for each of :attr:`sizes` the rank that observes it.
            failure: what went wrong before.
            observe: makes an observer of ``key`` look at the weight, or at rows of it.

        Returns:
            how many collectives this took, gathered weights not counted.

        Raises:
            CalibrationError: on every rank alike, see :func:`~lightning_obs.ranks.sync.share_weights`.
        """
        whole = {key: self.observers[key] for key in keys if key not in self._rows}
        shards = {key: list(self._shards(key)) for key in keys if key in self._rows}
        gathered: dict[Key, Exception | None] = {}
        if failure is None:  # the same on all ranks by now
            gathered = self._observe_gathered([key for key in self._gathered if key in whole], owners, observe)
        parts = {shard.key: shard for of_weight in shards.values() for shard in of_weight}

        def search(key: Key) -> None:
            if key in parts:
                self._observe_rows(parts[key], observe)
            elif key not in gathered:
                observe(key, self.observers[key], _matrix(self.modules[key]))
            elif problem := gathered[key]:
                raise problem

        ranks = {part: shard.rank for part, shard in parts.items()}
        together = {**whole, **{part: shard.observer for part, shard in parts.items()}}
        collectives = share_weights(together, {**owners, **ranks}, search, self.collectives, failure).collectives
        again = {
            shard.key: shard.observer
            for key, of_weight in shards.items()
            if self.observers[key].agree([shard.observer for shard in of_weight])
            for shard in of_weight
        }
        if again:
            collectives += share_weights(again, ranks, search, self.collectives).collectives
        for key, of_weight in shards.items():
            self.observers[key].join([(shard.start, shard.observer) for shard in of_weight])
        return collectives

    # ------------------------------------------------------------------ rows of each rank

    def _shards(self, key: Key) -> Iterator[_Shard]:
        """One for each rank that has rows; every rank makes all of them, to receive their ranges."""
        for rank, (start, stop) in enumerate(self._rows[key]):
            observer = self.observers[key].for_rows(start) if start < stop else None
            if observer is not None:
                yield _Shard(key, rank, start, stop, observer)

    def _observe_rows(self, shard: _Shard, observe: Observe) -> None:
        rows = _matrix(self.modules[shard.weight])
        if len(rows) != shard.stop - shard.start:
            raise CalibrationError(
                "the weight is sharded in another way than torch.chunk does",
                where=[shard.weight[0]],
                got=f"{len(rows)} rows",
                expected=f"rows {shard.start} to {shard.stop}",
            )
        height = rows_per_scale(shard.observer.args)
        above = 0 if height is None else shard.start % height
        # Rows of the block that another rank holds are zeros here; a range has to contain zero anyway.
        rows = nn.functional.pad(rows, (0, 0, above, 0)) if above else rows
        observe(shard.weight, shard.observer, rows)

    # ------------------------------------------------------------------ whole weights of sharded modules

    def _observe_gathered(
        self, keys: Sequence[Key], owners: Mapping[Key, int], observe: Observe
    ) -> dict[Key, Exception | None]:
        """Gather these weights, each for its owner, and let it observe. What went wrong there is returned, not raised:
        the other ranks go on gathering.

        One turn gathers a unit for each rank that is left with any; of FSDP2, a unit is one weight.
        """
        outcome: dict[Key, Exception | None] = {}
        for turn in zip_longest(*self._queues(keys, owners)):
            *units, last = filter(None, turn)
            mine: list[tuple[Key, torch.Tensor]] = []
            for unit in units:
                with whole_unit(self.modules[unit[0]]):
                    # A view into an FSDP1 unit would keep it; what FSDP2 gathers is nobody else's.
                    flat = unit_of(self.modules[unit[0]]) is not None
                    for key, weight in self._mine(unit, owners):
                        try:
                            mine.append((key, weight.clone() if flat else weight))
                        except RuntimeError as error:  # no room
                            outcome[key] = error
            with whole_unit(self.modules[last[0]]):
                for key, weight in [*mine, *self._mine(last, owners)]:
                    outcome[key] = None
                    try:
                        matrix = to_matrix(self.modules[key], weight)
                        assert matrix is not None  # preflight refused the module otherwise
                        observe(key, self.observers[key], matrix)
                    except Exception as error:
                        outcome[key] = error
        return outcome

    def _queues(self, keys: Sequence[Key], owners: Mapping[Key, int]) -> list[list[list[Key]]]:
        """For each rank the weights to gather, by unit. A unit is gathered in the turns of who owns most of it."""
        at = {self.modules[key]: key for key in sorted(keys)}
        queues: list[list[list[Key]]] = [[] for _ in range(self.collectives.size)]
        elements = self.sizes
        for modules in by_unit(at):
            unit = [at[module] for module in modules]
            owned = [0] * self.collectives.size
            for key in unit:
                owned[owners[key]] += elements[key]
            queues[owned.index(max(owned))].append(unit)
        return queues

    def _mine(self, unit: Sequence[Key], owners: Mapping[Key, int]) -> Iterator[tuple[Key, torch.Tensor]]:
        """The whole weights of a unit that this rank owns; every rank must go through all of them."""
        for key in unit:
            weight = self.modules[key].weight
            assert isinstance(weight, torch.Tensor)
            weight = whole_tensor(weight)
            if owners[key] == self.collectives.rank:
                yield key, weight
            del weight


@dataclass
class _Shard:
    """The rows ``start`` to ``stop`` of a weight, on one rank."""

    weight: Key
    rank: int
    start: int
    stop: int
    observer: Observer

    @property
    def key(self) -> Key:
        return self.weight[0], f"{self.weight[1]} rows {self.start} to {self.stop - 1}"


def _matrix(module: nn.Module) -> torch.Tensor:
    matrix = rows_here(module)
    assert matrix is not None  # preflight refused the module otherwise
    return matrix
