"""Observe the weights of a plan: each weight on one rank, wherever its data are, and all ranks get the result.

A weight may be whole on each rank, sharded over ranks (:mod:`.sharded_weights`), or offloaded; then it is loaded while
it is observed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from lightning_obs.calibration.sharded_weights import Observe, ShardedWeights
from lightning_obs.errors import refuse
from lightning_obs.files.tensors import Progress, Tally
from lightning_obs.model.offload import is_offloaded
from lightning_obs.model.weight import onloaded, place_of, whole_matrix
from lightning_obs.observers import Key, Observer
from lightning_obs.ranks.collectives import Collectives, Stretch
from lightning_obs.ranks.sync import share_weights


class WeightSearch:
    """Lets the ranks observe a set of weights, each weight on one rank.

    A finalization makes one for the observers of weights, and one for the roundings, and calls :meth:`observe` of each.

    Args:
        modules: by key (module name, base name), the module of each weight.
        observers: by key, the observer of each weight.
        collectives: of this rank.
        progress: called after each weight that this rank has searched; None: no progress is shown.

    Attributes:
        modules: as given.
        sizes: by key, the number of elements of the weight, by which weights are shared out.

    Raises:
        CalibrationError: a weight is on the meta device, or sharded over ranks that ``collectives`` does not reach.
    """

    def __init__(
        self,
        modules: Mapping[Key, nn.Module],
        observers: Mapping[Key, Observer],
        collectives: Collectives,
        progress: Progress | None = None,
    ) -> None:
        self.modules = modules
        self.sizes: dict[Key, int] = {}
        self._observers = observers
        self._collectives = collectives
        self._progress = progress
        self._sharded: ShardedWeights | None = None
        refuse(
            [name for (name, _), module in modules.items() if _is_on_meta(module)],
            "the weight is not materialized (meta device)",
            remedy="load it first.",
        )
        is_sharded = False
        for key, module in modules.items():
            place = place_of(module)
            self.sizes[key] = place.shape.numel()
            is_sharded = is_sharded or bool(place.groups)
        if is_sharded:
            self._sharded = ShardedWeights(modules, observers, collectives)

    def observe(self, keys: Collection[Key], owners: Mapping[Key, int], observe: Observe, stretch: Stretch) -> int:
        """Let each rank observe the weights that it owns, and give all ranks all ranges. Every rank must call this.

        Args:
            keys: the weights to observe; the same on every rank on which nothing failed.
            owners: by key, the rank that observes the weight.
            observe: called with the key, observer and whole weight (a matrix) of each weight that this rank owns.
            stretch: this rank's work. If it holds a failure, this rank observes nothing, and the failure is raised on
                all ranks; a failure in here is kept in it.

        Returns:
            The number of collectives, without the gathering of sharded weights.
        """
        if self._progress is not None:
            observe = self._reporting(observe, keys, owners, self._progress)
        if self._sharded is not None:
            return self._sharded.observe(keys, owners, observe, stretch)

        def search(key: Key) -> None:
            module = self.modules[key]
            with onloaded(module):
                matrix = whole_matrix(module)
                assert matrix is not None  # a plan has no weight without a matrix
                observe(key, self._observers[key], matrix)

        observers = {key: self._observers[key] for key in keys}
        shared = share_weights(observers, owners, search, self._collectives, stretch.failure)
        if shared.failure is not None:
            stretch.keep(shared.failure)
        return shared.collectives

    def _reporting(
        self, observe: Observe, keys: Collection[Key], owners: Mapping[Key, int], progress: Progress
    ) -> Observe:
        """A function that calls ``observe``, and then ``progress`` with the bytes that this rank has observed so far.

        The total is the bytes of the weights in ``keys`` that this rank owns.
        """
        total = 0
        for key in keys:
            if owners.get(key) == self._collectives.rank:
                weight: Any = self.modules[key].weight
                total += self.sizes[key] * weight.itemsize
        tally = Tally(total, progress)

        def observe_and_report(key: Key, observer: Observer, weight: torch.Tensor) -> None:
            observe(key, observer, weight)
            name, _ = key
            tally.add(name if self._collectives.size == 1 else f"{name} (this rank's share)", weight.nbytes)

        return observe_and_report


def _is_on_meta(module: nn.Module) -> bool:
    """Whether a module's weight has no data: it is on the meta device, and no offloading will load it."""
    weight: Any = module.weight
    return bool(weight.is_meta) and not is_offloaded(module)
