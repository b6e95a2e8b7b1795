"""The progress of a calibration that searches its weights in many parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_obs.calibration.observation import Observation
from lightning_obs.files.tensors import Progress


class TotalProgress:
    """Reports the weights of all steps as one job.

    Args:
        observation: of the whole model; its ``progress`` is called.
    """

    def __init__(self, observation: Observation) -> None:
        self._progress = observation.progress
        self._sizes: dict[str, int] = {}
        for target in observation.plan.targets:
            weight: Any = target.module.weight
            self._sizes[target.name] = weight.numel() * weight.itemsize
        self._done = 0

    def show(self, text: str) -> None:
        """Show a text beside what is done so far."""
        if self._progress is not None:
            self._progress(text, self._done, sum(self._sizes.values()))

    def of_part(self, names: Sequence[str]) -> Progress | None:
        """What the search of some modules' weights reports to."""
        progress = self._progress
        if progress is None:
            return None
        size = sum(self._sizes[name] for name in names)
        done_before = self._done
        self._done += size
        total = sum(self._sizes.values())

        def report(name: str, done: int, total_of_part: int) -> None:
            progress(name, done_before + size * done // max(1, total_of_part), total)

        return report
