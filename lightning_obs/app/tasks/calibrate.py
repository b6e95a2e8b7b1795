"""Calibrate: measure, calibrate, measure again, export, load the checkpoint in a new process, report.

The other tasks that calibrate add a step: a choice before the calibration, or training after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig
from typing_extensions import override

from lightning_obs.app.checkpoint import write_checkpoint
from lightning_obs.app.console import bytes_done, say, step
from lightning_obs.app.duration import say_duration
from lightning_obs.app.file_export import FileExport
from lightning_obs.app.from_config import make_options, make_trainer
from lightning_obs.app.job import Job
from lightning_obs.app.quality import Quality, QualityMeter
from lightning_obs.app.run_report import gather_report, publish_report, quality_facts
from lightning_obs.app.step_commands import StepCommands
from lightning_obs.app.tasks.task import Task
from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.calibration.token_mask import find_mask
from lightning_obs.callbacks.calibration import CalibrationCallback
from lightning_obs.callbacks.session_callback import SessionCallback
from lightning_obs.callbacks.trainer_session import describe
from lightning_obs.choice.smoothing import require_quantized_inputs, smooth_inputs
from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.histogram import Support
from lightning_obs.report.earlier_run import read_earlier
from lightning_obs.report.layer_errors import LayerError


def refuse_several_devices(trainer: Trainer, what: str, remedy: str) -> None:
    """Raise a CalibrationError if the Trainer has several devices; called for steps that run on one device.

    Args:
        trainer: the Trainer of the run.
        what: the words of the command that ask for the step.
        remedy: the way to run it.
    """
    if trainer.world_size > 1:
        raise CalibrationError(f"{what} runs on one device", got=f"{trainer.world_size} devices", remedy=remedy)


#: with ``smooth=true``, forward passes to find the modules that can divide channels (two, and about four of repeated
#: layers), and two whose outputs are compared
_PASSES_OF_TRIALS = 8


class Calibrate(Task):
    """``task=calibrate``: find the ranges in one pass over the data; no weight changes.

    A subclass that adds a step overrides :meth:`choose` or :meth:`train`, which :meth:`run` calls, and the methods that
    tell about the step: what it refuses (:meth:`check_task`), how long it takes (:meth:`passes`), its part of the
    report (:meth:`report_facts`, :meth:`closing_lines`, :meth:`label`).

    Attributes:
        job: model, data, callback and Trainers.
        file_export: writes ``export.file``; None: the config sets no such file.
        meter: measures the quality on held-out data; None if ``evaluate`` is off.
        original: the quality in full precision; None: not measured.
        quantized: the quality of the exported model; None: not measured.
        result: the result of the calibration; None: not yet calibrated.
        layer_errors: the error of each layer, worst first; empty: not measured.
        input_counts: by module name, how often each input value occurred: in the calibration if the input's observer
            counts values (``histogram``...), else in the batches of the layer errors; empty: no layer was measured.
        smoothing_lines: a line about inputs that were smoothed, for the closing report; empty without ``smooth=true``.
        export_lines: lines about the checkpoint or file, for the closing report.
        report_row: the report's numbers for a table that compares runs; empty on ranks that write no report.
    """

    #: whether a report may propose to train the result
    may_train = True

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.job = Job(config)
        self.file_export: FileExport | None = None
        self.meter: QualityMeter | None = None
        self.original: Quality | None = None
        self.quantized: Quality | None = None
        self.result: CalibrationResult | None = None
        self.layer_errors: Sequence[LayerError] = ()
        self.input_counts: dict[str, Support] = {}
        self.smoothing_lines: list[str] = []
        self.export_lines: list[str] = []
        self.report_row: Mapping[str, Any] = {}

    # ------------------------------------------------------------------ what every task has

    @override
    def check(self) -> None:
        """Load model and data, print which module is calibrated, and refuse configs that would fail later.

        ``main.run`` calls it before :meth:`run`. It refuses an earlier report (``against``) that cannot be read, a
        scheme that does not fit the model, devices or a precision that do not work, data that are too few, batches
        without the mask that ``token_mask`` names, and a file that cannot be written.
        """
        job = self.job
        if self.config.against is not None:
            read_earlier(self.config.against)  # what cannot be read is refused before anything is loaded
        job.use(self.make_callback(make_options(self.config)))
        if job.file is not None:
            self.file_export = FileExport(self.config)
            self.file_export.check_path()
        job.load()
        if self.config.evaluate:
            self.meter = QualityMeter(job.module, job.model, job.data, make_trainer(self.config))
        if self.config.token_mask is not None:
            first_batch = next(iter(job.data.val_dataloader()))
            find_mask(first_batch, self.config.token_mask)  # raises if the batch has no such mask
        if self.config.smooth:
            require_quantized_inputs(job.callback.options)
            refuse_several_devices(
                job.trainer, "smooth=true", "smooth with trainer.devices=1; a calibration takes few batches."
            )
        self.check_task()
        self.check_scheme()
        if self.file_export is not None:
            session = job.callback.session
            schemes = {} if session is None else session.plan.schemes  # a task that chooses schemes has no session yet
            self.file_export.check_model(job, schemes)

    @override
    def run(self) -> None:
        """Run the steps in their order: measure, choose, calibrate, train, measure again, export, report.

        ``main.run`` calls it on every rank, after :meth:`check`.
        """
        job = self.job
        session = job.callback.session
        needs_data = session is None or session.needs_data
        say_duration(job, self.passes(needs_data))
        if self.meter is not None:
            self.original = self.meter.original()
        if self.config.smooth:
            self.smooth()
        self.choose()
        self.result = self.calibrate()
        self.train()
        self.measure_layers()
        if self.meter is not None:
            self.quantized = self.meter.quantized("quantized")
        if job.folder is not None:
            self.export_lines = write_checkpoint(job, job.folder, self.result)
            self.after_export(job.folder)
        if self.file_export is not None:
            self.export_lines += self.file_export.write(job)
        if job.trainer.is_global_zero:
            self.report()

    @override
    def row(self) -> dict[str, Any]:
        """The numbers of the report, under the label of the result.

        ``main.run`` calls it for the row that a ``--multirun`` compares, and :meth:`report` for ``report.json``.
        """
        return {**self.report_row, "run": self.label()}

    # ------------------------------------------------------------------ what a task may override

    def make_callback(self, options: CalibrationOptions) -> SessionCallback:
        """The callback that calibrates with these options. It shows nothing: the run's own report shows more.

        Called by :meth:`check`, and by :meth:`choose` of a subclass for the options that it chose.
        """
        config = self.config
        return CalibrationCallback(options, show=False, module=config.module, token_mask=config.token_mask)

    def check_task(self) -> None:
        """Refuse configs that this task in particular cannot run; here: none.

        :meth:`check` calls it once model and data are loaded.
        """

    def check_scheme(self) -> None:
        """Check the scheme against the model, and print which module is calibrated; :meth:`check` calls it."""
        job = self.job
        session = job.callback.prepare(job.trainer, job.module)  # the run uses it again, since the model is the same
        say(f"· {describe(job.module, self.config.module, session)}")

    def choose(self) -> None:
        """Choose schemes or observers, and give the job a callback that calibrates with them; here: nothing.

        :meth:`run` calls it before the calibration.
        """

    def train(self) -> None:
        """Train the calibrated model; here: nothing. :meth:`run` calls it after the calibration."""

    def after_export(self, folder: Path) -> None:
        """Measure the checkpoint in ``folder``; here: nothing. :meth:`run` calls it on every rank after the export."""

    def passes(self, needs_data: bool) -> int:
        """Estimate how many batches the whole run forwards; :meth:`run` prints the duration by it before it starts.

        Args:
            needs_data: whether the calibration runs any batch.
        """
        passes = 2 * self.batches_of_a_measurement() + int(self.config.report.layer_error_batches)
        if needs_data:
            passes += self.job.batches("batches")
        if self.config.smooth:
            passes += self.job.batches("batches") + _PASSES_OF_TRIALS
        return passes

    def label(self) -> str:
        """Return the name of the result: its scheme and the step that the task has added.

        :meth:`report` calls it for the title of the page, and :meth:`row` for a comparison. Parts of a recipe that were
        left out are not in the name.
        """
        assert self.result is not None  # the model was calibrated
        return self.result.scheme

    def report_facts(self) -> dict[str, Any]:
        """Return the task's facts for the report, by the names of the fields of ``Report``; :meth:`report` calls it."""
        return {
            **quality_facts(self.original, self.quantized),
            "errors": self.layer_errors,
            "counts": self.input_counts,
        }

    def closing_lines(self) -> list[str]:
        """Return the task's lines for the closing report, behind those of the export; :meth:`report` calls it."""
        return []

    # ------------------------------------------------------------------ steps

    def smooth(self) -> None:
        """Move outliers of inputs into weights, by the calibration data, and say how many inputs were smoothed.

        :meth:`run` calls it after the measurement in full precision, with ``smooth=true``.
        """
        job = self.job
        job.to_device()
        mask_name = self.config.token_mask
        inputs = []
        masks: dict[int, torch.Tensor] = {}  # by the id of the inputs, which may lack the mask
        for batch in job.data.val_dataloader():
            inputs_of_batch = job.inputs(batch)
            inputs.append(inputs_of_batch)
            if mask_name is not None:
                masks[id(inputs_of_batch)] = find_mask(batch, mask_name)

        def mask_of(inputs_of_batch: Any) -> torch.Tensor:
            return masks[id(inputs_of_batch)]

        token_mask = None if mask_name is None else mask_of
        with step("smoothing inputs"):
            smoothed = smooth_inputs(job.model, inputs, job.callback.options, token_mask=token_mask)
        before = sum(entry.error_before for entry in smoothed)
        after = sum(entry.error_after for entry in smoothed)
        if smoothed:
            change = f"errors of their outputs {after / before - 1:+.1%}, as estimated"
            self.smoothing_lines = [f"smooth: outliers of {len(smoothed)} inputs moved into weights; {change}"]

    def calibrate(self) -> CalibrationResult:
        """Calibrate in Lightning's validation loop; no batch is run if neither scheme nor observers need data.

        :meth:`run` calls it after :meth:`choose`. Without data, the callback's session is entered and left at once:
        when the ``with`` block ends, the session chooses the ranges of the weights, and has the result.

        Returns:
            The result of the job's callback.
        """
        job = self.job
        label = job.callback.label
        say(f"· calibrating {label}")
        session = job.callback.prepare(job.trainer, job.module)
        with bytes_done("searching the weights", at_once=False) as progress:
            session.show_progress(progress)
            if session.needs_data:
                job.trainer.validate(job.module, datamodule=job.data, verbose=False)
            else:
                say(f"{label} needs no data: no batch is run to calibrate it")
                say("(data are for static activations, as in int8_static, fp8, nvfp4; imatrix_mse; rounding=gptq)")
                job.to_device()
                with session:
                    pass  # nothing to observe; the end of the block calibrates
        session.show_progress(None)
        result = job.callback.result
        assert result is not None  # a calibration without a result has raised
        return result

    def measure_layers(self) -> None:
        """Measure each layer's error on ``report.layer_error_batches`` held-out batches, and count the input values.

        :meth:`run` calls it on every rank after the training; with 0 batches nothing is measured or counted. The
        callback fills ``input_counts``. If the observer of an input has counted its values in the calibration
        (``histogram``...), these counts are taken; else the values are counted in the held-out batches.
        """
        batches = self.config.report.layer_error_batches
        if batches < 1:
            return
        held_out = self.job.first_inputs(self.job.data.test_dataloader(), batches)
        with step("measuring each layer's error"):
            self.layer_errors = self.job.callback.layer_errors(held_out, self.input_counts)

    def report(self) -> None:
        """Write the page and print the closing report; :meth:`run` calls it on rank 0, last."""
        has_logits = self.quantized is not None and self.quantized.moved is not None
        commands = StepCommands(self.job, has_logits, self.may_train)
        lines = [*self.smoothing_lines, *self.export_lines, *self.closing_lines()]
        report = gather_report(self.job, self.label(), self.report_facts(), lines, commands)
        self.report_row = report.row
        publish_report(self.job, report, self.row(), commands)

    def batches_of_a_measurement(self) -> int:
        """Return the batches that one measurement of the quality takes, for :meth:`passes`; 0 without ``evaluate``."""
        return self.job.batches("eval_batches") if self.config.evaluate else 0
