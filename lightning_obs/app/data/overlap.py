"""Find what stands word for word in the data that a model is measured on.

Documents repeat each other: a chapter contains pages that are documents of their own, rows of a file occur twice. So a
split by documents lets a model be measured on text that it was calibrated or trained on, and it looks better than it
is. What tells is a run of :data:`RUN` equal tokens, wherever it begins.

Runs are compared by a hash of 64 bits. Equal runs have equal hashes, so none is overlooked; two unlike runs of one hash
would only cost some text that could have been used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: tokens of a run; a power of two
RUN = 32
#: an odd number of 64 bits (that of Knuth's linear congruential generator), so that no bit of a token is lost
_FACTOR = 6364136223846793005


@dataclass(frozen=True)
class Selection:
    """Samples, and how much was passed over to make them, in words; empty for nothing."""

    samples: list[Any]
    left_out: str = ""


class HeldOutRuns:
    """The runs of :data:`RUN` tokens of held-out samples, and the samples that are shorter.

    Args:
        sequences: the token ids of the held-out samples; samples that follow each other in one text are one sequence.

    >>> held_out = HeldOutRuns([range(100, 140)])
    >>> held_out.shares([1, 2, *range(105, 137)]), held_out.shares([1, 2, *range(105, 136)])
    (True, False)
    """

    def __init__(self, sequences: Iterable[Sequence[int] | torch.Tensor]) -> None:
        self._short: set[tuple[int, ...]] = set()
        hashes = [torch.zeros(0, dtype=torch.long)]
        for sequence in sequences:
            tokens = torch.as_tensor(sequence, dtype=torch.long)
            if len(tokens) < RUN:
                self._short.add(tuple(tokens.tolist()))
            hashes.append(run_hashes(tokens))
        self._hashes = torch.cat(hashes).unique()

    def shares(self, sequence: Sequence[int] | torch.Tensor) -> bool:
        """Whether a sequence contains one of the runs, or is one of the samples that are shorter."""
        tokens = torch.as_tensor(sequence, dtype=torch.long)
        if len(tokens) < RUN:
            return tuple(tokens.tolist()) in self._short
        return bool(torch.isin(run_hashes(tokens), self._hashes).any())

    def positions_apart(self, tokens: torch.Tensor) -> torch.Tensor:
        """Positions of the tokens that stay when every shared run is cut out: ``(M,)`` to ``(N,)``, ascending.

        What stays has no such run, not even across a cut.
        """
        positions = torch.arange(len(tokens))
        while True:
            shared = self._in_shared_run(tokens[positions])
            if not shared.any():
                return positions
            positions = positions[~shared]  # the ends that meet now may make another run

    def _in_shared_run(self, tokens: torch.Tensor) -> torch.Tensor:
        """Which tokens are part of a shared run, ``(M,)``."""
        is_start = torch.isin(run_hashes(tokens), self._hashes)
        is_part = torch.zeros(len(tokens), dtype=torch.bool)
        for offset in range(RUN):
            is_part[offset : offset + len(is_start)] |= is_start
        return is_part


def run_hashes(tokens: torch.Tensor) -> torch.Tensor:
    """A hash of each run of :data:`RUN` tokens, ``(M,)`` to ``(M - RUN + 1,)``; none of fewer tokens.

    The hash of a run is that of its first half times a factor, plus that of its second half, modulo 2**64.
    """
    if len(tokens) < RUN:
        return tokens[:0]
    hashes = tokens
    factor = torch.tensor(_FACTOR)
    length = 1
    while length < RUN:
        hashes = hashes[:-length] * factor + hashes[length:]
        factor = factor * factor
        length *= 2
    return hashes
