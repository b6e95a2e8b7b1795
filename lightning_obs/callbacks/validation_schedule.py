"""Which validations calibrate: all of ``trainer.validate``, and in a fit those of every n-th epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.lightning_package import TrainerFn
from lightning_obs.callbacks.sanity_check import SanityWatch
from lightning_obs.errors import require_at_least, require_bool

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class ValidationSchedule:
    """Decides at each validation's start whether it calibrates; watches a sanity check that does not.

    Args:
        every_n_epochs: in fit, calibrate in the validations of the epochs n, 2n, ... only.
        sanity_check: also calibrate in fit's sanity check.
        starts_at_once: calibrate in the first validation of a fit in any case, so that a monitor of a quantized metric
            has a value from the first validation on.

    Raises:
        CalibrationError: an argument of another type, or ``every_n_epochs`` below one.
    """

    def __init__(self, every_n_epochs: int, sanity_check: bool, starts_at_once: bool) -> None:
        require_at_least(1, every_n_epochs=every_n_epochs)
        require_bool(sanity_check=sanity_check)
        self.every_n_epochs = every_n_epochs
        self._sanity_check = sanity_check
        self._starts_at_once = starts_at_once
        self._sanity_watch: SanityWatch | None = None  # of the sanity check that runs now

    def is_due(self, trainer: Trainer, has_calibrated: bool) -> bool:
        """Whether the validation that starts calibrates; ``has_calibrated``: whether there are qparams already."""
        if trainer.sanity_checking:
            return self._sanity_check
        if trainer.state.fn != TrainerFn.FITTING:
            return True
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            return True
        return self._starts_at_once and not has_calibrated

    def watch(self, trainer: Trainer, session: CalibrationSession) -> None:
        """In a sanity check that does not calibrate, see which layers its batches call."""
        if trainer.sanity_checking and session.needs_data and not session.has_written:
            self._sanity_watch = SanityWatch(session)

    def warn_of_uncalled(self, trainer: Trainer) -> None:
        """At the end of a sanity check, warn of the layers that were not called; rank 0 does."""
        if self._sanity_watch is not None and trainer.is_global_zero:
            self._sanity_watch.tell()

    def stop(self) -> None:
        """Stop watching. Can be called at any time, any number of times."""
        if self._sanity_watch is not None:
            self._sanity_watch.close()
        self._sanity_watch = None
