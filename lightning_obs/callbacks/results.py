"""The outputs of a calibration: a checkpoint, layer errors, a report, numbers for the user's own loggers.

``export_folder`` is written in ``teardown``: weight averaging has put its weights in, the last validation of a fit is
over, and Lightning does not call it after an error or Ctrl-C.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.deep_copies import DeepCopies
from lightning_obs.callbacks.lightning_package import Callback, TrainerFn, class_of
from lightning_obs.callbacks.possible_steps import takes_options
from lightning_obs.callbacks.quantized_validation import quantized_name
from lightning_obs.callbacks.strategies import collectives_of
from lightning_obs.callbacks.which_module import require_forward
from lightning_obs.checkpoint.export import export_checkpoint
from lightning_obs.choice.observer_choice import ObserverChoice
from lightning_obs.errors import CalibrationError, refuse_unknown, require_bool, require_kind
from lightning_obs.files.tensors import Progress
from lightning_obs.files.write import require_free
from lightning_obs.model.weight import in_shards, reshard
from lightning_obs.numerics.histogram import Support
from lightning_obs.ranks.collectives import on_all_ranks
from lightning_obs.report.facts import Report, ScaleDrift, aggregates, known_facts
from lightning_obs.report.layer_errors import LayerError, known_layer_errors, measure_layer_errors
from lightning_obs.report.page import layer_row, write_csv, write_report
from lightning_obs.report.predictions import Moved
from lightning_obs.report.step import Step

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import Logger


class Results(Callback):
    """The results of a callback's session, for users, loggers and the page; a subclass makes the session."""

    label: str  # of the scheme that was asked for: it names the state in checkpoints
    #: the LightningModule of the session: its tokenizer is exported, its root unit resharded
    _owner: LightningModule

    def __init__(self, export_folder: str | os.PathLike[str] | None, export_overwrite: bool, log: bool | None) -> None:
        require_bool(export_overwrite=export_overwrite)
        if log is not None:
            require_bool(log=log)
        if export_overwrite and export_folder is None:
            raise CalibrationError("export_overwrite without export_folder", remedy="say which folder.")
        require_kind("export_folder", export_folder, (str, os.PathLike), "a folder")
        self.export_folder = None if export_folder is None else Path(export_folder)
        #: replace a checkpoint that is in it; after the first run also the one that was written
        self.export_overwrite = export_overwrite
        self.tells_loggers = log  # Lightning gives every callback a `log`
        self.drift = ScaleDrift()  # of this run's scales, calibration by calibration
        self.session: CalibrationSession | None = None
        #: the scores where observers are chosen by measurement; None: not chosen, or by an earlier run
        self.choice: ObserverChoice | None = None
        #: how far the last validation's quantized predictions are from the unquantized ones; None: not measured
        self.moved: Moved | None = None
        #: the scheme in the names of quantized metrics, where several callbacks measure theirs; else empty
        self.measured_as = ""
        #: by name of a metric, its direction as torchmetrics has it
        self.higher_is_better: dict[str, bool] = {}
        #: whether a fit has trained the model through the quantization
        self.was_trained = False
        self._logged: list[dict[str, Any]] = []  # as ``curves``, not read by the host yet
        self._copies = DeepCopies()

    @property
    def result(self) -> CalibrationResult | None:
        """The result of the last calibration, by this callback or its deep copy; None before it."""
        session = self._copies.with_results(self).session
        return session.result if session is not None else None

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

        The checkpoint has this callback's scheme, even if another callback has calibrated the same model since. Of a
        callback that a library has deep-copied and run as a copy (neuralforecast does), it is the copy's; the same is
        true of ``result``, ``layer_errors`` and ``report``.

        On several ranks, rank 0 writes. Under DDP the others return at once; where weights are sharded (FSDP) every
        rank must call this, to gather them. Before another rank reads the folder, call
        ``trainer.strategy.barrier()``.

        Args:
            folder: written whole or not at all.
            tokenizer: saved beside it; default: the LightningModule's ``tokenizer`` or ``processor``, if it has one.
            overwrite, max_shard_size, progress: as of :func:`~lightning_obs.export_checkpoint`.

        Raises:
            CalibrationError: no validation has calibrated the model yet, or it was trained on since; ``folder`` cannot
                be written or is taken. In fine-tuning also: activations were not calibrated yet.
        """
        source = self._copies.with_results(self)
        session = source._session_to_export()
        reshard(source._owner)
        if session.collectives.rank != 0 and not any(map(in_shards, session.model.modules())):
            return Path(folder)
        found = (getattr(source._owner, name, None) for name in ("tokenizer", "processor"))
        own = next((one for one in found if hasattr(one, "save_pretrained")), None)
        with session.in_force():
            return export_checkpoint(
                session.model,
                folder,
                tokenizer=tokenizer or own,
                overwrite=overwrite,
                max_shard_size=max_shard_size,
                progress=progress,
            )

    def _session_to_export(self) -> CalibrationSession:
        return self._calibrated_session()

    def layer_errors(
        self,
        batches: Iterable[Mapping[str, Any] | torch.Tensor] | None = None,
        counts: dict[str, Support] | None = None,
    ) -> list[LayerError]:
        """The error of each layer, the worst first.

        On several ranks every rank must call this.

        Args:
            batches: arguments of the calibrated module, as keyword arguments or one tensor: it is run on them,
                and the outputs of its layers compared. A few hundred tokens are enough. None: nothing is run. Then
                there are the weights, and inputs that an observer counted (``histogram``, ``percentile``).
            counts: filled with how often each input value was seen, by module name; of the calibration where its
                observer counted, else of ``batches``.

        Raises:
            CalibrationError: nothing was calibrated yet; ``batches`` for a module without ``forward``.
        """
        session = self._copies.with_results(self)._calibrated_session()
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
        batches: Iterable[Mapping[str, Any] | torch.Tensor] | None = None,
        **parts: Any,
    ) -> Path:
        """Write ``report.html``, ``report.json`` and ``layers.csv``; on several ranks every rank must call this.

        Args:
            folder: made if it is not there; rank 0 writes.
            batches: as for :meth:`layer_errors`.
            **parts: further facts for the page, such as ``metrics={"val_loss": (before, after)}``
                (:class:`~lightning_obs.report.facts.Report`).

        Returns:
            The path of the page.

        Raises:
            CalibrationError: nothing was calibrated yet.
        """
        refuse_unknown(parts, [one.name for one in fields(Report)])
        session = self._copies.with_results(self)._calibrated_session()
        counts: dict[str, Support] = {}
        known = {"errors": self.layer_errors(batches, counts), "counts": counts}
        if session.collectives.rank != 0:
            return Path(folder) / "report.html"
        return write_report(folder, self.facts(**{**known, **parts}))

    def facts(self, **parts: Any) -> Report:
        """The facts of the last calibration; ``parts`` are added, or replace facts of their names."""
        source = self._copies.with_results(self)
        if source is not self:
            return source.facts(**parts)
        known = known_facts(self._calibrated_session()) | {"title": self.label, "checkpoint": self.export_folder}
        known |= {"drift": self.drift, "moved": self.moved, "curves": self.curves, "metrics": self.metrics}
        known |= {"higher_is_better": self.higher_is_better, "was_trained": self.was_trained, "can_run": self.can_run}
        known["scores"] = () if self.choice is None else self.choice.scores
        return Report(**{**known, **parts})

    def can_run(self, step: Step) -> bool:
        """Whether a next step can run on this model: the step's options are checked as those of a calibration are."""
        if step.name in ("leave_out", "token_scales", "rounding"):
            return takes_options(self._calibrated_session(), step.changes)
        return step.name in ("export", "serve", "load", "budget", "untrained")

    @property
    def curves(self) -> list[dict[str, float]]:
        """The metrics that each validation has logged, with their ``step``."""
        validations = self._copies.with_results(self)._logged
        return [{name: float(value) for name, value in logged.items()} for logged in validations]

    @property
    def metrics(self) -> dict[str, tuple[float | None, float | None]]:
        """The metrics of the last validation and of its second, quantized pass (``evaluate=True``), by name."""
        last = next(iter(self.curves[-1:]), {})
        measured_as = self._copies.with_results(self).measured_as
        twins = {name: quantized_name(name, measured_as) for name in last}
        return {name: (last[name], last[twin]) for name, twin in twins.items() if twin in last}

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the validation's logged metrics for the page; the callback's own numbers are on it already."""
        logged = {name: v.detach() for name, v in trainer.callback_metrics.items() if not name.startswith("quant/")}
        if logged and not trainer.sanity_checking:
            self._logged.append({"step": trainer.global_step, **logged})

    def log_calibration(
        self, trainer: Trainer, pl_module: LightningModule, errors: list[LayerError] | None = None
    ) -> None:
        """Tell the loggers, in ``on_validation_epoch_end``; nothing without them, or with ``log=False``.

        Single numbers are logged as metrics. The table of all layers goes to loggers that take one: a text and a
        histogram in TensorBoard, a CSV file beside the CSV logger's own, ``log_table`` (Weights & Biases).
        """
        session = self._calibrated_session()
        self.drift.add(trainer.global_step, session.qparams)
        if not self.logs(trainer):
            return
        prefix = self.prefix(trainer)
        errors = self.layer_errors() if errors is None else errors
        for name, value in (aggregates(session.result, errors) | self.drift.numbers()).items():
            self.log_of_all(trainer, pl_module, name, value)
        if trainer.is_global_zero:
            chosen: dict[str, dict[str, Any]] = {}
            for (name, base), observer in session.observers.items():
                chosen.setdefault(name, {})[f"{base}_observer"] = observer.args.observer
            rows = [{**layer_row(error), **chosen.get(error.name, {})} for error in errors]
            for logger in trainer.loggers:
                _log_table(logger, prefix, rows, trainer.global_step)

    def log_of_all(self, trainer: Trainer, pl_module: LightningModule, name: str, value: float) -> None:
        """Log a number that is equal on all ranks, or whose largest counts (the time)."""
        how: dict[str, Any] = {"sync_dist": True, "reduce_fx": "max"}
        pl_module.log(f"{self.prefix(trainer)}/{name}", torch.tensor(value), **how)

    def prefix(self, trainer: Trainer) -> str:
        """The prefix of logged names; it has the scheme in it where there are two callbacks."""
        alone = sum(isinstance(callback, Results) for callback in trainer.callbacks) == 1
        return "quant" if alone else f"quant/{self.label}"

    def logs(self, trainer: Trainer) -> bool:
        """Whether the Trainer's loggers get the results."""
        return bool(trainer.loggers) if self.tells_loggers is None else self.tells_loggers

    @property
    def has_calibrated(self) -> bool:
        """Whether there are qparams, found by this callback or loaded."""
        return self.session is not None and self.session.has_written

    def _calibrated_session(self) -> CalibrationSession:
        if self.session is None or not self.has_calibrated:
            raise CalibrationError(
                "nothing was calibrated yet", remedy="run trainer.validate or trainer.fit with this callback first."
            )
        return self.session

    # ------------------------------------------------------------------ export_folder

    def _export_due(self, trainer: Trainer) -> Path | None:
        """Where this run ends with a checkpoint."""
        ends = trainer.state.fn in (TrainerFn.FITTING, TrainerFn.VALIDATING) and not trainer.fast_dev_run
        return self.export_folder if ends else None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse, before the first batch and on all ranks alike, an ``export_folder`` that cannot be written."""
        if trainer.fast_dev_run and self.export_folder is not None:
            rank_zero_info(f"fast_dev_run: {self.export_folder} is not written")
        if (folder := self._export_due(trainer)) is None:
            return
        if trainer.state.fn == TrainerFn.FITTING and not trainer.enable_validation:
            raise CalibrationError(
                "this fit will not validate, so no checkpoint could be written in the end",
                where=[str(folder)],
                expected="a validation loader, a validation_step, and limit_val_batches above 0",
                remedy="give it these, or leave export_folder out.",
            )
        with on_all_ranks(collectives_of(trainer)):
            if trainer.is_global_zero:
                require_free(folder, self.export_overwrite)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the checkpoint to ``export_folder``; no rank goes on before it is there. Not called after an error."""
        if (folder := self._export_due(trainer)) is None:
            return
        if not self.has_calibrated:
            ended = "fit" if trainer.state.fn == TrainerFn.FITTING else "validation"
            raise CalibrationError(
                f"the {ended} has ended and nothing was calibrated, so there is no checkpoint to write",
                where=[str(folder)],
                expected="a validation with batches",
            )
        with on_all_ranks(collectives_of(trainer)):
            self.export(folder, overwrite=self.export_overwrite)
        self.export_overwrite = True
        rank_zero_info(f"wrote {folder}")


def _log_table(logger: Logger, prefix: str, rows: list[dict[str, Any]], step: int) -> None:
    ratios = torch.tensor([row["sqnr"] for row in rows if row["sqnr"] is not None])
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if class_of(logger, "TensorBoardLogger"):
        lines = [columns, ["---"] * len(columns), *([str(row.get(key, "")) for key in columns] for row in rows)]
        logger.experiment.add_text(f"{prefix}/layers", "\n".join(f"| {' | '.join(line)} |" for line in lines), step)
        if len(ratios):
            logger.experiment.add_histogram(f"{prefix}/sqnr", ratios, step)
    elif class_of(logger, "CSVLogger"):
        folder = Path(logger.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(folder / f"{prefix.replace('/', '_')}_layers_step{step}.csv", rows)
    elif hasattr(logger, "log_table") and rows:
        logger.log_table(f"{prefix}/layers", columns, [[row.get(key) for key in columns] for row in rows], step=step)
