"""Find text that is repeated, word for word, in the data that a model is measured on.

Documents repeat each other: a chapter contains pages that are documents as well, and rows of a file occur twice. After
a split by documents, a model may be measured on text that it was calibrated or trained on, and looks better than it is.
Two texts overlap where they share a run of :data:`RUN` equal tokens, at any place. ``TextData`` (``module.py``) makes
the :class:`HeldOutRuns` of its held-out blocks, and cuts their runs out of the text to calibrate and to train on.

Runs are compared by a hash of 64 bits. Equal runs have equal hashes, so every overlap is found; two unlike runs with
one hash would only cost some text that could have been used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

#: tokens of a run; a power of two
RUN = 32
#: an odd number of 64 bits, from Knuth's linear congruential generator: odd, so that no bit of a token is lost
_FACTOR = 6364136223846793005


class HeldOutRuns:
    """The runs of :data:`RUN` tokens in held-out text.

    Args:
        sequences: token ids of the held-out texts; blocks that follow each other in one text are one sequence.

    >>> held_out = HeldOutRuns([range(100, 140)])
    >>> held_out.shares([1, 2, *range(105, 137)]), held_out.shares([1, 2, *range(105, 136)])
    (True, False)
    """

    def __init__(self, sequences: Iterable[Sequence[int] | torch.Tensor]) -> None:
        hashes = [torch.zeros(0, dtype=torch.long)]
        for sequence in sequences:
            hashes.append(run_hashes(torch.as_tensor(sequence, dtype=torch.long)))
        self._hashes = torch.cat(hashes).unique()

    def shares(self, sequence: Sequence[int] | torch.Tensor) -> bool:
        """Whether a sequence of token ids contains one of the runs.

        ``chats_apart_from`` (``chats.py``) asks it for each chat to calibrate or train on.
        """
        hashes = run_hashes(torch.as_tensor(sequence, dtype=torch.long))
        return bool(torch.isin(hashes, self._hashes).any())

    def positions_apart(self, tokens: torch.Tensor) -> torch.Tensor:
        """Cut every shared run out of a text, until what remains shares no run, not even across a cut.

        ``TextData`` calls it for the text to calibrate and to train on.

        Args:
            tokens: token ids ``(M,)``.

        Returns:
            The positions in ``tokens`` of the tokens that remain, ``(N,)``, ascending.
        """
        positions = torch.arange(len(tokens))
        while True:
            shared = self._in_shared_run(tokens[positions])
            if not shared.any():
                return positions
            positions = positions[~shared]  # the ends that meet now may make another run

    def _in_shared_run(self, tokens: torch.Tensor) -> torch.Tensor:
        """Whether each token of a text is part of a shared run: token ids ``(M,)`` to bool ``(M,)``."""
        is_start = torch.isin(run_hashes(tokens), self._hashes)
        is_part = torch.zeros(len(tokens), dtype=torch.bool)
        for offset in range(RUN):
            is_part[offset : offset + len(is_start)] |= is_start
        return is_part


def run_hashes(tokens: torch.Tensor) -> torch.Tensor:
    """Hash each run of :data:`RUN` tokens: ids ``(M,)`` to int64 ``(M - RUN + 1,)``, or ``(0,)`` for fewer tokens.

    :class:`HeldOutRuns` hashes the held-out text and the text to compare by it.

    hash(run) = factor * hash(first half) + hash(second half), modulo 2**64, where the factor is squared each time that
    the length doubles, from one token on.
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
