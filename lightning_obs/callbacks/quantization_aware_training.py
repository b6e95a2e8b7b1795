"""Fine-tune through fake quantization, so that the checkpoint gives the numbers that validation saw.

:mod:`.quantized_fit` decides which ranges are in force meanwhile, and :mod:`.distillation` changes the loss. Start
reading at the callback's hooks: each calls these parts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack, override

from lightning_obs.calibration.options import CalibrationOptions, OptionKeywords, takes_keywords_of
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.destinations import ExportTo
from lightning_obs.callbacks.distillation import Distillation
from lightning_obs.callbacks.lightning_package import TrainerFn, class_of
from lightning_obs.callbacks.lost_updates import LostUpdates
from lightning_obs.callbacks.observed_batches import ObservedBatches
from lightning_obs.callbacks.quantized_fit import QuantizedFit
from lightning_obs.callbacks.results import Results
from lightning_obs.callbacks.resumed_optimizers import check_resumed_optimizers
from lightning_obs.callbacks.session_callback import (
    SessionCallback,
    make_export_at_end,
    restore_outside_of_fit,
    stop_all,
)
from lightning_obs.callbacks.strategies import average_gradients
from lightning_obs.callbacks.trainable import require_precision, require_trainable
from lightning_obs.callbacks.trainer_session import TrainerSession, find_module
from lightning_obs.errors import CalibrationError, refuse, refuse_unknown, warn
from lightning_obs.fine_tuning.learned_scales import frozen
from lightning_obs.fine_tuning.quantized_training import Phase
from lightning_obs.schemes.config import SchemeLike, has_rounding, rounds_on_quantized_inputs
from lightning_obs.schemes.recipes import Recipe

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class QuantizationAwareTraining(SessionCallback):
    """Train through fake quantization in ``trainer.fit``; validate, test and predict through it too.

    Weights are quantized from the first step on, in the ranges that they have then; these stay. Activations pass
    unquantized until their ranges are known: from an earlier ``trainer.validate`` with this callback, from a
    checkpoint, from the sanity check (``sanity_check=True``), or from the first ``calibration_batches`` training
    batches. Afterwards ``callback.export(folder)`` writes the model of the last validation.

    A ``trainer.validate`` before any of that calibrates the model; later it measures the quantized model, and its data
    change no activation range.

    Args:
        scheme (str | dict | QuantizationConfig | CalibrationOptions | None): preset name (``"FP8"``, ``"INT8_STATIC"``,
            ``"W4A16"``...), a config as a dict or object, or complete options, whose fields the arguments below then
            replace. None with ``kv_cache``, for the cache alone. No default.
        train (str): ``"weights"``; ``"scales"`` alone, from where calibration put them; or ``"all"``, both. Learned
            scales (not those of q, k and v) join the first parameter group of the optimizer that trains their module,
            and are no longer observed. With ``"scales"`` every parameter of the LightningModule is frozen while fit
            runs. NVFP4's block scales are learned with ``"scales"`` only; global scales, zero points and scales of MX
            never. Default: ``"weights"``.
        distill (float | str | None): weight of the divergence of the quantized model's logits from the teacher's, added
            to the loss that ``training_step`` returns; ``"only"``: it is the loss; 0: none. It costs one more forward
            per step. Logged as ``quant/distillation``. Default: None, ``"only"`` for scales alone, else 0.
        teacher (Module | str | None): takes the calls that the quantized model takes. ``"original"`` is a copy of the
            model before training, which takes the memory of its weights once more. Default: None, the model itself,
            unquantized: it moves as it is trained.
        quantize (str): tensors quantized in training: ``"all"``, ``"weights"`` or ``"activations"``. Validation and
            export always quantize all that the scheme says. Default: ``"all"``.
        observe (str): the data that refresh the ranges of activations: ``"train"``, the ``calibration_batches``
            training batches after a validation; ``"val"``, every validation of fit, for the training after it;
            ``"none"``, nothing after the first calibration. Default: ``"train"``.
        calibration_batches (int): how many training batches are observed at a time. They do not run compiled. With 0,
            nothing is observed in training. Default: 16.
        start_epoch (int): nothing is quantized or observed before this epoch. Default: 0.
        start_step (int): nothing is quantized or observed before this many optimizer steps. Default: 0.
        freeze_after (int | None): from this epoch on the ranges of activations do not change. Default: None, never.
        module (str | None): attribute path of the module to calibrate and export; ``""`` is the LightningModule itself.
            None: the one transformers model that it holds (of several, the one nearest to it); without one its only
            child with weights, if it has no ``forward`` itself; else the LightningModule. The choice is printed at the
            start. Default: None.
        export_to (str | PathLike | list | dict | None): what to write when ``validate`` or ``fit`` has ended; not in
            ``fast_dev_run``, nor after an error or Ctrl-C. A folder gets the checkpoint, as ``export(folder)`` writes
            it; a name that ends in ``.onnx``, ``.pt2`` or ``.gguf`` is a file, as ``export_onnx``, ``export_program``
            and ``export_gguf`` write them. A list has several; a dict has the options of each:
            ``{"model.onnx": {"signed": True}, "model.gguf": {"base": "model-f16.gguf"}}``. A path that is taken, a
            model or scheme that the format cannot hold, a missing package and a fit without validation are errors
            before the first batch. Default: None, nothing is written.
        export_overwrite (bool): replace what is at the paths of ``export_to`` before the first run of this callback.
            Default: False.
        sanity_check (bool): quantize and observe also in fit's sanity check (its few batches). Default: False.
        refresh_weights (bool): observe weights again at every validation and at the end of fit: for training that moves
            them far, from a random start for example. A new range rounds many weights to other numbers than those that
            training settled on. Default: False, weights are exported in the ranges in which they were trained.
        token_mask (str | Callable | None): where to find, in a batch, which tokens count: a key (``"attention_mask"``)
            or a function of the batch. A tensor ``(batch, tokens)``, nonzero for tokens that count; the others
            (padding) reach no observer. Default: None, all tokens count.
        log (bool | None): give the Trainer's loggers ``quant/sqnr_min``, ``quant/clipped_max`` and the other numbers of
            docs/guide/quantized_metric.md, and the table of all layers, once per validation; no data are run for them.
            Default: None, if there are loggers.
        targets (str | Sequence[str] | None): the modules to quantize where the scheme does not say. Default: None,
            every Linear.
        ignore (str | Sequence[str]): modules to leave alone: names, class names, ``re:`` patterns. Names are relative
            to the calibrated module. Default: (), none.
        observers (str | dict | None): observer per base name (weight, input, output; q, k, v):
            ``{"input": "minmax", "weight": {"name": ..., <hyperparameter>: ...}}``. Default: None, the scheme's
            observers; else ``memoryless_minmax`` for weights and ``minmax`` for the rest.
        kv_cache (str | dict | QuantizationArgs | None): quantize k and v of every attention module (transformers
            models): ``"FP8"`` (one scale per layer for k and one for v), ``"FP8_HEAD"`` (one per head), or
            compressed-tensors' arguments. Default: None.
        on_missing (str): the action when no data reached a module: ``"error"``; ``"warn"`` and leave it in full
            precision; or ``"siblings"``, which quantizes an expert without tokens with the range of the layer's other
            experts. In a fit, which an error would end, ``"error"`` is ``"warn"``. Default: ``"error"``.
        engines (str | Sequence[str]): the engines that will load the checkpoint: ``"transformers"``
            (``from_pretrained``), ``"dequantize"``, ``"vllm"``, ``"sglang"``, ``"llama.cpp"``, the name of an engine of
            your own, or ``"unchecked"``. The checkpoint is written for the first one; one that any of them would refuse
            is an error now. Default: (), transformers; where ``export_to`` names files alone, unchecked.
        calibrate_all_experts (bool): let every expert observe all tokens, not only those that the router sends it.
            Outputs do not change. Default: False.
        fused_sets (Sequence[Sequence[str]]): names of modules, under one parent, that your engine fuses, in addition
            to those of the known engines: ``[["a_proj", "b_proj"]]``. Default: ().
        join_fused_scales (bool): let modules that vLLM fuses (q, k, v; gate, up) share their scales per tensor.
            Default: False.
        rounding (str | dict | None): with ``train="scales"`` only: ``"gptq"``, training starts from integers that are
            chosen so that the outputs change least, and that stay. Default: None, as the scheme says; else the nearest
            integers.
        recipe (str | dict | None): observers and rounding under one word: ``"accurate"``, the least loss, which needs
            data and memory for products of inputs; ``"fast"``, which chooses weights without data. What ``observers``
            and ``rounding`` name comes before it; what the model cannot run is left out, with a warning before any
            data. Trained weights take its scales without its rounding; with ``train="scales"`` weights are rounded by
            inputs in full precision. Default: None, as the scheme says.

    Raises:
        CalibrationError: by the constructor for wrong arguments; when fit starts, for a precision whose weights are
            not in float32, and for targets, shapes or devices; at the first step, if nothing will ever calibrate the
            activations; at a batch without its token mask; when ranges are computed, for values that are not finite.

    Attributes:
        train: as given.
        quantized_fit: runs the model through fake quantization, and decides when activations are observed.
        distillation: adds the divergence from the teacher to the loss.
        batches: tells which tokens of a batch count.
        changes_of_fit: undoes what a fit has changed in the LightningModule.
        lost_updates: warns if the first steps leave most of the weights unchanged.
        options, label, trainer_session, results, export_at_end: as in :class:`.SessionCallback`.
        parts_of_run: all of these that hooks have to stop at a run's end, stopped in this order: ``trainer_session``,
            the example for exports (``results.first_call``), ``quantized_fit``, ``batches``, ``changes_of_fit``,
            ``lost_updates``.

    Reference:
        Jacob et al., Quantization and Training of Neural Networks, 2018, arXiv:1712.05877, section 3; for
        ``train`` Esser et al., Learned Step Size Quantization, 2020, arXiv:1902.08153.
    """

    @takes_keywords_of(CalibrationOptions)
    def __init__(
        self,
        scheme: SchemeLike | CalibrationOptions | None,
        *,
        train: Literal["weights", "scales", "all"] = "weights",
        distill: float | Literal["only"] | None = None,
        teacher: nn.Module | Literal["original"] | None = None,
        quantize: Literal["all", "weights", "activations"] = "all",
        observe: Literal["train", "val", "none"] = "train",
        calibration_batches: int = 16,
        start_epoch: int = 0,
        start_step: int = 0,
        freeze_after: int | None = None,
        module: str | None = None,
        export_to: ExportTo = None,
        export_overwrite: bool = False,
        sanity_check: bool = False,
        refresh_weights: bool = False,
        token_mask: str | Callable[[Any], torch.Tensor] | None = None,
        log: bool | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        refuse_unknown(options, CalibrationOptions.names(type(self)))
        export_at_end = make_export_at_end(export_to, export_overwrite)
        calibration_options = CalibrationOptions.of(scheme, **options)
        if export_at_end is not None:
            calibration_options = export_at_end.options_for(calibration_options)
        self.quantized_fit = QuantizedFit(
            train=train,
            quantize=quantize,
            observe=observe,
            calibration_batches=calibration_batches,
            start_epoch=start_epoch,
            start_step=start_step,
            freeze_after=freeze_after,
            sanity_check=sanity_check,
            refresh_weights=refresh_weights,
        )
        if distill is None:
            distill = "only" if train == "scales" else 0.0
        self.distillation = Distillation(distill, teacher)
        if train == "scales":
            _require_distillation(self.distillation)
            calibration_options = calibration_options.with_recipe(Recipe.without_quantized_inputs)
            _refuse_quantized_inputs(calibration_options)
        else:
            calibration_options = calibration_options.with_recipe(Recipe.without_rounding)
            _refuse_rounding(calibration_options)
        self.train = train
        self.batches = ObservedBatches(token_mask)
        self.changes_of_fit = _ChangesOfFit()
        self.lost_updates = LostUpdates(calibration_options.label)
        trainer_session = TrainerSession(module)
        results = Results(
            trainer_session,
            calibration_options.label,
            log,
            token_mask=token_mask,
            require_exportable=self.quantized_fit.require_ranges,
        )
        super().__init__(
            calibration_options,
            trainer_session,
            results,
            export_at_end,
            parts_of_run=[self.quantized_fit, self.batches, self.changes_of_fit, self.lost_updates],
        )

    # ------------------------------------------------------------------ fit

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before a fit, copy the model if its original is the teacher; refuse to train scales of a frozen model.

        With ``train="scales"`` the optimizer is made of the model's own parameters, so some of them must require
        gradients. In other stages than fit, only the setup of the base class is done.

        Raises:
            CalibrationError: ``train="scales"``, and every parameter is frozen; or the module to copy is not found.
        """
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if self.distillation.copies_student:
            _, model = find_module(pl_module, self.trainer_session.module_path)
            self.distillation.keep_original(model)
        if self.train != "scales":
            return
        parameters = list(pl_module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            raise CalibrationError(
                "every parameter is frozen, so configure_optimizers has nothing to make an optimizer of",
                remedy="leave requires_grad on: fit freezes the parameters, and puts the scales in their place.",
            )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse setups that cannot train; give learned scales to the optimizer; wrap the step to distill.

        A checkpoint whose optimizer trains other scales is a CalibrationError when Lightning restores the optimizer.
        """
        require_precision(trainer)
        session = self.prepare(trainer, pl_module)
        require_trainable(session)
        _require_own_modules(self, session, trainer)
        training = self.quantized_fit.training
        if training.learned is not None:
            _refuse_finetuning_callbacks(trainer, self.train)
        if training.learned is not None and trainer.optimizers:
            training.learned.join(trainer.optimizers)
        uncheck = check_resumed_optimizers(trainer, type(self).__name__, self.label, self.train)
        self.changes_of_fit.callback(uncheck)
        if self.distillation.is_on:
            is_logged = self.results.logs(trainer)
            unwrap_step = self.distillation.wrap_step(pl_module, training, self.batches, is_logged)
            self.changes_of_fit.callback(unwrap_step)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore a state that was loaded after ``on_fit_start``; freeze the weights if scales are trained alone.

        From now on the optimizers' first steps are watched for updates that half precision loses. Reports learn that
        the model was trained (``Results.was_trained``): they then propose no rounding and no further training.
        """
        super().on_train_start(trainer, pl_module)
        self.quantized_fit.begin_fit(trainer)
        self.lost_updates.watch(trainer)
        self.results.was_trained = True
        if self.train == "scales":
            self.changes_of_fit.enter_context(frozen(pl_module))
            if isinstance(trainer.strategy.model, DistributedDataParallel):
                # Otherwise it would wait for the gradients of frozen weights.
                self.changes_of_fit.enter_context(trainer.strategy.model.no_sync())

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Put the ranges of the last validation in force; observe this batch if activations' ranges are due.

        An observed batch gets its token mask. Before ``start_epoch`` and ``start_step`` nothing happens.
        """
        if not self.quantized_fit.has_started(trainer):
            return
        self.quantized_fit.begin_training_batch(trainer, pl_module)
        training = self.quantized_fit.training
        if training.phase is Phase.OBSERVING and self.batches.token_mask is not None:
            training.session.mask_tokens(self.batches.mask_of(batch))

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average the gradients of learned scales over ranks; DDP averages those of the module's own parameters only.

        A later hook would be too late: a gradient that a loss scale made infinite on one rank must be seen on all ranks
        before they step.
        """
        learned = self.quantized_fit.training.learned
        if learned is not None and trainer.world_size > 1:
            average_gradients(trainer, learned.parameters)

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Count the batch if it is observed; after the last of the observed batches write the ranges."""
        self.quantized_fit.end_training_batch()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the trained weights their ranges; warn on rank 0 of a training that had no effect.

        That is a fit that ended before ``start_epoch`` or ``start_step``, or a training of scales alone that has
        changed no scale. Scales are compared as they are stored. A float8 scale (NVFP4) is stored as the same number
        until training has changed it by 3 to 6 %, so a small learning rate may change none.
        """
        self.quantized_fit.end_fit()
        if trainer.is_global_zero and self.quantized_fit.training.forwards is None:
            warn(
                f"{self.label}: nothing was quantized in this fit, which ended before start_epoch or start_step, after "
                f"{trainer.global_step} steps. Set a smaller one, or train longer."
            )
        learned = self.quantized_fit.training.learned
        if self.train != "scales" or learned is None or not trainer.is_global_zero:
            return
        if trainer.global_step and not learned.has_changed:
            warn(
                f"{self.label}: no scale has changed in {trainer.global_step} steps; raise the learning rate. "
                "A step of Adam changes a scale by about the learning rate times the scale."
            )

    # ------------------------------------------------------------------ validate, test and predict

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before the first batch, quantize everything, or begin to observe data for a first calibration.

        Before each batch that is observed, mask its padding and repeated samples. The first call of the model is kept
        as an example for exports.
        """
        _begin_validation(self, trainer, pl_module)
        self.batches.begin_batch(trainer, self.session, batch, batch_idx, dataloader_idx)
        self.results.first_call.watch(self.session)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the ranges of a first calibration; in a fit keep the statistics until training goes on.

        Then, unless this is a sanity check, the loggers get the calibration that is in force.
        """
        _begin_validation(self, trainer, pl_module)
        if self.session is not None and self.session.is_attached:
            if trainer.state.fn == TrainerFn.VALIDATING:
                self.trainer_session.finalize()
            else:
                self.quantized_fit.gather_statistics()
        if self.trainer_session.has_calibrated and not trainer.sanity_checking:
            self.results.log_calibration(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the logged metrics; return to training, or outside of fit remove all hooks.

        A file that ``export_to`` is to trace and for which no batch has given an example is an error here.
        """
        self.results.keep_metrics(trainer)
        if self.export_at_end is not None:
            self.export_at_end.require_example(trainer, self.results)
        if trainer.state.fn == TrainerFn.FITTING:
            self.quantized_fit.end_validation(trainer)
        else:
            stop_all(self.parts_of_run)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let a test or a prediction run quantized, with the ranges of its ``ckpt_path`` or of the run before.

        If nothing was calibrated, the model runs in full precision, with a warning.
        """
        restore_outside_of_fit(self, trainer)
        if self.session is not None or self.trainer_session.saved_state is not None:
            self.prepare(trainer, pl_module)
        if self.session is not None and self.quantized_fit.is_quantized:
            self.quantized_fit.begin_test(pl_module)
        elif trainer.is_global_zero:
            warn(f"{self.label}: nothing was calibrated, the model runs in full precision")

    on_predict_start = on_test_start

    # ------------------------------------------------------------------ the session and its state

    @override
    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> CalibrationSession:
        """Check the options against the model, restore a loaded state, and return the session that the hooks use.

        Called by the hooks when a run or a validation starts.

        A scheme that needs no data (``session.needs_data`` is False) can be applied with it at once:
        ``with callback.prepare(trainer, module): pass``.

        Args:
            trainer: runs the model now, or will.
            pl_module: holds the module to calibrate.

        Raises:
            CalibrationError: the module cannot be found, or options or state do not fit the model or the Trainer.
        """
        session = super().prepare(trainer, pl_module)
        self.quantized_fit.use(session)
        state = self.trainer_session.take_state()
        if state is not None:
            self.quantized_fit.load_state_dict(state)
        return session

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return ranges, learned scales, and how far an observation has come, so that a resumed fit goes on from there.

        Lightning calls this when it saves a checkpoint. A loaded state that no session has taken yet is returned as it
        is; before there is a session, the dict is empty. The values are tensors, strings and numbers, so that
        ``weights_only`` loading works. On several ranks every rank must call this, as Lightning does.
        """
        if self.trainer_session.saved_state is not None:
            return self.trainer_session.saved_state
        if self.session is None:
            return {}
        return self.quantized_fit.state_dict()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take all hooks off the model; on several ranks also drop a half-done observation.

        Each rank may have seen other data by then, so the next run observes from the beginning.
        """
        self.quantized_fit.give_up_on_ranks(trainer)
        super().on_exception(trainer, pl_module, exception)


def _begin_validation(callback: QuantizationAwareTraining, trainer: Trainer, pl_module: LightningModule) -> None:
    """Begin a validation, unless it has begun; not in a sanity check that is left out, nor before ``start_epoch``.

    In ``trainer.validate``, first load the callback's state from ``ckpt_path`` if Lightning has not (in a fit it has).
    Then prepare the session, and let the model run quantized, or be observed for a first calibration.

    Called by ``on_validation_batch_start`` at the first batch, and by ``on_validation_epoch_end`` for a rank without
    batches. Not in ``on_validation_start``, where a callback that averages weights may still put others into the model.
    """
    if callback.quantized_fit.validation_is_due(trainer):
        restore_outside_of_fit(callback, trainer)
        callback.prepare(trainer, pl_module)
        callback.quantized_fit.begin_validation(trainer, pl_module, callback.batches)


def _require_own_modules(callback: QuantizationAwareTraining, session: CalibrationSession, trainer: Trainer) -> None:
    """Refuse modules that an earlier callback of the Trainer trains: only one forward can be in a module's place."""
    trained: set[int] = set()
    for earlier in takewhile(partial(operator.is_not, callback), trainer.callbacks):
        if isinstance(earlier, QuantizationAwareTraining) and earlier.session is not None:
            trained.update(id(target.module) for target in earlier.session.plan.targets)
    refuse(
        [target.name for target in session.plan.targets if id(target.module) in trained],
        "another QuantizationAwareTraining of this Trainer trains these modules",
        remedy="give each callback modules of its own (`module`, `targets`, `ignore`), or one callback both schemes.",
    )


def _refuse_finetuning_callbacks(trainer: Trainer, train: str) -> None:
    """Refuse Lightning's callbacks that freeze layers, where scales are trained.

    They look up each parameter of the optimizers in the module, and the scales are none of its parameters.
    """
    names = [type(callback).__name__ for callback in trainer.callbacks if class_of(callback, "BaseFinetuning")]
    refuse(
        names,
        f"train={train!r} puts scales into the optimizer, and this callback fails at parameters not of the module",
        remedy="train='weights', or freeze the layers yourself (requires_grad_(False)) and leave this callback out.",
    )


def _require_distillation(distillation: Distillation) -> None:
    """Refuse to train scales alone without a teacher's predictions to learn from."""
    if not distillation.is_on:
        raise CalibrationError(
            "train='scales' learns from the unquantized model",
            got="distill=0",
            expected="distill='only', or the weight of its term beside your loss",
        )


def _refuse_rounding(options: CalibrationOptions) -> None:
    """Refuse to train weights whose integers are chosen: the first step would round them to the nearest again."""
    if has_rounding(options.config):
        raise CalibrationError(
            "training the weights undoes their rounding",
            got="QuantizationAwareTraining(rounding=...)",
            remedy="train='scales'; or train without it, then calibrate the trained model with "
            "CalibrationCallback(rounding='gptq').",
        )


def _refuse_quantized_inputs(options: CalibrationOptions) -> None:
    """Refuse a rounding that runs the model block by block, which a training does not do at its start."""
    if rounds_on_quantized_inputs(options.config):
        raise CalibrationError(
            "a training starts from weights that are rounded by inputs in full precision",
            got="QuantizationAwareTraining(rounding=...) on quantized inputs",
            remedy="rounding='gptq'.",
        )


class _ChangesOfFit(ExitStack):
    """Changes of the LightningModule while fit runs: its wrapped ``training_step``, its frozen weights.

    `QuantizationAwareTraining` holds one, makes the changes in ``on_fit_start`` and ``on_train_start``, and adds here
    how to undo each.
    """

    def stop(self) -> None:
        """Undo the changes; called when the run ends, however it ends."""
        self.close()
