"""Measure the quantized model in a validation or a test: its metrics, and how far its predictions have moved.

The Trainer's batches run a second time, through the quantized model
(:class:`~lightning_obs.callbacks.quantized_validation.QuantizedValidation`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.logged_results import log_number
from lightning_obs.callbacks.quantized_validation import QuantizedValidation, quantized_name, require_batches
from lightning_obs.callbacks.trainer_session import TrainerSession
from lightning_obs.errors import CalibrationError
from lightning_obs.report.predictions import Moved

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class QuantizedMetrics:
    """Runs the second pass of each validation and test, and logs its metrics as ``<name>_quantized``.

    `CalibrationCallback` holds one with ``evaluate``, and calls :meth:`start`, :meth:`keep_batch` and
    :meth:`measure` in the hooks of the epoch's start, of each batch and of the epoch's end.

    Args:
        evaluate: True, or the share in (0, 1] of each loader's batches to run again.

    Raises:
        CalibrationError: ``evaluate`` is no share.
    """

    def __init__(self, evaluate: bool | float) -> None:
        if not isinstance(evaluate, (int, float)) or not 0 < evaluate <= 1:
            raise CalibrationError("evaluate", got=repr(evaluate), expected="True, False, or a share in (0, 1]")
        self._share = float(evaluate)
        #: the scheme in the names of metrics, where several callbacks of a Trainer measure theirs; else empty
        self.scheme_in_names = ""
        #: how far the last validation's quantized predictions are from the unquantized ones; None: not measured
        self.moved: Moved | None = None
        #: by name of a metric that was logged as an object of torchmetrics, its direction
        self.higher_is_better: dict[str, bool] = {}
        self._second_pass: QuantizedValidation | None = None  # of the validation or test that runs now

    def require_possible(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a step that fetches its batches itself, as they could not be run again; called in ``setup``."""
        require_batches(trainer, pl_module, "evaluate")

    def start(self, trainer: Trainer, pl_module: LightningModule, session: CalibrationSession) -> None:
        """Prepare the second pass of a validation or test that starts.

        Called in ``on_validation_start`` of a validation that calibrates or comes after a calibration (no sanity
        check), and in ``on_test_start`` with a calibrated model.
        """
        self._second_pass = QuantizedValidation(trainer, pl_module, session.model, self._share)

    def keep_batch(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        """Keep a batch that is about to run, if a second pass will follow; called before each batch."""
        if self._second_pass is not None:
            self._second_pass.keep_batch(batch, batch_idx, dataloader_idx)

    def measure(
        self, trainer: Trainer, pl_module: LightningModule, trainer_session: TrainerSession, log_prefix: str
    ) -> None:
        """Run the second pass and log its metrics, if one was started; called at the end of the epoch, on all ranks.

        Args:
            trainer: runs the validation or test.
            pl_module: logs the metrics.
            trainer_session: holds the calibrated session.
            log_prefix: begins the names of ``divergence`` and ``agreement``, such as ``quant``.
        """
        if self._second_pass is None:
            return
        metrics = self._second_pass.run(trainer_session.require_calibrated())
        for name, (value, log_options) in metrics.items():
            self._log(trainer, pl_module, name, value, log_options)
        self.moved = self._second_pass.moved
        self.higher_is_better |= self._second_pass.higher_is_better
        if self.moved is not None:
            log_number(pl_module, f"{log_prefix}/divergence", self.moved.divergence)
            log_number(pl_module, f"{log_prefix}/agreement", self.moved.agreement)

    def stop(self) -> None:
        """Give up the second pass, if one was started.

        Called after a first validation that has calibrated nothing, and when a validation or a run ends.
        """
        if self._second_pass is not None:
            self._second_pass.close()
        self._second_pass = None

    def _log(
        self, trainer: Trainer, pl_module: LightningModule, name: str, value: torch.Tensor, log_options: dict[str, Any]
    ) -> None:
        """Log a metric of the second pass; ranks have reduced its value already.

        ``self.log`` would list a metric of one of several loaders under every loader, and before Lightning 2.5 it
        refuses the number in its name. So such a metric is given to the Trainer's connector and loop directly.
        """
        original_name = name
        name = quantized_name(name, self.scheme_in_names)
        if "/dataloader_idx_" not in original_name:
            pl_module.log(name, value, **log_options)
            return
        connector = trainer._logger_connector  # its properties would compute the first pass's metrics too early
        connector._callback_metrics[name] = value
        if log_options["prog_bar"]:
            connector._progress_bar_metrics[name] = value
        # The loop keeps a dict for each loader that had batches, so the loader's number is not the dict's.
        for logged_of_loader in trainer._active_loop._logged_outputs:
            if original_name in logged_of_loader:
                logged_of_loader[name] = value
