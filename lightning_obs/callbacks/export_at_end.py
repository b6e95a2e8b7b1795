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
    """The ``export_folder`` of a callback.

    Args:
        folder: None: nothing is written.
        overwrite: replace a checkpoint that is there before the first run.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, overwrite: bool) -> None:
        if overwrite and folder is None:
            raise CalibrationError("export_overwrite without export_folder", remedy="say which folder.")
        self.folder = None if folder is None else Path(folder)
        #: also after the first run, for what that has written
        self.overwrite = overwrite

    def is_due(self, trainer: Trainer, stage: str) -> bool:
        """Whether this run ends with a checkpoint."""
        asked = self.folder is not None and stage in (TrainerFn.FITTING, TrainerFn.VALIDATING)
        if asked and trainer.fast_dev_run:
            rank_zero_info(f"fast_dev_run: {self.folder} is not written")
            return False
        return asked

    def require_possible(self, trainer: Trainer) -> None:
        """Refuse what is known to be wrong before the first batch, on all ranks alike.

        Raises:
            CalibrationError: the folder is taken; the fit will not validate, so nothing would be calibrated.
        """
        assert self.folder is not None
        if trainer.state.fn == TrainerFn.FITTING and not trainer.enable_validation:
            raise CalibrationError(
                "this fit will not validate, so no checkpoint could be written in the end",
                where=[str(self.folder)],
                expected="a validation loader, a validation_step, and limit_val_batches above 0",
                remedy="give it these, or leave export_folder out.",
            )
        self._together(trainer, lambda: require_free(self._path, self.overwrite), only_first=True)

    def write(self, trainer: Trainer, stage: str, export: Callable[..., Any] | None) -> None:
        """Write it. No rank goes on before it is there.

        Args:
            trainer: in ``teardown``.
            stage: of the run that has ended.
            export: of the callback; None if nothing was calibrated.

        Raises:
            CalibrationError: on all ranks, whatever is wrong on one. The folder is as it was before.
        """
        if export is None:
            ended = "fit" if stage == TrainerFn.FITTING else "validation"
            raise CalibrationError(
                f"the {ended} has ended and nothing was calibrated, so there is no checkpoint to write",
                where=[str(self.folder)],
                expected="a validation with batches",
            )
        self._together(trainer, lambda: export(self._path, overwrite=self.overwrite))
        self.overwrite = True
        rank_zero_info(f"wrote {self.folder}")

    @property
    def _path(self) -> Path:
        assert self.folder is not None
        return self.folder

    @staticmethod
    def _together(trainer: Trainer, step: Callable[[], Any], only_first: bool = False) -> None:
        """Run a step on all ranks, or the first; what fails on one fails on all."""
        failure = None
        try:
            if trainer.is_global_zero or not only_first:
                step()
        except CalibrationError as error:
            failure = sendable(error)
        require_no_failure(collectives_of(trainer).gather_object(failure))
