"""The calls of a model that are observed: which tokens of the present call count, and what was counted so far.

Hooks read and change this record while the model runs. Its owner is the session; the observation holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from compressed_tensors.utils.helpers import patch_attr


@dataclass
class ReadCache:
    """Cache for modules that read one tensor in turn (q, k, v): its unmasked tokens, and its statistics.

    Attributes:
        tensor: a weak reference to the tensor that was read last; None: no tensor was read yet.
        stamp: changes whenever the content of the tensor may have changed.
        tokens: its tokens that count; None: they were not selected yet.
        measured: its statistics, by kind of observer.
    """

    tensor: Callable[[], torch.Tensor | None] | None = None
    stamp: Hashable = None
    tokens: torch.Tensor | None = None
    measured: dict[Hashable, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is empty: a weak reference cannot be copied."""
        return vars(ReadCache())

    def forget(self) -> None:
        """Forget the tensor and its statistics."""
        vars(self).update(vars(ReadCache()))

    def read(self, tensor: torch.Tensor, stamp: Hashable) -> None:
        """Begin with a tensor, unless it is the one that was read last and it has not changed."""
        is_last = self.tensor is not None and self.tensor() is tensor
        if not is_last or self.stamp != stamp:
            vars(self).update(vars(ReadCache(weakref.ref(tensor), stamp)))


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
    """

    batches: int = 0
    measurements: int = 0
    is_paused: bool = False
    mask: torch.Tensor | None = None
    expert_tokens: dict[str, list[Any]] = field(default_factory=dict)
    cache: ReadCache = field(default_factory=ReadCache)

    def paused(self) -> AbstractContextManager[None]:
        """A block in which calls of the model are ignored."""
        return patch_attr(self, "is_paused", True)
