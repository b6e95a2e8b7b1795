"""Whether a model is as it was calibrated, by checksums of its parameters on their modules.

A module keeps those of its own parameters and buffers, so they survive whatever renames or replaces modules around it.
The parts that ranks hold add up to the checksum of the whole, whatever shards it
(:mod:`lightning_obs.numerics.checksum`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_obs.errors import CalibrationError
from lightning_obs.model.qparams import CHECKSUMS, calibrated_modules
from lightning_obs.model.weight import part_here, place_of, reshard
from lightning_obs.model.wrappers import adapters_of, refuse_unmerged, without_wrappers
from lightning_obs.numerics.checksum import checksum
from lightning_obs.ranks.collectives import all_ranks_answer


def require_ready(model: nn.Module, merged_for: str | None = None) -> None:
    """Refuse a model that is :func:`not_ready`, or has LoRA adapters beside weights that a use needs merged.

    Where parameters are sharded, all ranks must call this.
    """
    if merged_for is not None:
        refuse_unmerged(model, merged_for)
    problem = not_ready(model)
    if problem is not None:
        raise problem


def not_ready(model: nn.Module) -> CalibrationError | None:
    """Why the model is not as it was calibrated: it was not, or has changed since; else None."""
    if next(calibrated_modules(model), None) is None:
        return CalibrationError(
            f"{type(model).__name__} was not calibrated, it is in full precision",
            remedy="run CalibrationSession or CalibrationCallback on it first.",
        )
    changed = changed_since(model)
    if not changed:
        return None
    return CalibrationError(
        f"{len(changed)} parameters and buffers have changed since the model was calibrated",
        where=changed,
        remedy="calibrate the model as it is now (trainer.validate with the callback).",
    )


def checksums(places: Sequence[tuple[nn.Module, str]]) -> list[int]:
    """Of each tensor ``(module, name)`` the checksum of all of it; the weight of a LoRA layer counts as merged.

    Where parameters are sharded, all ranks must call this, with the same places.
    """
    values = [getattr(module, name) for module, name in places]
    keys = [  # a parameter of two modules is read once
        (id(value), name if adapters_of(module) is None else id(module))
        for value, (module, name) in zip(values, places, strict=True)
    ]
    parts: dict[tuple[torch.device, tuple[dist.ProcessGroup, ...]], dict[Hashable, torch.Tensor]] = {}
    for key, (module, name) in dict(zip(keys, places, strict=True)).items():
        part, first = part_here(module, name)
        parts.setdefault((part.device, place_of(module, name).groups), {})[key] = checksum(part, first)
    found: dict[Hashable, int] = {}
    for (_, groups), by_key in parts.items():  # one reduction and one copy to the host for all
        total = torch.stack(list(by_key.values()))
        for group in groups:
            with all_ranks_answer():
                dist.all_reduce(total, group=group)
        found |= zip(by_key, total.tolist(), strict=True)
    return [found[key] for key in keys]


def remember(model: nn.Module) -> None:
    """Keep the checksums of everything that a checkpoint of ``model`` holds, on its modules.

    Where parameters are sharded, all ranks must call this.
    """
    reshard(model)
    places = [(module, name) for module in model.modules() for name in _held(module)]
    by_module: dict[nn.Module, dict[str, int]] = {}
    for (module, name), found in zip(places, checksums(places), strict=True):
        by_module.setdefault(module, {})[name] = found
    for module in model.modules():
        vars(module)[CHECKSUMS] = by_module.get(module, {})


def changed_since(model: nn.Module) -> list[str]:
    """Names of parameters and buffers that are not what they were when ``model`` was calibrated.

    Where parameters are sharded, all ranks must call this.
    """
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
    """What a checkpoint holds of a module by itself. Buffers of integers count steps, which changes no output."""
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.is_meta and not is_lazy(parameter):
            yield name
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point() and not buffer.is_meta and name not in module._non_persistent_buffers_set:
            yield name
