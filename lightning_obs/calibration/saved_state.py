"""Save a calibration, finished or not, in a checkpoint of a run, and restore it.

A *finished* calibration is its config, qparams and checksums (:func:`dump_state`, :func:`load_state`); a
:class:`.CalibrationSession` saves it in its ``state_dict``. The *statistics* of an observation that is not complete are
saved by :func:`dump_observation`, when a checkpoint is written in the middle of a quantized fit
(``fine_tuning/quantized_training.py``).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig
from torch import nn

from lightning_obs.calibration.finalize import write_all
from lightning_obs.calibration.token_weights import count_tokens_alike
from lightning_obs.errors import CalibrationError, name_list, refuse
from lightning_obs.files.sealed import require_whole, sealed
from lightning_obs.model.kinds import without_adapters, without_wrappers
from lightning_obs.model.module_qparams import CHECKSUMS
from lightning_obs.model.offload import at_rest
from lightning_obs.observers import Key, Observer
from lightning_obs.observers.statistic import declared_statistics
from lightning_obs.ranks.collectives import Collectives, Stretch
from lightning_obs.ranks.sync import require_plain, sync_statistics
from lightning_obs.schemes.planned_modules import Plan, drop_outputs, find_misfits, round_by_full_precision

#: the key, in a state whose observers were chosen by measurement, of the config that the user asked for (as JSON),
#: followed by the candidates; ``CalibrationCallback`` writes it
ASKED_CONFIG = "asked_config"

#: number of the state's layout; a state with another number is refused
_FORMAT = 7
#: matches the paths of observers and their hyperparameters among the fields of a config
_OBSERVER = re.compile(r"\.observer(_kwargs)?\b")
_REMEDY = "load the checkpoint of this model, or calibrate again."


def dump_state(
    plan: Plan,
    qparams: Mapping[str, torch.Tensor],
    checksums: Mapping[str, Mapping[str, int]],
    skipped: Iterable[str],
    followed: Iterable[str],
    tokens_alike: Iterable[str],
    in_full_precision: bool,
) -> dict[str, Any]:
    """A finished calibration as a dict of tensors and strings, with a checksum of the whole (:func:`.sealed`).

    Called by ``CalibrationSession.state_dict``.

    Args:
        plan: its config is saved.
        qparams: ``{"layer.weight_scale": tensor}``.
        checksums: of the weights that the qparams belong to, ``{"layer": {"weight": checksum}}``.
        skipped: names of modules that were left in full precision.
        followed: names of modules whose output is not quantized, because the output of a follower is
            (:attr:`.OutputReaders.followed`).
        tokens_alike: names of modules whose tokens count alike, although a recipe asks for token weights.
        in_full_precision: whether a recipe went over from quantized inputs to a rounding by inputs in full precision.
    """
    return sealed(
        {
            "format": _FORMAT,
            "config": plan.config.model_dump_json(),
            "qparams": dict(qparams),
            "checksums": dict(checksums),
            "skipped": sorted(skipped),
            "followed": sorted(followed),
            "tokens_alike": sorted(tokens_alike),
            "in_full_precision": in_full_precision,
        }
    )


def by_module(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Turn ``{"layer.weight_scale": value}`` into ``{"layer": {"weight_scale": value}}``, to write it to modules.

    Called by :func:`load_state` and ``CalibrationSession.write_scales``.
    """
    nested: dict[str, dict[str, Any]] = {}
    for full_name, value in values.items():
        module_name, _, key = str(full_name).rpartition(".")
        nested.setdefault(module_name, {})[key] = value
    return nested


