"""The calls of a model that are observed: which tokens of the present call count, and what was counted so far.

Hooks read and change this record while the model runs. Its owner is the session; the observation holds it.
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
    """The state of the observed calls of a model.

    Attributes:
        batches: how many batches (usually calls of the model) were observed.
        measurements: how often an activation was reduced to a statistic; modules that read one tensor share it.
        is_paused: whether calls of the model are ignored, although hooks are attached.
        mask: on the CPU, nonzero for the tokens, ``(batch, tokens)``, or samples, ``(batch,)``, that count; None: all.
        expert_tokens: how many tokens the router sent to each expert, by the name of the experts' container; a count
            is an int, or a tensor on the device where the expert ran.
        cache: of the tensor that was read last. Sessions that observe the same calls may share it.
        readers: which module reads which quantized output; None: no output is quantized.
    """

    batches: int = 0
    measurements: int = 0
    is_paused: bool = False
    mask: torch.Tensor | None = None
    expert_tokens: dict[str, list[Any]] = field(default_factory=dict)
    cache: ReadCache = field(default_factory=ReadCache)
    readers: OutputReaders | None = None

    def paused(self) -> AbstractContextManager[None]:
        """A block in which calls of the model are ignored."""
        return patch_attr(self, "is_paused", True)
