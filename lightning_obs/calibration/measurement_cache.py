"""Measure a tensor once, however many modules read it.

Modules that read one tensor (q, k, v; gate, up) share one measurement of it. That it still is the same tensor is
known from its identity and version counter. Inference tensors have no version; on the CPU 64 of their values are
compared instead (an in-place change between two readers that misses all 64 is not seen), elsewhere they are measured
again.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

_SAMPLES = 64


@dataclass
class Read:
    """A tensor that was read: its tokens that count (None: not selected), and what observers measured of them."""

    tokens: torch.Tensor | None = None
    measured: dict[Hashable, Any] = field(default_factory=dict)


class LastRead:
    """The measurements of the tensor that was read last, while it lives and was not changed."""

    def __init__(self, count: int = 0) -> None:
        self._earlier = count
        self._tensor: Any = None
        self._stamp: Hashable = None
        self._read = Read()

    def of(self, value: torch.Tensor) -> Read:
        """Where to look for, and leave, what was measured of ``value``; empty if it was not the last one read."""
        stamp = _stamp(value)
        if stamp is None or self._tensor is None or self._tensor() is not value or stamp != self._stamp:
            self._earlier += len(self._read.measured)
            self._tensor, self._stamp, self._read = weakref.ref(value), stamp, Read()
        return self._read

    @property
    def count(self) -> int:
        """How many measurements were made."""
        return self._earlier + len(self._read.measured)


def _stamp(value: torch.Tensor) -> Hashable:
    if not value.is_inference():
        return value._version
    if value.device.type != "cpu" or not value.is_contiguous():
        return None
    return tuple(value.view(-1)[:: max(1, value.numel() // _SAMPLES)].tolist())
