"""A calibration as tensors and strings, for a checkpoint, and back onto a model."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig
from torch import nn

from lightning_obs.calibration.finalize import write_all
from lightning_obs.errors import CalibrationError, name_list, refuse
from lightning_obs.files.sealed import require_whole, sealed
from lightning_obs.model.module_qparams import CHECKSUMS
from lightning_obs.model.offload import at_rest
from lightning_obs.model.wrappers import without_adapters, without_wrappers
from lightning_obs.observers import Key, Observer
from lightning_obs.observers.statistic import declared_statistics
from lightning_obs.ranks.collectives import Collectives, Stretch
from lightning_obs.ranks.sync import require_plain, sync_statistics
from lightning_obs.schemes.planned_modules import Plan, find_misfits

_FORMAT = 4
_REMEDY = "load the checkpoint of this model, or calibrate again."


def dump_state(
    plan: Plan,
    qparams: Mapping[str, torch.Tensor],
    checksums: Mapping[str, Mapping[str, int]],
    skipped: Iterable[str],
) -> dict[str, Any]:
    """``{"layer.weight_scale": tensor}``, ``{"layer": {"weight": checksum}}``, modules left in full precision."""
    found = {"qparams": dict(qparams), "checksums": dict(checksums), "skipped": sorted(skipped)}
    return sealed({"format": _FORMAT, "config": plan.config.model_dump_json(), **found})


def by_module(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """``{"layer.weight_scale": value}`` as ``{"layer": {"weight_scale": value}}``."""
    nested: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        name, _, key = str(key).rpartition(".")
        nested.setdefault(name, {})[key] = value
    return nested


def load_state(model: nn.Module, plan: Plan, state: Mapping[str, Any]) -> None:
    """Write the qparams of a :func:`dump_state` to the plan's modules of ``model``.

    Raises:
        CalibrationError: the state was made with another scheme or for another model. Nothing was written then.
    """
    require_whole(state)
    if (found := state.get("format")) != _FORMAT:
        raise CalibrationError(
            "the saved calibration has a format that this version does not know",
            got=found,
            expected=_FORMAT,
            remedy="load it with the version of lightning_obs that wrote it, or calibrate again.",
        )
    refuse_other_options(state, plan.config)
    qparams = by_module(state["qparams"])
    unknown = sorted(qparams.keys() - {target.name for target in plan.targets})
    refuse(unknown, "the saved calibration has modules that this model does not have")
    refuse(list(_misfits(plan, qparams)), "the saved calibration does not fit", remedy=_REMEDY)
    with torch.inference_mode(False), torch.no_grad(), at_rest():
        write_all(plan, qparams)
        with without_wrappers(model), without_adapters(model):
            for name, module in model.named_modules():
                vars(module)[CHECKSUMS] = dict(state["checksums"].get(name, {}))


def changed_options(state: Mapping[str, Any], config: QuantizationConfig) -> list[str]:
    """How a config differs from that of a saved calibration: ``["weights.num_bits: 8 -> 4", ...]``."""
    try:
        saved = dict(flat_fields(json.loads(state["config"])))
    except (KeyError, TypeError, ValueError):
        return ["its config is missing or damaged"]
    return changes(saved, dict(flat_fields(json.loads(config.model_dump_json()))))


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The fields that differ: ``["ranks: 2 -> 1", ...]``."""
    names = [name for name in dict.fromkeys([*saved, *now]) if saved.get(name) != now.get(name)]
    return [f"{name}: {_change(saved.get(name), now.get(name))}" for name in names]


def refuse_other_options(state: Mapping[str, Any], config: QuantizationConfig) -> None:
    """Raise a CalibrationError that names the fields in which the config of a saved calibration differs."""
    refuse(
        changed_options(state, config),
        "the saved calibration was made with another scheme, other observers or another ignore list",
        remedy="use the options that the checkpoint was calibrated with, or calibrate again.",
    )


