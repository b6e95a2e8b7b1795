"""Keep every fourth batch out of a second fit of a few weights, to judge whether fitting holds on other data.

Observers of weights that read inputs, and roundings, *fit* weights to the calibration data. With few tokens or little
damping they fit peculiarities of these data. So a few modules are fitted a second time, without every fourth batch. The
statistics for this fit are the sums over all batches minus the sums over the batches that are kept out. Then
:mod:`.fit_errors` estimates the errors of the modules' outputs on both parts of the data, beside those of weights that
were chosen without data. The weights that are written are fitted to all batches, so no result changes.

Inputs are not stored for these estimates. The inputs of the batches that are kept out, and of as many others, are added
up with random signs to a *sketch* S of :data:`ROWS` rows. The expectation of ``S^T S`` is the sum of ``x x^T``. Like a
Hessian, a sketch is a sum over batches and ranks, but takes a fraction of the memory. The other half of the batches
adds no work.

An observation makes the hold-outs; the hooks on the modules feed them, and ``finalize`` reads and resets them.

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

#: one of so many batches is kept out
KEPT_OUT_OF = 4
#: the number of rows of a sketch; a rank's sketch of at most so many tokens holds their inputs themselves, with signs
ROWS = 512
#: by how many rows each further 512 tokens are shifted, so that the first tokens of sequences, whose inputs are often
#: the largest, are not added in the same row
_STRIDE = 197
#: the most modules that are fitted twice
_MODULES = 8
#: the most input channels of such a module: its second Hessian takes 1 GiB then
_MOST_INPUTS = 1 << 14
#: base names of the sketches: of inputs in batches that are fitted to, and in batches that are kept out
_FITTED = "inputs fitted to"
_KEPT_OUT = "inputs kept out"
#: stands before the base names of a hold-out's observers, which differ by it from those of the module's own observers
_PREFIX = "hold-out: "


class InputSketch(Observer):
    """Adds up a module's inputs with random signs, so that errors of its outputs can be estimated later.

    A :class:`HoldOut` has two. They observe ``(P, ..., C)``: P is 1, or 2 for pairs of an input in full precision and
    the same input of the quantized model, which get equal signs. ``sketch`` is ``(P, 512, C)`` in float32. For a sketch
    S and a vector d, ``|S d|^2`` approximates the sum of ``(x d)^2`` over all tokens x. On one rank the two are equal
    for 512 tokens or fewer; each rank starts at the first row, so in the sum over ranks their tokens share rows.

    Attributes:
        rank: of this process; the signs of different ranks are independent.
        tokens: how many tokens were observed since the last reset.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (Statistic("sketch", "sum", of_inputs=True),)
    sketch: torch.Tensor

    def __init__(self, base_name: str, args: QuantizationArgs) -> None:
        super().__init__(base_name, args)
        self.rank = 0
        self.tokens = 0

    def measure_inputs(self, value: torch.Tensor) -> tuple[torch.Tensor]:
        """The sketch of one input ``(P, ..., C)``.

        The base class calls this in ``observe_inputs``, and adds the result to the sketch so far.
        """
        rows = value.flatten(1, -2).float()
        tokens = rows.shape[1]
        signs, places = _signs_and_places(self.tokens, tokens, self.rank, rows.device)
        self.tokens += tokens
        sketch = torch.zeros(len(rows), ROWS, rows.shape[-1], dtype=torch.float32, device=rows.device)
        return (sketch.index_add_(1, places, rows * signs),)

    @override
    def reset(self, keep: Collection[str] = ()) -> None:
        """Forget the sketch, and begin to count tokens anew.

        Called by :meth:`HoldOut.reset`, and wherever all observers of an observation are reset.
        """
        super().reset(keep)
        self.tokens = 0


