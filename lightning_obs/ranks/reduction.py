"""Reduce all statistics of all observers in three reductions at most: extremes, sums of floats, integers.

Statistics of one reduction and dtype are put end to end as one tensor, widened without loss, and taken apart again
afterwards: a model has hundreds of them, of a few bytes each, and every operation on one costs as much as on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from lightning_obs.errors import CalibrationError
from lightning_obs.observers import Key, Observer
from lightning_obs.ranks.agreement import Agreed, Statistic
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.ranks.failures import key_text
from lightning_obs.ranks.packing import BLOCK, WIDE, extreme, ordered, read_bytes, unordered, words, write_bytes


class _Group(NamedTuple):
    """A statistic of many observers, and what this rank has of it: all of them, or none."""

    what: Agreed
    mine: list[torch.Tensor] | None


def merge(
    agreed: Sequence[Agreed], observers: Mapping[Key, Observer], collectives: Collectives
) -> tuple[dict[Key, dict[str, Any]], int]:
    """The merged statistics of this rank's observers, in new tensors, and the number of reductions made."""
    buckets: dict[Callable[..., Iterable[Iterable[torch.Tensor]]], list[_Group]] = {}
    for one in agreed:
        has_it = collectives.rank in one.ranks
        mine = [getattr(observers[key], one.statistic.name) for key in one.keys] if has_it else None
        buckets.setdefault(_bucket(one.statistic), []).append(_Group(one, mine))
    merged: dict[Key, dict[str, Any]] = {}
    kinds = [kind for kind in (_extremes, _sums_of_floats, _integers) if kind in buckets]
    for kind in kinds:
        for (one, mine), totals in zip(buckets[kind], kind(buckets[kind], collectives), strict=True):
            if one.keys[0] not in observers:  # nor any other: this rank holds all or none
                continue
            if mine is not None:
                totals = [_on(value.device, total) for total, value in zip(totals, mine, strict=True)]
            for key, total in zip(one.keys, totals, strict=True):
                merged.setdefault(key, {})[one.statistic.name] = total
    return merged, len(kinds)


def _bucket(statistic: Statistic) -> Callable[..., Iterable[Iterable[torch.Tensor]]]:
    if statistic.op in ("min", "max"):
        return _extremes
    return _integers if statistic.op == "copy" or not statistic.dtype.is_floating_point else _sums_of_floats


def _extremes(groups: Sequence[_Group], collectives: Collectives) -> Iterator[Sequence[torch.Tensor]]:
    """Minima and maxima of all dtypes, in one minimum of integers that are ordered as the values are."""
    keys = []
    for group in groups:
        smallest = group.what.statistic.op == "min"
        identity = extreme(WIDE[group.what.statistic.dtype], largest=smallest)
        flat = ordered(_flat(group, identity, collectives.device))
        keys.append(flat if smallest else ~flat)
    parts = collectives.reduce(torch.cat(keys), "min").split([len(k) for k in keys])
    for group, part in zip(groups, parts, strict=True):
        statistic = group.what.statistic
        yield _apart(unordered(part if statistic.op == "min" else ~part, WIDE[statistic.dtype]), group.what)


def _sums_of_floats(groups: Sequence[_Group], collectives: Collectives) -> Iterator[Sequence[torch.Tensor]]:
    """Sums in float64, and means as sums over the number of ranks that have them."""
    sums = [_flat(group, 0, collectives.device).double() for group in groups]
    parts = collectives.reduce(torch.cat(sums), "sum").split([len(part) for part in sums])
    for group, part in zip(groups, parts, strict=True):
        mean = group.what.statistic.op == "mean"
        yield _apart(part / len(group.what.ranks) if mean else part, group.what)


def _flat(group: _Group, identity: float, device: torch.device) -> torch.Tensor:
    """A group's values end to end, widened; what this rank lacks is the identity."""
    wide = WIDE[group.what.statistic.dtype]
    if group.mine is None:
        return torch.full((len(group.what.keys) * group.what.numel,), identity, dtype=wide, device=device)
    return torch.stack([_on(device, value) for value in group.mine]).reshape(-1).to(wide)


def _on(device: torch.device, value: torch.Tensor) -> torch.Tensor:
    return value if value.device == device else value.to(device)


def _apart(values: torch.Tensor, one: Agreed) -> Sequence[torch.Tensor]:
    """Each observer's values, in their dtype and in memory of their own: a view would keep the whole bucket alive."""
    values = values.to(one.statistic.dtype).view(len(one.keys), *one.statistic.shape)
    apart: Sequence[torch.Tensor] = torch.unbind_copy(values)  # type: ignore[func-returns-value, assignment]
    return apart


def _integers(groups: Sequence[_Group], collectives: Collectives) -> Iterator[Iterator[torch.Tensor]]:
    """Sums of integers without their empty blocks, and copies as bytes, to which the other ranks add zero."""
    sizes = [_lengths(group.what) for group in groups]
    bucket = torch.zeros(sum(map(sum, sizes)), dtype=torch.int64, device=collectives.device)
    for group, part, each in zip(groups, bucket.split([sum(each) for each in sizes]), sizes, strict=True):
        if group.mine is not None:
            for value, blocks, place in zip(group.mine, _blocks(group.what), part.split(each), strict=True):
                _write_integers(group.what.statistic, value, blocks, place)
    bucket = collectives.reduce(bucket, "sum")
    for group, part, each in zip(groups, bucket.split([sum(each) for each in sizes]), sizes, strict=True):
        yield map(partial(_read_integers, group.what), group.what.keys, _blocks(group.what), part.split(each))


def _lengths(one: Agreed) -> list[int]:
    if one.statistic.op == "copy":
        return [words(one.numel * one.statistic.dtype.itemsize)] * len(one.keys)
    return [one.numel if blocks is None else len(blocks) * BLOCK for blocks in _blocks(one)]


def _blocks(one: Agreed) -> Sequence[torch.Tensor | None]:
    return one.blocks or [None] * len(one.keys)


def _write_integers(
    statistic: Statistic, value: torch.Tensor, blocks: torch.Tensor | None, place: torch.Tensor
) -> None:
    if statistic.op == "copy":
        write_bytes(place, value)
    elif blocks is not None:
        place.copy_(value.reshape(-1, BLOCK)[blocks.to(value.device)].reshape(-1))
    else:
        place.copy_(value.reshape(-1))


def _read_integers(one: Agreed, key: Key, blocks: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    statistic = one.statistic
    if statistic.op == "copy":
        return read_bytes(part, statistic.dtype, statistic.shape)
    if blocks is not None:
        dense = part.new_zeros(one.numel // BLOCK, BLOCK)
        dense[blocks.to(part.device)] = part.view(-1, BLOCK)
        return dense.view(statistic.shape)
    narrow = part.to(statistic.dtype, copy=True)
    if (part != narrow).any():
        raise CalibrationError(
            f"the sum of {statistic.name} over ranks does not fit into {statistic.dtype}",
            where=[key_text(key)],
            remedy="count in int64.",
        )
    return narrow.view(statistic.shape)
