"""Whether a next step of the report can run on the calibrated model: its options are checked, no data are run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.choice.observer_choice import fitting_candidates
from lightning_obs.errors import CalibrationError
from lightning_obs.schemes.config import has_rounding


def takes_options(session: CalibrationSession, changes: Mapping[str, Any]) -> bool:
    """Whether the session's model can be calibrated with other options, and with the rounding of their recipe.

    ``Results.can_run`` asks it of each next step of a report that would calibrate with other options.

    Args:
        session: the session of the calibration; nothing on its model changes.
        changes: fields of :class:`~lightning_obs.CalibrationOptions` with their new values.

    Returns:
        False also if the session would leave out the rounding that the options ask for.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings concern the run that is proposed, which may never start
        try:
            options = replace(session.options, **changes)
            other_session = CalibrationSession(session.model, options)
        except CalibrationError:
            return False
    return has_rounding(other_session.options.config) == has_rounding(options.config)


def can_choose_observers(session: CalibrationSession) -> bool:
    """Whether ``observers="auto"`` could run on the session's model, as a next step that a report proposes.

    ``Results.can_run`` and the command line ask it, only where the model's output has logits. The user's own choice of
    observers is set aside, since the step would replace it.

    Args:
        session: the session of the calibration; nothing on its model changes.

    Returns:
        False on several ranks, and where no candidate fits.
    """
    if session.collectives.size > 1:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fitting_candidates(session.model, replace(session.options, observers=None))
        except CalibrationError:
            return False
    return True
