"""Reduce all statistics of all observers in three reductions at most: extremes, sums of floats, integers.

Statistics of one reduction and dtype are put end to end as one tensor, widened without loss, and taken apart again
afterwards: a model has hundreds of them, of a few bytes each, and every operation on one costs as much as on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lightning_obs.agreement import Agreed, Key, text
from lightning_obs.collectives import Collectives
from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.packing import (
    BLOCK,
    WIDE,
    extreme,
    ordered,
    read_bytes,
    unordered,
    words,
    write_bytes,
)
from lightning_obs.observers import Observer


class _Group(NamedTuple):
    """Statistics of one reduction and dtype, and what this rank has of them."""

    op: str
    dtype: torch.dtype
    members: list[Agreed]
    mine: list[torch.Tensor | None]

    @property
    def sizes(self) -> list[int]:
        """Elements of each."""
        return [one.numel for one in self.members]


def merge(
    agreed: Sequence[Agreed], observers: Mapping[Key, Observer], collectives: Collectives
) -> tuple[dict[Key, dict[str, Any]], int]:
    """The merged statistics of this rank's observers, in new tensors, and the number of reductions made."""
    alike: dict[tuple[str, torch.dtype], list[Agreed]] = {}
    for one in agreed:
        alike.setdefault((one.statistic.op, one.statistic.dtype), []).append(one)
    buckets: dict[Callable[..., Iterable[Iterable[torch.Tensor]]], list[_Group]] = {}
    for (op, dtype), members in alike.items():
        rank = collectives.rank
        mine = [getattr(observers[one.key], one.statistic.name) if rank in one.ranks else None for one in members]
        buckets.setdefault(_bucket(op, dtype), []).append(_Group(op, dtype, members, mine))
    merged: dict[Key, dict[str, Any]] = {}
    kinds = [kind for kind in (_extremes, _sums_of_floats, _integers) if kind in buckets]
    for kind in kinds:
        for group, found in zip(buckets[kind], kind(buckets[kind], collectives), strict=True):
            for one, value, total in zip(group.members, group.mine, found, strict=True):
                if one.key not in observers:
                    continue
                if value is not None and value.device != total.device:
                    total = total.to(value.device)
                if total.shape != one.statistic.shape:
                    total = total.view(one.statistic.shape)
                merged.setdefault(one.key, {})[one.statistic.name] = total
    return merged, len(kinds)


def _bucket(op: str, dtype: torch.dtype) -> Callable[..., Iterable[Iterable[torch.Tensor]]]:
    if op in ("min", "max"):
        return _extremes
    return _integers if op == "copy" or not dtype.is_floating_point else _sums_of_floats


def _extremes(groups: Sequence[_Group], collectives: Collectives) -> Iterator[list[torch.Tensor]]:
    """Minima and maxima of all dtypes, in one minimum of integers that are ordered as the values are."""
    keys = []
    for group in groups:
        flat = ordered(_flat(group, extreme(WIDE[group.dtype], largest=group.op == "min"), collectives.device))
        keys.append(flat if group.op == "min" else ~flat)
    parts = collectives.reduce(torch.cat(keys), "min").split([len(k) for k in keys])
    for group, part in zip(groups, parts, strict=True):
        yield _split(unordered(part if group.op == "min" else ~part, WIDE[group.dtype]), group)


def _sums_of_floats(groups: Sequence[_Group], collectives: Collectives) -> Iterator[list[torch.Tensor]]:
    """Sums in float64, and means as sums over the number of ranks that have them."""
    sums = [_flat(group, 0, collectives.device).double() for group in groups]
    parts = collectives.reduce(torch.cat(sums), "sum").split([len(part) for part in sums])
    for group, part in zip(groups, parts, strict=True):
        if group.op == "mean":
            counts = torch.tensor([len(one.ranks) for one in group.members])
            part = part / counts.repeat_interleave(torch.tensor(group.sizes)).to(part.device)
        yield _split(part, group)


def _flat(group: _Group, identity: float, device: torch.device) -> torch.Tensor:
    """A group's values end to end, widened; what this rank lacks is the identity."""
    wide = WIDE[group.dtype]
    found = [value for value in group.mine if value is not None and value.device == device]
    if len(found) < len(group.members):
        found = [
            torch.full((one.numel,), identity, dtype=wide, device=device) if value is None else value.to(device, wide)
            for one, value in zip(group.members, group.mine, strict=True)
        ]
    return torch.cat([value if value.ndim == 1 else value.reshape(-1) for value in found]).to(wide)


def _split(values: torch.Tensor, group: _Group) -> list[torch.Tensor]:
    """A group's values, in its dtype and in memory of their own: a view would keep the whole bucket alive."""
    return [part.clone() for part in values.to(group.dtype).split(group.sizes)]


def _integers(groups: Sequence[_Group], collectives: Collectives) -> Iterator[Iterator[torch.Tensor]]:
    """Sums of integers without their empty blocks, and copies as bytes, to which the other ranks add zero."""
    sizes = [[_length(one) for one in group.members] for group in groups]
    bucket = torch.zeros(sum(map(sum, sizes)), dtype=torch.int64, device=collectives.device)
    for group, part, each in zip(groups, bucket.split([sum(each) for each in sizes]), sizes, strict=True):
        for one, value, place in zip(group.members, group.mine, part.split(each), strict=True):
            if value is not None:
                _write_integers(one, value, place)
    bucket = collectives.reduce(bucket, "sum")
    for group, part, each in zip(groups, bucket.split([sum(each) for each in sizes]), sizes, strict=True):
        yield map(_read_integers, group.members, part.split(each))


def _length(one: Agreed) -> int:
    if one.statistic.op == "copy":
        return words(one.numel * one.statistic.dtype.itemsize)
    return one.numel if one.blocks is None else len(one.blocks) * BLOCK


def _write_integers(one: Agreed, value: torch.Tensor, place: torch.Tensor) -> None:
    if one.statistic.op == "copy":
        write_bytes(place, value)
    elif one.blocks is not None:
        place.copy_(value.reshape(-1, BLOCK)[one.blocks.to(value.device)].reshape(-1))
    else:
        place.copy_(value.reshape(-1))


def _read_integers(one: Agreed, part: torch.Tensor) -> torch.Tensor:
    if one.statistic.op == "copy":
        return read_bytes(part, one.statistic.dtype, one.statistic.shape)
    if one.blocks is not None:
        dense = part.new_zeros(one.numel // BLOCK, BLOCK)
        dense[one.blocks.to(part.device)] = part.view(-1, BLOCK)
        return dense
    found = part.to(one.statistic.dtype, copy=True)
    if (part != found).any():
        raise CalibrationError(
            f"the sum of {one.statistic.name} over ranks does not fit into {one.statistic.dtype}",
            where=[text(one.key)],
            remedy="count in int64.",
        )
    return found
