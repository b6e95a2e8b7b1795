"""Calibrate a model part by part: one fused set of weights, or one block, is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace

from torch import nn

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
        module_names: all modules of the part; modules that are not in the session's plan stay as they are.
        on_weight: called after each weight was searched.

    Yields:
        The result of the part; None if the plan has no module in it.
    """
    part, plan, kept = copy(session), session.plan, set(module_names)
    part.plan = replace(
        plan,
        targets=[target for target in plan.targets if target.name in kept],
        fused=[group for group in plan.fused if group[0] in kept],
    )
    part.observers = {key: observer for key, observer in session.observers.items() if key[0] in kept}
    part.fed = {key: observer for key, observer in session.fed.items() if key[0] in kept}
    part.experts = copy(session.experts)
    part.experts.tokens = {name: counts for name, counts in session.experts.tokens.items() if name in kept}
    part.model = nn.ModuleList(target.module for target in part.plan.targets)
    part.progress = on_weight
    try:
        yield part.finalize() if part.plan.targets else None
    finally:
        for module in part.model.modules():
            clear_qparams(module)
        for observer in (part.observers | part.fed).values():
            observer.reset()
