"""Observe weights that are sharded over ranks: gather each one for the rank that searches it.

Some ranges depend on the whole weight (a range of the tensor, a block, a search that ends when no scale improves), so
each weight is searched whole, on one rank, and the ranges are then sent to all. Gathering is a collective: all ranks
gather the same weights in the same order, also a rank that failed.

Weights are gathered by unit: of FSDP2 one weight, of FSDP1 all parameters that one wrapper holds. One turn gathers a
unit for each rank, then all ranks search at once. So of FSDP2 a rank holds at most two whole weights, and of FSDP1
one unit and its share of the turn's other units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import zip_longest
from typing import TypeAlias

import torch
from torch import nn

from lightning_obs.errors import refuse
from lightning_obs.model.weight import by_unit, place_of, unit_of, whole_matrix, whole_shape, whole_unit
from lightning_obs.observers import Key, Observer
from lightning_obs.ranks.collectives import Collectives, Stretch
from lightning_obs.ranks.sync import share_weights

#: lets the observer of a key observe its weight, a matrix
Observe: TypeAlias = Callable[[Key, Observer, torch.Tensor], object]
#: weights that are gathered together
_Unit: TypeAlias = list[Key]


class ShardedWeights:
    """The weights of a model some of which are sharded over ranks, and their observers.

    Args:
        modules: the module of each weight.
        observers: the observer of each weight.
        collectives: of this rank.

    Raises:
        CalibrationError: a weight is sharded over ranks that ``collectives`` does not reach.
    """

    def __init__(
        self, modules: Mapping[Key, nn.Module], observers: Mapping[Key, Observer], collectives: Collectives
    ) -> None:
        self.modules = modules
        self.observers = observers
        self.collectives = collectives
        self._sharded: list[Key] = []
        unreachable = []
        for key, module in modules.items():
            if place_of(module).groups:
                self._sharded.append(key)
                if collectives.size == 1:
                    unreachable.append(key[0])
        refuse(
            unreachable,
            "the weight is sharded over ranks, and the session was not told of them",
            remedy="CalibrationSession(..., collectives=Collectives.of_group()), on every rank.",
        )

    def observe(self, keys: Collection[Key], owners: Mapping[Key, int], observe: Observe, stretch: Stretch) -> int:
        """Let each rank observe the weights that it owns, and give all ranks all ranges. Every rank must call this.

        Args:
            keys: the weights to observe; the same on every rank where nothing failed.
            owners: the rank that observes each weight.
            observe: called with each weight that this rank owns.
            stretch: an earlier failure of this rank in it is raised on all ranks; a later one is kept there.

        Returns:
            The number of collectives, without the gathering of weights.
        """
        keys_of_this_rank: set[Key] = set()
        if stretch.failure is None:
            keys_of_this_rank = {key for key in keys if owners[key] == self.collectives.rank}
        failures = self._observe_sharded(keys_of_this_rank, owners, observe)

        def search(key: Key) -> None:
            if key not in failures:
                matrix = whole_matrix(self.modules[key])
                assert matrix is not None  # a plan has no weight without a matrix
                observe(key, self.observers[key], matrix)
                return
            failure = failures[key]
            if failure is not None:
                raise failure

        observers = {key: self.observers[key] for key in keys}
        shared = share_weights(observers, owners, search, self.collectives, stretch.failure)
        if shared.failure is not None:
            stretch.keep(shared.failure)
        return shared.collectives

    def _observe_sharded(
        self, keys: Collection[Key], owners: Mapping[Key, int], observe: Observe
    ) -> dict[Key, Exception | None]:
        """Gather all sharded weights, and observe those of ``keys``.

        Returns:
            For each observed weight, the error of observing it, or None. It is not raised here, because
            the other ranks wait for this rank to gather the next weights.
        """
        failures: dict[Key, Exception | None] = {}
        for units in self._turns(owners):
            matrices: dict[Key, torch.Tensor] = {}
            for unit in units:
                is_last = unit is units[-1]
                with whole_unit(self.modules[unit[0]]):
                    self._gather(unit, keys, is_last, matrices, failures)
                    if is_last:  # inside its block: the matrices of the last unit of FSDP1 are views of it
                        self._observe_matrices(matrices, observe, failures)
        return failures

    def _gather(
        self,
        unit: _Unit,
        keys: Collection[Key],
        is_last: bool,
        matrices: dict[Key, torch.Tensor],
        failures: dict[Key, Exception | None],
    ) -> None:
        """Gather a unit's weights, and add those of ``keys`` to ``matrices``."""
        # The next unit of FSDP1 takes the memory that a view would point to; a weight gathered by FSDP2 is no view.
        is_view = unit_of(self.modules[unit[0]]) is not None
        for key in unit:
            matrix = whole_matrix(self.modules[key])
            assert matrix is not None  # a plan has no weight without a matrix
            if key in keys:
                try:
                    matrices[key] = matrix.clone() if is_view and not is_last else matrix
                except RuntimeError as error:  # no room for the copy
                    failures[key] = error
            del matrix  # before the next is gathered

    def _observe_matrices(
        self, matrices: Mapping[Key, torch.Tensor], observe: Observe, failures: dict[Key, Exception | None]
    ) -> None:
        for key, matrix in matrices.items():
            failures[key] = None
            try:
                observe(key, self.observers[key], matrix)
            except Exception as error:
                failures[key] = error

    def _turns(self, owners: Mapping[Key, int]) -> Iterator[list[_Unit]]:
        """The units of each turn: one for each rank, as long as it has any left. The same on every rank.

        A unit is gathered in the turns of the rank that owns most of its elements.
        """
        key_of = {self.modules[key]: key for key in sorted(self._sharded)}
        ranks = self.collectives.size
        queues: dict[int, list[_Unit]] = {rank: [] for rank in range(ranks)}
        for modules in by_unit(key_of):
            unit: _Unit = []
            elements = [0] * ranks
            for module in modules:
                key = key_of[module]
                unit.append(key)
                elements[owners[key]] += math.prod(whole_shape(module) or ())
            owner_of_most = elements.index(max(elements))
            queues[owner_of_most].append(unit)
        for units in zip_longest(*queues.values()):
            yield [unit for unit in units if unit is not None]
