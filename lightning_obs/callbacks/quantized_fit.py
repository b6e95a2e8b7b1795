"""Which ranges are in force while a model trains through fake quantization.

A validation runs the model that would be exported at that moment: weights are observed again before its first batch
(after weight averaging has swapped the weights in), and nothing changes until it ends. Ranges of activations from its
own data (``observe="val"``) are in force from the next training batch on, ranges from training batches
(``observe="train"``) after the last of these; no forward pass is added.

Ranges and an incomplete observation are in the callback's state, so a resumed run continues as if it had not stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import Unpack, override

from lightning_obs.calibration.options import CalibrationOptions, takes_keywords_of
from lightning_obs.calibration.saved_state import refuse_other_options
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.base import SessionCallback, SessionKeywords, require_at_least
from lightning_obs.callbacks.lightning_package import TrainerFn
from lightning_obs.errors import CalibrationError, require_choice, warn
from lightning_obs.files.read import naming
from lightning_obs.files.sealed import sealed
from lightning_obs.fine_tuning.quantized_training import Phase, QuantizedTraining
from lightning_obs.schemes.config import SchemeLike

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class FitKeywords(SessionKeywords, total=False):
    """The options of a quantized fit, for type checkers and editors."""

    quantize: Literal["all", "weights", "activations"]
    observe: Literal["train", "val", "none"]
    calibration_batches: int
    start_epoch: int
    start_step: int
    freeze_after: int | None


class QuantizedFit(SessionCallback):
    """Runs the model through fake quantization in fit, validation, test and prediction, and observes it when asked.

    Args:
        quantize: tensors quantized in training: ``"all"``, ``"weights"`` or ``"activations"``. Validation and export
            always quantize all that the scheme says.
        observe: the data that refresh the ranges of activations: ``"train"``, the ``calibration_batches`` training
            batches after a validation; ``"val"``, every validation of fit, for the training after it; ``"none"``,
            nothing after the first calibration.
        calibration_batches: how many training batches are observed at a time. They do not run compiled. With 0,
            nothing is observed in training.
        start_epoch: nothing is quantized or observed before this epoch.
        start_step: nothing is quantized or observed before this many optimizer steps.
        freeze_after: from this epoch on the ranges of activations do not change; None: never.
        **options: of :class:`~lightning_obs.callbacks.base.SessionCallback`.
    """

    train: str = "weights"

    @takes_keywords_of(SessionCallback)
    def __init__(
        self,
        scheme: SchemeLike | CalibrationOptions | None,
        *,
        quantize: Literal["all", "weights", "activations"] = "all",
        observe: Literal["train", "val", "none"] = "train",
        calibration_batches: int = 16,
        start_epoch: int = 0,
        start_step: int = 0,
        freeze_after: int | None = None,
        **options: Unpack[SessionKeywords],
    ) -> None:
        super().__init__(scheme, **options)
        self.quantize, self.observe, self.calibration_batches = quantize, observe, calibration_batches
        self.start_epoch, self.start_step, self.freeze_after = start_epoch, start_step, freeze_after
        require_choice("quantize", quantize, ("all", "weights", "activations"))
        require_choice("observe", observe, ("train", "val", "none"))
        require_at_least(0, calibration_batches=calibration_batches, freeze_after=freeze_after)
        require_at_least(0, start_epoch=start_epoch, start_step=start_step)
        self._training: QuantizedTraining | None = None
        #: the state in which the last fit ended, where weights were observed afterwards; None: the present state
        self._state_of_fit: dict[str, Any] | None = None
        self._validated = 0  # validation batches that Lightning has counted when this callback last looked

    @override
    def _session_to_export(self) -> CalibrationSession:
        if self._training is not None and self._training.is_quantized and not self._training.has_all_ranges:
            needed = (
                f"{self.calibration_batches} training batches were observed"
                if self.calibration_batches
                else "a validation"
            )
            raise CalibrationError(
                "activations were not calibrated yet",
                got=f"a fit that ended before {needed}",
                remedy="run trainer.validate with this callback, then export; or set a smaller calibration_batches.",
            )
        return super()._session_to_export()

    # ------------------------------------------------------------------ the model in training

    @override
    def make_session(self, model: nn.Module) -> CalibrationSession:
        """A session whose training goes on where an earlier session of the same model left it."""
        self._state_of_fit = None
        session, training = super().make_session(model), self._training
        if training is not None and training.session.model is model:
            training.session.detach()
            training.session = session
        else:
            self.clean_up()
            self._training = QuantizedTraining(session, self.train)
        return session

    def _running(self, trainer: Trainer, pl_module: LightningModule) -> QuantizedTraining:
        if self._training is None or self.session is None or self._waiting_state is not None:
            self.prepare(trainer, pl_module)
        assert self._training is not None
        self._training.start(around=pl_module)
        return self._training

    # ------------------------------------------------------------------ fit

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take a checkpoint that Lightning loads after ``on_fit_start``; count earlier validations."""
        super().on_train_start(trainer, pl_module)
        self._validated = _validation_batches(trainer)
        self._state_of_fit = None
        self.was_trained = True

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Put the ranges of the last validation in force; observe this batch if ranges are due."""
        if not self._has_started(trainer):
            return
        training = self._running(trainer, pl_module)
        if _validation_batches(trainer) != self._validated:  # counted, not run: a resumed run begins behind it
            self._validated = _validation_batches(trainer)
            training.begin_validation()
            training.end_validation()
        due = training.begin_training_batch()
        training.switch.weights = self.quantize != "activations"
        training.switch.activations = self.quantize != "weights"
        if due and self._may_observe(trainer, training, "train"):
            if self.calibration_batches:
                training.observe_training()
            elif self.observe != "val" and not training.has_all_ranges:
                raise CalibrationError(
                    f"nothing will ever calibrate the activations of {self.label}",
                    got=f"calibration_batches=0, observe={self.observe!r}",
                    remedy="set calibration_batches, sanity_check or observe='val', or run trainer.validate first.",
                )
        if training.phase is Phase.OBSERVING and self.token_mask is not None:
            training.session.mask_tokens(self.mask_of(batch))

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        """Write the ranges after the last of the observed batches."""
        training = self._training
        if training is not None and training.end_training_batch(self.calibration_batches):
            rank_zero_info(f"{self.label}: ranges of activations from {training.session.batches} batches")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Observe the weights that were trained since the last validation, so that they can be exported.

        The strategy has not been torn down yet: the model is on its device, and ranks can communicate. A callback that
        averages weights puts them into the model in this hook, too; if it is listed after this one, the export refuses
        the changed weights until a validation has observed them.

        Checkpoints that are saved afterwards have the state in which training ended: a run that resumes from them goes
        on as if it had not stopped.
        """
        training = self._training
        if training is None or not training.has_trained or not training.has_all_ranges:
            return
        self._state_of_fit = self.state_of(training.session)
        training.refresh_weights()

    # ------------------------------------------------------------------ validate, test and predict

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """In ``trainer.validate`` of a model without ranges: calibrate it. Else wait for the first batch."""
        self._state_of_fit = None
        if trainer.state.fn == TrainerFn.VALIDATING and self._lacks_ranges(trainer, pl_module):
            session = self.prepare(trainer, pl_module)
            if session.needs_data:
                self.observe_validation(trainer, session)

    @override
    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *seen: Any) -> None:
        """Before the first batch, and after every other callback's start: observe weights, quantize everything."""
        self._begin_validation(trainer, pl_module)
        super().on_validation_batch_start(trainer, pl_module, *seen)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the statistics until training goes on; the very first ranges are in force at once."""
        self._begin_validation(trainer, pl_module)  # other ranks may have batches, and their weights' ranges are shared
        training = self._training
        if training is not None and training.session.is_attached:
            if trainer.state.fn == TrainerFn.VALIDATING:
                self.finish_calibration(training.session, pl_module)
            else:
                training.gather()
                if not training.has_all_ranges:
                    training.write()
        if self.has_calibrated and not trainer.sanity_checking:
            self.log_calibration(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on to training, or leave nothing behind."""
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn != TrainerFn.FITTING:
            self.clean_up()
            return
        self._validated = _validation_batches(trainer)
        if self._training is not None:
            self._training.end_validation()

    def _begin_validation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Once in each validation, unless it calibrates the model for the first time."""
        fits = trainer.state.fn == TrainerFn.FITTING
        calibrates = self.session is not None and self.session.is_attached and not fits
        skipped = (trainer.sanity_checking and not self.sanity_check) or (fits and not self._has_started(trainer))
        if calibrates or skipped:
            return
        training = self._running(trainer, pl_module)
        asked = fits and (self.observe == "val" or trainer.sanity_checking)
        if training.begin_validation() and asked and self._may_observe(trainer, training, "val"):
            training.session.attach(count_calls=False)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run quantized, with the qparams of ``test(ckpt_path=...)`` or of the fit before; ``predict`` too."""
        if self._is_calibrated(trainer, pl_module):
            training = self._running(trainer, pl_module)
            training.refresh_weights()
            training.switch.weights = training.switch.activations = True
        elif trainer.is_global_zero:
            warn(f"{self.label}: nothing was calibrated, the model runs in full precision")

    on_predict_start = on_test_start

    def _is_calibrated(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        self.restore_outside_of_fit(trainer)
        if self._waiting_state is None and self.session is None:
            return False
        self.prepare(trainer, pl_module)
        return self._training is not None and self._training.is_quantized

    def _lacks_ranges(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Whether there are no ranges yet, of activations neither in force nor in training batches observed so far."""
        if not self._is_calibrated(trainer, pl_module):
            return True
        assert self._training is not None
        return not self._training.has_all_ranges and not self._training.has_observed

    def _has_started(self, trainer: Trainer) -> bool:
        return bool(trainer.current_epoch >= self.start_epoch and trainer.global_step >= self.start_step)

    def _may_observe(self, trainer: Trainer, training: QuantizedTraining, source: str) -> bool:
        """Whether these data may give the ranges of activations: the first there are, or others if asked for."""
        if not training.has_all_ranges:
            return training.session.needs_data
        frozen = self.freeze_after is not None and trainer.current_epoch >= self.freeze_after
        return self.observe == source and training.can_refresh and not frozen and not trainer.sanity_checking

    # ------------------------------------------------------------------ state

    @override
    def state_of(self, session: CalibrationSession) -> dict[str, Any]:
        """Ranges, learned scales, and where in an observation training is."""
        if self._state_of_fit is not None:
            return self._state_of_fit
        assert self._training is not None
        return sealed({**session.state_dict(), "training": self._training.state_dict()})

    @override
    def take_state(self, trainer: Trainer, session: CalibrationSession, state: dict[str, Any]) -> None:
        """Write the ranges of a checkpoint, and resume training where it stood."""
        assert self._training is not None
        refuse_other_options(state, session.plan.config)
        with naming("the saved state of the training", remedy="resume from another checkpoint."):
            # Before the ranges, as it writes nothing to the model.
            self._training.load_state_dict(state.get("training", {}))
        super().take_state(trainer, session, state)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind. On several ranks a half-done observation starts again: the others may be elsewhere."""
        training = self._training
        if trainer.world_size > 1 and training is not None and training.phase in (Phase.OBSERVING, Phase.GATHERED):
            training.give_up()
        super().on_exception(trainer, pl_module, exception)

    @override
    def clean_up(self) -> None:
        """Give the model its own forward back."""
        super().clean_up()
        if self._training is not None:
            self._training.stop()


def _validation_batches(trainer: Trainer) -> int:
    """How many validation batches Lightning has counted, with the earlier ones of a resumed run."""
    return int(trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.ready)
