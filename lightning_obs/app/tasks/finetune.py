"""Fine-tune a calibrated model through fake quantization, and measure how much of the loss is recovered.

The quality on held-out data is measured four times: in full precision, calibrated, fine-tuned, and with the checkpoint
loaded again. The last two must be the same number.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything
from omegaconf import DictConfig
from typing_extensions import override

from lightning_obs.app.console import say
from lightning_obs.app.from_config import make_trainer, plain, require_training
from lightning_obs.app.quality import Quality, recovered_share
from lightning_obs.app.tasks.calibrate import Calibrate
from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.callbacks.quantization_aware_training import QuantizationAwareTraining
from lightning_obs.callbacks.trainable import require_precision
from lightning_obs.errors import CalibrationError

#: a training step in forward passes: one forward, and about two for the backward
PASSES_OF_A_STEP = 3


class Finetune(Calibrate):
    """``task=finetune``: train the calibrated model, from the ranges that calibration chose.

    Attributes:
        calibrated: the quality before training; None: not measured.
        reloaded: the quality of the checkpoint, loaded again; None: not measured.
        seconds_trained: wall time of the fit and of the validation after it.
        steps: training steps.
    """

    may_train = False  # the report proposes no training: this task has trained the model already

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.calibrated: Quality | None = None
        self.reloaded: Quality | None = None
        self.seconds_trained = 0.0
        self.steps = 0

    @override
    def make_callback(self, options: CalibrationOptions) -> QuantizationAwareTraining:
        """A callback that calibrates with these options and trains with those of ``task.callback``.

        ``Calibrate.check`` calls it before the model is loaded.
        """
        config = self.config
        training_options = plain(config.task.callback)
        return QuantizationAwareTraining(
            options, module=config.module, token_mask=config.token_mask, **training_options
        )

    @override
    def check_task(self) -> None:
        """Refuse a Trainer that cannot train or takes no step, a GGUF export, and a run without training batches.

        ``Calibrate.check`` calls it, once model and data are loaded. The config of the task always has the key
        ``data.train_batches``, also for data of the user's own class.
        """
        job = self.job
        require_precision(job.trainer)
        require_training(job.trainer)
        if self.file_export is not None and self.file_export.destination.replaces_weights:
            raise CalibrationError(
                "export=gguf with task=finetune: export.base holds the weights from before the training",
                remedy="export=checkpoint; convert its weights with llama.cpp, and export_gguf the loaded checkpoint.",
            )
        if job.batches("train_batches") < 1:
            got = self.config.data.get("train_batches")
            raise CalibrationError("data.train_batches", got=got, expected="one or more")

    @override
    def train(self) -> None:
        """Measure the calibrated model, fit, and validate the result; ``Calibrate.run`` calls it before the export.

        The fit has a Trainer of its own, whose steps and epochs begin at 0. In the validation after it, the callback
        keeps the metrics of the trained model, for the curve of the report.

        Afterwards ``result`` is that of the last calibration. If the fit ended while the callback was observing batches
        for new ranges, there is no newer result than the first calibration's.
        """
        if self.meter is not None:
            self.calibrated = self.meter.quantized("as calibrated")
        job = self.job
        say(f"· fine-tuning {job.callback.label}")
        started = time.perf_counter()
        if self.config.task.seed is not None:
            seed_everything(self.config.task.seed, verbose=False)
        trainer = make_trainer(self.config, job.callback)
        job.module.train()
        trainer.fit(job.module, datamodule=job.data)
        job.module.eval()
        trainer.validate(job.module, datamodule=job.data, verbose=False)
        self.seconds_trained = time.perf_counter() - started
        self.steps = trainer.global_step
        self.result = job.callback.result or self.result

    @override
    def after_export(self, folder: Path) -> None:
        """Load the checkpoint again and measure it; each rank measures its share of the data.

        ``Calibrate.run`` calls it on every rank after the export. Under torchrun each process may have composed another
        ``folder``, so rank 0 broadcasts the folder that was written.
        """
        if self.meter is None or self.calibrated is None:
            return
        strategy = self.job.trainer.strategy
        written = Path(strategy.broadcast(str(folder.resolve())))
        if not strategy.reduce_boolean_decision(written.is_dir()):
            self.export_lines.append("not loaded again: some ranks cannot read that folder")
            return
        module, model = self.job.load_again(written)
        self.reloaded = self.meter.loaded(module, model, "the checkpoint, loaded again")

    @override
    def passes(self, needs_data: bool) -> int:
        """Add the training steps, the validation after them, and two more measurements of the quality.

        ``Calibrate.run`` calls it for the printed duration. With ``distill`` each step also forwards the teacher.
        """
        steps = int(self.config.trainer.get("max_steps", -1))
        if steps < 0:
            steps = self.job.batches("train_batches")
        passes_of_a_step = PASSES_OF_A_STEP
        if self.config.task.callback.distill:
            passes_of_a_step += 1
        training = steps * passes_of_a_step + self.job.batches("batches")
        return super().passes(needs_data) + training + 2 * self.batches_of_a_measurement()

    @override
    def report_facts(self) -> dict[str, Any]:
        """Add the quality before training and the curve of the quality to the facts of ``Calibrate``.

        ``Calibrate.report`` calls it at the end of the run.
        """
        facts = super().report_facts()
        facts["curves"] = self.job.callback.results.curves or self._measured_curves()
        facts["calibrated"] = {}
        if self.calibrated is not None:
            facts["calibrated"][self.calibrated.name] = self.calibrated.value
        return facts

    def _measured_curves(self) -> list[dict[str, float]]:
        """The quality before and after training, as a curve of two points, for a module whose validation logs nothing.

        Empty if one of the qualities was not measured.
        """
        if self.original is None or self.calibrated is None or self.quantized is None:
            return []
        name = self.original.name
        curves = []
        for training_step, quality in ((0, self.calibrated), (self.steps, self.quantized)):
            curves.append({"step": training_step, name: self.original.value, f"{name}_quantized": quality.value})
        return curves

    @override
    def label(self) -> str:
        """The label of the calibration, and that the model was fine-tuned; the report and the row have this name."""
        return f"{super().label()}, fine-tuned"

    @override
    def row(self) -> dict[str, Any]:
        """Add the qualities before training and of the loaded checkpoint, the time of training, the recovered share.

        ``main.run`` calls it last, and ``Calibrate.report`` for ``report.json``.
        """
        row = super().row()
        row["seconds_trained"] = self.seconds_trained
        row["recovered"] = recovered_share(self.original, self.calibrated, self.quantized)
        for stage, quality in (("calibrated", self.calibrated), ("reloaded", self.reloaded)):
            if quality is None:
                continue
            row[f"{quality.name}_{stage}"] = quality.value
            if quality.moved is not None:
                row[f"divergence_{stage}"] = quality.moved.divergence
        return row

    @override
    def closing_lines(self) -> list[str]:
        """The quality at each stage, how long training took, and the share of the loss that it recovered.

        ``Calibrate.report`` calls it for the closing report.
        """
        lines = []
        if self.calibrated is not None:
            lines.extend(self._quality_lines(self.calibrated.name))
        minutes = self.seconds_trained / 60
        duration = f"fine-tuning took {minutes:.1f} minutes"
        share = recovered_share(self.original, self.calibrated, self.quantized)
        if share:
            duration += f", and brought back {share:.0%} of what calibration lost"
        return [*lines, duration]

    def _quality_lines(self, metric: str) -> list[str]:
        """Lines with the metric at each stage, and with the divergence of the predictions from the original's.

        Args:
            metric: the name of the metric.
        """
        stages = {
            "full precision": self.original,
            "calibrated": self.calibrated,
            "fine-tuned": self.quantized,
            "reloaded": self.reloaded,
        }
        values = []
        divergences = []
        for stage, quality in stages.items():
            if quality is None:
                continue
            values.append(f"{stage} {quality.value:.3f}")
            if quality.moved is not None:
                divergences.append(f"{stage} {quality.moved.divergence:.4f}")
        lines = [f"{metric} on held-out data: {', '.join(values)}"]
        if divergences:
            lines.append(f"KL divergence from the original [nats]: {', '.join(divergences)}")
        return lines
