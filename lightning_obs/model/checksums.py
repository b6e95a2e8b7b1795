"""Whether a model is as it was calibrated, by checksums of its parameters on their modules.

A module keeps the checksums of its own parameters and buffers: they survive renaming and wrapping of modules around it.
Where parameters are sharded, every rank must call these functions.

A tensor's bytes are words of 32 bits, in tiles of 2**17. With pseudorandom odd multipliers of 64 bits, ``a`` for each
tile and ``b`` for each place in a tile, the checksum is ``sum a * b * word`` modulo 2**64. A sum needs no order of its
terms: the parts that ranks hold add up to the checksum of the whole, under any sharding, and every device gives the
same.

Why it is sound. The difference of two words is below 2**32, so ``b`` times it takes a given value modulo 2**64 for at
most 2**-32 of all multipliers. Two different tensors therefore have one checksum by chance only: multipliers do not
depend on weights. Each position has its own, so swapped rows are noticed. (With words of 64 bits, two changes of the
highest bit would cancel, since every multiplier is odd.)
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.model.kinds import is_dispatched
from lightning_obs.model.module_qparams import CHECKSUMS, calibrated_modules
from lightning_obs.model.offload import at_rest, is_offloaded
from lightning_obs.model.weight import (
    adapters_of,
    by_unit,
    identity,
    onloaded,
    part_here,
    place_of,
    register_surroundings,
    reshard,
)
from lightning_obs.model.wrappers import without_wrappers
from lightning_obs.ranks.collectives import all_ranks_answer

_TILE = 1 << 17  # words: a tile and its sums stay in a CPU's cache
_WORD = 4  # bytes
_SOME = 256  # tiles whose multipliers are made at once


def require_ready(model: nn.Module, merged_for: str | None = None) -> None:
    """Refuse a model that is :func:`not_ready`, or has LoRA adapters beside weights that a use needs merged."""
    if merged_for is not None:
        refuse_unmerged(model, merged_for)
    if (problem := not_ready(model)) is not None:
        raise problem


def refuse_unmerged(model: nn.Module, what: str) -> None:
    """Raise a CalibrationError if adapters still stand beside weights of the model."""
    register_surroundings(model)
    refuse(
        [name for name, module in model.named_modules() if adapters_of(module) is not None],
        f"{what} needs adapters merged into their weights",
        remedy="model.merge_and_unload() of peft first; the quantization parameters stay on the merged layers.",
    )


def not_ready(model: nn.Module) -> CalibrationError | None:
    """Why the model is not as it was calibrated: it was not, or has changed since; else None."""
    if next(calibrated_modules(model), None) is None:
        return CalibrationError(
            f"{type(model).__name__} was not calibrated, it is in full precision",
            remedy="run CalibrationSession or CalibrationCallback on it first.",
        )
    if not (changed := changed_since(model)):
        return None
    return CalibrationError(
        f"{len(changed)} parameters and buffers have changed since the model was calibrated",
        where=changed,
        remedy="calibrate the model as it is now (trainer.validate with the callback).",
    )


@at_rest()
def checksums(places: Sequence[tuple[nn.Module, str]]) -> list[int]:
    """The checksum of each whole tensor ``(module, name)``, the same on all ranks; LoRA's weights count as merged."""
    kept = [getattr(module, name) for module, name in places]  # an id is of one object while that is alive
    keys: list[Hashable] = [  # a parameter of two modules is read once
        (identity(module, name), name if adapters_of(module) is None else id(module)) for module, name in places
    ]
    unique, once = dict(zip(keys, places, strict=True)), dict[nn.Module, list[tuple[int, str]]]()
    for number, (module, name) in enumerate(unique.values()):
        once.setdefault(module, []).append((number, name))
    # Each checksum has its place in one tensor. A tensor of its own, between the large ones of :func:`checksum`, would
    # keep glibc from using their memory for the next.
    totals: dict[tuple[torch.device, tuple[dist.ProcessGroup, ...]], torch.Tensor] = {}
    for unit in by_unit(once):
        with onloaded(unit[0]):
            for module in unit:
                for number, name in once[module]:
                    part, first = part_here(module, name)
                    where = part.device, place_of(module, name).groups
                    if where not in totals:
                        totals[where] = torch.zeros(len(unique), dtype=torch.int64, device=part.device)
                    checksum(part, first, out=totals[where][number])
    del kept
    for (_, groups), total in totals.items():  # one reduction and one copy to the host for all
        for group in groups:
            with all_ranks_answer():
                dist.all_reduce(total, group=group)
    sums = map(sum, zip(*(total.tolist() for total in totals.values()), strict=True))  # all but one are zero
    found = dict(zip(unique, sums, strict=True))
    return [found[key] for key in keys]


@at_rest()
def remember(model: nn.Module) -> None:
    """Keep the checksums of everything that a checkpoint of ``model`` holds, on its modules."""
    by_module: dict[nn.Module, dict[str, int]] = {}
    for (module, name), found in _checksums_of(model):
        by_module.setdefault(module, {})[name] = found
    for module in model.modules():
        vars(module)[CHECKSUMS] = by_module.get(module, {})


def _checksums_of(model: nn.Module) -> list[tuple[tuple[nn.Module, str], int]]:
    reshard(model)
    places = [(module, name) for module in model.modules() for name in _held(module)]
    return list(zip(places, checksums(places), strict=True))


@at_rest()
def changed_since(model: nn.Module) -> list[str]:
    """Names of parameters and buffers that have changed since ``model`` was calibrated."""
    register_surroundings(model)
    reshard(model)
    with without_wrappers(model):
        modules = list(model.named_modules())
    known = {
        (module, name): (f"{prefix}.{name}" if prefix else name, before)
        for prefix, module in modules
        for name, before in vars(module).get(CHECKSUMS, {}).items()
        if isinstance(getattr(module, name, None), torch.Tensor)
    }
    now = checksums(list(known))
    return [name for (name, before), checksum in zip(known.values(), now, strict=True) if checksum != before]


def _held(module: nn.Module) -> Iterator[str]:
    """The module's own parameters and buffers in a checkpoint; without integer buffers, which count steps."""
    offloaded = is_dispatched(module) and is_offloaded(module)
    for name, parameter in module.named_parameters(recurse=False):
        if (offloaded or not parameter.is_meta) and not is_lazy(parameter):
            yield name
    for name, buffer in module.named_buffers(recurse=False):
        there = offloaded or not buffer.is_meta
        if buffer.is_floating_point() and there and name not in module._non_persistent_buffers_set:
            yield name


# ---------------------------------------------------------------------- of one tensor


def checksum(part: torch.Tensor, first: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
    """The checksum of a tensor, a scalar in int64; ``out`` if it is given.

    Of a part, ``first`` is the place of its first element in the whole, whose checksum is the sum over its parts modulo
    2**64.
    """
    start = first * part.element_size()
    words, at = _words(part, start % _WORD), start // _WORD
    tile, place = divmod(at, _TILE)
    sums = torch.zeros(min(_TILE, place + len(words)), dtype=torch.int64, device=words.device)
    while len(words):
        now, words = words[: _TILE - place], words[_TILE - place :]
        sums[place : place + len(now)].add_(now, alpha=_of_tiles(tile // _SOME)[tile % _SOME])
        tile, place = tile + 1, 0
    return torch.sum(sums.mul_(_of_places(words.device)[: len(sums)]), 0, out=out)


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
