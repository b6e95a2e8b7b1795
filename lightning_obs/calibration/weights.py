"""Observe weights that are sharded over ranks, and give every rank the whole weight's ranges.

FSDP2 shares out rows, and a scale of a channel, a group or a block depends on its own rows only. So each rank observes
the rows that it holds, with an observer of their own, and sends the ranges (``for_rows``, ``join``): no weight travels.

A search for the least error stops when some candidates in a row improved no scale *of the whole tensor*, which a shard
cannot know. So a shard visits all candidates, and sends which ones improved any of its rows. Each rank derives where
one device would have stopped; if a later candidate was better for some scale, shards search again, that far
(``agree``).

A weight whose ranges depend on several shards (a range of the whole tensor, a block across two shards, a histogram, a
user's observer) is observed whole, on one rank. Weights are gathered in the same order on all ranks, one for each rank
before they all search: a rank never holds more than two. FSDP1's flat shards end anywhere in a row, so all are
gathered, a unit for each rank in one turn, and each rank copies the weights that it is to search: it never holds more
than one unit and its share of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

import torch
from torch import nn

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.model.kinds import kind_of
from lightning_obs.model.weight import by_unit, place_of, rows_here, unit_of, whole_matrix, whole_shape, whole_unit
from lightning_obs.numerics.qparams import rows_per_scale
from lightning_obs.observers import Key, Observer
from lightning_obs.ranks.collectives import Collectives, Stretch
from lightning_obs.ranks.sync import share_weights

#: makes the observer of a key look at its weight, or at rows of it
Observe: TypeAlias = Callable[[Key, Observer, torch.Tensor], object]


class ShardedWeights:
    """The weights of ``modules``, some of them sharded, and their observers.

    Raises:
        CalibrationError: a weight lies on ranks that ``collectives`` does not reach.
    """

    def __init__(
        self, modules: Mapping[Key, nn.Module], observers: Mapping[Key, Observer], collectives: Collectives
    ) -> None:
        self.modules, self.observers, self.collectives = modules, observers, collectives
        places = {key: place for key, module in modules.items() if (place := place_of(module)).groups}
        refuse(
            [name for name, _ in places] if collectives.size == 1 else [],
            "the weight is sharded over ranks, and the session was not told of them",
            remedy="CalibrationSession(..., collectives=Collectives.of_group()), on every rank.",
        )
        #: of each weight that ranks observe apart: first row and row after the last of each rank, alike on all ranks
        self.rows = {
            key: rows
            for key, place in places.items()
            if (rows := place.rows) is not None
            and len(rows) == collectives.size
            and not kind_of(modules[key]).rows
            and all(observers[key].for_rows(start) is not None for start, stop in rows if start < stop)
        }
        self._gathered = places.keys() - self.rows.keys()

    def observe(self, keys: Collection[Key], owners: Mapping[Key, int], observe: Observe, stretch: Stretch) -> int:
        """Let the observers of ``keys`` observe their weights, shared out over ranks. All end with all ranges.

        ``keys`` are the same on every rank where nothing failed; ``owners`` are the ranks that observe the weights that
        are not in :attr:`rows`; a failure in ``stretch``, an earlier one of this rank, is raised on all ranks, a
        later one is kept there. Returns the number of collectives, without gathered weights.
        """
        whole = {key: self.observers[key] for key in keys if key not in self.rows}
        shards: dict[Key, list[_Shard]] = {}
        with stretch:
            shards = {key: list(self._shards(key)) for key in keys if key in self.rows}
        parts = {shard.key: shard for of_weight in shards.values() for shard in of_weight}
        gathered = self._observe_gathered(whole if stretch.failure is None else (), owners, observe)

        def search(key: Key) -> None:
            if key in parts:
                self._observe_rows(parts[key], observe)
            elif key not in gathered:
                observe(key, self.observers[key], rows_here(self.modules[key]))
            elif (problem := gathered[key]) is not None:
                raise problem

        ranks = {part: shard.rank for part, shard in parts.items()}
        together = {**whole, **{part: shard.observer for part, shard in parts.items()}}
        shared = share_weights(together, {**owners, **ranks}, search, self.collectives, stretch.failure)
        collectives = shared.collectives
        if shared.failure is not None:
            stretch.keep(shared.failure)
        again = {
            shard.key: shard.observer
            for key, of_weight in shards.items()
            if self.observers[key].agree([shard.observer for shard in of_weight])
            for shard in of_weight
        }
        if again:
            collectives += share_weights(again, ranks, search, self.collectives, stretch.failure).collectives
        with stretch:
            for key, of_weight in shards.items():
                self.observers[key].join([(shard.start, shard.observer) for shard in of_weight])
        return collectives

    # ------------------------------------------------------------------ rows of each rank

    def _shards(self, key: Key) -> Iterator[_Shard]:
        """A shard for each rank that has rows; every rank makes all of them, to receive their ranges."""
        for rank, (start, stop) in enumerate(self.rows[key]):
            observer = self.observers[key].for_rows(start) if start < stop else None
            if observer is not None:
                yield _Shard(key, rank, start, stop, observer)

    def _observe_rows(self, shard: _Shard, observe: Observe) -> None:
        rows = rows_here(self.modules[shard.weight])
        if len(rows) != shard.stop - shard.start:
            raise CalibrationError(
                "the weight is not sharded as torch.chunk does",
                where=[shard.weight[0]],
                got=f"{len(rows)} rows",
                expected=f"rows {shard.start} to {shard.stop}",
            )
        height = rows_per_scale(shard.observer.args)
        above = 0 if height is None else shard.start % height
        # Rows of the block that another rank holds are zeros here; a range has to contain zero anyway.
        observe(shard.weight, shard.observer, nn.functional.pad(rows, (0, 0, above, 0)) if above else rows)

    # ------------------------------------------------------------------ whole weights of sharded modules

    def _observe_gathered(
        self, keys: Collection[Key], owners: Mapping[Key, int], observe: Observe
    ) -> dict[Key, Exception | None]:
        """Gather the weights, each for its owner, and let it observe the ones in ``keys``.

        All are gathered, for any keys, and errors of observing are returned: the other ranks go on gathering.
        One turn gathers a unit for each rank that is left with any; of FSDP2, a unit is one weight.
        """
        outcome: dict[Key, Exception | None] = {}
        for turn in zip_longest(*self._queues(owners)):
            units = [unit for unit in turn if unit is not None]
            mine: dict[Key, torch.Tensor] = {}
            for unit in units:
                # A view would keep the unit of FSDP1 in memory; a tensor that FSDP2 gathers has no other owner.
                copied = unit is not units[-1] and unit_of(self.modules[unit[0]]) is not None
                with whole_unit(self.modules[unit[0]]):
                    for key in unit:
                        matrix = whole_matrix(self.modules[key])
                        assert matrix is not None  # a plan has no weight without a matrix
                        if key in keys and owners[key] == self.collectives.rank:
                            try:
                                mine[key] = matrix.clone() if copied else matrix
                            except RuntimeError as error:  # no room
                                outcome[key] = error
                        del matrix  # before the next is gathered
                    for key, matrix in mine.items() if unit is units[-1] else ():
                        try:
                            observe(key, self.observers[key], matrix)
                            outcome[key] = None
                        except Exception as error:
                            outcome[key] = error
        return outcome

    def _queues(self, owners: Mapping[Key, int]) -> list[list[list[Key]]]:
        """For each rank the weights to gather, by unit. A unit is gathered in the turns of who owns most of it."""
        by_module = {self.modules[key]: key for key in sorted(self._gathered)}
        queues: list[list[list[Key]]] = [[] for _ in range(self.collectives.size)]
        for modules in by_unit(by_module):
            unit = [by_module[module] for module in modules]
            owned = [0] * self.collectives.size
            for key in unit:
                owned[owners[key]] += math.prod(whole_shape(self.modules[key]) or ())
            queues[owned.index(max(owned))].append(unit)
        return queues


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
