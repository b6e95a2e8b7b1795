"""Fine-tune a calibrated model through fake quantization, and measure how much of the loss is recovered.

Its quality on held-out data is measured four times: full precision, calibrated only, fine-tuned, and of the checkpoint
loaded again. The last two are the same number, or something is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything
from typing_extensions import override

from lightning_obs.app.console import say
from lightning_obs.app.job import Quality, make_trainer, plain, recovered_share
from lightning_obs.app.tasks.calibrate import Calibrate
from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.callbacks.quantization_aware_training import QuantizationAwareTraining
from lightning_obs.callbacks.session_callback import SessionCallback
from lightning_obs.callbacks.trainable import require_precision
from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.histogram import Support

#: a step of training in forward passes: one there, about two back
PASSES_OF_A_STEP = 3


class Finetune(Calibrate):
    """Train from the ranges that calibration chose."""

    calibrated: Quality | None = None  # before training
    reloaded: Quality | None = None  # of the checkpoint, loaded again
    seconds_trained: float

    @override
    def make_callback(self, options: CalibrationOptions) -> SessionCallback:
        of_callback = {"module": self.config.module, "token_mask": self.config.token_mask}
        return QuantizationAwareTraining(options, **plain(self.config.task.callback), **of_callback)

    @override
    def check_task(self) -> None:
        require_precision(self.trainer)
        if not self.batches("train_batches"):
            got = self.config.data.get("train_batches")
            raise CalibrationError("data.train_batches", got=got, expected="one or more")

    @override
    def train(self) -> None:
        """Fit, then validate the result."""
        self.calibrated = self.quality("as calibrated")
        config, module = self.config, self.module
        say(f"· fine-tuning {self.callback.label}")
        started = time.perf_counter()
        if config.task.seed is not None:
            seed_everything(config.task.seed, verbose=False)
        trainer = make_trainer(config, self.callback)
        module.train()
        trainer.fit(module, datamodule=self.data)
        module.eval()
        trainer.validate(module, datamodule=self.data, verbose=False)
        self.seconds_trained, self.steps = time.perf_counter() - started, trainer.global_step
        self.result = self.callback.result or self.result

    @override
    def after_export(self, folder: Path) -> None:
        """Measure the checkpoint, loaded again: each rank its share.

        Ranks that torchrun started may have composed another folder, so rank 0 says which.
        """
        if self.calibrated is None:
            return
        strategy = self.trainer.strategy
        written = Path(strategy.broadcast(str(folder.resolve())))
        if not strategy.reduce_boolean_decision(written.is_dir()):
            self.lines = [*self.lines, "not loaded again: some ranks cannot read that folder"]
            return
        loaded = self.load_again(written)
        self.reloaded = self.quality("the checkpoint, loaded again", again=loaded)

    @override
    def passes(self, needs_data: bool) -> int:
        """Also the training steps, and two more measurements."""
        steps = int(self.config.trainer.get("max_steps", -1))
        of_a_step = PASSES_OF_A_STEP + (1 if self.config.task.callback.distill else 0)
        trained = (self.batches("train_batches") if steps < 0 else steps) * of_a_step
        return super().passes(needs_data) + trained + self.batches("batches") + 2 * self.measured

    @override
    def report(self, counts: Mapping[str, Support], parts: Mapping[str, Any]) -> None:
        """Show the quality before training and after it, beside full precision, where no validation has logged any."""
        curves = self.callback.curves
        if not curves and self.full is not None and self.calibrated is not None and self.quantized is not None:
            name, whole = self.full.name, self.full.value
            tuned = {0: self.calibrated.value, self.steps: self.quantized.value}
            curves = [{"step": step, name: whole, f"{name}_quantized": value} for step, value in tuned.items()]
        calibrated = {} if self.calibrated is None else {self.calibrated.name: self.calibrated.value}
        super().report(counts, {**parts, "curves": curves, "calibrated": calibrated})

    @property
    @override
    def label(self) -> str:
        return f"{super().label}, fine-tuned"

    @override
    def row(self) -> dict[str, Any]:
        """Also the numbers of the checkpoint before training and loaded again."""
        stages: dict[str, Any] = {"seconds_trained": self.seconds_trained}
        stages["recovered"] = recovered_share(self.full, self.calibrated, self.quantized)
        for when, found in (("calibrated", self.calibrated), ("reloaded", self.reloaded)):
            stages |= {} if found is None else {f"{found.name}_{when}": found.value}
            stages |= {} if found is None or found.moved is None else {f"divergence_{when}": found.moved.divergence}
        return {**super().row(), **stages}

    @override
    def closing_lines(self) -> list[str]:
        lines = []
        if self.calibrated is not None:
            values = {"full precision": self.full, "calibrated": self.calibrated, "fine-tuned": self.quantized}
            measured = {when: found for when, found in {**values, "reloaded": self.reloaded}.items() if found}
            text = ", ".join(f"{when} {found.value:.3f}" for when, found in measured.items())
            lines.append(f"{self.calibrated.name} on held-out data: {text}")
            moved = [f"{when} {found.moved.divergence:.4f}" for when, found in measured.items() if found.moved]
            lines += [f"KL divergence from the original [nats]: {', '.join(moved)}"] if moved else []
        took = f"fine-tuning took {self.seconds_trained / 60:.1f} minutes"
        share = recovered_share(self.full, self.calibrated, self.quantized)
        if share:
            took += f", and brought back {share:.0%} of what calibration lost"
        return [*lines, took]
