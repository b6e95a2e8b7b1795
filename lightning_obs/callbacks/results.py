"""The results of a callback's runs: a checkpoint, layer errors, a report, metrics of its validations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.auto_observers import AutoObservers
from lightning_obs.callbacks.deep_copies import DeepCopies
from lightning_obs.callbacks.logged_results import log_layers, log_number
from lightning_obs.callbacks.observed_batches import FirstCall
from lightning_obs.callbacks.possible_steps import can_choose_observers, takes_options
from lightning_obs.callbacks.quantized_metrics import QuantizedMetrics
from lightning_obs.callbacks.quantized_validation import quantized_name
from lightning_obs.callbacks.trainable import can_train
from lightning_obs.callbacks.trainer_session import TrainerSession, require_forward
from lightning_obs.checkpoint.export import export_checkpoint
from lightning_obs.choice.smoothing import can_smooth
from lightning_obs.errors import refuse_unknown, require_bool
from lightning_obs.gguf.gguf_file import export_gguf
from lightning_obs.model.weight import in_shards, reshard
from lightning_obs.numerics.histogram import Support
from lightning_obs.report.facts import Report, aggregates, fact_names, known_facts
from lightning_obs.report.layer_errors import LayerError, known_layer_errors, measure_layer_errors
from lightning_obs.report.metrics import ScaleDrift
from lightning_obs.report.page import write_report
from lightning_obs.report.step import Step
from lightning_obs.report.summary import layer_table, print_report

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

#: layers in the table that ``trainer.validate`` prints
_LAYERS_SHOWN = 5


class Results:
    """Writes, reports and logs the results of a callback, from its session and from what its runs have measured.

    Each callback holds one, and its public methods (``export``, ``report``, ``layer_errors``...) call the methods
    of the same names here. The callback sets ``log_prefix``, ``checkpoint_folder``, ``files`` and ``was_trained`` once
    they are known. A library may deep-copy a callback and run the copy (neuralforecast does). The
    original's results are then the copy's.

    Args:
        trainer_session: holds the session.
        label: the label of the callback's scheme; the report's title where observers are chosen.
        log: whether the Trainer's loggers get the results; None: if there are loggers.
        quantized_metrics: measures the quantized model in a second pass; None: there is no second pass.
        auto: chooses observers; None: the options name them.
        token_mask: the callback's option of this name; None: all tokens count.
        require_exportable: raises a :class:`CalibrationError` if the calibration cannot be exported yet; called before
            each export. Given by a callback that trains the model; None: the callback only calibrates.

    Raises:
        CalibrationError: ``log`` is neither a bool nor None.
    """

    def __init__(
        self,
        trainer_session: TrainerSession,
        label: str,
        log: bool | None,
        *,
        quantized_metrics: QuantizedMetrics | None = None,
        auto: AutoObservers | None = None,
        token_mask: str | Callable[[Any], torch.Tensor] | None = None,
        require_exportable: Callable[[], None] | None = None,
    ) -> None:
        if log is not None:
            require_bool(log=log)
        self.trainer_session = trainer_session
        #: begins the names of logged numbers; with a scheme in it where a Trainer has several callbacks
        self.log_prefix = "quant"
        self.drift = ScaleDrift()  # how far the scales move, calibration by calibration
        self.checkpoint_folder: Path | None = None  # where a checkpoint is written when a run ends; None: nowhere
        self.files: Sequence[Path] = ()  # files of other formats that are written when a run ends
        self.was_trained = False  # whether a fit has trained the model through the quantization
        #: an example for files that are traced: the arguments of the model's first call in a validation or test. The
        #: callback's ``on_validation_batch_start`` lets it watch for that call
        self.first_call = FirstCall()
        self._label = label
        self._log = log
        self._quantized_metrics = quantized_metrics
        self._auto = auto
        self._token_mask = token_mask
        self._require_exportable = require_exportable
        #: the metrics that each validation has logged, as tensors: their values are read when somebody asks
        self._validations: list[dict[str, Any]] = []
        self._copies: DeepCopies | None = None  # these results and their deep copies; None: there are no copies

    # ------------------------------------------------------------------ of this object or of a copy

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a deep copy or a pickle; from now on these results and the copy know each other.

        ``copy.deepcopy`` of the callback calls this, before the copy runs.
        """
        if self._copies is None:
            self._copies = DeepCopies()
            if self.session is not None:
                self._copies.register(self)
        return vars(self)

    @property
    def _source(self) -> Results:
        """The results to read: those of the deep copy that ran in place of this callback, or else this object.

        Asked by each export and report.
        """
        return self if self._copies is None else self._copies.with_results(self)

    @property
    def session(self) -> CalibrationSession | None:
        """The session of these results; None before one was prepared. `DeepCopies` reads it to find who has run."""
        return self.trainer_session.session

    @property
    def has_calibrated(self) -> bool:
        """Whether there are quantization parameters, computed or loaded.

        `DeepCopies` asks, to find the callback that ran.
        """
        return self.trainer_session.has_calibrated

    def register(self) -> None:
        """Tell deep copies of the callback that these results have a session now.

        The callback's ``prepare`` calls it when it has made a new session.
        """
        if self._copies is not None:
            self._copies.register(self)

    @property
    def result(self) -> CalibrationResult | None:
        """The result of the last calibration; None before it. The callback's ``result`` reads it."""
        session = self._source.session
        return None if session is None else session.result

    # ------------------------------------------------------------------ for users

    def export(self, folder: str | os.PathLike[str], tokenizer: Any = None, **options: Any) -> Path:
        """Write the calibrated module as a checkpoint; on several ranks, rank 0 writes.

        Called by the callback's ``export``, and at a run's end for a folder of ``export_to``. Under FSDP2 the last
        forward has left parameters whole; they are freed first, so that each rank has its shards again, which the
        export gathers one at a time. The writers of other files refuse sharded weights.

        Args:
            folder: written whole or not at all.
            tokenizer: saved in it; None: the LightningModule's ``tokenizer`` or ``processor``, if it has one.
            **options: ``overwrite``, ``max_shard_size`` and ``progress`` of :func:`~lightning_obs.export_checkpoint`.

        Raises:
            CalibrationError: nothing was calibrated yet, or the checkpoint cannot be written.
        """
        source = self._source
        session = source._exportable_session()
        pl_module = source.trainer_session.pl_module
        reshard(pl_module)
        if not _writes(session):
            return Path(folder)
        with session.in_force():
            return export_checkpoint(session.model, folder, tokenizer=tokenizer or _tokenizer_of(pl_module), **options)

    def export_traced(
        self, write: Callable[..., Path], file: str | os.PathLike[str], example: Any, **options: Any
    ) -> Path:
        """Write the calibrated module by a function that traces it; on several ranks, rank 0 writes.

        Called by the callback's ``export_onnx`` and ``export_program``, and at a run's end for such files of
        ``export_to``.

        Args:
            write: :func:`~lightning_obs.export_onnx`, :func:`.export_and_measure` (which also runs the ONNX file), or
                :func:`~lightning_obs.export_program`; called with the model, ``file``, an example, and ``options``.
            file: written whole or not at all.
            example: an example of the module's inputs; None: those of the first validation batch.
            **options: further arguments of ``write``.

        Raises:
            CalibrationError: nothing was calibrated yet, or the file cannot be written.
        """
        source = self._source
        session = source._exportable_session()
        if example is None:
            example = source.first_call.example(session.model, is_dynamic=options.get("dynamic_shapes") is not None)
        if not _writes(session):
            return Path(file)
        with session.in_force():
            return write(session.model, file, example, **options)

    def export_gguf(self, file: str | os.PathLike[str], base: str | os.PathLike[str], overwrite: bool) -> Path:
        """Write the calibrated module as a GGUF file; on several ranks, rank 0 writes.

        Called by the callback's ``export_gguf``, and at a run's end for such a file of ``export_to``.

        Args:
            file: path of the new file, written whole or not at all.
            base: a GGUF file of the same model in float, whose weights are replaced.
            overwrite: replace an existing ``file``.

        Raises:
            CalibrationError: nothing was calibrated yet, or the file cannot be written.
        """
        session = self._source._exportable_session()
        if not _writes(session):
            return Path(file)
        with session.in_force():
            return export_gguf(session.model, file, base, overwrite=overwrite)

    def _exportable_session(self) -> CalibrationSession:
        """The session whose calibration is exported; each export asks for it first.

        Raises:
            CalibrationError: nothing was calibrated yet, or the calibration cannot be exported yet.
        """
        if self._require_exportable is not None:
            self._require_exportable()
        return self.trainer_session.require_calibrated()

    def layer_errors(
        self,
        batches: Iterable[Mapping[str, Any] | torch.Tensor] | None = None,
        counts: dict[str, Support] | None = None,
    ) -> list[LayerError]:
        """Measure the error of each layer, the worst first; on several ranks every rank must call this.

        Called by the callback's ``layer_errors``, for a report, and without batches after each calibration that is
        logged or printed.

        Args:
            batches: arguments of the calibrated module to run it on; None: nothing is run, and there are the errors
                that are known without data.
            counts: filled with how often each input value was seen, by module name.

        Raises:
            CalibrationError: nothing was calibrated yet; ``batches`` for a module without ``forward``.
        """
        session = self._source.trainer_session.require_calibrated()
        if batches is not None:
            require_forward(session.model, "layer_errors(batches)")
        with session.in_force():
            if batches is None:
                errors = known_layer_errors(session.model, session.observation.input_counts, session.collectives)
            else:
                errors = measure_layer_errors(session.model, batches, collectives=session.collectives, counts=counts)
        if counts is not None:
            counts.update(session.observation.input_counts)
        return errors

    def report(
        self,
        folder: str | os.PathLike[str],
        batches: Iterable[Mapping[str, Any] | torch.Tensor] | None,
        facts: Mapping[str, Any],
    ) -> Path:
        """Write ``report.html``, ``report.json`` and ``layers.csv``; on several ranks every rank must call this.

        Called by the callback's ``report``.

        Args:
            folder: created if it does not exist; rank 0 writes.
            batches: as for :meth:`layer_errors`.
            facts: facts to add, or to replace, as :meth:`.Report.of` takes them.

        Returns:
            The path of the page.

        Raises:
            CalibrationError: nothing was calibrated yet.
        """
        refuse_unknown(facts, fact_names())
        session = self._source.trainer_session.require_calibrated()
        counts: dict[str, Support] = {}
        errors = self.layer_errors(batches, counts)
        if session.collectives.rank != 0:
            return Path(folder) / "report.html"
        measured = {"errors": errors, "counts": counts}
        return write_report(folder, self.facts(**{**measured, **facts}))

    def facts(self, **facts: Any) -> Report:
        """Gather the facts of the last calibration for the report.

        Called by :meth:`report`, and by the command line for the report of its run.

        Args:
            **facts: facts to add, or to replace, as :meth:`.Report.of` takes them.
        """
        source = self._source
        if source is not self:
            return source.facts(**facts)
        session = self.trainer_session.require_calibrated()
        gathered = known_facts(session)
        # of the session: without parts of a recipe that were left out; once observers are chosen it names no preset
        gathered["title"] = session.label if self._auto is None else self._label
        gathered["checkpoint"] = self.checkpoint_folder
        gathered["files"] = self.files
        gathered["drift"] = self.drift
        gathered["curves"] = self.curves
        gathered["metrics"] = self.metrics
        gathered["was_trained"] = self.was_trained
        gathered["token_mask"] = self._token_mask
        gathered["can_run"] = self.can_run
        if self._quantized_metrics is not None:
            gathered["moved"] = self._quantized_metrics.moved
            gathered["higher_is_better"] = self._quantized_metrics.higher_is_better
        if self._auto is not None and self._auto.choice is not None:
            gathered["scores"] = self._auto.choice.scores
            gathered["scored"] = self._auto.choice.lines
        return Report.of(**{**gathered, **facts})

    def can_run(self, step: Step) -> bool:
        """Whether a next step of the report can run on the calibrated model; no data are run to find out.

        The report asks it of each step that it may propose, by the fact ``can_run``. ``report/step.py`` explains the
        names of the steps.

        - A step that calibrates with other options ("leave_out", "token_scales", "rounding", "without_data") can run if
          these options fit the model.
        - "smooth", which changes the model before a new calibration, can run if there is one rank and the model has
          inputs to smooth (:func:`.can_smooth`).
        - A step that uses the model as it is, or makes a new run of its own, can always run.
        - In a callback that trains the model, no other step can run.
        - Metrics can be measured if no second pass measures them, and the last validation has logged some.
        - Observers can be chosen if the second pass has compared logits, no tokens are masked, and the options allow
          it.
        - Fine-tuning can run if the model can be trained (:func:`.can_train`).
        """
        session = self.trainer_session.require_calibrated()
        if step.name in ("leave_out", "token_scales", "rounding", "without_data"):
            return takes_options(session, step.changes)
        if step.name == "smooth":
            return session.collectives.size == 1 and can_smooth(session.model)
        if step.name in ("export", "serve", "load", "budget", "untrained"):
            return True
        if self._require_exportable is not None:  # the callback trains the model
            return False
        if step.name == "measure":
            return self._quantized_metrics is None and self._has_logged_metrics
        if step.name == "observers":
            has_logits = self._quantized_metrics is not None and self._quantized_metrics.moved is not None
            return has_logits and self._token_mask is None and can_choose_observers(session)
        return step.name == "fine_tune" and can_train(session, self.trainer_session.pl_module)

    # ------------------------------------------------------------------ at the end of a validation

    def logs(self, trainer: Trainer) -> bool:
        """Whether the Trainer's loggers get the results: the option ``log``; if it is None, whether there are loggers.

        Asked after each calibration, and when a fit that distills starts.
        """
        return bool(trainer.loggers) if self._log is None else self._log

    def log_calibration(
        self, trainer: Trainer, pl_module: LightningModule, errors: Sequence[LayerError] | None = None
    ) -> None:
        """Record the scales, and give a calibration's numbers and table of layers to the loggers.

        Called in ``on_validation_epoch_end``, by `CalibrationCallback` through :meth:`show_calibration`.

        Args:
            trainer: runs the validation.
            pl_module: logs the numbers.
            errors: the errors of the layers; None: they are measured here, without data.
        """
        session = self.trainer_session.require_calibrated()
        self.drift.add(trainer.global_step, session.qparams)
        if not self.logs(trainer):
            return
        if errors is None:
            errors = self.layer_errors()
        numbers = aggregates(session.result, errors) | self.drift.numbers()
        for name, value in numbers.items():
            log_number(pl_module, f"{self.log_prefix}/{name}", value)
        log_layers(trainer, self.log_prefix, session, errors)

    def show_calibration(self, trainer: Trainer, pl_module: LightningModule, is_printed: bool) -> None:
        """Log a calibration, and with ``is_printed`` print the layers with the largest errors.

        Called by `CalibrationCallback` in ``on_validation_epoch_end``, after it has calibrated.
        """
        errors = self.layer_errors() if is_printed or self.logs(trainer) else []
        self.log_calibration(trainer, pl_module, errors)
        if is_printed and errors and trainer.is_global_zero:
            print_report(layer_table(errors[:_LAYERS_SHOWN]))

    def keep_metrics(self, trainer: Trainer) -> None:
        """Keep the metrics that a validation has logged, except those under ``quant/``.

        Both callbacks call it in ``on_validation_end``; of a sanity check nothing is kept.
        """
        logged = {}
        for name, value in trainer.callback_metrics.items():
            if not name.startswith("quant/"):
                logged[name] = value.detach()
        if logged and not trainer.sanity_checking:
            self._validations.append({"step": trainer.global_step, **logged})

    @property
    def curves(self) -> list[dict[str, float]]:
        """For each validation, the values of its logged metrics and its ``step``; read when a report is written."""
        curves = []
        for logged in self._source._validations:
            curves.append({name: float(value) for name, value in logged.items()})
        return curves

    @property
    def metrics(self) -> dict[str, tuple[float | None, float | None]]:
        """By name, each metric of the last validation that has a value in the second, quantized pass too: both values.

        Read by `CalibrationCallback`'s ``metrics``, and when a report is written.
        """
        source = self._source
        if not source.curves:
            return {}
        scheme = "" if source._quantized_metrics is None else source._quantized_metrics.scheme_in_names
        last = source.curves[-1]
        pairs: dict[str, tuple[float | None, float | None]] = {}
        for name, value in last.items():
            twin = quantized_name(name, scheme)
            if twin in last:
                pairs[name] = (value, last[twin])
        return pairs

    @property
    def _has_logged_metrics(self) -> bool:
        """Whether the last validation has logged any metric; each entry of ``curves`` also has its ``step``."""
        return bool(self.curves) and len(self.curves[-1]) > 1


def _writes(session: CalibrationSession) -> bool:
    """Whether this rank takes part in an export: rank 0, and every rank where weights are sharded.

    Asked by each export; the other ranks return at once.

    For a checkpoint sharded weights are gathered by all ranks; the writers of other files refuse them on all ranks.
    """
    return session.collectives.rank == 0 or any(in_shards(module) for module in session.model.modules())


def _tokenizer_of(pl_module: LightningModule) -> Any:
    """The LightningModule's tokenizer or processor that can be saved; None if it has none."""
    for name in ("tokenizer", "processor"):
        tokenizer = getattr(pl_module, name, None)
        if hasattr(tokenizer, "save_pretrained"):
            return tokenizer
    return None
