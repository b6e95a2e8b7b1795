"""The progress of a calibration step by step, which searches the weights of a model in many parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_obs.calibration.observation import Observation
from lightning_obs.files.tensors import Progress


class TotalProgress:
    """Shows the searches of all parts as one job, on one progress display; :class:`.StepwiseCalibration` has one.

    Args:
        observation: of the whole model, with its ``progress``. The total is the bytes of all planned weights.
    """

    def __init__(self, observation: Observation) -> None:
        self._progress = observation.progress
        self._sizes: dict[str, int] = {}
        for target in observation.plan.targets:
            weight: Any = target.module.weight
            self._sizes[target.name] = weight.numel() * weight.itemsize
        self._done = 0

    def of_part(self, names: Sequence[str]) -> Progress | None:
        """A progress function for one part, which reports the part's progress as that of the whole model.

        ``StepwiseCalibration`` calls this before the weights of the part are searched; later parts count this part as
        done.

        Args:
            names: of the modules of the part.

        Returns:
            The function to give to ``Observation.of``; None if the observation reports no progress.
        """
        progress = self._progress
        if progress is None:
            return None
        size = sum(self._sizes[name] for name in names)
        done_before = self._done
        self._done += size
        total = sum(self._sizes.values())

        def report(name: str, done: int, total_of_part: int) -> None:
            """Report the bytes done in all parts, of the bytes of all parts; ``done`` counts those of this part."""
            progress(name, done_before + size * done // max(1, total_of_part), total)

        return report
