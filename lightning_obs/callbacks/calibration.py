"""Calibrate in Lightning's validation loop.

Lightning already runs the user's data through the user's model; this callback only watches, through a
:class:`~lightning_obs.CalibrationSession`.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import Unpack, override

from lightning_obs.calibration.options import CalibrationOptions, takes_keywords_of
from lightning_obs.calibration.saved_state import changed_options
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.auto_observers import AutoObservers, given_candidates
from lightning_obs.callbacks.base import require_at_least
from lightning_obs.callbacks.lightning_package import TrainerFn, class_of
from lightning_obs.callbacks.observed_batches import BatchKeywords, ObservedBatches
from lightning_obs.callbacks.possible_steps import can_choose_observers
from lightning_obs.callbacks.quantization_aware_training import can_train
from lightning_obs.callbacks.quantized_validation import QuantizedValidation, quantized_name, require_batches
from lightning_obs.callbacks.sanity_check import SanityWatch
from lightning_obs.callbacks.strategies import collectives_of
from lightning_obs.choice.observer_choice import Candidates
from lightning_obs.errors import CalibrationError, name_list, refuse, require_bool, warn
from lightning_obs.files.sealed import sealed
from lightning_obs.report.step import Step
from lightning_obs.report.summary import layer_table, print_report
from lightning_obs.schemes.config import SchemeLike

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class CalibrationCallback(ObservedBatches):
    """Observe weights and activations during validation and write quantization parameters at the epoch's end.

    Works in ``trainer.validate`` and in the validation of ``trainer.fit`` (each validation calibrates again; the last
    one stands). Outputs, metrics, ``state_dict`` and the forward of the model do not change. Afterwards:
    ``callback.result``, ``callback.export(folder)``, ``quantized(model)``.

    Args:
        scheme: as for :class:`~lightning_obs.CalibrationOptions`, or such options.
        evaluate: run each validation, and each ``trainer.test`` of a calibrated model, a second time through the
            quantized model. The metrics that ``validation_step`` and ``on_validation_epoch_end`` log for the epoch are
            logged again as ``<name>_quantized`` (``<name>_quantized/<scheme>`` where several callbacks evaluate), in
            time for ``ModelCheckpoint(monitor="val_loss_quantized")`` and ``EarlyStopping``. A model whose output has
            ``logits`` also gets ``quant/divergence``, the mean Kullback-Leibler divergence from the unquantized model's
            predictions [nats], and ``quant/agreement``, the share of positions with the same most likely class
            (``callback.moved``). A number in (0, 1): run that share of each loader's batches. Batches and logits are
            kept on the CPU for it, up to 2 GiB of each on each rank.
        every_n_epochs: in fit, calibrate in the validations of every n-th epoch only (of epochs n, 2n, ...). With
            ``evaluate`` also in the first one; the validations between measure with the latest scales.
        show: print the layers that lose most at the end of ``trainer.validate``.
        **options: of :class:`~lightning_obs.callbacks.observed_batches.ObservedBatches` and
            :class:`~lightning_obs.callbacks.base.SessionCallback`, and the fields of
            :class:`~lightning_obs.CalibrationOptions`. ``observers="auto"`` chooses them in the first validation
            (:func:`~lightning_obs.choose_observers`; ``callback.choice`` has the scores);
            ``observers={"weight": ["imatrix_mse", {"name": "hessian", "rounding": "gptq"}]}`` chooses from your own
            list. Both work on one device, for models with logits; the model's arguments are kept and run again.

    Raises:
        CalibrationError: by the constructor for a wrong option; before the first batch for targets, shapes or devices;
            at a batch without its token mask; at the end of a validation for values that are not finite and, in
            ``trainer.validate``, for layers that no data reached. In a fit such layers stay in float, with a warning
            (in the sanity check already, where it shows them): they do not end the training.
    """

    @takes_keywords_of(ObservedBatches)
    def __init__(
        self,
        scheme: SchemeLike | CalibrationOptions | None,
        *,
        evaluate: bool | float = False,
        every_n_epochs: int = 1,
        show: bool = True,
        **options: Unpack[BatchKeywords],
    ) -> None:
        candidates: Candidates | None = None
        if "observers" in options:
            options["observers"], candidates = given_candidates(options["observers"])
        super().__init__(scheme, **options)
        masked = self.token_mask is not None
        self._auto = None if candidates is None else AutoObservers(self.options, masked, candidates)
        if not isinstance(evaluate, (int, float)) or not 0 <= evaluate <= 1:
            raise CalibrationError("evaluate", got=repr(evaluate), expected="True, False, or a share in (0, 1]")
        require_at_least(1, every_n_epochs=every_n_epochs)
        require_bool(show=show)
        self.evaluate, self.every_n_epochs, self.show = float(evaluate), every_n_epochs, show
        self._second_pass: QuantizedValidation | None = None  # of the validation that runs now
        self._sanity_watch: SanityWatch | None = None  # of the sanity check that runs now

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse, before the first batch, setups that would fail in the end."""
        super().setup(trainer, pl_module, stage)
        if self.evaluate:
            require_batches(trainer, pl_module, "evaluate")
            measured = [one for one in trainer.callbacks if isinstance(one, CalibrationCallback) and one.evaluate]
            self.measured_as = self.label if len(measured) > 1 else ""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a wrong configuration before hours of training; restore the qparams of a resumed run."""
        earlier = takewhile(lambda callback: callback is not self, trainer.callbacks)
        refuse(
            [type(callback).__name__ for callback in earlier if class_of(callback, "WeightAveraging")],
            "weight averaging stands before the calibration, and takes its weights back before they are observed",
            remedy="list the calibration first: callbacks=[calibration, averaging].",
        )
        session = self.prepare(trainer, pl_module)
        if self._auto is not None:
            self._auto.require_possible(session)
        if not trainer.enable_validation and not session.has_written:
            warn(
                f"{self.label}: this Trainer will not validate, so nothing will be calibrated. Give fit a validation "
                "loader, the LightningModule a validation_step, and leave limit_val_batches above 0."
            )

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the observers; make ready for a second pass."""
        self.restore_outside_of_fit(trainer)
        is_due = self._is_due(trainer)
        session = self.prepare(trainer, pl_module) if is_due else self.session
        if session is None:
            return
        if trainer.sanity_checking and not is_due and session.needs_data and not session.has_written:
            self._sanity_watch = SanityWatch(session)
        if self.evaluate and not trainer.sanity_checking and (is_due or session.has_written):
            self._second_pass = QuantizedValidation(trainer, pl_module, session.model, self.evaluate)
        if is_due:
            self.observe_validation(trainer, session)
        if is_due and self._auto is not None:
            self._auto.start(session)

    @override
    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *seen: Any) -> None:
        """Keep the batch for the second pass; observe it if it is asked for."""
        self.on_test_batch_start(trainer, pl_module, *seen)
        super().on_validation_batch_start(trainer, pl_module, *seen)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute and write the quantization parameters; ModelCheckpoint, which runs later, saves them."""
        if self.session is not None and self.session.is_attached:
            self._calibrate(self.session, trainer, pl_module)
        self.on_test_epoch_end(trainer, pl_module)

    def _calibrate(self, session: CalibrationSession, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._auto is not None:
            with trainer.precision_plugin.val_step_context():
                self.session = session = self._auto.choose(session)
            self.options, self.choice = session.options, self._auto.choice
        try:
            self.finish_calibration(session, pl_module)
        except CalibrationError as error:
            if not (session.is_fitting and session.lacked_data):
                raise
            warn(f"{self.label}: this validation has calibrated nothing, and the training goes on. {error}")
            if not session.has_written and self._second_pass is not None:
                self._second_pass.close()
                self._second_pass = None
            return
        shown = self.show and trainer.state.fn == TrainerFn.VALIDATING
        errors = self.layer_errors() if shown or self.logs(trainer) else None
        self.log_calibration(trainer, pl_module, errors)
        if shown and errors and trainer.is_global_zero:
            print_report(layer_table(errors[:5]))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave nothing behind."""
        super().on_validation_end(trainer, pl_module)
        if self._sanity_watch is not None and trainer.is_global_zero:
            self._sanity_watch.tell()
        self.clean_up()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave nothing behind; say so if no validation has come."""
        super().teardown(trainer, pl_module, stage)
        fits = stage == TrainerFn.FITTING
        told = fits and (trainer.fast_dev_run or not trainer.enable_validation)
        known = told or self._waiting_state is not None or self.has_calibrated
        if stage in (TrainerFn.FITTING, TrainerFn.VALIDATING) and not known:
            when = f" in an epoch that {self.every_n_epochs} divides" if fits and self.every_n_epochs > 1 else ""
            warn(
                f"{self.label}: the {'fit' if fits else 'validation'} has ended and nothing was calibrated: no "
                f"validation batches were run{when}."
            )

    @override
    def clean_up(self) -> None:
        """Take every hook out. Can be called at any time, any number of times."""
        super().clean_up()
        if self._second_pass is not None:
            self._second_pass.close()
        self._second_pass = None
        if self._sanity_watch is not None:
            self._sanity_watch.close()
        self._sanity_watch = None
        if self._auto is not None:
            self._auto.stop()

    @override
    def take_state(self, trainer: Trainer, session: CalibrationSession, state: dict[str, Any]) -> None:
        """Write a checkpoint's qparams; qparams of other options are dropped where this run calibrates again."""
        changed, runs = changed_options(state, session.plan.config), trainer.state.fn
        if changed and (trainer.enable_validation if runs == TrainerFn.FITTING else runs == TrainerFn.VALIDATING):
            rank_zero_info(
                f"{self.label}: the checkpoint was calibrated with other options ({name_list(changed)}); "
                "its calibration is dropped, this run calibrates again"
            )
        else:
            super().take_state(trainer, session, state)

    def _is_due(self, trainer: Trainer) -> bool:
        if trainer.sanity_checking:
            return self.sanity_check
        if trainer.state.fn != TrainerFn.FITTING or (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            return True
        return bool(self.evaluate) and not self.has_calibrated  # a monitor has a value from the first validation on

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the qparams of ``test(ckpt_path=...)``; make ready for a second pass."""
        super().on_test_start(trainer, pl_module)
        if self.evaluate and self.session is not None and self.has_calibrated:
            self.session.collectives = collectives_of(trainer)
            self._second_pass = QuantizedValidation(trainer, pl_module, self.session.model, self.evaluate)
        elif self.evaluate:
            warn(f"{self.label}: nothing was calibrated, so evaluate has nothing to measure in this test.")

    @override
    def on_test_batch_start(self, trainer: Trainer, pl_module: LightningModule, *seen: Any) -> None:
        """Keep the batch for the second pass."""
        if self._second_pass is not None:
            self._second_pass.keep_batch(*seen)

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the second pass of a test or a validation, and log its metrics."""
        if self._second_pass is not None:
            metrics = self._second_pass.run(self._calibrated_session())
            for name, (value, how) in metrics.items():
                self._log_quantized(trainer, pl_module, name, value, how)
            self.moved = self._second_pass.moved
            self.higher_is_better |= self._second_pass.higher_is_better
            for name in () if self.moved is None else ("divergence", "agreement"):
                self.log_of_all(trainer, pl_module, name, getattr(self.moved, name))

    def _log_quantized(
        self, trainer: Trainer, pl_module: LightningModule, name: str, value: torch.Tensor, how: dict[str, Any]
    ) -> None:
        """Log a metric of the second pass, as ``<name>_quantized``.

        ``self.log`` would list a metric of one of several loaders under every loader, and before Lightning 2.5 it
        refuses the number in its name. So the Trainer is told directly; ranks have reduced the value already.
        """
        loader = name.partition("/dataloader_idx_")[2]
        name = quantized_name(name, self.measured_as)
        if not loader:
            pl_module.log(name, value, **how)
            return
        connector = trainer._logger_connector  # its properties would compute the first pass's metrics too early
        connector._callback_metrics[name] = value
        if how["prog_bar"]:
            connector._progress_bar_metrics[name] = value
        trainer._active_loop._logged_outputs[int(loader)][name] = value

    @override
    def can_run(self, step: Step) -> bool:
        """Whether a next step can run; of those that need more than other options, what this run has shown is asked."""
        session = self._calibrated_session()
        if step.name == "measure":  # where validation logs nothing, a second pass has nothing to measure
            return not self.evaluate and any(name != "step" for name in next(iter(self.curves[-1:]), {}))
        if step.name == "observers":
            return self.moved is not None and self.token_mask is None and can_choose_observers(session)
        if step.name == "fine_tune":
            return can_train(session, self._owner)
        return super().can_run(step)

    @override
    def state_of(self, session: CalibrationSession) -> dict[str, Any]:
        """The quantization parameters, and the observers that were chosen for them; nothing before there are any."""
        state = session.state_dict()
        if not state["qparams"]:
            return {}
        return state if self._auto is None else sealed({**state, **self._auto.state_dict()})

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the saved qparams until the model is on its device, and the observers that were chosen for them."""
        super().load_state_dict(state_dict)
        if self._auto is not None:
            self._auto.load_state_dict(state_dict)
            self.options, self.choice = self._auto.options or self._auto.asked, None
