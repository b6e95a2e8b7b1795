"""Ranges for experts that no token reached, from the other experts of the layer.

An engine that runs experts fused takes one activation scale for all of them, the widest, so the union of the siblings'
ranges is what an expert without tokens would be run with anyway. Its weights need no tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.errors import CalibrationError, name_list, warn
from lightning_obs.numerics.reshape import ATTENTION
from lightning_obs.observers import Key, Observer
from lightning_obs.observers.min_max import StaticMinMaxObserver


def borrow_ranges(
    observers: Mapping[Key, Observer],
    containers: Mapping[str, int],
    fused: Sequence[Sequence[str]],
    join_ranges: bool = False,
) -> dict[Key, Observer]:
    """Stand-ins for the observers of experts that no data reached.

    Args:
        observers: ``{(module name, base name): observer}``.
        containers: how many experts there are under each container's name.
        fused: modules that share a global scale; they borrow together.
        join_ranges: let them share the range of a whole tensor too (:meth:`Observer.fuse`).

    Returns:
        For every activation of every module that borrows: an observer whose range is the union of those of the same
        projection in the siblings that data reached. A module whose siblings saw nothing either is not in it. A weight
        whose observer lacks inputs is in it as it is.
    """
    needing = {key for key, observer in observers.items() if observer.observes_data}
    unreached = {name for name, base in needing if not observers[name, base].is_reached}
    unreached |= {name for group in fused if unreached & set(group) for name in group}
    borrowed: dict[Key, Observer] = {}
    for name in sorted(unreached):
        mine = {key: observer for key, observer in observers.items() if key[0] == name and key in needing}
        reached = {
            key: [
                observers[sibling, key[1]]
                for sibling in _siblings(name, containers)
                if (sibling, key[1]) in observers and observers[sibling, key[1]].is_reached
            ]
            for key in mine
        }
        if all(reached.values()):
            borrowed |= {
                key: observer if key[1] == "weight" else _union(observer, reached[key])
                for key, observer in mine.items()
            }
    for group in fused:
        for base in ("input", "output"):
            members = [borrowed[name, base] for name in group if (name, base) in borrowed]
            Observer.fuse(members, join_ranges)
    return borrowed


def _siblings(name: str, containers: Mapping[str, int]) -> list[str]:
    """The same projection in the other experts of the innermost container that ``name`` is in."""
    for container in sorted(containers, key=len, reverse=True):
        prefix = f"{container}." if container else ""
        index, _, rest = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and index.isdecimal() and int(index) < containers[container]:
            others = (str(other) for other in range(containers[container]) if other != int(index))
            return [".".join(filter(None, (container, other, rest))) for other in others]
    return []


def _union(own: Observer, others: Sequence[Observer]) -> Observer:
    args = own.args.model_copy(deep=True, update={"observer_kwargs": {}})
    stand_in = StaticMinMaxObserver(own.base_name, args)
    stand_in.qparams_dtype = own.qparams_dtype
    ranges = [other.get_min_max() for other in others]
    device = ranges[0][0].device
    stand_in.min_vals = torch.stack([low.to(device) for low, _ in ranges]).amin(0)
    stand_in.max_vals = torch.stack([high.to(device) for _, high in ranges]).amax(0)
    return stand_in


def check_coverage(
    observers: Mapping[Key, Observer],
    unreached: Collection[Key],
    fused: Sequence[Sequence[str]],
    options: CalibrationOptions,
    batches: int,
    experts: bool = False,
) -> set[str]:
    """Names of modules to leave in full precision, because no data reached them.

    Args:
        observers: all of them.
        unreached: those that no data reached, on any rank; weights count only where their observer needs inputs.
        fused: names of modules that are quantized together or not at all.
        options: with ``on_missing="warn"`` they are left out, else they are an error.
        batches: how many were seen, for the error.
        experts: the model has some; the error says what can be done for them.

    Raises:
        CalibrationError: no observer saw any data, or one saw none and ``on_missing`` is ``"error"``.
    """
    needing = [key for key, observer in observers.items() if observer.observes_data]
    unreached = [key for key in needing if key in unreached]
    if not unreached:
        return set()
    missing = [f"{name} ({base if base != 'weight' else 'inputs for its weight'})" for name, base in unreached]
    if len(unreached) == len(needing):
        static = any(base != "weight" for _, base in needing)
        raise CalibrationError(
            f"{options.label} has {'static activations' if static else 'weights that are observed with their inputs'} "
            "and saw no data",
            where=missing,
            got=f"{batches} batches",
            expected="calibration batches that run these modules",
            remedy="run the model inside the session (in Lightning: validation batches), "
            + (
                "or choose a scheme that needs no data (FP8_DYNAMIC, W8A8, W4A16)."
                if static
                else "or choose an observer that needs no inputs (memoryless_mse)."
            ),
        )
    # An attention module without scales would be loaded with uninitialized ones: there, nothing can be left out.
    if options.on_missing != "warn" or any(base in ATTENTION for _, base in unreached):
        raise CalibrationError(
            f"no data reached {len(unreached)} of {len(needing)} observers",
            where=missing,
            remedy="add calibration batches, list them in `ignore`, or set on_missing='warn' "
            "to leave them in full precision."
            + (" For experts there are on_missing='siblings' and calibrate_all_experts=True." if experts else ""),
        )
    names = {name for name, _ in unreached}
    # A fused set is quantized whole or not at all.
    mates = {name for group in fused if names & set(group) for name in group} - names
    with_them = f"; and, fused with them: {name_list(sorted(mates))}" if mates else ""
    warn(f"left in full precision, because no data reached them: {name_list(missing)}{with_them}")
    return names | mates
