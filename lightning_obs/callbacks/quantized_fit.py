"""Which ranges are in force while a model trains through fake quantization.

A validation runs the model that would be exported at that moment, and nothing changes until it ends. Weights are
trained in the ranges that they had when the fit started; with ``refresh_weights`` they are observed again before a
validation's first batch (after weight averaging has swapped the weights in). Ranges of activations from its own data
(``observe="val"``) are in force from the next training batch on, ranges from training batches (``observe="train"``)
after the last of these; no forward pass is added.

Ranges and an incomplete observation are in the callback's state, so a resumed run continues as if it had not stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_obs.calibration.saved_state import refuse_other_options
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.lightning_package import TrainerFn
from lightning_obs.callbacks.observed_batches import ObservedBatches
from lightning_obs.errors import CalibrationError, require_at_least, require_bool, require_choice
from lightning_obs.files.read import naming
from lightning_obs.files.sealed import sealed
from lightning_obs.fine_tuning.quantized_training import Phase, QuantizedTraining

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class QuantizedFit:
    """Runs the model through fake quantization in fit, validation, test and prediction, and decides when to observe it.

    `QuantizationAwareTraining` holds one, whose methods its hooks call; a
    :class:`~lightning_obs.fine_tuning.quantized_training.QuantizedTraining` holds the ranges themselves.

    Args:
        train: parameters to train: ``"weights"``, ``"scales"`` or ``"all"``.
        quantize: tensors quantized in training: ``"all"``, ``"weights"`` or ``"activations"``. Validation and export
            always quantize all that the scheme says.
        observe: the data that refresh the ranges of activations: ``"train"``, ``"val"`` or ``"none"``.
        calibration_batches: how many training batches are observed at a time; 0: none.
        start_epoch: nothing is quantized or observed before this epoch.
        start_step: nothing is quantized or observed before this many optimizer steps.
        freeze_after: from this epoch on the ranges of activations do not change; None: never.
        sanity_check: also quantize and observe in fit's sanity check.
        refresh_weights: observe the weights again at each validation and at the end.

    Raises:
        CalibrationError: an argument with another value than these.
    """

    def __init__(
        self,
        train: Literal["weights", "scales", "all"],
        quantize: Literal["all", "weights", "activations"],
        observe: Literal["train", "val", "none"],
        calibration_batches: int,
        start_epoch: int,
        start_step: int,
        freeze_after: int | None,
        sanity_check: bool,
        refresh_weights: bool,
    ) -> None:
        require_choice("train", train, ("weights", "scales", "all"))
        require_choice("quantize", quantize, ("all", "weights", "activations"))
        require_choice("observe", observe, ("train", "val", "none"))
        require_at_least(0, calibration_batches=calibration_batches, freeze_after=freeze_after)
        require_at_least(0, start_epoch=start_epoch, start_step=start_step)
        require_bool(sanity_check=sanity_check, refresh_weights=refresh_weights)
        self._train = train
        self._quantize = quantize
        self._observe = observe
        self._calibration_batches = calibration_batches
        self._start_epoch = start_epoch
        self._start_step = start_step
        self._freeze_after = freeze_after
        self._sanity_check = sanity_check
        self._refresh_weights = refresh_weights
        self._training: QuantizedTraining | None = None
        #: the state in which the last fit ended, if weights were observed afterwards; None: the present state counts
        self._state_of_fit: dict[str, Any] | None = None
        #: validation batches that Lightning had counted when this object last looked
        self._validation_batches = 0

    @property
    def training(self) -> QuantizedTraining:
        """The ranges of the session's model; may be read only after :meth:`use`, once the session was prepared."""
        assert self._training is not None
        return self._training

    @property
    def is_quantized(self) -> bool:
        """Whether any module was calibrated; asked when a test starts, which then runs quantized."""
        return self._training is not None and self._training.is_quantized

    def use(self, session: CalibrationSession) -> None:
        """Train with this session from now on; called when the callback has prepared it.

        Where an earlier session trained the same model, training goes on from where that one stopped.
        """
        if self._training is not None and self._training.session is session:
            return
        self._state_of_fit = None
        if self._training is not None and self._training.session.model is session.model:
            self._training.session.detach()
            self._training.session = session
        else:
            self.stop()
            self._training = QuantizedTraining(session, self._train, self._refresh_weights)

    def stop(self) -> None:
        """Give the model its own forward back, if it runs quantized.

        Called at the end of a run, however it ends, at the end of a validation outside of fit, and when a session of
        another model is used.
        """
        if self._training is not None:
            self._training.stop()

    def require_ranges(self) -> None:
        """Refuse to export a model whose activations were not calibrated yet.

        `Results` calls it before each export.

        Raises:
            CalibrationError: weights have ranges, and some activation has none.
        """
        training = self._training
        if training is None or not training.is_quantized or training.has_all_ranges:
            return
        data = "a validation"
        if self._calibration_batches:
            data = f"{self._calibration_batches} training batches were observed"
        raise CalibrationError(
            "activations were not calibrated yet",
            got=f"a fit that ended before {data}",
            remedy="run trainer.validate with this callback, then export; or set a smaller calibration_batches.",
        )

    # ------------------------------------------------------------------ training batches

    def begin_fit(self, trainer: Trainer) -> None:
        """Remember how many validation batches Lightning has counted; called in ``on_train_start`` of a fit.

        The state in which an earlier fit ended counts no more.
        """
        self._validation_batches = _validation_batches(trainer)
        self._state_of_fit = None

    def begin_training_batch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the ranges of the last validation in force; observe this batch and the next ones if ranges are due.

        From the first such batch on, the modules run quantized. Which of their tensors do is set here for each batch
        (``quantize``), since a validation quantizes all. Called before each training batch of a fit that has reached
        ``start_epoch`` and ``start_step``.

        Raises:
            CalibrationError: activations have no ranges, and no option would ever give them any.
        """
        training = self.training
        training.start(around=pl_module)  # ``pl_module`` may hold a compiled wrapper of the model
        if _validation_batches(trainer) != self._validation_batches:
            # A validation has run in another process, before this fit was resumed: Lightning counts its batches. What
            # its beginning and its end change in ``training`` is done now.
            self._validation_batches = _validation_batches(trainer)
            training.begin_validation()
            training.end_validation()
        ranges_are_due = training.begin_training_batch()  # nothing was observed yet, or a validation has just ended
        training.switch.weights = self._quantize != "activations"
        training.switch.activations = self._quantize != "weights"
        if not (ranges_are_due and self._may_observe(trainer, "train")):
            return
        if self._calibration_batches:
            training.observe_training()
        elif self._observe != "val" and not training.has_all_ranges:
            raise CalibrationError(
                f"nothing will ever calibrate the activations of {training.session.label}",
                got=f"calibration_batches=0, observe={self._observe!r}",
                remedy="set calibration_batches, sanity_check or observe='val', or run trainer.validate first.",
            )

    def end_training_batch(self) -> None:
        """Count a training batch if it is observed; after the last observed batch write the ranges and print a line.

        Called in ``on_train_batch_end``.
        """
        training = self._training
        if training is not None and training.end_training_batch(self._calibration_batches):
            session = training.session
            rank_zero_info(f"{session.label}: ranges of activations from {session.batches} batches")

    def end_fit(self) -> None:
        """Give the weights that were trained since the last validation their ranges, so that they can be exported.

        Called in ``on_train_end``. The strategy has not been torn down yet: the model is on its device, and ranks can
        communicate. A callback that averages weights puts them into the model in the same hook; if it is listed after
        this one, the export refuses the changed weights until a validation has observed them.

        Checkpoints that are saved afterwards have the state in which training ended: a run that resumes from them goes
        on as if it had not stopped.
        """
        training = self._training
        if training is None or not training.has_trained or not training.has_all_ranges:
            return
        self._state_of_fit = self.state_dict()
        training.refresh_weights()

    def has_started(self, trainer: Trainer) -> bool:
        """Whether fit has reached ``start_epoch`` and ``start_step``; asked before batches and validations."""
        return bool(trainer.current_epoch >= self._start_epoch and trainer.global_step >= self._start_step)

    # ------------------------------------------------------------------ validation, test and predict

    def validation_is_due(self, trainer: Trainer) -> bool:
        """Whether :meth:`begin_validation` is to be called now; asked before each validation batch and at the end.

        False if it was called for the running validation: then the modules run quantized (``training.validating``), or,
        outside of a fit, the session is attached, to observe the model. In a fit also False in a sanity check that is
        left out, and before ``start_epoch`` and ``start_step``.
        """
        if self._training is not None and self._training.validating:
            return False
        if trainer.state.fn != TrainerFn.FITTING:
            is_observed = self._training is not None and self._training.session.is_attached
            return not is_observed
        if trainer.sanity_checking and not self._sanity_check:
            return False
        return self.has_started(trainer)

    def begin_validation(self, trainer: Trainer, pl_module: LightningModule, batches: ObservedBatches) -> None:
        """Observe the weights and quantize everything; or calibrate a model that has no ranges yet.

        In ``trainer.validate``, a model that needs data and lacks ranges is observed in full precision, and nothing
        else happens: it is calibrated at the end. But if a fit has observed some training batches and was cut short,
        these give the missing ranges of activations, and the model is not calibrated anew.

        In every other validation the modules run quantized from now on. ``training.begin_validation`` writes the ranges
        of observed training batches, observes the weights if their ranges follow them, and switches the quantization of
        all tensors on. In a fit the data are observed as well, if they may give ranges of activations. The state in
        which an earlier fit ended counts no more.

        Called before the first batch, after every other callback's ``on_validation_start``; on a rank without batches
        at the end, as the ranges of its weights may be needed by the others.

        Args:
            trainer: runs the validation.
            pl_module: holds the model.
            batches: attach the session of a model that is calibrated by ``trainer.validate``.
        """
        training = self.training
        session = training.session
        self._state_of_fit = None
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        # Ranges of observed training batches are not in force yet: ``training.begin_validation`` writes them.
        lacks_ranges = not training.has_all_ranges and not training.has_observed
        if not is_fitting and session.needs_data and (not training.is_quantized or lacks_ranges):
            batches.start(trainer, session)
            return
        training.start(around=pl_module)
        training.begin_validation()
        if is_fitting and (self._observe == "val" or trainer.sanity_checking) and self._may_observe(trainer, "val"):
            session.attach(count_calls=False)

    def end_validation(self, trainer: Trainer) -> None:
        """Leave a validation of a fit; the next training batch puts newer ranges in force.

        Called in ``on_validation_end`` of each validation of a fit.
        """
        self._validation_batches = _validation_batches(trainer)
        if self._training is not None:
            self._training.end_validation()

    def gather_statistics(self) -> None:
        """Keep a fit's validation statistics until training goes on; a fit's first ranges are in force at once.

        Called at the end of a validation's epoch, if its data were observed.
        """
        self.training.gather()
        if not self.training.has_all_ranges:
            self.training.write()

    def begin_test(self, pl_module: LightningModule) -> None:
        """Let a test or a prediction that starts run quantized, with ranges of the present weights.

        Called in ``on_test_start`` and ``on_predict_start``, if the model was calibrated.
        """
        training = self.training
        training.start(around=pl_module)
        training.refresh_weights()
        training.switch.weights = True
        training.switch.activations = True

    def _may_observe(self, trainer: Trainer, source: Literal["train", "val"]) -> bool:
        """Whether these data may give ranges of activations: the first ranges, or newer ones if they are asked for.

        Asked before training batches, if ranges are due, and before validations of a fit. Known ranges are replaced
        only by data of the kind that ``observe`` names, before ``freeze_after``, and not in a sanity check; and not if
        data cannot change them (``can_refresh``): only scales are trained, all ranges of activations are learned, or
        the scheme needs no data.
        """
        training = self.training
        if not training.has_all_ranges:
            return training.session.needs_data
        if self._freeze_after is not None and trainer.current_epoch >= self._freeze_after:
            return False
        return self._observe == source and training.can_refresh and not trainer.sanity_checking

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the ranges, learned scales, and how far an observation has come, for the callback's state.

        It also says what was trained, for an error if a fit resumes with another ``train``.

        Called when Lightning saves a checkpoint. After :meth:`end_fit` it is the state in which training ended.
        """
        if self._state_of_fit is not None:
            return self._state_of_fit
        training = self.training
        return sealed({**training.session.state_dict(), "training": training.state_dict(), "train": self._train})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Write the ranges of a checkpoint to the model, and continue the training where it stopped.

        Called by ``prepare`` when Lightning has restored the callback from a checkpoint.

        Raises:
            CalibrationError: the state has other options, is damaged, or is of another model.
        """
        session = self.training.session
        refuse_other_options(state, session.plan.config)
        with naming("the saved state of the training", remedy="resume from another checkpoint."):
            # Before the ranges, as it writes nothing to the model.
            self.training.load_state_dict(state.get("training", {}))
        session.load_state_dict(state)

    def give_up_on_ranks(self, trainer: Trainer) -> None:
        """Drop a half-done observation of a run on several ranks, as each rank may have stopped elsewhere.

        Called in ``on_exception``; on one rank the observation is kept.
        """
        if trainer.world_size == 1 or self._training is None:
            return
        if self._training.phase in (Phase.OBSERVING, Phase.GATHERED):
            self._training.give_up()


def _validation_batches(trainer: Trainer) -> int:
    """How many validation batches Lightning has counted in this fit; a resumed fit also counts those from before.

    A number that has changed between two training batches tells that a validation has run in between.
    """
    return int(trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.ready)
