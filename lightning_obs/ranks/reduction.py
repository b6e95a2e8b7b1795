"""Reduce all statistics of all observers in three reductions at most: extremes, sums of floats, sums of integers.

Statistics of one reduction and dtype are put end to end as one tensor, widened without loss, and taken apart again
afterwards: a model has hundreds of them, of a few bytes each, and every operation on one costs as much as on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from lightning_obs.errors import CalibrationError
from lightning_obs.observers import Key, Observer
from lightning_obs.ranks.agreement import Agreed
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.ranks.failures import key_text
from lightning_obs.ranks.packing import BLOCK, WIDE, extreme, ordered, unordered


class _Part(NamedTuple):
    """A statistic of many observers, and what this rank has of it: all of them, or none."""

    what: Agreed
    mine: list[torch.Tensor] | None


def reduce_statistics(
    agreed: Sequence[Agreed], observers: Mapping[Key, Observer], collectives: Collectives
) -> tuple[dict[Key, dict[str, torch.Tensor]], int]:
    """The reduced statistics of this rank's observers, in new tensors, and the number of reductions made."""
    buckets: dict[Callable[..., Iterable[Iterable[torch.Tensor]]], list[_Part]] = {}
    for one in agreed:
        has_it = collectives.rank in one.ranks
        mine = [getattr(observers[key], one.form.name) for key in one.keys] if has_it else None
        buckets.setdefault(_bucket(one), []).append(_Part(one, mine))
    reduced: dict[Key, dict[str, torch.Tensor]] = {}
    kinds = [kind for kind in (_extremes, _sums_of_floats, _sums_of_integers) if kind in buckets]
    for kind in kinds:
        for (one, mine), totals in zip(buckets[kind], kind(buckets[kind], collectives), strict=True):
            if one.keys[0] not in observers:  # this rank holds all of the keys or none
                continue
            if mine is not None:
                totals = [_on(value.device, total) for total, value in zip(totals, mine, strict=True)]
            for key, total in zip(one.keys, totals, strict=True):
                reduced.setdefault(key, {})[one.form.name] = total
    return reduced, len(kinds)


def _bucket(one: Agreed) -> Callable[..., Iterable[Iterable[torch.Tensor]]]:
    if one.form.reduction in ("min", "max"):
        return _extremes
    return _sums_of_floats if one.form.dtype.is_floating_point else _sums_of_integers


def _extremes(parts: Sequence[_Part], collectives: Collectives) -> Iterator[Sequence[torch.Tensor]]:
    """Minima and maxima of all dtypes, in one minimum of integers that are ordered as the values are."""
    keys = []
    for part in parts:
        smallest = part.what.form.reduction == "min"
        flat = ordered(_flat(part, extreme(WIDE[part.what.form.dtype], largest=smallest), collectives.device))
        keys.append(flat if smallest else ~flat)
    reduced = collectives.reduce(torch.cat(keys), "min").split([len(k) for k in keys])
    for part, values in zip(parts, reduced, strict=True):
        form = part.what.form
        yield _apart(unordered(values if form.reduction == "min" else ~values, WIDE[form.dtype]), part.what)


def _sums_of_floats(parts: Sequence[_Part], collectives: Collectives) -> Iterator[Sequence[torch.Tensor]]:
    """Sums in float64, and means as sums over the number of ranks that have them."""
    sums = [_flat(part, 0, collectives.device).double() for part in parts]
    reduced = collectives.reduce(torch.cat(sums), "sum").split([len(values) for values in sums])
    for part, values in zip(parts, reduced, strict=True):
        mean = part.what.form.reduction == "mean"
        yield _apart(values / len(part.what.ranks) if mean else values, part.what)


def _flat(part: _Part, identity: float, device: torch.device) -> torch.Tensor:
    """The values of all observers end to end, widened; where this rank has none, the identity."""
    form, wide = part.what.form, WIDE[part.what.form.dtype]
    if part.mine is None:
        return torch.full((len(part.what.keys) * form.numel,), identity, dtype=wide, device=device)
    return torch.stack([_on(device, value) for value in part.mine]).reshape(-1).to(wide)


def _on(device: torch.device, value: torch.Tensor) -> torch.Tensor:
    return value if value.device == device else value.to(device)


def _apart(values: torch.Tensor, one: Agreed) -> Sequence[torch.Tensor]:
    """Each observer's values, in their dtype and in memory of their own: a view would keep the whole bucket alive."""
    values = values.to(one.form.dtype).view(len(one.keys), *one.form.shape)
    apart: Sequence[torch.Tensor] = torch.unbind_copy(values)  # type: ignore[func-returns-value, assignment]
    return apart


def _sums_of_integers(parts: Sequence[_Part], collectives: Collectives) -> Iterator[Iterator[torch.Tensor]]:
    """Sums of integers, of counts without their empty blocks."""
    sizes = [[one.form.numel if b is None else len(b) * BLOCK for b in _blocks(one)] for one, _ in parts]
    bucket = torch.zeros(sum(map(sum, sizes)), dtype=torch.int64, device=collectives.device)
    for part, place, each in zip(parts, bucket.split([sum(each) for each in sizes]), sizes, strict=True):
        for value, blocks, into in zip(part.mine or (), _blocks(part.what), place.split(each), strict=False):
            rows = value if blocks is None else value.reshape(-1, BLOCK)[blocks.to(value.device)]
            into.copy_(rows.reshape(-1))
    bucket = collectives.reduce(bucket, "sum")
    for part, place, each in zip(parts, bucket.split([sum(each) for each in sizes]), sizes, strict=True):
        yield map(partial(_read_sum, part.what), part.what.keys, _blocks(part.what), place.split(each))


def _blocks(one: Agreed) -> Sequence[torch.Tensor | None]:
    return one.blocks or [None] * len(one.keys)


def _read_sum(one: Agreed, key: Key, blocks: torch.Tensor | None, sums: torch.Tensor) -> torch.Tensor:
    form = one.form
    if blocks is not None:
        dense = sums.new_zeros(form.numel // BLOCK, BLOCK)
        dense[blocks.to(sums.device)] = sums.view(-1, BLOCK)
        return dense.view(form.shape)
    narrow = sums.to(form.dtype, copy=True)
    if (sums != narrow).any():
        raise CalibrationError(
            f"the sum of {form.name} over ranks does not fit into {form.dtype}",
            where=[key_text(key)],
            remedy="count in int64.",
        )
    return narrow.view(form.shape)
