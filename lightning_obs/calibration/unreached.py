"""Modules that no data reached: raise an error, or leave them in full precision with a warning.

``finalize`` comes here once the statistics were reduced over ranks, before it computes qparams.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_obs.calibration.base_names import GRADIENTS, HESSIAN, INPUT_ERRORS, RANGE
from lightning_obs.calibration.observation import Observation
from lightning_obs.errors import CalibrationError, key_text, name_list, refuse, warn
from lightning_obs.numerics.qparams import ATTENTION
from lightning_obs.observers import Key


def left_in_float_without_data(observation: Observation, unreached: Collection[Key]) -> set[str]:
    """Decide which modules stay in full precision because no data reached them, and warn of them.

    ``finalize`` calls this on every rank if an observer without a stand-in has no data. A *stand-in* replaces the
    observer of an expert without tokens: it has the ranges of the layer's other experts (``on_missing="siblings"``,
    :func:`.borrow_ranges`).

    Args:
        observation: of this rank. Its ``coverage.lacks_data`` is True afterwards if this raises for missing data; then,
            in a fit, :meth:`.TrainerSession.finalize` warns instead of raising, and :meth:`.KeptRuns.calibrate` does
            not try another rounding. In the record of a part of a model, ``coverage.others_have_data`` says whether
            data reached the other parts.
        unreached: the observers that no data reached on any rank, without those that have a stand-in.

    Returns:
        Names of these modules, and of all modules in the groups (``observation.inseparable``: fused sets, the experts
        of a layer) that contain one of them.

    Raises:
        CalibrationError: no observer has data; or some observer has none, and ``on_missing`` does not allow it. In a
            fit, which an error would end, modules without data are left with a warning whatever ``on_missing`` says.
    """
    required = _required_observers(observation)
    lacking = [key for key in required if key in unreached]
    if not lacking:
        return set()
    _refuse_hidden_statistics(observation, lacking)
    observation.coverage.lacks_data = True
    if len(lacking) == len(required) and not observation.coverage.others_have_data:
        raise _no_data_at_all(observation, required)
    # compressed-tensors, by which transformers loads a checkpoint, allocates scales of the kv cache in every attention
    # module. Those that the checkpoint lacks would stay uninitialized, so no attention module can be left out.
    needs_all_scales = any(base in ATTENTION for _, base in lacking)
    may_be_left = observation.options.on_missing == "warn" or observation.is_fitting
    if needs_all_scales or not may_be_left:
        raise _no_data_for_some(observation, lacking, required)
    observation.coverage.lacks_data = False
    names = {name for name, _ in lacking}
    fused_with_them: set[str] = set()
    for group in observation.inseparable:
        if names.intersection(group):
            fused_with_them.update(group)
    _warn_of_modules_left(observation, lacking, fused_with_them - names)
    return names | fused_with_them


def _required_observers(observation: Observation) -> list[Key]:
    """The observers that must have data: those of the plan, and helpers that gather a Hessian.

    Other helpers gather what a report or a rounding can do without. With ``on_missing="siblings"`` the Hessian is not
    required either: the weight of an expert without tokens is rounded to nearest.
    """
    helpers = {RANGE, GRADIENTS, INPUT_ERRORS}
    if observation.options.on_missing == "siblings":
        helpers.add(HESSIAN)
    return [key for key in observation.data_observers if key[1] not in helpers]


def _refuse_hidden_statistics(observation: Observation, lacking: Sequence[Key]) -> None:
    """Raise a CalibrationError if a user's observer holds statistics although its ``has_statistics`` is False.

    Such an observer counts as unreached by mistake; the error says what its class lacks.
    """
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
    """The error to raise if no required observer has data."""
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
    """The error to raise if some required observers (``lacking``) have no data."""
    remedy = "add calibration batches, list them in `ignore`, or set on_missing='warn' to leave them in full precision."
    if observation.experts is not None:
        remedy += " For experts there are on_missing='siblings' and calibrate_all_experts=True."
    return CalibrationError(
        f"no data reached {len(lacking)} of {len(required)} observers", where=_texts(lacking), remedy=remedy
    )


def _warn_of_modules_left(observation: Observation, lacking: Sequence[Key], fused_with_them: Collection[str]) -> None:
    """Warn of the modules that are left in full precision: those of ``lacking``, and modules fused with them."""
    text = f"left in full precision, because no data reached them: {name_list(_texts(lacking))}"
    if fused_with_them:
        text += f"; and, fused with them: {name_list(sorted(fused_with_them))}"
    if observation.options.on_missing != "warn":
        text += ". List them in `ignore` to leave them on purpose, or call them in validation."
    warn(text)


def _texts(keys: Sequence[Key]) -> list[str]:
    """A text for each tensor that was not observed: ``"layer (input)"``, ``"layer (inputs for its weight)"``.

    Two observers of a weight that lack its inputs (of its range and its Hessian) have one text.
    """
    texts = []
    for name, base in keys:
        missing = "inputs for its weight" if base in ("weight", HESSIAN) else base
        texts.append(f"{name} ({missing})")
    return list(dict.fromkeys(texts))