def load_state(model: nn.Module, plan: Plan, state: Mapping[str, Any]) -> None:
    """Write the qparams of a :func:`dump_state` to the planned modules of a model.

    Called by ``CalibrationSession.load_state_dict``. The whole state is checked before anything is changed.

    Args:
        model: of the session. Every module gets the checksums that were saved for it: none, for most modules.
        plan: of the session; outputs that the saved calibration did not quantize are dropped from it, and its schemes
            say so if a recipe had rounded weights by inputs in full precision.
        state: the result of :func:`dump_state`.

    Raises:
        CalibrationError: the state was made with another scheme or for another model. Plan and modules are as before
            then.
    """
    require_whole(state)
    saved_format = state.get("format")
    if saved_format != _FORMAT:
        raise CalibrationError(
            "the saved calibration has a format that this version does not know",
            got=saved_format,
            expected=_FORMAT,
            remedy="load it with the version of lightning_obs that wrote it, or calibrate again.",
        )
    refuse_other_options(state, plan.config)
    qparams = by_module(state["qparams"])
    unknown = sorted(qparams.keys() - {target.name for target in plan.targets})
    refuse(unknown, "the saved calibration has modules that this model does not have")
    followed = set(state["followed"])
    refuse(list(_misfits(plan, qparams, followed)), "the saved calibration does not fit", remedy=_REMEDY)
    drop_outputs(plan, followed)
    if state["in_full_precision"]:
        round_by_full_precision(plan)
    # Qparams that were made in inference mode could not be used in training. At rest, no offloaded weight is loaded.
    with torch.inference_mode(False), torch.no_grad(), at_rest():
        write_all(plan, qparams)  # by the plan's own names and modules
        count_tokens_alike(plan, state["tokens_alike"])
        with without_wrappers(model), without_adapters(model):
            # In this block a module inside a wrapper (torch.compile, DDP) or under LoRA has the name that the plain,
            # merged model gives it: checksums are saved by these names, also those of modules outside the plan.
            for name, module in model.named_modules():
                # Also where none was saved: checksums of an earlier calibration must not stay.
                vars(module)[CHECKSUMS] = dict(state["checksums"].get(name, {}))


def changed_options(state: Mapping[str, Any], config: QuantizationConfig) -> list[str]:
    """The fields in which the config of a saved calibration differs from ``config``: ``["weights.num_bits: 8 -> 4"]``.

    If the saved observers were chosen by measurement, the saved config has a group for each combination of observers,
    so its fields cannot be compared with those of ``config``. Then the config that the user asked for is compared,
    without its observers. Called by :func:`refuse_other_options`, and by ``CalibrationCallback`` when it applies a
    saved calibration.

    Args:
        state: the saved state.
        config: of the present session.
    """
    present = dict(flat_fields(json.loads(config.model_dump_json())))
    try:
        saved = dict(flat_fields(json.loads(state["config"])))
        differences = changes(saved, present)
        if not differences or ASKED_CONFIG not in state:
            return differences
        asked, _ = json.JSONDecoder().raw_decode(state[ASKED_CONFIG])
        combinations = list(json.loads(state["config"])["config_groups"])
    except (KeyError, TypeError, ValueError):
        return ["its config is missing or damaged"]
    differences = changes(_without_observers(dict(flat_fields(asked))), _without_observers(present))
    return [*differences, f'observers: chosen by measurement, observers="auto" ({name_list(combinations, 3)})']


def _without_observers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config (path -> value), without observers and their hyperparameters."""
    return {name: value for name, value in fields.items() if not _OBSERVER.search(name)}


def changes(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """A text for each field whose value differs: ``["ranks: 2 -> 1"]``.

    Called by :func:`changed_options` for configs, and by ``streaming/finished_blocks.py`` for the facts of a killed
    run.

    Args:
        saved: the fields of the saved state, by name.
        present: the fields of the present run; a field that one of the two lacks counts as None there.
    """
    texts = []
    for name in dict.fromkeys([*saved, *present]):
        if saved.get(name) != present.get(name):
            texts.append(f"{name}: {_change(saved.get(name), present.get(name))}")
    return texts


def refuse_other_options(state: Mapping[str, Any], config: QuantizationConfig) -> None:
    """Raise a CalibrationError if a saved calibration has another config than ``config``; it names the fields.

    Called before a saved state is loaded, by :func:`load_state` and by a resumed quantized fit.
    """
    refuse(
        changed_options(state, config),
        "the saved calibration was made with another scheme, other observers or another ignore list",
        remedy="use the options that the checkpoint was calibrated with, or calibrate again.",
    )


def flat_fields(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts with their paths: ``("weights.num_bits", 8)``.

    Called for configs by :func:`changed_options`, and by ``streaming/finished_blocks.py`` for the facts of a run.

    Args:
        value: the dict; anything else is yielded as it is.
        name: the path to ``value``; empty at the top.
    """
    if isinstance(value, dict) and value:
        for key, field in value.items():
            yield from flat_fields(field, f"{name}.{key}".lstrip("."))
    else:
        yield name, value


