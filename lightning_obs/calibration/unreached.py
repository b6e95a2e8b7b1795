"""Modules that no data reached: an error, or left in float with a warning."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_obs.calibration.observation import GRADIENTS, HESSIAN, INPUT_ERRORS, RANGE, Observation
from lightning_obs.errors import CalibrationError, key_text, name_list, refuse, warn
from lightning_obs.numerics.qparams import ATTENTION
from lightning_obs.observers import Key


def left_in_float_without_data(observation: Observation, unreached: Collection[Key]) -> set[str]:
    """Names of modules to leave in full precision, because no data reached them, with the modules fused with them.

    Args:
        observation: of this rank; its ``lacks_data`` says afterwards whether data were missing.
        unreached: the observers that no data reached on any rank, and that have no stand-in.

    Raises:
        CalibrationError: no observer has any data, or one has none and ``on_missing`` is ``"error"``; in a fit, which
            an error would end, there is a warning instead.
    """
    required = _required_observers(observation)
    lacking = [key for key in required if key in unreached]
    if not lacking:
        return set()
    _refuse_hidden_statistics(observation, lacking)
    observation.lacks_data = True
    if len(lacking) == len(required) and not observation.others_have_data:
        raise _no_data_at_all(observation, required)
    # An attention module without scales would be loaded with uninitialized ones: there, nothing can be left out.
    needs_all_scales = any(base in ATTENTION for _, base in lacking)
    may_be_left = observation.options.on_missing == "warn" or observation.is_fitting
    if needs_all_scales or not may_be_left:
        raise _no_data_for_some(observation, lacking, required)
    observation.lacks_data = False
    names = {name for name, _ in lacking}
    fused_with_them: set[str] = set()
    for group in observation.inseparable:
        if names.intersection(group):
            fused_with_them.update(group)
    _warn_of_modules_left(observation, lacking, fused_with_them - names)
    return names | fused_with_them


def _required_observers(observation: Observation) -> list[Key]:
    """The observers that need data: not those of helpers, except for a Hessian. Experts may lack that too."""
    helpers = {RANGE, GRADIENTS, INPUT_ERRORS}
    if observation.options.on_missing == "siblings":
        helpers.add(HESSIAN)
    return [key for key in observation.data_observers if key[1] not in helpers]


def _refuse_hidden_statistics(observation: Observation, lacking: Sequence[Key]) -> None:
    """Raise a CalibrationError for a user's observers that gathered statistics and do not say so."""
    hidden = []
    for key in lacking:
        if key in observation.observers and observation.observers[key].get_statistics():
            hidden.append(key_text(key))
    refuse(
        hidden,
        "observer says has_statistics=False although it stored statistics",
        expected="min_vals and max_vals, or an observer that says what it gathers",
        remedy="declare `statistics`, or write has_statistics beside get_min_max (docs/guide/new_observer.md).",
    )


def _no_data_at_all(observation: Observation, required: Sequence[Key]) -> CalibrationError:
    if all(base in ("weight", HESSIAN) for _, base in required):
        reason = "weights that are observed with their inputs"
        alternative = "an observer that needs no inputs (memoryless_mse)"
    else:
        reason = "static activations"
        alternative = "a scheme that needs no data (FP8_DYNAMIC, W8A8, W4A16)"
    return CalibrationError(
        f"{observation.options.label} has {reason} and saw no data",
        where=_texts(required),
        got=f"{observation.calls.batches} batches",
        expected="calibration batches that run these modules",
        remedy=f"run the model inside the session (in Lightning: validation batches), or choose {alternative}.",
    )


def _no_data_for_some(observation: Observation, lacking: Sequence[Key], required: Sequence[Key]) -> CalibrationError:
    remedy = "add calibration batches, list them in `ignore`, or set on_missing='warn' to leave them in full precision."
    if observation.experts is not None:
        remedy += " For experts there are on_missing='siblings' and calibrate_all_experts=True."
    return CalibrationError(
        f"no data reached {len(lacking)} of {len(required)} observers", where=_texts(lacking), remedy=remedy
    )


def _warn_of_modules_left(observation: Observation, lacking: Sequence[Key], fused_with_them: Collection[str]) -> None:
    text = f"left in full precision, because no data reached them: {name_list(_texts(lacking))}"
    if fused_with_them:
        text += f"; and, fused with them: {name_list(sorted(fused_with_them))}"
    if observation.options.on_missing != "warn":
        text += ". List them in `ignore` to leave them on purpose, or call them in validation."
    warn(text)


def _texts(keys: Sequence[Key]) -> list[str]:
    """What was not observed, for an error: ``"layer (input)"``, ``"layer (inputs for its weight)"``."""
    texts = []
    for name, base in keys:
        missing = "inputs for its weight" if base in ("weight", HESSIAN) else base
        texts.append(f"{name} ({missing})")
    return texts
