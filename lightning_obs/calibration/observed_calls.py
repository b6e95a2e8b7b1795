"""The record of a model's observed calls: which tokens of the present call count, and what was counted so far.

An observation holds one. Hooks read and change it while the model runs; the session pauses it and counts batches.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from compressed_tensors.utils.helpers import patch_attr

from lightning_obs.calibration.output_readers import OutputReaders
from lightning_obs.observers.observer import ReadCache


@dataclass
class ObservedCalls:
    """The state of the observed calls of a model; ``Observation.calls`` is one.

    Hooks and the session change it while data run. :func:`.finalize` and the properties of the session read it.

    Attributes:
        batches: how many batches (usually calls of the model) were observed.
        number: the number of the present batch, from 0, if batches run several times; None: it is ``batches - 1``.
        measurements: how often the statistics of an activation were computed; modules that read one tensor share them.
        is_paused: whether hooks ignore the calls of the model, although they are attached.
        depth: how many calls of the model run now, while hooks are attached: 2 and more in a forward that calls the
            model itself.
        is_kept: whether the present call of the model is kept (:class:`.KeptCalls`). Hooks ignore its modules, which
            are observed when the call runs again.
        only_for_weights: whether the present run has random tokens (:mod:`.random_tokens`). Weights observe their
            inputs then; the ranges of activations do not.
        mask: the mask of the present call, on the CPU, nonzero for the tokens ``(batch, tokens)`` or samples
            ``(batch,)`` that count; None: all count.
        expert_tokens: by name of the experts' container, how many tokens the router sent to each expert. A count is an
            int, or a scalar tensor if a mask excluded tokens.
        cache: the statistics of the tensor that was read last. Sessions that observe the same calls may share it.
        readers: the record of which module reads which quantized output; None: no output is quantized.
    """

    batches: int = 0
    number: int | None = None
    measurements: int = 0
    is_paused: bool = False
    depth: int = 0
    is_kept: bool = False
    only_for_weights: bool = False
    mask: torch.Tensor | None = None
    expert_tokens: dict[str, list[Any]] = field(default_factory=dict)
    cache: ReadCache = field(default_factory=ReadCache)
    readers: OutputReaders | None = None

    @property
    def present_number(self) -> int:
        """The number of the batch that this rank runs now, from 0; -1 before the first counted batch.

        :meth:`.Place.of` asks for it, to decide whether the batch is kept out.
        """
        return self.batches - 1 if self.number is None else self.number

    def number_batch(self, number: int | None) -> None:
        """Say which batch of this rank runs next.

        The calibration from files, which runs each batch once for each block, calls this before each run
        (``streaming/blocks.py``), and with None after the last one.

        Args:
            number: of the batch, from 0; None: batches run once and are counted.
        """
        self.number = number

    def paused(self) -> AbstractContextManager[None]:
        """A context manager in which hooks ignore the calls of the model.

        Entered by ``CalibrationSession.paused``, and by :class:`.TokenWeights` while a copy of the model runs.
        """
        return patch_attr(self, "is_paused", True)
