"""Calibrate in Lightning's validation loop.

Lightning already runs the user's data through the user's model; this callback only watches, through a
:class:`~lightning_obs.CalibrationSession`. Start reading at its hooks: each calls parts that the callback holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import Unpack, override

from lightning_obs.calibration.options import CalibrationOptions, OptionKeywords, takes_keywords_of
from lightning_obs.calibration.saved_state import changed_options
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.auto_observers import AutoObservers, split_candidates
from lightning_obs.callbacks.destinations import ExportTo
from lightning_obs.callbacks.lightning_package import TrainerFn, class_of, ends_a_trial
from lightning_obs.callbacks.observed_batches import ObservedBatches, ValidationSchedule
from lightning_obs.callbacks.quantized_metrics import QuantizedMetrics
from lightning_obs.callbacks.results import Results
from lightning_obs.callbacks.session_callback import (
    PartOfRun,
    SessionCallback,
    make_export_at_end,
    restore_outside_of_fit,
    stop_all,
)
from lightning_obs.callbacks.strategies import collectives_of
from lightning_obs.callbacks.trainer_session import TrainerSession
from lightning_obs.choice.observer_choice import Candidates, ObserverChoice
from lightning_obs.errors import name_list, refuse, refuse_unknown, require_bool, warn
from lightning_obs.files.sealed import sealed
from lightning_obs.report.predictions import Moved
from lightning_obs.schemes.config import SchemeLike

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class CalibrationCallback(SessionCallback):
    """Observe weights and activations during validation and write quantization parameters at the epoch's end.

    Works in ``trainer.validate`` and in the validation of ``trainer.fit``, where each validation calibrates again and
    the last calibration is kept. Outputs, metrics, ``state_dict`` and the forward of the model do not change.
    Afterwards: ``callback.result``, ``callback.export(folder)``, ``quantized(model)``.

    Args:
        scheme (str | dict | QuantizationConfig | CalibrationOptions | None): preset name (``"FP8"``, ``"INT8_STATIC"``,
            ``"W4A16"``...), a config as a dict or object, or complete options, whose fields the arguments below then
            replace. None with ``kv_cache``, for the cache alone. No default.
        evaluate (bool | float): run each validation, and each ``trainer.test`` of a calibrated model, a second time
            through the quantized model. The metrics that ``validation_step`` and ``on_validation_epoch_end`` log for
            the epoch are logged again as ``<name>_quantized`` (``<name>_quantized/<scheme>`` where several callbacks
            evaluate), in time for ``ModelCheckpoint(monitor="val_loss_quantized")`` and ``EarlyStopping``. A model
            whose output has ``logits`` also gets ``quant/divergence``, the mean Kullback-Leibler divergence from the
            unquantized model's predictions [nats], and ``quant/agreement``, the share of positions with the same most
            likely class (``callback.moved``). A number in (0, 1): run that share of each loader's batches. Batches and
            logits are kept on the CPU for it, up to 2 GiB of each on each rank. Each pass has its own metrics, tensors,
            numbers, lists, dicts and records of these; both share all other objects. Default: False.
        every_n_epochs (int): in fit, calibrate in the validations of every n-th epoch only (of epochs n, 2n, ...). With
            ``evaluate`` also in the first one; the validations between measure with the latest scales. Default: 1.
        max_batches (int | None): observe at most this many batches of a validation, on each rank; None: all.
            Default: None.
        dataloaders (int | str | Sequence[int | str] | None): the validation loaders to observe, by number, or by key
            where they are a dict; None: all. Default: None.
        show (bool): print the layers that lose most at the end of ``trainer.validate``. Default: True.
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
        sanity_check (bool): also calibrate in fit's sanity check (its few batches). False: nothing is observed there,
            and a warning names layers that its batches do not call. Default: False.
        token_mask (str | Callable | None): where to find, in a batch, which tokens count: a key (``"attention_mask"``)
            or a function of the batch. A tensor ``(batch, tokens)``, nonzero for tokens that count; the others
            (padding) reach no observer. Default: None, all tokens count.
        log (bool | None): give the Trainer's loggers ``quant/sqnr_min``, ``quant/clipped_max`` and the other numbers of
            docs/guide/quantized_metric.md, and the table of all layers, once per calibration; no data are run for them.
            Default: None, if there are loggers.
        targets (str | Sequence[str] | None): the modules to quantize where the scheme does not say. Default: None,
            every Linear.
        ignore (str | Sequence[str]): modules to leave alone: names, class names, ``re:`` patterns. Names are relative
            to the calibrated module. Default: (), none.
        observers (str | dict | None): observer per base name (weight, input, output; q, k, v):
            ``{"input": "minmax", "weight": {"name": ..., <hyperparameter>: ...}}``. ``"auto"`` chooses them in the
            first validation (:func:`~lightning_obs.choose_observers`; ``callback.choice`` has the scores);
            ``{"weight": ["imatrix_mse", {"name": "hessian", "rounding": "gptq"}]}`` chooses from your own list. Both
            work on one device, for models with logits; the model's arguments are kept and run again. Default: None,
            the scheme's observers; else ``memoryless_minmax`` for weights and ``minmax`` for the rest.
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
        rounding (str | dict | None): ``"gptq"``: after the scales of weights, choose integers that are not the nearest
            ones, so that the outputs change least; or ``{"name": "gptq", "act_order": ..., "damping": ...}``. It needs
            data. With ``"inputs": "quantized"`` each weight is rounded by the inputs that the quantized modules before
            it give: the model's calls are kept on the CPU, up to 2 GiB on each rank, and run again at the epoch's end,
            block by block; ``"correction"`` (0.5) is the share of what the inputs differ by that the rounding makes
            up for, and ``"random_tokens"`` (0) the share of each batch's tokens that random ones replace in a second
            run. Default: None, as the scheme says; else the nearest integers.
        recipe (str | dict | None): observers and rounding under one word: ``"accurate"``, the least loss, which needs
            data and memory for products of inputs; ``"fast"``, which chooses weights without data. What ``observers``
            and ``rounding`` name comes before it; what the model cannot run is left out, with a warning: before any
            data, or, of a rounding on quantized inputs, perhaps at their end. Default: None, as the scheme says.

    Raises:
        CalibrationError: by the constructor for a wrong option; before the first batch for targets, shapes or devices;
            at a batch without its token mask; at the end of a validation for values that are not finite and, in
            ``trainer.validate``, for layers that no data reached. In a fit such layers stay in float, with a warning
            (in the sanity check already, where it shows them): they do not end the training.
    """

    @takes_keywords_of(CalibrationOptions)
    def __init__(
        self,
        scheme: SchemeLike | CalibrationOptions | None,
        *,
        evaluate: bool | float = False,
        every_n_epochs: int = 1,
        max_batches: int | None = None,
        dataloaders: int | str | Sequence[int | str] | None = None,
        show: bool = True,
        module: str | None = None,
        export_to: ExportTo = None,
        export_overwrite: bool = False,
        sanity_check: bool = False,
        token_mask: str | Callable[[Any], torch.Tensor] | None = None,
        log: bool | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        # The decorator shows the fields of CalibrationOptions in the signature, in place of ``**options``. A keyword
        # among ``options`` that is no such field is unknown; the error suggests the nearest of all keywords of this
        # class, a subclass's own included.
        refuse_unknown(options, CalibrationOptions.names(type(self)))
        candidates: Candidates | None = None
        if "observers" in options:
            options["observers"], candidates = split_candidates(options["observers"])
        require_bool(show=show)
        export_at_end = make_export_at_end(export_to, export_overwrite)
        calibration_options = CalibrationOptions.of(scheme, **options)
        if export_at_end is not None:
            calibration_options = export_at_end.options_for(calibration_options)
        trainer_session = TrainerSession(module)
        self.batches = ObservedBatches(token_mask, max_batches, dataloaders)
        evaluates = evaluate != 0  # False is 0
        self.schedule = ValidationSchedule(every_n_epochs, sanity_check, starts_at_once=evaluates)
        parts_of_run: list[PartOfRun] = [self.batches, self.schedule]
        #: the second pass of each validation and test; None without ``evaluate``
        self.quantized_metrics: QuantizedMetrics | None = None
        if evaluates:
            self.quantized_metrics = QuantizedMetrics(evaluate)
            parts_of_run.append(self.quantized_metrics)
        #: chooses the observers; None: the options name them
        self.auto: AutoObservers | None = None
        if candidates is not None:
            self.auto = AutoObservers(calibration_options, candidates, is_masked=token_mask is not None)
            parts_of_run.append(self.auto)
        self.show = show
        results = Results(
            trainer_session,
            calibration_options.label,
            log,
            quantized_metrics=self.quantized_metrics,
            auto=self.auto,
            token_mask=token_mask,
        )
        super().__init__(calibration_options, trainer_session, results, export_at_end, parts_of_run)

    @property
    def choice(self) -> ObserverChoice | None:
        """The scores of a choice of observers (``observers="auto"`` or lists of candidates).

        None if this run has chosen nothing: the options name all observers, or an earlier run has chosen.
        """
        return None if self.auto is None else self.auto.choice

    @property
    def moved(self) -> Moved | None:
        """How far the last validation's quantized predictions are from the unquantized ones; None: not measured."""
        return None if self.quantized_metrics is None else self.quantized_metrics.moved

    @property
    def metrics(self) -> dict[str, tuple[float | None, float | None]]:
        """By name, each metric of the last validation, in float and in its second, quantized pass."""
        return self.results.metrics

    # ------------------------------------------------------------------ before the first batch

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse, before the first batch, an ``export_to`` or ``evaluate`` that would fail in the end.

        Where several callbacks of the Trainer evaluate, the scheme also becomes a part of the metrics' names.
        """
        super().setup(trainer, pl_module, stage)
        if self.quantized_metrics is None:
            return
        self.quantized_metrics.require_possible(trainer, pl_module)
        evaluating = 0
        for callback in trainer.callbacks:
            if isinstance(callback, CalibrationCallback) and callback.quantized_metrics is not None:
                evaluating += 1
        self.quantized_metrics.scheme_in_names = self.label if evaluating > 1 else ""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a wrong configuration before hours of training, and restore the calibration of a resumed run.

        A Trainer that will not validate, so that nothing will be calibrated, gets a warning.
        """
        earlier = takewhile(lambda callback: callback is not self, trainer.callbacks)
        refuse(
            [type(callback).__name__ for callback in earlier if class_of(callback, "WeightAveraging")],
            "weight averaging is listed before the calibration, so it takes the averaged weights out of the model "
            "before they are observed",
            remedy="list the calibration first: callbacks=[calibration, averaging].",
        )
        session = self.prepare(trainer, pl_module)
        if self.auto is not None:
            self.auto.require_possible(session)
        if not trainer.enable_validation and not session.has_written:
            warn(
                f"{self.label}: this Trainer will not validate, so nothing will be calibrated. Give fit a validation "
                "loader, the LightningModule a validation_step, and leave limit_val_batches above 0."
            )

    # ------------------------------------------------------------------ a validation

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the observers if this validation calibrates; with ``evaluate``, prepare the second pass.

        Before that, in ``trainer.validate(ckpt_path=...)``, the callback's state is read from the checkpoint if
        Lightning does not restore it there. If the validation does not calibrate and is a sanity check, the layers that
        its batches call are recorded. Nothing more happens if there is no session yet and none is due. With
        ``observers="auto"`` the first validation that calibrates also begins to keep the model's inputs for the choice.
        """
        restore_outside_of_fit(self, trainer)
        is_due = self.schedule.is_due(trainer, self.trainer_session.has_calibrated)
        session = self.prepare(trainer, pl_module) if is_due else self.session
        if session is None:
            return
        if not is_due:
            self.schedule.watch(trainer, session)  # does nothing unless this is a sanity check
        is_measured = not trainer.sanity_checking and (is_due or session.has_written)
        if self.quantized_metrics is not None and is_measured:
            self.quantized_metrics.start(trainer, pl_module, session)
        if is_due:
            self.batches.start(trainer, session)
            if self.auto is not None:
                self.auto.start(session)

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the batch for the second pass; observe it if the session is attached (in a test it is not).

        The first call of the model is kept as an example for files that are traced.
        """
        if self.quantized_metrics is not None:
            self.quantized_metrics.keep_batch(batch, batch_idx, dataloader_idx)
        self.batches.begin_batch(trainer, self.session, batch, batch_idx, dataloader_idx)
        self.results.first_call.watch(self.session)

    on_test_batch_start = on_validation_batch_start

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute and write the quantization parameters; run the second pass and log its metrics.

        With ``observers="auto"`` the first such validation chooses the observers before that. In a fit, a validation
        that lacks data computes no parameters; if no earlier validation has either, the second pass is given up, since
        there is nothing to measure. In a test, where nothing is observed, only the second pass runs. ModelCheckpoint,
        which runs later, saves the parameters and can monitor the metrics.
        """
        if self.session is not None and self.session.is_attached:
            if self.auto is not None and self.auto.is_keeping:
                # The choice runs the model, so it needs the Trainer's autocast. The finalization runs no forward, or
                # repeats calls with the autocast that each of them had.
                with trainer.precision_plugin.val_step_context():
                    self.trainer_session.session = self.auto.choose(self.session)
                self.options = self.auto.options
            if self.trainer_session.finalize():
                is_printed = self.show and trainer.state.fn == TrainerFn.VALIDATING
                self.results.show_calibration(trainer, pl_module, is_printed)
            elif self.quantized_metrics is not None and not self.trainer_session.has_calibrated:
                self.quantized_metrics.stop()
        if self.quantized_metrics is not None:
            self.quantized_metrics.measure(trainer, pl_module, self.trainer_session, self.results.log_prefix)

    on_test_epoch_end = on_validation_epoch_end

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove all hooks from the model, and keep the metrics that the validation has logged.

        After a sanity check that did not calibrate, layers that were not called get a warning. A file that
        ``export_to`` is to trace and for which no batch has given an example is an error here.
        """
        self.results.keep_metrics(trainer)
        if self.export_at_end is not None:
            self.export_at_end.require_example(trainer, self.results)
        self.schedule.warn_of_uncalled(trainer)
        stop_all(self.parts_of_run)

    # ------------------------------------------------------------------ a test, and the end

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the calibration of ``test(ckpt_path=...)``; with ``evaluate``, prepare the second pass.

        If nothing was calibrated, ``evaluate`` has nothing to measure, and there is a warning.
        """
        super().on_test_start(trainer, pl_module)
        if self.quantized_metrics is None:
            return
        if self.session is None or not self.session.has_written:
            warn(f"{self.label}: nothing was calibrated, so evaluate has nothing to measure in this test.")
            return
        self.session.begin_run(collectives_of(trainer), is_fitting=False)
        self.quantized_metrics.start(trainer, pl_module, self.session)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove all hooks from the model, write ``export_to``, and warn if the run has calibrated nothing.

        Lightning calls this when a run has ended without an error.
        """
        super().teardown(trainer, pl_module, stage)
        has_state = self.trainer_session.saved_state is not None or self.trainer_session.has_calibrated
        if has_state or ends_a_trial():
            return
        reason = "no validation batches were run"
        if self.session is not None and self.session.observation.coverage.lacks_data:
            reason = "no validation batch has called the modules to quantize"
        if stage == TrainerFn.VALIDATING:
            warn(f"{self.label}: the validation has ended and nothing was calibrated: {reason}.")
        if stage == TrainerFn.FITTING and trainer.enable_validation and not trainer.fast_dev_run:
            every = self.schedule.every_n_epochs
            epochs = f" in an epoch that {every} divides" if every > 1 else ""
            warn(f"{self.label}: the fit has ended and nothing was calibrated: {reason}{epochs}.")

    # ------------------------------------------------------------------ state

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the quantization parameters and the chosen observers; an empty dict before anything was calibrated.

        Lightning calls this when it saves a checkpoint. A loaded state that no session has taken yet is returned as it
        is. The values are tensors, strings and numbers, so that ``weights_only`` loading works. The state holds its own
        checksum (``sealed``); with the entries of a choice, the session's checksum is replaced by one that covers them.
        On several ranks every rank must call this, as Lightning does.
        """
        if self.trainer_session.saved_state is not None:
            return self.trainer_session.saved_state
        if self.session is None:
            return {}
        state = self.session.state_dict()
        if not state["qparams"]:
            return {}
        choice = {} if self.auto is None else self.auto.state_dict()
        return sealed({**state, **choice}) if choice else state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the saved quantization parameters until the model is on its device; load the observers chosen for them.

        Lightning calls this when it restores the callback from a checkpoint.
        """
        super().load_state_dict(state_dict)
        if self.auto is not None:
            self.auto.load_state_dict(state_dict)
            self.options = self.auto.options

    @override
    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> CalibrationSession:
        """Check the options against the model, restore a loaded state, and return the session that the hooks use.

        Called by the hooks when a run or a validation that calibrates starts, and by the command line.

        A scheme that needs no data (``session.needs_data`` is False) can be applied with it at once:
        ``with callback.prepare(trainer, module): pass``. A loaded calibration of other options is dropped where this
        run calibrates again.

        Args:
            trainer: runs the model now, or will.
            pl_module: holds the module to calibrate.

        Raises:
            CalibrationError: the module cannot be found, or options or state do not fit the model or the Trainer.
        """
        session = super().prepare(trainer, pl_module)
        state = self.trainer_session.take_state()
        if state is None:
            return session
        changes = changed_options(state, session.plan.config)
        if changes and _calibrates(trainer):
            rank_zero_info(
                f"{self.label}: the checkpoint was calibrated with other options ({name_list(changes)}); "
                "its calibration is dropped, this run calibrates again"
            )
        else:
            session.load_state_dict(state)
        return session


def _calibrates(trainer: Trainer) -> bool:
    """Whether the present run validates, and so calibrates again; asked in :meth:`.prepare` about a loaded state."""
    if trainer.state.fn == TrainerFn.FITTING:
        return bool(trainer.enable_validation)
    return bool(trainer.state.fn == TrainerFn.VALIDATING)