def flat_fields(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dicts by their path: ``("weights.num_bits", 8)``..."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from flat_fields(each, f"{name}.{key}".lstrip("."))
    else:
        yield name, value


def _change(saved: Any, now: Any) -> str:
    if isinstance(saved, list) and isinstance(now, list):  # names of modules, perhaps hundreds
        gone, new = ([repr(one) for one in a if one not in b] for a, b in ((saved, now), (now, saved)))
        parts = [f"{word} {name_list(names, 3)}" for word, names in (("without", gone), ("with", new)) if names]
        return "now " + (" and ".join(parts) or "in another order")
    return f"{saved!r} -> {now!r}"


def dump_statistics(observers: Mapping[Key, Observer]) -> dict[str, dict[str, Any]]:
    """The statistics so far: ``{"layer.input": {statistic: value}}``; observers without any are left out.

    Tensors are the observers' own.

    Raises:
        CalibrationError: a statistic is neither tensor, number nor string, so no checkpoint could hold it.
    """
    found = {key: observer.get_statistics() for key, observer in observers.items()}
    require_plain(found, "statistics that cannot be saved in a checkpoint")
    return {f"{name}.{base}": statistics for (name, base), statistics in found.items() if statistics}


def load_statistics(observers: Mapping[Key, Observer], state: Mapping[str, Mapping[str, Any]]) -> None:
    """Let observers continue from a :func:`dump_statistics`."""
    for (name, base_name), observer in observers.items():
        statistics = state.get(f"{name}.{base_name}")
        if statistics:
            observer.reset()
            observer.load_statistics(copy.deepcopy(dict(statistics)))


def dump_observation(observers: Mapping[Key, Observer], collectives: Collectives) -> dict[str, Any]:
    """The statistics of all ranks, of an observation that is not complete. Every rank must call this.

    A checkpoint holds one state for all ranks: extremes and counts are reduced; statistics whose reduction depends on
    the order (moving averages, float sums, undeclared ones) are kept rank by rank. The observers do not change.
    """
    apart: dict[str, dict[str, Any]] = {}
    copies: dict[Key, Observer] = {}
    stretch = Stretch(collectives)
    with stretch:
        apart = dump_statistics({key: o for key, o in observers.items() if not _is_exact(o)})
        for key, observer in observers.items():
            if _is_exact(observer):
                copies[key] = type(observer)(observer.base_name, observer.args)
                copies[key].load_statistics(observer.get_statistics())
    synced = sync_statistics(copies, collectives, failure=stretch.failure, note=apart)
    state: dict[str, Any] = {}
    stretch = Stretch(collectives, synced.failure)
    with stretch:
        state = copy.deepcopy({"reduced": dump_statistics(copies), "of_ranks": synced.notes})
    stretch.agree()
    return state


def load_observation(observers: Mapping[Key, Observer], state: Mapping[str, Any], collectives: Collectives) -> bool:
    """Let observers continue from a :func:`dump_observation`; rank 0 takes the reduced statistics.

    False, and nothing is loaded, if statistics kept rank by rank are of another number of ranks.
    """
    every = state["of_ranks"]
    if any(every) and len(every) != collectives.size:
        return False
    for observer in observers.values():
        observer.reset()
    if collectives.rank == 0:
        load_statistics(observers, state["reduced"])
    if any(every):
        load_statistics(observers, every[collectives.rank])
    return True


def _is_exact(observer: Observer) -> bool:
    """Whether its statistics, reduced, have the same bits for any ranks in any order."""
    declared = {statistic.name: statistic for statistic in declared_statistics(observer)}
    return all(n in declared and declared[n].is_exact(value) for n, value in observer.get_statistics().items())


def _misfits(plan: Plan, saved: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    # Before the first data, no module has qparams of activations. Modules that no data reached have none at all.
    known = {"weight"} | {key.partition("_")[0] for qparams in saved.values() for key in qparams}
    for target in plan.targets:
        if target.name in saved:
            yield from find_misfits(target, saved[target.name], known)
