"""Whether parameters are still the ones that were calibrated: a checksum of their bits, in order.

Method. The tensor's bytes are words of 64 bits, in tiles of 2**17. With pseudorandom odd multipliers, ``a`` for each
tile, ``b`` and ``c`` for each place in a tile, the checksum is ``sum a * (b * word + c * (word >> 32))`` modulo 2**64.

Why it is sound. Where a word differs, its lower or its upper half does, and then ``b`` times the difference of the
words, or ``c`` times that of the shifted words, takes a given value modulo 2**64 for at most 2**-32 of all multipliers.
So two different tensors have one checksum by chance only, whatever differs: the multipliers know nothing of weights.
Each position has its own, so rows that swap places show. (Without ``c``, two changes in the highest bit would cancel.)

A sum needs no order of its terms. So the parts that ranks hold add up to the checksum of the whole, whatever shards it,
and every device gives the same. A tile and its scratch stay in cache: the speed is that of reading memory, within a
small factor (``sum`` with integers of two bytes, which widens them, is several times slower).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parameter import is_lazy

from lightning_obs.distributed.collectives import add_up
from lightning_obs.model.lora import adapters_of
from lightning_obs.model.sharding import first_element, groups_of_shards, reshard, without_wrappers
from lightning_obs.model.weights import full_weight

#: a module and the name of one of its own parameters or buffers
Place: TypeAlias = tuple[nn.Module, str]
#: the attribute of a module that holds those of its own parameters and buffers
CHECKSUMS = "calibrated_checksums"
_TILE = 1 << 17
_WORD = 8


def checksums(places: Sequence[Place]) -> list[int]:
    """Of each parameter or buffer the checksum of all of it; the weight of a LoRA layer counts as merged.

    Where parameters are sharded, all ranks must call this, with the same places.
    """
    on: dict[torch.device, _Sums] = {}
    parts: dict[tuple[torch.device, tuple[dist.ProcessGroup, ...]], dict[int, torch.Tensor]] = {}
    for at, (module, name) in enumerate(places):
        part, first = _part(module, name)
        if part.device not in on:
            on[part.device] = _Sums(part.device)
        parts.setdefault((part.device, groups_of_shards(module, name)), {})[at] = on[part.device].add(part, first)
    found: dict[int, int] = {}
    for (_, groups), by_place in parts.items():  # one reduction and one copy to the host for all
        found |= zip(by_place, add_up(torch.stack(list(by_place.values())), groups).tolist(), strict=True)
    return [found[at] for at in range(len(places))]


def remember(model: nn.Module) -> None:
    """Keep the checksums of everything that a checkpoint of ``model`` holds, on its modules.

    Where parameters are sharded, all ranks must call this.
    """
    reshard(model)
    places = [(module, name) for module in model.modules() for name in _held(module)]
    by_module: dict[nn.Module, dict[str, int]] = {}
    for (module, name), checksum in zip(places, checksums(places), strict=True):
        by_module.setdefault(module, {})[name] = checksum
    for module in model.modules():
        vars(module)[CHECKSUMS] = by_module.get(module, {})


def changed_since(model: nn.Module) -> list[str]:
    """Names of parameters and buffers that are not what they were when ``model`` was calibrated.

    Where parameters are sharded, all ranks must call this.
    """
    reshard(model)
    with without_wrappers(model):
        modules = list(model.named_modules())
    known = [
        (prefix, module, name, checksum)
        for prefix, module in modules
        for name, checksum in vars(module).get(CHECKSUMS, {}).items()
        if isinstance(getattr(module, name, None), torch.Tensor)
    ]
    now = checksums([(module, name) for _, module, name, _ in known])
    return [
        ".".join(filter(None, (prefix, name)))
        for (prefix, _, name, before), checksum in zip(known, now, strict=True)
        if checksum != before
    ]


def _held(module: nn.Module) -> Iterator[str]:
    """What a checkpoint holds of a module by itself. Buffers of integers count steps, which changes no output."""
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.is_meta and not is_lazy(parameter):
            yield name
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point() and not buffer.is_meta and name not in module._non_persistent_buffers_set:
            yield name


# ---------------------------------------------------------------------- the parts that this rank holds


def _part(module: nn.Module, name: str) -> tuple[torch.Tensor, int]:
    """What this rank holds of a tensor, in the order of the whole, and the place of its first element there."""
    merged = name == "weight" and adapters_of(module) is not None
    value = full_weight(module) if merged else getattr(module, name)
    assert isinstance(value, torch.Tensor)
    value = value.detach()
    if not isinstance(value, DTensor):
        return value, first_element(module, name)
    local = value.to_local()
    _, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if local.shape[1:] == value.shape[1:]:
        return local, start[0] * value.shape[1:].numel() if start else 0
    whole = local.new_zeros(value.shape)  # columns of a row lie apart
    whole[tuple(slice(at, at + size) for at, size in zip(start, local.shape, strict=True))] = local
    return whole, 0


class _Sums:
    """Sums of words times multipliers, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_tiles = _odd(torch.arange(64)).tolist()
        self._make_room(1 << 10)

    def _make_room(self, places: int) -> None:
        self._of_places = _odd(torch.arange(2 * places, device=self._device).view(places, 2).T.contiguous())
        self._halves = torch.empty_like(self._of_places)
        self._shifted = torch.empty_like(self._of_places[0])

    def add(self, part: torch.Tensor, first: int) -> torch.Tensor:
        """The sum over a part whose first element is number ``first`` of the whole: a scalar in int64."""
        start = first * part.element_size()
        words, at = _words(part, start % _WORD), start // _WORD
        if (tiles := (at + len(words)) // _TILE + 1) > len(self._of_tiles):
            self._of_tiles = _odd(torch.arange(2 * tiles)).tolist()
        places = min(_TILE, at % _TILE + len(words))
        if places > len(self._shifted):
            self._make_room(min(_TILE, 2 * places))
        low, high = halves = self._halves[:, :places].zero_()
        for factor in self._of_tiles[at // _TILE : tiles]:
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
        bits = nn.functional.pad(bits, (before, after))
    return bits.view(torch.int64)


def _odd(index: torch.Tensor) -> torch.Tensor:
    """A pseudorandom odd number for each index, the same on every device and in every version (splitmix64)."""
    bits = (index + 1) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return bits ^ ((bits >> 31) & ((1 << 33) - 1)) | 1
