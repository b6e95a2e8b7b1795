"""What a run layer by layer knows of the modules outside of blocks, saved after each block for a run that goes on.

Such modules (a projection of embeddings, a Linear between two blocks) are observed while blocks run, and written last.
A run that goes on after a kill skips the finished blocks, and so would not observe what is called before or between
them. Rounding on quantized inputs computes the qparams of these modules at once; then the qparams are saved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from lightning_obs.calibration.observation import Observation
from lightning_obs.calibration.saved_state import dump_statistics, load_statistics
from lightning_obs.model.module_qparams import get_scheme, read_qparams
from lightning_obs.observers import Key, Observer


def dump_outside(observation: Observation, module_names: Collection[str]) -> dict[str, Any]:
    """The statistics and qparams of the modules outside of blocks so far, for :func:`load_outside`.

    ``layerwise.py`` calls this after each block.

    Args:
        observation: of this rank.
        module_names: the modules outside of blocks; modules that are not planned are ignored.

    Returns:
        ``{"statistics": by observer, "sketched": tokens in each sketch, "qparams": by module name}``. Tensors are not
        copied. A module with qparams needs no statistics any more.

    Raises:
        CalibrationError: a statistic cannot be saved.
    """
    part = observation.of(module_names)
    qparams = {}
    for target in part.plan.targets:
        if get_scheme(target.module) is not None:
            qparams[target.name] = read_qparams(target.module)
    observers = {key: observer for key, observer in _observers(part).items() if key[0] not in qparams}
    sketched = {}
    for name, hold_out in part.hold_outs.items():
        if name not in qparams:
            sketched[name] = hold_out.sketched_tokens
    return {"statistics": dump_statistics(observers), "sketched": sketched, "qparams": qparams}


def load_outside(observation: Observation, module_names: Collection[str], state: Mapping[str, Any]) -> None:
    """Give the observers of modules outside of blocks the statistics of a :func:`dump_outside`.

    ``layerwise.py`` calls this when a run goes on, once the hooks are attached. The qparams in the state are for
    :meth:`.StepwiseCalibration.take_over`.
    """
    part = observation.of(module_names)
    load_statistics(_observers(part), state["statistics"])
    for name, tokens in state["sketched"].items():
        part.hold_outs[name].sketched_tokens = tokens


def calibrated_outside(state: Mapping[str, Any] | None) -> Mapping[str, dict[str, torch.Tensor]]:
    """The qparams in a :func:`dump_outside`, by module name; empty if there is no state, since no run was killed."""
    if state is None:
        return {}
    qparams: Mapping[str, dict[str, torch.Tensor]] = state["qparams"]
    return qparams


def _observers(part: Observation) -> dict[Key, Observer]:
    """The observers that data reach in a part of a model, those of hold-outs included."""
    observers = dict(part.data_observers)
    for hold_out in part.hold_outs.values():
        observers |= hold_out.by_key
    return observers
