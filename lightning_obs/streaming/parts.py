"""Calibrate a model part by part: one fused set of weights, or one block, is in memory at a time.

A fused set is the modules that engines multiply as one matrix (q, k, v), so their scales are found together. An
observation (:class:`~lightning_obs.calibration.observation.Observation`) is a plan with its observers and statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from lightning_obs.calibration.finalize import finalize
from lightning_obs.calibration.observation import Observation
from lightning_obs.calibration.result import CalibrationResult, warn_of_borrowed_ranges
from lightning_obs.files.tensors import Progress
from lightning_obs.model.module_qparams import clear_qparams


@contextmanager
def calibrated(
    observation: Observation, module_names: Collection[str], on_weight: Progress | None = None
) -> Iterator[CalibrationResult | None]:
    """Search the ranges of some modules; they hold their qparams for the length of the ``with`` block, to be written.

    At its end qparams and statistics are removed, so that only one part is in memory. ``QuantizedFiles.quantize``
    enters the block for each fused set, ``layerwise.py`` for each block and for the modules outside of blocks. Every
    rank must call this.

    Args:
        observation: has the statistics of these modules' inputs; their weights are loaded.
        module_names: all modules of the part; modules that are not in the plan stay as they are.
        on_weight: called after this rank has searched a weight, with the weight's name, the bytes that this rank has
            searched so far, and the bytes of all weights of the part that this rank is to search.

    Yields:
        The result of the part; None if the plan has no module in it.
    """
    part = observation.of(set(module_names), on_weight)  # part.model holds the planned modules of the part, no others
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
        for observer in part.all_observers:
            observer.reset()
