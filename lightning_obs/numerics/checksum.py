"""A checksum of a tensor's bits, in order, in one pass over memory.

Method. The tensor's bytes are words of 32 bits, in tiles of 2**17. With pseudorandom odd multipliers of 64 bits, ``a``
for each tile and ``b`` for each place in a tile, the checksum is ``sum a * b * word`` modulo 2**64.

Why it is sound. The difference of two words is below 2**32, so ``b`` times it takes a given value modulo 2**64 for at
most 2**-32 of all multipliers. Two different tensors therefore have one checksum by chance only, whatever differs: the
multipliers know nothing of weights. Each position has its own, so rows that swap places show. (With words of 64 bits,
two changes of the highest bit would cancel, since every multiplier is odd.)

A sum needs no order of its terms, so parts add up, and every device gives the same.
"""

from __future__ import annotations

import functools

import torch

_TILE = 1 << 17  # words: a tile and its sums stay in a CPU's cache
_WORD = 4  # bytes
_SOME = 256  # tiles whose multipliers are made at once


def checksum(part: torch.Tensor, first: int = 0) -> torch.Tensor:
    """The checksum of a tensor, a scalar in int64.

    Args:
        part: any shape and dtype.
        first: place of its first element in the whole, whose checksum is the sum of its parts' modulo 2**64.
    """
    start = first * part.element_size()
    words, at = _words(part, start % _WORD), start // _WORD
    tile, place = divmod(at, _TILE)
    sums = torch.zeros(min(_TILE, place + len(words)), dtype=torch.int64, device=words.device)
    while len(words):
        now, words = words[: _TILE - place], words[_TILE - place :]
        sums[place : place + len(now)].add_(now, alpha=_of_tiles(tile // _SOME)[tile % _SOME])
        tile, place = tile + 1, 0
    return (sums * _of_places(words.device)[: len(sums)]).sum()


@functools.cache
def _of_places(device: torch.device) -> torch.Tensor:
    """The multipliers of each place in a tile: 1 MiB that takes longer to make than to use."""
    return _odd(torch.arange(_TILE, device=device))


@functools.lru_cache(maxsize=64)
def _of_tiles(number: int) -> list[int]:
    """The multipliers of one run of ``_SOME`` tiles."""
    return _odd(torch.arange(number * _SOME, (number + 1) * _SOME, device="cpu")).tolist()


def _words(part: torch.Tensor, before: int) -> torch.Tensor:
    """The bits as int32, with zeros for the bytes of the first and last word that other ranks hold."""
    bits = part.contiguous().view(-1).view(torch.uint8)
    after = -(before + len(bits)) % _WORD
    if before or after or bits.storage_offset() % _WORD:
        bits = torch.nn.functional.pad(bits, (before, after))
    return bits.view(torch.int32)


def _odd(index: torch.Tensor) -> torch.Tensor:
    """A pseudorandom odd number for each index, the same on every device and in every version (splitmix64)."""
    bits = (index + 1) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return bits ^ ((bits >> 31) & ((1 << 33) - 1)) | 1