def _change(saved: Any, present: Any) -> str:
    """The text of one changed field: ``8 -> 4``. Of two lists (hundreds of names), only the entries that differ."""
    if not isinstance(saved, list) or not isinstance(present, list):
        return f"{saved!r} -> {present!r}"
    differences = []
    removed = [repr(name) for name in saved if name not in present]
    if removed:
        differences.append(f"without {name_list(removed, 3)}")
    added = [repr(name) for name in present if name not in saved]
    if added:
        differences.append(f"with {name_list(added, 3)}")
    return "now " + (" and ".join(differences) or "in another order")


def dump_statistics(observers: Mapping[Key, Observer]) -> dict[str, dict[str, Any]]:
    """The statistics of observers so far: ``{"layer.input": {statistic: value}}``.

    Observers without statistics are left out. Tensors are the observers' own, not copies. Called by
    :func:`dump_observation`, and by ``QuantizedTraining.state_dict`` for a checkpoint between two observations.

    Raises:
        CalibrationError: a statistic is no tensor, number or string, so a checkpoint cannot hold it.
    """
    statistics_of = {key: observer.get_statistics() for key, observer in observers.items()}
    require_plain(statistics_of, "statistics that cannot be saved in a checkpoint")
    return {f"{name}.{base}": statistics for (name, base), statistics in statistics_of.items() if statistics}


def load_statistics(observers: Mapping[Key, Observer], state: Mapping[str, Mapping[str, Any]]) -> None:
    """Give observers the statistics of a :func:`dump_statistics`; observers without an entry do not change.

    Called by :func:`load_observation` and ``QuantizedTraining.load_state_dict``, when a quantized fit resumes.

    Raises:
        CalibrationError: an observer's class declares a statistic that it did not declare when the state was saved.
    """
    for (name, base_name), observer in observers.items():
        statistics = state.get(f"{name}.{base_name}")
        if statistics:
            _require_declared(observer, statistics, f"{name} ({base_name})")
            observer.reset()
            observer.load_statistics(copy.deepcopy(dict(statistics)))


def _require_declared(observer: Observer, statistics: Mapping[str, Any], where: str) -> None:
    """Raise a CalibrationError if an observer declares statistics that were not saved.

    An observer sets all its statistics of a tensor at once, and all its statistics of inputs at once. So if some of
    these are absent and others are not, another version of the class has saved them.

    Args:
        observer: to be loaded.
        statistics: its saved statistics by name.
        where: the tensor, for the error.
    """
    for of_inputs in (False, True):
        declared = [statistic.name for statistic in declared_statistics(observer) if statistic.of_inputs == of_inputs]
        absent = [name for name in declared if name not in statistics]
        if absent and len(absent) < len(declared):
            raise CalibrationError(
                f"the saved observation is of another version of {type(observer).__name__}",
                where=[where],
                got=f"no {name_list(absent)}",
                remedy="calibrate again, or load it with the class that saved it.",
            )


