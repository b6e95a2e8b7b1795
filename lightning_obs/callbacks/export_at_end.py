"""Write the destinations of ``export_to`` when ``validate`` or ``fit`` has ended.

That is in ``teardown``: weight averaging has put its weights into the model, the last validation of a fit is over, and
Lightning does not call it after an error or Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.destinations import Destination
from lightning_obs.callbacks.lightning_package import TrainerFn
from lightning_obs.callbacks.results import Results
from lightning_obs.callbacks.strategies import collectives_of
from lightning_obs.errors import CalibrationError, name_list, refuse
from lightning_obs.ranks.collectives import on_all_ranks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class ExportAtEnd:
    """Writes a callback's ``export_to`` at the end of its runs.

    Each callback with an ``export_to`` holds one; its hooks check the destinations before data run, and write them in
    the end.

    Args:
        destinations: the folders and files to write, at least one. A later run of the callback always replaces those
            that an earlier run has written.
    """

    def __init__(self, destinations: Sequence[Destination]) -> None:
        self.destinations = list(destinations)

    @property
    def folder(self) -> Path | None:
        """The folder of the first checkpoint; None if only files are written.

        Read when a callback is made: its report names the folder, and :meth:`options_for` needs to know.
        """
        for destination in self.destinations:
            if type(destination) is Destination:
                return destination.path
        return None

    @property
    def files(self) -> list[Path]:
        """The paths of the files of other formats than a checkpoint; read when a callback is made, for its report."""
        return [destination.path for destination in self.destinations if type(destination) is not Destination]

    def options_for(self, options: CalibrationOptions) -> CalibrationOptions:
        """Return the options to calibrate with.

        Called when a callback is made. Where only files of other formats are written, no engine loads a checkpoint, and
        ``engines`` becomes ``"unchecked"`` unless the user has named some.

        Args:
            options: as the user has set them; engines that are named are asked.
        """
        if self.folder is None and not options.engines:
            return CalibrationOptions.of(options, engines="unchecked")
        return options

    def require_possible(self, trainer: Trainer) -> None:
        """Refuse destinations that could not be written in the end; called in ``setup``, on all ranks.

        Nothing is refused in a run that writes nothing: a test, a prediction, or ``fast_dev_run``, which says so.

        Raises:
            CalibrationError: a path is taken, a package is missing, this fit does not validate, or it changes the
                weights that a destination is written beside.
        """
        if trainer.fast_dev_run:
            rank_zero_info(f"fast_dev_run: {name_list(self._paths)} is not written")
        if not self._writes(trainer):
            return
        if trainer.state.fn == TrainerFn.FITTING:
            self._refuse_fit(trainer)
        with on_all_ranks(collectives_of(trainer)):
            if trainer.is_global_zero:
                for destination in self.destinations:
                    destination.check_path()

    def _refuse_fit(self, trainer: Trainer) -> None:
        """Refuse a fit that never validates, since files are written after a validation; and the base of a GGUF file.

        The base holds the weights from before this fit, which would stay in the file where they are not quantized.
        :meth:`require_possible` calls this method when a fit is set up.
        """
        if not trainer.enable_validation:
            raise CalibrationError(
                "this fit will not validate, so nothing could be written in the end",
                where=self._paths,
                expected="a validation loader, a validation_step, and limit_val_batches above 0",
                remedy="give it these, or leave export_to out.",
            )
        refuse(
            [str(destination.path) for destination in self.destinations if destination.replaces_weights],
            "the base of a GGUF file holds the weights from before the training",
            remedy="leave it out of this fit's export_to. Afterwards convert the trained model with llama.cpp, and "
            "call callback.export_gguf(file, base).",
        )

    def require_writable(self, trainer: Trainer, session: CalibrationSession) -> None:
        """Refuse a model or a scheme that a destination cannot hold.

        Called on all ranks whenever a callback has prepared its ``session``, before data run.

        Raises:
            CalibrationError: names the modules, what the format holds, and the remedy.
        """
        if not self._writes(trainer):
            return
        with on_all_ranks(session.collectives):
            if trainer.is_global_zero:
                for destination in self.destinations:
                    destination.check_model(session.model, session.plan.schemes)

    def require_example(self, trainer: Trainer, results: Results) -> None:
        """Refuse to go on if a file is to be traced and no batch has called the model; called after a validation.

        It is also called after a fit's sanity check, so that a training does not end with an error that could be known
        before it.

        Raises:
            CalibrationError: there is no example, of the validation or in the destination's options.
        """
        if not self._writes(trainer) or results.session is None:
            return
        for destination in self.destinations:
            if destination.is_traced and destination.options.get("example") is None:
                results.first_call.require(results.session.model)

    def write(self, trainer: Trainer, results: Results) -> None:
        """Write the calibrated model to all destinations; no rank goes on before all of them are complete.

        Called by the callback's ``teardown``, when a run has ended without an error.

        Raises:
            CalibrationError: the run has calibrated nothing, or a destination cannot be written.
        """
        if not self._writes(trainer):
            return
        if not results.trainer_session.has_calibrated:
            run = "fit" if trainer.state.fn == TrainerFn.FITTING else "validation"
            raise CalibrationError(
                f"the {run} has ended and nothing was calibrated, so there is nothing to write",
                where=self._paths,
                expected="a validation with batches",
            )
        with on_all_ranks(collectives_of(trainer)):
            for destination in self.destinations:
                destination.write(results)
        for destination in self.destinations:
            destination.overwrite = True
        rank_zero_info(f"wrote {name_list(self._paths)}")

    @property
    def _paths(self) -> list[str]:
        """The paths of all destinations, for messages."""
        return [str(destination.path) for destination in self.destinations]

    def _writes(self, trainer: Trainer) -> bool:
        """Whether the Trainer's present run writes its destinations."""
        is_exported = trainer.state.fn in (TrainerFn.FITTING, TrainerFn.VALIDATING)
        return is_exported and not trainer.fast_dev_run
