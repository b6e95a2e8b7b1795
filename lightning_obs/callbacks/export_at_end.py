"""Write the checkpoint when a run has ended, so that a config alone can ask for it.

When: in ``teardown``. Weight averaging has put its weights in by then, the last validation of a fit is over, and
Lightning does not come here after an error or Ctrl-C. It is the state in which ``callback.export(folder)`` after
``trainer.fit`` finds the model, so both write the same. Whatever can be known before the first batch is refused there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_obs.callbacks.strategies import collectives_of
from lightning_obs.errors import CalibrationError, require_no_failure, sendable
from lightning_obs.files.write import require_free


class ExportAtEnd:
    """The ``export_folder`` of a callback; None: nothing is written."""

    def __init__(self, folder: str | os.PathLike[str] | None, overwrite: bool) -> None:
        if overwrite and folder is None:
            raise CalibrationError("export_overwrite without export_folder", remedy="say which folder.")
        self.folder = None if folder is None else Path(folder)
        #: replace a checkpoint that is there; after the first run also the one that it has written
        self.overwrite = overwrite

    def require_possible(self, trainer: Trainer) -> None:
        """Refuse what is known to be wrong before the first batch, on all ranks alike."""
        if (folder := self._due(trainer)) is None:
            return
        if trainer.state.fn == TrainerFn.FITTING and not trainer.enable_validation:
            raise CalibrationError(
                "this fit will not validate, so no checkpoint could be written in the end",
                where=[str(folder)],
                expected="a validation loader, a validation_step, and limit_val_batches above 0",
                remedy="give it these, or leave export_folder out.",
            )

        def check() -> None:
            if trainer.is_global_zero:
                require_free(folder, self.overwrite)

        _together(trainer, check)

    def write(self, trainer: Trainer, export: Callable[..., Any] | None) -> None:
        """Write it in ``teardown``, by the callback's ``export``; None if nothing was calibrated.

        No rank goes on before the checkpoint is there. What fails on one rank fails on all; the folder is as it was.
        """
        if (folder := self._due(trainer)) is None:
            return
        if export is None:
            ended = "fit" if trainer.state.fn == TrainerFn.FITTING else "validation"
            raise CalibrationError(
                f"the {ended} has ended and nothing was calibrated, so there is no checkpoint to write",
                where=[str(folder)],
                expected="a validation with batches",
            )
        _together(trainer, lambda: export(folder, overwrite=self.overwrite))
        self.overwrite = True
        rank_zero_info(f"wrote {folder}")

    def _due(self, trainer: Trainer) -> Path | None:
        """The folder, if this run ends with a checkpoint."""
        if self.folder is None or trainer.state.fn not in (TrainerFn.FITTING, TrainerFn.VALIDATING):
            return None
        if trainer.fast_dev_run:
            rank_zero_info(f"fast_dev_run: {self.folder} is not written")
            return None
        return self.folder


def _together(trainer: Trainer, step: Callable[[], Any]) -> None:
    failure = None
    try:
        step()
    except CalibrationError as error:
        failure = sendable(error)
    require_no_failure(collectives_of(trainer).gather_object(failure))