def dump_observation(observers: Mapping[Key, Observer], collectives: Collectives) -> dict[str, Any]:
    """Gather the statistics of all ranks in an observation that is not complete. Every rank must call this.

    Called by ``QuantizedTraining.state_dict``, when Lightning writes a checkpoint in the middle of a quantized fit's
    observation. A checkpoint holds one state for all ranks. Extremes and counts, which can be reduced exactly, are
    stored once. Statistics whose reduction depends on the order (moving averages, sums of floats, undeclared
    statistics) are stored for each rank.

    Args:
        observers: they keep their statistics, since copies of them are reduced.
        collectives: of this rank.

    Returns:
        ``{"reduced": statistics of all ranks, "of_ranks": [statistics of rank 0, ...]}``, the same on all ranks.

    Raises:
        CalibrationError: the same on all ranks: a statistic that cannot be saved or reduced, NaN or infinity, or
            another failure of some rank.
    """
    kept_by_rank: dict[str, dict[str, Any]] = {}
    copies: dict[Key, Observer] = {}
    # Each ``with stretch`` catches an error of this rank, since the other ranks enter the next collective in any case.
    # ``sync_statistics`` raises the error of the first block on all ranks, ``agree`` that of the second.
    stretch = Stretch(collectives)
    with stretch:
        inexact: dict[Key, Observer] = {}
        for key, observer in observers.items():
            if _is_exact(observer):
                copies[key] = type(observer)(observer.base_name, observer.args)
                # The same tensors, which reducing replaces and does not change.
                copies[key].load_statistics(observer.get_statistics())
            else:
                inexact[key] = observer
        kept_by_rank = dump_statistics(inexact)
    synced = sync_statistics(copies, collectives, failure=stretch.failure, note=kept_by_rank)
    # ``synced.notes`` are the ``kept_by_rank`` of all ranks.
    state: dict[str, Any] = {}
    stretch = Stretch(collectives, synced.failure)
    with stretch:
        state = copy.deepcopy({"reduced": dump_statistics(copies), "of_ranks": synced.notes})
    stretch.agree()
    return state


def load_observation(observers: Mapping[Key, Observer], state: Mapping[str, Any], collectives: Collectives) -> bool:
    """Give observers the statistics of a :func:`dump_observation`.

    ``QuantizedTraining.load_state_dict`` calls this when a quantized fit resumes.
    Rank 0 takes the reduced statistics, and every rank takes those that were stored for it.

    Returns:
        False if statistics were stored for each rank and the number of ranks is another now; nothing is loaded then.
    """
    statistics_of_ranks = state["of_ranks"]
    has_inexact = any(statistics_of_ranks)
    if has_inexact and len(statistics_of_ranks) != collectives.size:
        return False
    for observer in observers.values():
        observer.reset()
    if collectives.rank == 0:
        load_statistics(observers, state["reduced"])
    if has_inexact:
        load_statistics(observers, statistics_of_ranks[collectives.rank])
    return True


def _is_exact(observer: Observer) -> bool:
    """Whether reducing the observer's statistics over ranks gives the same bits in any order of the ranks."""
    declared = {statistic.name: statistic for statistic in declared_statistics(observer)}
    for name, value in observer.get_statistics().items():
        if name not in declared or not declared[name].is_exact(value):
            return False
    return True


def _misfits(plan: Plan, saved: Mapping[str, dict[str, Any]], followed: Collection[str]) -> Iterator[str]:
    """Yield a message for each saved qparam that is missing, unexpected, or of another shape than its module needs.

    :func:`load_state` calls this before it changes anything.

    Args:
        plan: of the session.
        saved: the saved qparams by module name, ``{"layer": {"weight_scale": tensor}}``.
        followed: names of modules whose output the saved calibration did not quantize, so that its qparams are missing
            rightly.
    """
    # A state may lack qparams that are not required: those of all activations, if it was saved before any data, and
    # those of modules that no data reached.
    saved_base_names = {"weight"}
    for qparams in saved.values():
        saved_base_names |= {key.partition("_")[0] for key in qparams}
    for target in plan.targets:
        if target.name in saved:
            base_names = saved_base_names - {"output"} if target.name in followed else saved_base_names
            yield from find_misfits(target, saved[target.name], base_names)
