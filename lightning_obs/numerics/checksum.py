"""A checksum of a tensor's bits, in order, in one pass over memory.

Method. The tensor's bytes are words of 64 bits, in tiles of 2**17. With pseudorandom odd multipliers, ``a`` for each
tile, ``b`` and ``c`` for each place in a tile, the checksum is ``sum a * (b * word + c * (word >> 32))`` modulo 2**64.

Why it is sound. Where a word differs, its lower or its upper half does, and then ``b`` times the difference of the
words, or ``c`` times that of the shifted words, takes a given value modulo 2**64 for at most 2**-32 of all multipliers.
So two different tensors have one checksum by chance only, whatever differs: the multipliers know nothing of weights.
Each position has its own, so rows that swap places show. (Without ``c``, two changes in the highest bit would cancel.)

A sum needs no order of its terms, so parts add up, and every device gives the same. On a CPU a compiled loop does it in
one pass; elsewhere a tile and its scratch stay in cache.
"""

from __future__ import annotations

import torch

from lightning_obs.numerics import kernels

_TILE = 1 << 17
_WORD = 8


class Checksums:
    """The multipliers and the scratch for checksums, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_tiles = _odd(torch.arange(64))
        self._of_places = self._halves = torch.empty(2, 0, dtype=torch.int64, device=device)
        self._shifted = self._halves[0]

    def of(self, part: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The checksum of a tensor, a scalar in int64.

        Args:
            part: any shape and dtype.
            first: place of its first element in the whole, whose checksum is the sum of its parts' modulo 2**64.
        """
        start = first * part.element_size()
        words, at = _words(part, start % _WORD), start // _WORD
        if (tiles := (at + len(words)) // _TILE + 1) > len(self._of_tiles):
            self._of_tiles = _odd(torch.arange(2 * tiles))
        places = min(_TILE, at % _TILE + len(words))
        if places > self._of_places.shape[1]:
            self._of_places = _odd(torch.arange(4 * places, device=self._device).view(-1, 2).T.contiguous())
        if words.device.type == "cpu" and kernels.available():
            return torch.tensor(kernels.checksum(words, at, self._of_tiles, self._of_places[:, :_TILE], _TILE))
        if places > len(self._shifted):
            self._halves = torch.empty_like(self._of_places[:, : 2 * places])
            self._shifted = torch.empty_like(self._halves[0])
        low, high = halves = self._halves[:, :places].zero_()
        for factor in self._of_tiles[at // _TILE : tiles].tolist():
            place = at % _TILE
            now, words = words[: _TILE - place], words[_TILE - place :]
            here = slice(place, place + len(now))
            low[here].add_(now, alpha=factor)
            high[here].add_(torch.bitwise_right_shift(now, 32, out=self._shifted[: len(now)]), alpha=factor)
            at += len(now)
        return (halves * self._of_places[:, :places]).sum()


def _words(part: torch.Tensor, before: int) -> torch.Tensor:
    """The bits as int64, with zeros for the bytes of the first and last word that other ranks hold."""
    bits = part.contiguous().view(-1).view(torch.uint8)
    after = -(before + len(bits)) % _WORD
    if before or after or bits.storage_offset() % _WORD:
        bits = torch.nn.functional.pad(bits, (before, after))
    return bits.view(torch.int64)


def _odd(index: torch.Tensor) -> torch.Tensor:
    """A pseudorandom odd number for each index, the same on every device and in every version (splitmix64)."""
    bits = (index + 1) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return bits ^ ((bits >> 31) & ((1 << 33) - 1)) | 1
