"""Fine-tune through fake quantization, so that the checkpoint gives the numbers that validation saw.

While fit runs, the forward of every planned module is replaced on the instance
(:mod:`~lightning_obs.forward.quantized_forward`). Three rules say which ranges are in force, and make the promise hold:

* A validation runs through what would be exported at that moment. Weights are observed anew before its first batch
  (after weight averaging has swapped the weights in), and nothing changes until it has ended.
* What a validation's data say about activations (``observe="val"``) is used from the next training batch on. If none
  follows, it is never used: the ranges of the last validation are the ones that are exported.
* Ranges found on training data (``observe="train"``) are in force as soon as the last of the batches was seen. The
  forward passes are those that training makes anyway.

All of it travels in the callback's state, the statistics of a half-done observation too, so that a resumed run
continues as if it had not stopped. The model's ``state_dict`` stays what it was.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.saved_state import refuse_other_options, sealed
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.calibration.token_mask import find_mask
from lightning_obs.callbacks.base import SessionCallback
from lightning_obs.callbacks.distillation import distill_in_training_step
from lightning_obs.errors import CalibrationError, warn
from lightning_obs.files.read import naming
from lightning_obs.fine_tuning.phase import Phase
from lightning_obs.fine_tuning.quantized_training import QuantizedTraining
from lightning_obs.forward.calls import in_evaluation_mode
from lightning_obs.schemes.config import SchemeLike

_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


class QuantizationAwareTraining(SessionCallback):
    """Train through fake quantization in ``trainer.fit``; validate, test and predict through it too.

    Weights are quantized from the first step on, and their ranges are observed anew at every validation. Activations
    pass unquantized until their ranges are known: from an earlier ``trainer.validate`` with this callback, from a
    checkpoint, from the sanity check (``sanity_check=True``), or from the first ``calibration_batches`` training
    batches. Afterwards ``callback.export(folder)`` writes what the last validation saw.

    A ``trainer.validate`` before any of that calibrates as :class:`CalibrationCallback` does; later it measures the
    quantized model, and its data change no activation range.

    Args:
        scheme: as for :class:`CalibrationCallback`.
        quantize: what training sees quantized: ``"all"``, ``"weights"`` or ``"activations"``. Validation and export
            always quantize all that the scheme says.
        observe: which data refresh the ranges of activations: ``"train"``, the ``calibration_batches`` training batches
            that follow a validation; ``"val"``, every validation of fit, for the training after it; ``"none"``, nothing
            after the first calibration. Validation data change nothing unless you say ``"val"``.
        calibration_batches: how many training batches are observed at a time. They do not run compiled. With 0,
            nothing is observed in training.
        start_epoch: nothing is quantized or observed before this epoch...
        start_step: ...and this many optimizer steps.
        freeze_after: from this epoch on the ranges of activations stay what they are; None: never.
        learn_scales: train the scales (learned step size) from where calibration put them. They join the first
            parameter group of the optimizer that trains their module, and are observed no more. (Those of q, k and v
            are, as ever.)
        distill: weight of the divergence of the quantized model's logits from the teacher's, added to the loss that
            ``training_step`` returns; 0: none. It costs one more forward per step.
        teacher: takes the calls that the quantized model takes. None: the model itself, unquantized.
        **options: as for :class:`CalibrationCallback`: ``targets``, ``ignore``, ``observers``, ``kv_cache``,
            ``module``, ``export_folder``, ``export_overwrite``, ``on_missing``, ``reload``, ``sanity_check``,
            ``token_mask``, ``log`` (here also how far the logits are from the teacher's, ``quant/distillation``).

    Raises:
        CalibrationError: by the constructor for wrong arguments; when fit starts, for a precision whose weights are
            not in float32, or where :class:`CalibrationCallback` raises; at the first step, if nothing will ever
            calibrate the activations.

    Reference:
        Jacob et al., Quantization and Training of Neural Networks, 2018, arXiv:1712.05877, section 3; for
        ``learn_scales`` Esser et al., Learned Step Size Quantization, 2020, arXiv:1902.08153.
    """

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
        learn_scales: bool = False,
        distill: float = 0.0,
        teacher: nn.Module | None = None,
        **options: Any,
    ) -> None:
        super().__init__(scheme, **options)
        for name, value, allowed in (
            ("quantize", quantize, ("all", "weights", "activations")),
            ("observe", observe, ("train", "val", "none")),
        ):
            if value not in allowed:
                raise CalibrationError(name, got=repr(value), expected=", ".join(map(repr, allowed)))
        numbers = {"calibration_batches": calibration_batches, "start_epoch": start_epoch, "start_step": start_step}
        for name, number in {**numbers, "freeze_after": freeze_after or 0, "distill": distill}.items():
            if number < 0:
                raise CalibrationError(name, got=number, expected="zero or more")
        if teacher is not None and not distill:
            raise CalibrationError("a teacher without distill", remedy="set distill, the weight of its term.")
        self.quantize, self.observe, self.calibration_batches = quantize, observe, calibration_batches
        self.start_epoch, self.start_step, self.freeze_after = start_epoch, start_step, freeze_after
        self.learn_scales, self.distill, self.teacher = learn_scales, distill, teacher
        self._training: QuantizedTraining | None = None
        self._on_fit: ExitStack | None = None  # undone when fit ends: the wrapped training_step
        #: validation batches that Lightning has counted when this callback last looked
        self._validated = 0

    @override
    def export(self, folder: str | os.PathLike[str], *, tokenizer: Any = None, overwrite: bool = False) -> Path:
        """Write what the last validation saw, see :meth:`CalibrationCallback.export`.

        Raises:
            CalibrationError: as there; the model was trained on since its last validation; activations were not
                calibrated yet.
        """
        if self._training is not None and self._training.is_quantized and not self._training.has_all_ranges:
            raise CalibrationError("activations were not calibrated yet", remedy="train or validate for longer.")
        return super().export(folder, tokenizer=tokenizer, overwrite=overwrite)

    # ------------------------------------------------------------------ fit

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what cannot work before any training; hand learned scales to the optimizer, wrap the loss."""
        self.require_precision(trainer)
        session = self.prepare(trainer, pl_module)
        with ExitStack() as stack:
            if self._training is not None and self._training.learned is not None and trainer.optimizers:
                self._training.learned.join(trainer.optimizers)
            if self.distill:
                if self.teacher is not None:
                    self.teacher.to(pl_module.device)
                mask = None if self.token_mask is None else self._mask_of
                stack.callback(
                    distill_in_training_step(
                        pl_module, session.model, self.distill, self._teach, mask, self.logs(trainer)
                    )
                )
            self._on_fit = stack.pop_all()

    @staticmethod
    def require_precision(trainer: Trainer) -> None:
        """Refuse a Trainer that trains weights in another precision than they were loaded in.

        Raises:
            CalibrationError: its precision is such a one.
        """
        if trainer.precision not in _PRECISIONS:
            raise CalibrationError(
                "training needs weights in the precision that they were loaded in",
                got=f"Trainer(precision={str(trainer.precision)!r})",
                expected=", ".join(_PRECISIONS),
                remedy="use bf16-mixed; for weights in bfloat16 load the model with dtype=torch.bfloat16 and leave "
                "precision at 32-true.",
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take up a checkpoint that Lightning loads after ``on_fit_start``; see what has been validated before."""
        if self._waiting_state is not None:
            self.prepare(trainer, pl_module)
        self._validated = _validation_batches(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Take what the last validation found; observe this batch, if its turn has come."""
        if not self._has_started(trainer):
            return
        training = self._begin(trainer, pl_module)
        if _validation_batches(trainer) != self._validated:  # counted, not run: a resumed run begins behind it
            self._validated = _validation_batches(trainer)
            training.end_observation()
            training.end_validation()
        due = training.begin_training_batch()
        training.switch.weights = self.quantize != "activations"
        training.switch.activations = self.quantize != "weights"
        if due and self._may_observe(trainer, training, "train"):
            self._require_source(training)
            if self.calibration_batches:
                training.observe_training(self.calibration_batches)
        training.go_on_observing()
        if training.phase is Phase.OBSERVING and self.token_mask is not None:
            training.session.mask_tokens(find_mask(batch, self.token_mask))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the ranges after the last of the observed batches."""
        if self._training is not None and self._training.phase is Phase.OBSERVING:
            self._training.count_batch()
            if self._training.phase is not Phase.OBSERVING:
                rank_zero_info(f"{self.label}: ranges of activations from {self._training.session.batches} batches")

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average the gradients of learned scales over ranks; DDP knows only the module's own parameters.

        Not later: what a loss scale made infinite on one rank has to be seen on all before they step or do not.
        """
        if self._training is None or self._training.learned is None or trainer.world_size == 1:
            return
        parameters = self._training.learned.parameters
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        mean = trainer.strategy.reduce(torch.cat([grad.reshape(-1) for grad in grads]), reduce_op="mean")
        for parameter, grad in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = grad.reshape(parameter.shape).clone()

    # ------------------------------------------------------------------ validate

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """In ``trainer.validate`` of a model that was not calibrated: calibrate it. Else wait for the first batch."""
        if trainer.state.fn == TrainerFn.VALIDATING and not self._is_calibrated(trainer, pl_module):
            session = self.prepare(trainer, pl_module)
            if session.needs_data:
                self.observe_validation(trainer, session)

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before the first batch, and after every other callback's start: weights anew, everything quantized."""
        self._begin_validation(trainer, pl_module)
        super().on_validation_batch_start(trainer, pl_module, batch, batch_idx, dataloader_idx)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what the data said for the training to come; the first ranges there are hold at once."""
        self._begin_validation(trainer, pl_module)  # other ranks may have batches, and their weights' ranges are shared
        self._end_validation(trainer, pl_module)
        if self.session is not None and self.session.has_written and not trainer.sanity_checking:
            self.log_calibration(trainer, pl_module)

    def _end_validation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        session, training = self.session, self._training
        if session is None or training is None or not session.is_attached:
            return
        if trainer.state.fn == TrainerFn.VALIDATING:
            self.finish_calibration(session, pl_module)
            return
        training.gather()
        if not training.has_all_ranges:
            training.write()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on to training, or leave nothing behind."""
        if trainer.state.fn != TrainerFn.FITTING:
            self.clean_up()
            return
        self._validated = _validation_batches(trainer)
        if self._training is not None:
            self._training.end_validation()

    def _begin_validation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Once in each validation, unless it calibrates the model for the first time."""
        calibrates = self.session is not None and self.session.is_attached and trainer.state.fn == TrainerFn.VALIDATING
        if calibrates or (trainer.sanity_checking and not self.sanity_check):
            return
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and not self._has_started(trainer):
            return
        training = self._begin(trainer, pl_module)
        if training.validating:
            return
        training.begin_validation()
        asked = fits and (self.observe == "val" or trainer.sanity_checking)
        if asked and self._may_observe(trainer, training, "val"):
            training.observe_validation()

    # ------------------------------------------------------------------ test and predict

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run quantized, with the qparams of ``test(ckpt_path=...)`` or of the fit before."""
        self._begin_evaluation(trainer, pl_module)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run quantized, with the qparams of ``predict(ckpt_path=...)`` or of the fit before."""
        self._begin_evaluation(trainer, pl_module)

    def _begin_evaluation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_calibrated(trainer, pl_module):
            training = self._begin(trainer, pl_module)
            training.refresh_weights()
            training.switch.weights = training.switch.activations = True
        elif trainer.is_global_zero:
            warn(f"{self.label}: nothing was calibrated, the model runs in full precision")

    # ------------------------------------------------------------------ state

    @override
    def state_dict(self) -> dict[str, Any]:
        """Ranges, learned scales, and where in an observation training is: tensors, strings and numbers.

        On several ranks every rank must call this, as Lightning does.
        """
        if self._waiting_state is not None:
            return self._waiting_state
        if self.session is None or self._training is None:
            return {}
        training = {**self._training.state_dict(), "validated": self._validated}
        return sealed({**self.session.state_dict(), "training": training})

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind. On several ranks a half-done observation starts again: the others may be elsewhere."""
        training = self._training
        if trainer.world_size > 1 and training is not None and training.phase in (Phase.OBSERVING, Phase.GATHERED):
            training.give_up()
        super().on_exception(trainer, pl_module, exception)

    @override
    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> CalibrationSession:
        """See :meth:`CalibrationCallback.prepare`."""
        session = super().prepare(trainer, pl_module)
        self._training_of(session)
        return session

    @override
    def take_state(self, session: CalibrationSession, state: Mapping[str, Any]) -> None:
        """Write the ranges of a checkpoint, and take training up where it stood."""
        refuse_other_options(state, session.plan.config)
        training = state.get("training", {})
        with naming("the saved state of the training", remedy="resume from another checkpoint."):
            # Before the ranges, as it writes nothing to the model.
            self._training_of(session).load_state_dict(training)
            self._validated = training.get("validated", self._validated)
        super().take_state(session, state)

    def _training_of(self, session: CalibrationSession) -> QuantizedTraining:
        """The training of this session's model; a new session of the same model continues with it."""
        if self._training is None or self._training.session.model is not session.model:
            if self._training is not None:
                self._training.stop()
            self._training = QuantizedTraining(session, self.learn_scales)
        self._training.take(session)
        return self._training

    # ------------------------------------------------------------------ what runs

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> QuantizedTraining:
        if self._training is None or self.session is None or self._waiting_state is not None:
            self.prepare(trainer, pl_module)
        assert self._training is not None
        self._training.start(around=pl_module)
        return self._training

    def _has_started(self, trainer: Trainer) -> bool:
        return bool(trainer.current_epoch >= self.start_epoch and trainer.global_step >= self.start_step)

    def _may_observe(self, trainer: Trainer, training: QuantizedTraining, source: str) -> bool:
        """Whether these data may give the ranges of activations: the first there are, or others if asked for."""
        if not training.has_all_ranges:
            return training.session.needs_data
        frozen = self.freeze_after is not None and trainer.current_epoch >= self.freeze_after
        return self.observe == source and training.can_refresh and not frozen and not trainer.sanity_checking

    def _require_source(self, training: QuantizedTraining) -> None:
        if not self.calibration_batches and self.observe != "val" and not training.has_all_ranges:
            raise CalibrationError(
                f"nothing will ever calibrate the activations of {self.label}",
                got=f"calibration_batches=0, observe={self.observe!r}",
                remedy="set calibration_batches, sanity_check=True or observe='val', or run trainer.validate first.",
            )

    def _is_calibrated(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        if self._waiting_state is None and self.session is None:
            return False
        return self._training_of(self.prepare(trainer, pl_module)).is_quantized

    def _teach(self, *args: Any, **kwargs: Any) -> Any:
        assert self._training is not None
        model = self.teacher if self.teacher is not None else self._training.session.model
        with self._training.unquantized(), in_evaluation_mode(model), torch.no_grad():
            return model(*args, **kwargs)

    def _mask_of(self, batch: Any) -> torch.Tensor:
        assert self.token_mask is not None
        return find_mask(batch, self.token_mask)

    @override
    def clean_up(self) -> None:
        """Give the model its own forward back, and the LightningModule its ``training_step``."""
        super().clean_up()
        if self._training is not None:
            self._training.stop()
        if self._on_fit is not None:
            self._on_fit.close()
            self._on_fit = None


def _validation_batches(trainer: Trainer) -> int:
    """How many validation batches Lightning has counted. A run that resumes behind a validation counts its batches."""
    return int(trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.ready)
