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

import functools

import torch

from lightning_obs.numerics import kernels

_TILE = 1 << 17
_WORD = 8
_SOME = 256  # tiles whose multipliers are made at once


def checksum(part: torch.Tensor, first: int = 0) -> torch.Tensor:
    """The checksum of a tensor, a scalar in int64.

    Args:
        part: any shape and dtype.
        first: place of its first element in the whole, whose checksum is the sum of its parts' modulo 2**64.
    """
    start = first * part.element_size()
    words, at = _words(part, start % _WORD), start // _WORD
    tiles = _of_tiles((at + len(words)) // _TILE // _SOME + 1)
    of_places = _of_places(words.device)
    if words.device.type == "cpu" and kernels.available():
        return torch.tensor(kernels.checksum(words, at, tiles, of_places, _TILE))
    places = min(_TILE, at % _TILE + len(words))
    low, high = halves = of_places.new_zeros(2, places)
    shifted = torch.empty_like(low)
    for factor in tiles[at // _TILE : (at + len(words)) // _TILE + 1].tolist():
        place = at % _TILE
        now, words = words[: _TILE - place], words[_TILE - place :]
        here = slice(place, place + len(now))
        low[here].add_(now, alpha=factor)
        high[here].add_(torch.bitwise_right_shift(now, 32, out=shifted[: len(now)]), alpha=factor)
        at += len(now)
    return (halves * of_places[:, :places]).sum()


@functools.cache
def _of_places(device: torch.device) -> torch.Tensor:
    """The multipliers of each place in a tile, ``(2, _TILE)``: 2 MiB that would take longer to make than to use."""
    return _odd(torch.arange(2 * _TILE, device=device).view(-1, 2).T.contiguous())


@functools.lru_cache(maxsize=8)
def _of_tiles(some: int) -> torch.Tensor:
    """The multipliers of so many times ``_SOME`` tiles."""
    return _odd(torch.arange(some * _SOME))


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
