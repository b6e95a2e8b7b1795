"""Write the checkpoint when ``validate`` or ``fit`` has ended.

That is in ``teardown``: weight averaging has put its weights into the model, the last validation of a fit is over, and
Lightning does not call it after an error or Ctrl-C.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_obs.callbacks.lightning_package import TrainerFn
from lightning_obs.callbacks.results import Results
from lightning_obs.callbacks.strategies import collectives_of
from lightning_obs.errors import CalibrationError
from lightning_obs.files.write import require_free
from lightning_obs.model.module_qparams import refuse_unmerged
from lightning_obs.model.weight import in_shards
from lightning_obs.ranks.collectives import on_all_ranks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class ExportAtEnd:
    """Writes a callback's ``export_folder`` at the end of its runs.

    Args:
        folder: of the checkpoint.
        overwrite: replace a checkpoint that was in the folder before the first run. The checkpoints that this object
            has written itself are always replaced.
    """

    def __init__(self, folder: str | os.PathLike[str], overwrite: bool) -> None:
        self.folder = Path(folder)
        self._overwrite = overwrite

    def require_possible(self, trainer: Trainer) -> None:
        """Refuse a folder that could not be written in the end; called in ``setup``, on all ranks.

        Raises:
            CalibrationError: the folder is taken, or this fit does not validate.
        """
        if trainer.fast_dev_run:
            rank_zero_info(f"fast_dev_run: {self.folder} is not written")
        folder = self._folder_of_run(trainer)
        if folder is None:
            return
        if trainer.state.fn == TrainerFn.FITTING and not trainer.enable_validation:
            raise CalibrationError(
                "this fit will not validate, so no checkpoint could be written in the end",
                where=[str(folder)],
                expected="a validation loader, a validation_step, and limit_val_batches above 0",
                remedy="give it these, or leave export_folder out.",
            )
        with on_all_ranks(collectives_of(trainer)):
            if trainer.is_global_zero:
                require_free(folder, self._overwrite)

    def require_merged(self, model: nn.Module) -> None:
        """Refuse sharded weights whose adapters would have to be merged for the checkpoint."""
        if any(in_shards(module) for module in model.modules()):
            refuse_unmerged(model, "export_folder, of sharded weights,")

    def write(self, trainer: Trainer, results: Results) -> None:
        """Write the checkpoint of a run that has ended; no rank goes on before it is complete.

        Raises:
            CalibrationError: the run has calibrated nothing, or the folder cannot be written.
        """
        folder = self._folder_of_run(trainer)
        if folder is None:
            return
        if not results.trainer_session.has_calibrated:
            run = "fit" if trainer.state.fn == TrainerFn.FITTING else "validation"
            raise CalibrationError(
                f"the {run} has ended and nothing was calibrated, so there is no checkpoint to write",
                where=[str(folder)],
                expected="a validation with batches",
            )
        with on_all_ranks(collectives_of(trainer)):
            results.export(folder, overwrite=self._overwrite)
        self._overwrite = True
        rank_zero_info(f"wrote {folder}")

    def _folder_of_run(self, trainer: Trainer) -> Path | None:
        """The folder that the Trainer's present run writes; None: it writes none."""
        is_exported = trainer.state.fn in (TrainerFn.FITTING, TrainerFn.VALIDATING)
        return self.folder if is_exported and not trainer.fast_dev_run else None
