"""Calibrate a model part by part: one fused set of weights, or one block, is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from lightning_obs.calibration.finalize import finalize, warn_of_borrowed_ranges
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.model.module_qparams import clear_qparams


@contextmanager
def calibrated(
    session: CalibrationSession, module_names: Collection[str], on_weight: Callable[..., None] | None = None
) -> Iterator[CalibrationResult | None]:
    """Calibrate some modules of a session; they hold their qparams for the length of the ``with`` block.

    At its end qparams and statistics are removed, so that only one part is in memory. Every rank must call this.

    Args:
        session: has observed the inputs of these modules; their weights are loaded.
        module_names: all modules of the part; those that are not in the session's plan stay as they are.
        on_weight: called after each weight was searched.

    Yields:
        The result of the part; None if the plan has no module in it.
    """
    part = session.observation.of(set(module_names), on_weight)
    try:
        if part.plan.targets:
            result = finalize(part)
            warn_of_borrowed_ranges(result)
            yield result
        else:
            yield None
    finally:
        for module in part.model.modules():
            clear_qparams(module)
        for observer in (part.observers | part.data_observers).values():
            observer.reset()
