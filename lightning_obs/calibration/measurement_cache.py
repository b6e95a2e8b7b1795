"""Measure a tensor once, however many modules read it.

Modules that read one tensor (q, k, v; gate, up) share one measurement of it, where it certainly is the same tensor: it
has the same identity, and the version counter that every change in place raises. Inference tensors, which Lightning
validates with, have no version. There all of the tensor is checked (:mod:`lightning_obs.numerics.checksum`) if that is
faster than to measure it again; extremes and counts are as fast, so they are simply measured again.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_obs.numerics.checksum import checksum


@dataclass
class Read:
    """A tensor that was read: its tokens that count (None: not selected), and what observers measured of them."""

    tokens: torch.Tensor | None = None
    measured: dict[Hashable, Any] = field(default_factory=dict)


class LastRead:
    """The measurements of the tensor that was read last, while it lives and was not changed."""

    def __init__(self) -> None:
        self._earlier = 0
        self._tensor: Any = None
        self._stamp: Hashable = None
        self._read = Read()

    def forget(self) -> None:
        """Take the next tensor for another, whatever it is."""
        self._earlier, self._tensor, self._read = self.count, None, Read()

    def of(self, value: torch.Tensor, *, measured_fast: bool) -> Read:
        """Where to look for, and leave, what was measured of ``value``; empty if it was not the last one read.

        Args:
            value: the tensor, in strided layout.
            measured_fast: measuring it again takes no longer than checking all of it.
        """
        stamp = value._version if not value.is_inference() else None if measured_fast else self._checksum(value)
        if stamp is None or self._tensor is None or self._tensor() is not value or stamp != self._stamp:
            self.forget()
            self._tensor, self._stamp = weakref.ref(value), stamp
        return self._read

    @property
    def count(self) -> int:
        """How many measurements were made."""
        return self._earlier + len(self._read.measured)

    def _checksum(self, value: torch.Tensor) -> Hashable:
        with torch.inference_mode(False), torch.no_grad():  # the multipliers are kept for other modes, too
            return value.shape, int(checksum(value))
