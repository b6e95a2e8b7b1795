"""Modules that no data reached: an error, or left in float with a warning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_obs.calibration.hooks import GRADIENTS, HESSIAN, RANGE
from lightning_obs.errors import CalibrationError, key_text, name_list, refuse, warn
from lightning_obs.numerics.qparams import ATTENTION
from lightning_obs.observers import Key

if TYPE_CHECKING:
    from lightning_obs.calibration.session import CalibrationSession


def left_in_float_without_data(session: CalibrationSession, unreached: set[Key]) -> set[str]:
    """Names of modules to leave in full precision, because no data reached them on any rank, with their fused mates.

    An error if no observer saw any data, or one saw none and ``on_missing`` is ``"error"``; in a fit, which it would
    end, a warning.
    """
    # Experts may lack a Hessian.
    other = {RANGE, GRADIENTS, *([HESSIAN] if session.options.on_missing == "siblings" else [])}
    needing = [key for key in session.fed if key[1] not in other]
    lacking = [key for key in needing if key in unreached]
    if not lacking:
        return set()
    refuse(
        [key_text(key) for key in lacking if key in session.observers and session.observers[key].get_statistics()],
        "observers have gathered statistics, and their has_statistics is False",
        expected="min_vals and max_vals, or an observer that says what it gathers",
        remedy="declare `statistics`, or write has_statistics beside get_min_max (docs/new_observer.md).",
    )
    missing = [f"{name} ({'inputs for its weight' if base in ('weight', HESSIAN) else base})" for name, base in lacking]
    session.lacked_data = True
    if len(lacking) == len(needing):
        what, others = "static activations", "a scheme that needs no data (FP8_DYNAMIC, W8A8, W4A16)"
        if all(base in ("weight", HESSIAN) for _, base in needing):
            what = "weights that are observed with their inputs"
            others = "an observer that needs no inputs (memoryless_mse)"
        raise CalibrationError(
            f"{session.label} has {what} and saw no data",
            where=missing,
            got=f"{session.batches} batches",
            expected="calibration batches that run these modules",
            remedy=f"run the model inside the session (in Lightning: validation batches), or choose {others}.",
        )
    # An attention module without scales would be loaded with uninitialized ones: there, nothing can be left out.
    may_be_left = session.options.on_missing == "warn" or session.is_fitting
    if not may_be_left or any(base in ATTENTION for _, base in lacking):
        for_experts = " For experts there are on_missing='siblings' and calibrate_all_experts=True."
        raise CalibrationError(
            f"no data reached {len(lacking)} of {len(needing)} observers",
            where=missing,
            remedy="add calibration batches, list them in `ignore`, or set on_missing='warn' to leave them in full "
            f"precision.{for_experts if session.experts.containers else ''}",
        )
    session.lacked_data = False
    names = {name for name, _ in lacking}
    mates = {name for group in session.together if names & set(group) for name in group} - names
    with_them = f"; and, fused with them: {name_list(sorted(mates))}" if mates else ""
    is_asked_for = session.options.on_missing == "warn"
    remedy = "" if is_asked_for else ". List them in `ignore` to leave them on purpose, or call them in validation."
    warn(f"left in full precision, because no data reached them: {name_list(missing)}{with_them}{remedy}")
    return names | mates
