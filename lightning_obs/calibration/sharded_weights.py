"""Observe weights that FSDP shards over ranks: gather each weight for the rank that searches its range.

Some ranges depend on the whole weight (one range per tensor or block, a search that ends when no scale improves). So
one rank searches each whole weight, and the ranges are then sent to all ranks. Gathering is a collective: every rank,
even one that has failed, gathers the same weights in the same order.

A *unit* is what is gathered at once: with FSDP2 one weight, with FSDP1 all parameters of one wrapper. A *turn* gathers
one unit for each rank, and then all ranks search at the same time. So a rank holds at most two whole weights with
FSDP2, and with FSDP1 one unit and its own weights of the turn's other units.

:class:`.WeightSearch` uses this file if any weight of the plan is sharded.
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

#: lets an observer observe a weight, a matrix; called with the key (module name, base name), the observer, the weight
Observe: TypeAlias = Callable[[Key, Observer, torch.Tensor], object]
#: weights that are gathered together
_Unit: TypeAlias = list[Key]


class ShardedWeights:
    """Observes the weights of a model of which at least some are sharded over ranks.

    :class:`.WeightSearch` makes one in each finalization of such a model.

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
            "the weight is sharded over ranks, and the session cannot reach them",
            remedy="CalibrationSession(..., collectives=Collectives.of_group()), on every rank.",
        )

    def observe(self, keys: Collection[Key], owners: Mapping[Key, int], observe: Observe, stretch: Stretch) -> int:
        """Let each rank observe the weights that it owns, and give all ranks all ranges. Every rank must call this.

        :meth:`.WeightSearch.observe` calls this, and leaves the whole work to it.

        Args:
            keys: the weights to observe; the same on every rank on which nothing failed.
            owners: by key, the rank that observes the weight.
            observe: called with each weight that this rank owns.
            stretch: this rank's work. If it holds a failure, this rank observes nothing, and the failure is raised on
                all ranks; a failure in here is kept in it.

        Returns:
            The number of collectives that reduce or send ranges, which the result of the calibration reports. Gathering
            weights is not counted, as its collectives are those of FSDP.
        """
        keys_of_this_rank: set[Key] = set()
        if stretch.failure is None:
            keys_of_this_rank = {key for key in keys if owners[key] == self.collectives.rank}
        failures = self._observe_sharded(keys_of_this_rank, owners, observe)

        def search(key: Key) -> None:
            """Observe a weight that is not sharded; of a sharded weight, raise the error that observing it has raised.

            :func:`.share_weights` calls this for each key that this rank owns.
            """
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
        """Gather all sharded weights, turn by turn, and observe those in ``keys`` (this rank's).

        Returns:
            By key of each observed sharded weight, the error that observing it raised; None: no error. Errors are not
            raised here, because the other ranks need this rank to gather the next weights.
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
        """Gather the weights of a unit, and add those in ``keys`` to ``matrices``. Every rank must call this.

        With FSDP2 the call of :func:`.whole_matrix` gathers the weight, so it is made for every weight of the unit,
        also for those that another rank observes. With FSDP1 the caller has gathered the unit already.

        Args:
            unit: whose parameters are whole now (:func:`.whole_unit`).
            keys: the weights that this rank observes.
            is_last: whether the unit is the last of its turn, so that its weights are observed before they are freed.
            matrices: added to, by key.
            failures: added to, if there is no memory for a copy.
        """
        # With FSDP1 a matrix is a view of memory that the next unit takes over, so it is copied. With FSDP2, where
        # there is no unit of FSDP1, each matrix has memory of its own.
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
        """Call ``observe`` with each gathered weight; errors go to ``failures``."""
        for key, matrix in matrices.items():
            failures[key] = None
            try:
                observe(key, self.observers[key], matrix)
            except Exception as error:
                failures[key] = error

    def _turns(self, owners: Mapping[Key, int]) -> Iterator[list[_Unit]]:
        """Yield the units of each turn, at most one for each rank; the same on every rank.

        A unit belongs to the rank that owns most of its elements. A rank whose units are used up has none in the
        further turns.
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
