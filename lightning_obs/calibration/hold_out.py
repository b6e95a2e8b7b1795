"""Observers of some modules that see every fourth batch alone, to judge whether what is fitted holds on other data.

Observers of weights that read inputs, and roundings, fit weights to the calibration data. With few tokens or little
damping they fit what no other data share. So a few modules are fitted once more, without every fourth batch: their
statistics are sums, and those of the batches that are kept out are subtracted. The errors of their outputs on either
part of the data stand beside those of ranges without data (:mod:`.fit_errors`). What is written is fitted to all
batches: only these modules have statistics twice, and no result changes.

Inputs are not kept for it. Those of the batches that are kept out, and of as many others, are added up with random
signs to a sketch S of :data:`ROWS` rows, whose expected ``S^T S`` is the sum of ``x x^T``: a sum over batches and ranks
as a Hessian is, for a fraction of its memory. Half of the batches cost nothing.

Reference:
    Charikar, Chen, Farach-Colton, Finding Frequent Items in Data Streams, 2002 (count sketch); Clarkson, Woodruff,
    Low-Rank Approximation and Regression in Input Sparsity Time, 2013, arXiv:1207.6365.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from typing_extensions import override

from lightning_obs.calibration.base_names import GRADIENTS, HESSIAN, INPUT_ERRORS
from lightning_obs.calibration.observed_calls import ObservedCalls
from lightning_obs.model.weight import matrix_shape
from lightning_obs.observers import Key, Observer
from lightning_obs.observers.observer import observe_inputs_shared
from lightning_obs.observers.statistic import Statistic, declared_statistics, input_statistics
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.schemes.planned_modules import PlannedModule

#: of so many batches one is kept out
KEPT_OUT_OF = 4
#: of a sketch; up to so many tokens it is their inputs themselves, but for signs
ROWS = 512
#: how far the rows of each further 512 tokens are shifted, so that the first tokens of sequences, whose inputs are
#: often the largest, meet in no row
_STRIDE = 197
#: how many modules are fitted twice at most
_MODULES = 8
#: the most inputs of such a module: 1 GiB for a second Hessian
_MOST_INPUTS = 1 << 14
#: base names of the sketches of inputs of batches that are fitted to, and that are kept out
_FITTED = "inputs fitted to"
_KEPT_OUT = "inputs kept out"
#: between the base name of a hold-out's observer and that of the module's own
_PREFIX = "hold-out: "


class InputSketch(Observer):
    """Adds up a module's inputs with random signs, so that errors of its outputs can be estimated later.

    It observes ``(P, ..., C)``: P is 1, or 2 for pairs of an input in full precision and the quantized one, whose signs
    are equal. ``sketch`` is ``(P, 512, C)`` in float32, for which ``|S d|^2`` is about the sum of ``(x d)^2`` over all
    tokens x; with 512 tokens or fewer it is that sum.

    Attributes:
        rank: of this process; the signs of ranks are independent.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (Statistic("sketch", "sum", of_inputs=True),)
    sketch: torch.Tensor

    def __init__(self, base_name: str, args: QuantizationArgs) -> None:
        super().__init__(base_name, args)
        self.rank = 0
        self._tokens = 0  # observed since the last reset

    def measure_inputs(self, value: torch.Tensor) -> tuple[torch.Tensor]:
        """The sketch of ``(P, ..., C)``."""
        rows = value.flatten(1, -2).float()
        tokens = rows.shape[1]
        signs, places = _signs_and_places(self._tokens, tokens, self.rank, rows.device)
        self._tokens += tokens
        sketch = torch.zeros(len(rows), ROWS, rows.shape[-1], device=rows.device)
        return (sketch.index_add_(1, places, rows * signs),)

    @override
    def reset(self, keep: Collection[str] = ()) -> None:
        super().reset(keep)
        self._tokens = 0


