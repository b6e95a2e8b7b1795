"""The base of both callbacks: a session of the Trainer's module, the saved state, and the results."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.destinations import ExportTo, destinations_of
from lightning_obs.callbacks.export_at_end import ExportAtEnd
from lightning_obs.callbacks.lightning_package import Callback, ends_a_trial
from lightning_obs.callbacks.measured_export import export_and_measure
from lightning_obs.callbacks.results import Results
from lightning_obs.callbacks.trainer_session import TrainerSession, describe, leave_in_place, state_in_checkpoint
from lightning_obs.errors import CalibrationError, require_bool
from lightning_obs.files.tensors import Progress
from lightning_obs.files.write import require_folder_name
from lightning_obs.numerics.histogram import Support
from lightning_obs.onnx.onnx_file import export_onnx
from lightning_obs.program.program_file import export_program
from lightning_obs.report.layer_errors import LayerError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class PartOfRun(Protocol):
    """A part of a callback that changes the model, or keeps data, while a run lasts.

    The callback makes its parts in its constructor, and stops them by :func:`stop_all`.
    """

    def stop(self) -> None:
        """Take hooks off the model and release kept data; nothing happens if there are none.

        Called when a run ends, however it ends, and at the end of a validation outside of fit (`CalibrationCallback`:
        of every validation).
        """
        ...


class SessionCallback(Callback):
    """A callback that calibrates through a :class:`~lightning_obs.CalibrationSession`.

    Base class of `CalibrationCallback` and `QuantizationAwareTraining`. The subclass decides when the session is
    attached and finalized, and restores its state.

    Attributes:
        options: the options of the calibration, checked when they were made.
        label: the label of the scheme; also a part of the key of this callback's state in checkpoints.
        trainer_session: makes and keeps the session.
        results: exports, reports, logs, and keeps what validations have logged.
        export_at_end: writes the destinations of ``export_to``; None: there are none.
        parts_of_run: the parts that are stopped when a run ends, however it ends.
    """

    #: Names the state in checkpoints: the states of two calibrations in one Trainer stay apart. Lightning has a
    #: property here; this attribute takes its place, so that an instance can have its own.
    state_key: str = ""

    def __init__(
        self,
        options: CalibrationOptions,
        trainer_session: TrainerSession,
        results: Results,
        export_at_end: ExportAtEnd | None,
        parts_of_run: Sequence[PartOfRun],
    ) -> None:
        self.options = options
        self.label = options.label
        self.state_key = str(self._generate_state_key(scheme=self.label, module=trainer_session.module_path))
        self.trainer_session = trainer_session
        self.results = results
        self.export_at_end = export_at_end
        if export_at_end is not None:
            results.checkpoint_folder = export_at_end.folder
            results.files = export_at_end.files
        self.parts_of_run: list[PartOfRun] = [trainer_session, results.first_call, *parts_of_run]

    # ------------------------------------------------------------------ results

    @property
    def session(self) -> CalibrationSession | None:
        """The session of the last run's model; None before the first run."""
        return self.trainer_session.session

    @property
    def result(self) -> CalibrationResult | None:
        """The result of the last calibration, by this callback or its deep copy; None before the first calibration."""
        return self.results.result

    def export(
        self,
        folder: str | os.PathLike[str],
        *,
        tokenizer: Any = None,
        overwrite: bool = False,
        max_shard_size: int | str = "50GB",
        progress: Progress | None = None,
    ) -> Path:
        """Write the calibrated module as a compressed-tensors checkpoint (:func:`~lightning_obs.export_checkpoint`).

        The checkpoint has this callback's scheme, even if another callback has calibrated the same model since. If a
        library has deep-copied this callback and run the copy (neuralforecast does), the copy's calibration is
        written; ``result``, ``layer_errors`` and ``report`` answer for the copy, too.

        On several ranks, rank 0 writes. Under DDP the others return at once; where weights are sharded (FSDP) every
        rank must call this, to gather them. Before another rank reads the folder, call
        ``trainer.strategy.barrier()``.

        Args:
            folder: written whole or not at all.
            tokenizer: saved in the folder; default: the LightningModule's ``tokenizer`` or ``processor``, if it has
                one.
            overwrite: replace a checkpoint that is in the folder.
            max_shard_size: the largest size of one file of weights, in bytes or as ``"5GB"``.
            progress: called with the name of each tensor written, the bytes written so far, and the bytes in all.

        Raises:
            CalibrationError: no validation has calibrated the model yet, or it was trained on since; ``folder`` cannot
                be written, is taken, or has the name of a file. In fine-tuning also: activations were not calibrated
                yet.
        """
        require_folder_name(folder)
        return self.results.export(
            folder, tokenizer, overwrite=overwrite, max_shard_size=max_shard_size, progress=progress
        )

    def export_onnx(
        self, file: str | os.PathLike[str], example: Any = None, *, measure: bool = True, **options: Any
    ) -> Path:
        """Write the calibrated module as an ONNX file (:func:`~lightning_obs.export_onnx`); rank 0 writes.

        If onnxruntime is installed, it runs the file, and a message says how much of it is computed with integers and
        how fast it is beside float (:func:`~lightning_obs.measure_onnx`).

        Args:
            file: path of the new file, which appears complete or not at all.
            example: inputs to trace the module with. None: those that the first validation batch called it with. If
                all its tensors have one size in their first dimension, that is one sample of them, or two where
                ``dynamic_shapes`` lets sizes vary; labels of a transformers model are left out.
            measure: run the file; it takes some seconds, and the memory of the model in float.
            **options: ``dynamic_shapes``, ``overwrite`` and the other options of the function.

        Raises:
            CalibrationError: as for :meth:`export`; there is no example; or no such file can hold the model.
        """
        require_bool(measure=measure)
        write = export_and_measure if measure else export_onnx
        return self.results.export_traced(write, file, example, **options)

    def export_program(self, file: str | os.PathLike[str], example: Any = None, **options: Any) -> Path:
        """Write the calibrated module as a program of torch.export (:func:`~lightning_obs.export_program`).

        Rank 0 writes.

        Args:
            file: path of the new file, which appears complete or not at all.
            example: inputs to trace the module with; None: as for :meth:`export_onnx`.
            **options: ``dynamic_shapes`` and ``overwrite`` of the function.

        Raises:
            CalibrationError: as for :meth:`export`; there is no example; or no such file can hold the model.
        """
        return self.results.export_traced(export_program, file, example, **options)

    def export_gguf(
        self, file: str | os.PathLike[str], base: str | os.PathLike[str], *, overwrite: bool = False
    ) -> Path:
        """Write the calibrated module as a GGUF file for llama.cpp (:func:`~lightning_obs.export_gguf`); rank 0 writes.

        Args:
            file: path of the new file, which appears complete or not at all.
            base: a GGUF file of the same model in float, whose weights are replaced.
            overwrite: replace an existing ``file``.

        Raises:
            CalibrationError: as for :meth:`export`; or no GGUF file can hold the model, or ``base`` is of another
                model.
        """
        return self.results.export_gguf(file, base, overwrite)

    def layer_errors(
        self,
        batches: Iterable[Mapping[str, Any] | torch.Tensor] | None = None,
        counts: dict[str, Support] | None = None,
    ) -> list[LayerError]:
        """Measure the error of each layer, the worst first; on several ranks every rank must call this.

        Args:
            batches: arguments of the calibrated module, as keyword arguments or one tensor: it is run on them,
                and the outputs of its layers compared. A few hundred tokens are enough. None: nothing is run. Then
                there are the errors of weights, and of inputs that an observer counted (``histogram``,
                ``percentile``).
            counts: filled with how often each input value was seen, by module name: in the calibration where the
                input's observer counts, else in ``batches``.

        Raises:
            CalibrationError: nothing was calibrated yet; ``batches`` for a module without ``forward``.
        """
        return self.results.layer_errors(batches, counts)

    def report(
        self,
        folder: str | os.PathLike[str],
        batches: Iterable[Mapping[str, Any] | torch.Tensor] | None = None,
        **facts: Any,
    ) -> Path:
        """Write ``report.html``, ``report.json`` and ``layers.csv``; on several ranks every rank must call this.

        Args:
            folder: created if it does not exist; rank 0 writes.
            batches: run to measure the layers' errors, as in :meth:`layer_errors`; None: nothing is run.
            **facts: further facts for the page, such as ``metrics={"val_loss": (before, after)}``
                (:meth:`Report.of <lightning_obs.report.facts.Report.of>`).

        Returns:
            The path of the page.

        Raises:
            CalibrationError: nothing was calibrated yet.
        """
        return self.results.report(folder, batches, facts)

    # ------------------------------------------------------------------ the session and its state

    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> CalibrationSession:
        """Check the options against the model, and return the session that the hooks use.

        If the session is new, deep copies of the callback are told so (``Results.register``), and rank 0 prints a line
        on the session. Destinations of ``export_to`` that cannot hold the model are refused.

        Called by the hooks when a run or a validation starts. The ``prepare`` of a subclass calls this first, and then
        restores a loaded state. A scheme that needs no data (``session.needs_data`` is False) can be applied with it at
        once: ``with callback.prepare(trainer, module): pass``.

        Args:
            trainer: runs the model now, or will.
            pl_module: holds the module to calibrate.

        Raises:
            CalibrationError: the module cannot be found, or the options do not fit the model or the Trainer.
        """
        earlier_session = self.session
        session = self.trainer_session.prepare(trainer, pl_module, self.options)
        if session is not earlier_session:
            self.results.register()
            rank_zero_info(f"{self.label}: {describe(pl_module, self.trainer_session.module_path, session)}")
        if self.export_at_end is not None:
            self.export_at_end.require_writable(trainer, session)
        return session

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the saved state until the model is on its device; :meth:`prepare` of the subclass then loads it.

        Lightning calls this when it restores the callback from a checkpoint, before it moves the model. A damaged state
        is a CalibrationError.
        """
        self.trainer_session.keep_state(state_dict)

    # ------------------------------------------------------------------ hooks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse an ``export_to`` that cannot be written in the end; keep an offloaded model where it is.

        Where the Trainer has several of these callbacks, the scheme also becomes a part of the names of logged numbers.
        """
        if self.export_at_end is not None:
            self.export_at_end.require_possible(trainer)
        leave_in_place(trainer, pl_module)
        has_company = sum(isinstance(callback, SessionCallback) for callback in trainer.callbacks) > 1
        self.results.log_prefix = f"quant/{self.label}" if has_company else "quant"

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore a saved state that no earlier hook could restore.

        Lightning calls this when training, a test or a prediction starts.

        For sharded checkpoints Lightning loads states only after ``on_fit_start``.
        """
        restore_outside_of_fit(self, trainer)
        if self.trainer_session.saved_state is not None:
            self.prepare(trainer, pl_module)

    on_test_start = on_predict_start = on_train_start

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take all hooks off the model: Lightning calls no ``teardown`` after an exception or Ctrl-C."""
        stop_all(self.parts_of_run)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take all hooks off the model, and write the destinations of ``export_to``, but not after a Tuner's trial.

        Lightning calls this when a run has ended without an error.
        """
        stop_all(self.parts_of_run)
        if self.export_at_end is not None and not ends_a_trial():
            self.export_at_end.write(trainer, self.results)


def make_export_at_end(export_to: ExportTo, overwrite: bool) -> ExportAtEnd | None:
    """Make the part that writes a callback's ``export_to``; None without an ``export_to``.

    Called by the constructors of both callbacks.

    Raises:
        CalibrationError: a wrong argument, or ``overwrite`` without a destination.
    """
    require_bool(export_overwrite=overwrite)
    if export_to is not None:
        return ExportAtEnd(destinations_of(export_to, overwrite))
    if overwrite:
        raise CalibrationError(
            "export_overwrite without export_to",
            expected="export_to, the path to write to",
            remedy="set export_to, or leave export_overwrite out.",
        )
    return None


def stop_all(parts: Iterable[PartOfRun]) -> None:
    """Stop all parts of a run.

    Called at the run's end, however it ends, and at the end of a validation that is not followed by training (by
    `CalibrationCallback` at the end of every validation).
    """
    for part_of_run in parts:
        part_of_run.stop()


def restore_outside_of_fit(callback: SessionCallback, trainer: Trainer) -> None:
    """Load the callback's state from ``ckpt_path`` in ``validate``, ``test`` and ``predict``.

    Called when training, a validation, a test or a prediction starts. In ``fit`` Lightning restores callbacks itself,
    as Lightning 2.5 and newer do in all runs, and nothing happens here.
    """
    state = state_in_checkpoint(trainer, callback.state_key)
    if state:
        callback.load_state_dict(state)