@lru_cache(maxsize=4)
def _signs_and_places(first: int, tokens: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The signs of consecutive tokens, ``(n, 1)``, 1 or -1, and the rows of a sketch to which they are added, ``(n,)``.

    Both depend only on the numbers of the tokens and on the rank, so all modules of a batch get the same.

    Args:
        first: the number of the first token, counted since the last reset.
        tokens: how many tokens there are.
        rank: of this process.
        device: of the result.

    Reference:
        Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, 2014 (the mixing of SplitMix64).
    """
    numbers = torch.arange(first, first + tokens, device=device)
    # SplitMix64's constants as int64, and its shifts. The rank stands above the 40 bits of a token's number; bit 31 of
    # the result, mixed as well as any other, is the sign.
    mixed = (numbers + (rank << 40)) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    signs = 1 - 2 * ((mixed >> 31) & 1)
    shifted = numbers + _STRIDE * (numbers // ROWS)
    return signs[:, None], shifted % ROWS


@dataclass(frozen=True)
class Place:
    """The place of a batch among the batches of all ranks, which decides whether the batch is kept out.

    For each observed input, the caller of a :class:`HoldOut` makes one with :meth:`of`: the hooks of :mod:`.hooks`,
    :class:`.PairedInputs` and :class:`.TokenWeights`. The hold-out reads it.

    Attributes:
        number: of the batch among those of all ranks, from 0.
        rank: the rank that runs the batch.
    """

    number: int
    rank: int

    @classmethod
    def of(cls, calls: ObservedCalls, collectives: Collectives) -> Place:
        """The place of the batch that this rank runs now; called when an input of a judged module is observed.

        >>> [Place.of(ObservedCalls(number=number), Collectives()).is_kept_out for number in range(4)]
        [False, False, False, True]
        """
        return cls(collectives.size * calls.present_number + collectives.rank, collectives.rank)

    @property
    def is_kept_out(self) -> bool:
        """Whether the batch is kept out of the second fit, as every fourth batch is.

        A :class:`HoldOut` asks this for each observed input.
        """
        return self.number % KEPT_OUT_OF == KEPT_OUT_OF - 1

    @property
    def is_sampled(self) -> bool:
        """Whether errors are estimated on the batch although it is fitted to, as on another fourth of the batches.

        A :class:`HoldOut` asks this before it adds an input to a sketch.
        """
        return self.number % KEPT_OUT_OF == 1


class HoldOut:
    """The observers that gather what judging the fit of one module's weight needs.

    ``Observation.of_model`` makes one for each of :func:`judged_targets`. While data run, its observers gather from the
    batches that are kept out the statistics that the module's own observers gather from all batches.
    :meth:`subtract_from` then turns these statistics into those of the other batches.

    Args:
        target: the module.
        observer: of the weight, with the class and options of the module's own observer.
        helpers: of the weight's rounding, by base name.

    Attributes:
        target: as given.
        observers: by base name, the observer, the helpers and two sketches.
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
        """The observers of this hold-out, by keys that no observer of the plan has.

        With several ranks, ``finalize`` asks for them once the data have ended, to reduce their statistics over ranks.
        """
        return {(self.target.name, f"{_PREFIX}{base}"): observer for base, observer in self.observers.items()}

    @property
    def sketches(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The sketches of inputs in batches that are fitted to, and in batches that are kept out.

        None if either has observed nothing: there were fewer than four batches, or none reached the module. Read by
        ``finalize`` and :func:`.judge_fit` while the module's weight is observed.
        """
        fitted = getattr(self.observers[_FITTED], "sketch", None)
        kept_out = getattr(self.observers[_KEPT_OUT], "sketch", None)
        return None if fitted is None or kept_out is None else (fitted, kept_out)

    @property
    def sketched_tokens(self) -> list[int]:
        """How many tokens each of the two sketches has; the signs of further tokens depend on it.

        Saved beside the statistics, and set again, where a killed run from files goes on.
        """
        return [sketch.tokens for sketch in self._sketch_observers]

    @sketched_tokens.setter
    def sketched_tokens(self, tokens: Sequence[int]) -> None:
        for sketch, number in zip(self._sketch_observers, tokens, strict=True):
            sketch.tokens = number

    @property
    def _sketch_observers(self) -> list[InputSketch]:
        """The observers of the two sketches."""
        return [observer for observer in self.observers.values() if isinstance(observer, InputSketch)]

    def reset(self) -> None:
        """Forget everything that was observed; ``finalize`` calls this once the ranks have shared their estimates."""
        for observer in self.observers.values():
            observer.reset()

    # ------------------------------------------------------------------ while data run

    def observe(self, tokens: torch.Tensor, measured: dict[Hashable, Any], place: Place) -> None:
        """Observe an input of the module; a hook calls this after the module's own observers.

        Args:
            tokens: the tokens that count, ``(..., C)``, as the weight's observer gets them.
            measured: by kind of observer, the statistics of ``tokens`` that were computed already.
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
        """Observe an input in full precision and the same input of the quantized model, ``(2, ..., C)``.

        :class:`.PairedInputs` calls this; ``measured`` and ``place`` are as in :meth:`observe`.
        """
        if place.is_kept_out:
            observe_inputs_shared(self.observers[INPUT_ERRORS], pair, measured)
        self._add_to_sketch(pair, place)

    def gradient_observer(self, place: Place) -> Observer | None:
        """The observer of the gradients at the module's outputs, if the batch is kept out and the rounding needs them.

        :class:`.TokenWeights` asks for it when it runs a copy of the model backward.
        """
        return self.observers.get(GRADIENTS) if place.is_kept_out else None

    def _add_to_sketch(self, value: torch.Tensor, place: Place) -> None:
        """Add an input to the sketch of its part of the data; half of the batches are in no sketch."""
        if not (place.is_kept_out or place.is_sampled):
            return
        sketch: Any = self.observers[_KEPT_OUT if place.is_kept_out else _FITTED]
        sketch.rank = place.rank
        sketch.observe_inputs(value)

    # ------------------------------------------------------------------ when data have ended

    def subtract_from(self, own_observers: Mapping[str, Observer]) -> None:
        """Turn the statistics of the batches that are kept out into those of all other batches.

        ``finalize`` calls this before the second fit, once statistics were reduced over ranks.

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
    """Whether a key is that of a hold-out's observer, which may lack data without an error.

    ``finalize`` asks this when it lists the observers that no data reached.
    """
    return key[1].startswith(_PREFIX)


def _can_be_judged(observer: Observer) -> bool:
    """Whether the statistics that an observer gathers of inputs are sums, from which batches can be subtracted."""
    of_inputs = [statistic for statistic in declared_statistics(observer) if statistic.of_inputs]
    are_known = bool(of_inputs) or not observer.needs_inputs
    return are_known and all(statistic.reduction == "sum" for statistic in of_inputs)


def judged_targets(targets: Sequence[PlannedModule], observers: Mapping[Key, Observer]) -> list[PlannedModule]:
    """Choose the modules whose fit is judged, when an observation begins: at most 8, spread over the model.

    About the same number is chosen for each shape of the weight.

    Args:
        targets: the modules whose weights are fitted to data, in the model's order.
        observers: of the plan.
    """
    by_shape = defaultdict[tuple[int, int], list[PlannedModule]](list)
    for target in targets:
        shape = matrix_shape(target.module)
        if shape is None or not _can_be_judged(observers[target.name, "weight"]):
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
    """Choose ``number`` of the modules, the middle one of each of so many equal parts; all, if there are no more."""
    if len(targets) <= number:
        return list(targets)
    return [targets[(2 * part + 1) * len(targets) // (2 * number)] for part in range(number)]