@lru_cache(maxsize=4)
def _signs_and_places(first: int, tokens: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The signs of the tokens of a batch, ``(n, 1)``, 1 or -1, and their rows in a sketch, ``(n,)``.

    They depend on nothing but the numbers of the tokens and of the rank. All modules of a batch share them.

    Args:
        first: the number of the first token.
        tokens: how many there are.
        rank: that has seen them.
        device: of the result.

    Reference:
        Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, 2014 (the mixing of SplitMix64).
    """
    numbers = torch.arange(first, first + tokens, device=device)
    mixed = (numbers + (rank << 40)) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    signs = 1 - 2 * ((mixed >> 31) & 1)
    shifted = numbers + _STRIDE * (numbers // ROWS)
    return signs[:, None], shifted % ROWS


@dataclass(frozen=True)
class Place:
    """The place of a batch among those of all ranks.

    Attributes:
        number: of the batch.
        rank: that runs it.
    """

    number: int
    rank: int

    @classmethod
    def of(cls, calls: ObservedCalls, collectives: Collectives) -> Place:
        """The place of the present batch of this rank.

        >>> [Place.of(ObservedCalls(number=number), Collectives()).is_kept_out for number in range(4)]
        [False, False, False, True]
        """
        return cls(collectives.size * calls.present_number + collectives.rank, collectives.rank)

    @property
    def is_kept_out(self) -> bool:
        """Whether the batch is kept out: every fourth is."""
        return self.number % KEPT_OUT_OF == KEPT_OUT_OF - 1

    @property
    def is_sampled(self) -> bool:
        """Whether errors are estimated on the batch, which is fitted to: every fourth is, too."""
        return self.number % KEPT_OUT_OF == 1


class HoldOut:
    """The observers of one module that judge its fit: as the module's own, for the batches that are kept out alone.

    Args:
        target: the module.
        observer: of its weight, another than the module's own.
        helpers: of its rounding, by base name.

    Attributes:
        target: as given.
        observers: by base name.
    """

    def __init__(self, target: PlannedModule, observer: Observer, helpers: Mapping[str, Observer]) -> None:
        self.target = target
        self.observers: dict[str, Observer] = {"weight": observer, **helpers}
        #: whether the rounding makes up for errors of its inputs, so that pairs of inputs are observed
        self._takes_pairs = INPUT_ERRORS in helpers
        for base in (_FITTED, _KEPT_OUT):
            self.observers[base] = InputSketch("weight", QuantizationArgs())

    @property
    def by_key(self) -> dict[Key, Observer]:
        """The observers by keys that no other observer has, to reduce their statistics over ranks."""
        return {(self.target.name, f"{_PREFIX}{base}"): observer for base, observer in self.observers.items()}

    @property
    def sketches(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The sketches of inputs that are fitted to, and that are kept out; None: either has seen none."""
        fitted = getattr(self.observers[_FITTED], "sketch", None)
        kept_out = getattr(self.observers[_KEPT_OUT], "sketch", None)
        return None if fitted is None or kept_out is None else (fitted, kept_out)

    def reset(self) -> None:
        """Forget everything observed."""
        for observer in self.observers.values():
            observer.reset()

    # ------------------------------------------------------------------ while data run

    def observe(self, tokens: torch.Tensor, measured: dict[Hashable, Any], place: Place) -> None:
        """Observe an input of the module; a hook calls this after the module's own observers.

        Args:
            tokens: that count, ``(..., C)``, as the weight's observer gets them.
            measured: by kind of observer, the measurements of ``tokens`` so far.
            place: of the batch.
        """
        if place.is_kept_out:
            for base in ("weight", HESSIAN):
                observer = self.observers.get(base)
                if observer is not None and observer.needs_inputs:
                    observe_inputs_shared(observer, tokens, measured)
        if not self._takes_pairs:
            self._add_to_sketch(tokens.unsqueeze(0), place)

    def observe_pair(self, pair: torch.Tensor, measured: dict[Hashable, Any], place: Place) -> None:
        """Observe an input in full precision and the quantized one, ``(2, ..., C)``; otherwise as :meth:`observe`."""
        if place.is_kept_out:
            observe_inputs_shared(self.observers[INPUT_ERRORS], pair, measured)
        self._add_to_sketch(pair, place)

    def gradient_observer(self, place: Place) -> Observer | None:
        """What observes the gradients at the module's outputs in a batch; None: nothing does."""
        return self.observers.get(GRADIENTS) if place.is_kept_out else None

    def _add_to_sketch(self, value: torch.Tensor, place: Place) -> None:
        if not (place.is_kept_out or place.is_sampled):
            return
        sketch: Any = self.observers[_KEPT_OUT if place.is_kept_out else _FITTED]
        sketch.rank = place.rank
        sketch.observe_inputs(value)

    # ------------------------------------------------------------------ when data have ended

    def subtract_from(self, own_observers: Mapping[str, Observer]) -> None:
        """Turn the statistics of the batches that are kept out into those of all others.

        Args:
            own_observers: the module's own observers, by base name, with the statistics of all batches.
        """
        for base, observer in self.observers.items():
            own = own_observers.get(base)
            if own is None or not observer.needs_inputs:
                continue
            others = {}
            for name in input_statistics(observer):
                if hasattr(own, name) and hasattr(observer, name):
                    others[name] = getattr(own, name) - getattr(observer, name)
            observer.load_statistics(others)


def of_hold_out(key: Key) -> bool:
    """Whether an observer is a hold-out's, whose data may be missing."""
    return key[1].startswith(_PREFIX)


def _can_be_judged(observer: Observer) -> bool:
    """Whether the statistics that an observer gathers of inputs are sums, from which batches can be subtracted."""
    of_inputs = [statistic for statistic in declared_statistics(observer) if statistic.of_inputs]
    are_known = bool(of_inputs) or not observer.needs_inputs
    return are_known and all(statistic.reduction == "sum" for statistic in of_inputs)


def is_fitted(observer: Observer) -> bool:
    """Whether an observer of a weight, or the rounding after it, fits the weight to data."""
    return observer.needs_inputs or observer.rounding is not None


def judged_targets(targets: Sequence[PlannedModule], observers: Mapping[Key, Observer]) -> list[PlannedModule]:
    """The modules whose fit is judged: at most 8 of those that are fitted, of each shape alike, spread over the model.

    Args:
        targets: all planned modules, in their order.
        observers: of the plan.
    """
    by_shape = defaultdict[tuple[int, int], list[PlannedModule]](list)
    for target in targets:
        observer = observers.get((target.name, "weight"))
        shape = matrix_shape(target.module)
        if observer is None or not is_fitted(observer) or not _can_be_judged(observer) or shape is None:
            continue
        outputs, inputs = shape
        if inputs <= _MOST_INPUTS:
            by_shape[inputs, outputs].append(target)
    judged: list[PlannedModule] = []
    for place, widest in enumerate(sorted(by_shape, reverse=True)):
        shapes_left = len(by_shape) - place
        share = math.ceil((_MODULES - len(judged)) / shapes_left)
        judged += _spread(by_shape[widest], share)
    names = {target.name for target in judged}
    return [target for target in targets if target.name in names]


def _spread(targets: Sequence[PlannedModule], number: int) -> list[PlannedModule]:
    """So many of some modules, the middle ones of equal parts of them; all where there are no more."""
    if len(targets) <= number:
        return list(targets)
    return [targets[(2 * part + 1) * len(targets) // (2 * number)] for part in range(number)]
