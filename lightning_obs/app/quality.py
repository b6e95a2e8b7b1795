"""The quality of a model on held-out data: one number, logged by the module's ``test_step``.

Tasks that calibrate hold a :class:`QualityMeter`; ``task=evaluate`` calls :func:`measure_quality` once.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn

from lightning_obs.app.console import say
from lightning_obs.callbacks.strategies import collectives_of
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.quantized_forward import quantized
from lightning_obs.report.predictions import Moved, Predictions

#: below this relative loss by calibration, "x % recovered" is noise and is not shown
_LEAST_LOSS = 1e-3


@dataclass(frozen=True)
class Quality:
    """The quality of a model, as :func:`measure_quality` measures it.

    Attributes:
        name: the name under which ``test_step`` logged the value.
        value: the logged value, over all held-out batches and ranks.
        higher_is_better: the direction of the module's torchmetrics metric of that name; None if there is no such
            metric.
        moved: the distance of the predictions from the original model's (divergence, agreement); None for the original
            itself, and for a model whose output has no logits.
    """

    name: str
    value: float
    higher_is_better: bool | None
    moved: Moved | None = None


def measure_quality(module: LightningModule, trainer: Trainer, data: LightningDataModule) -> Quality | None:
    """Run ``trainer.test`` and return the logged value that judges the model; None if ``test_step`` logs nothing.

    Called by :class:`QualityMeter`, ``task=evaluate`` and ``task=lora``.

    Raises:
        CalibrationError: ``test_step`` logs several values, and ``module.metric`` names none of them.
    """
    values = trainer.test(module, datamodule=data, verbose=False)[0]
    if not values:
        return None
    metric = getattr(module, "metric", None)
    first = next(iter(values))
    name = str(metric or first)
    if name not in values or (metric is None and len(values) > 1):
        raise CalibrationError(
            f"which value judges the model: {type(module).__name__}.test_step logs {', '.join(values)}",
            got=f"metric = {metric!r}",
            remedy=f"name one of them in the class: metric = {first!r}.",
        )
    higher_is_better = getattr(getattr(module, name, None), "higher_is_better", None)
    return Quality(name, float(values[name]), higher_is_better)


class QualityMeter:
    """Measures a model on the same held-out data at several stages of a run, and compares predictions.

    ``Calibrate.check`` makes one unless ``evaluate`` is off.

    Args:
        module: the LightningModule of the run.
        model: the model inside ``module`` that is calibrated.
        data: the data; its ``test_dataloader`` is held out.
        evaluator: a Trainer without the run's callback.
    """

    def __init__(
        self, module: LightningModule, model: nn.Module, data: LightningDataModule, evaluator: Trainer
    ) -> None:
        self.module = module
        self.model = model
        self.data = data
        self.evaluator = evaluator
        self._predictions = Predictions()

    def original(self) -> Quality | None:
        """Measure the quality in full precision, and keep the predictions for the later comparisons.

        ``Calibrate.run`` calls it before anything is calibrated.

        Raises:
            CalibrationError: the quality is not a finite number.
        """
        say("· measuring in full precision")
        with self._predictions.kept(self.model):
            quality = measure_quality(self.module, self.evaluator, self.data)
        if quality is not None and not math.isfinite(quality.value):
            raise CalibrationError(
                f"the {quality.name} of the unquantized model is not a finite number, so nothing can be compared "
                "with it",
                got=str(quality.value),
                remedy="look for NaN in the weights and for samples without anything to predict, "
                "or set evaluate=false.",
            )
        return quality

    def quantized(self, stage: str) -> Quality | None:
        """Measure the quality of the calibrated model in the quantized forward.

        ``Calibrate.run`` calls it before the export, ``Finetune`` also before the training.

        Args:
            stage: what is measured, in the line that is printed.
        """
        return self._compared(self.module, self.model, stage, is_loaded=False)

    def loaded(self, module: LightningModule, model: nn.Module, stage: str) -> Quality | None:
        """Measure the quality of a checkpoint that was loaded into another module; ``Finetune`` calls it.

        Args:
            module: the new LightningModule.
            model: the model inside it.
            stage: what is measured, in the line that is printed.
        """
        return self._compared(module, model, stage, is_loaded=True)

    def _compared(self, module: LightningModule, model: nn.Module, stage: str, is_loaded: bool) -> Quality | None:
        """Measure the quality of a quantized model, and compare its predictions with the original's.

        Args:
            module: the LightningModule whose ``test_step`` runs.
            model: the model inside ``module``, whose predictions are compared.
            stage: the name of this measurement for the user.
            is_loaded: whether the model was loaded from a checkpoint, so that its own forward is quantized.
        """
        say(f"· measuring {stage}")
        forward = nullcontext() if is_loaded else quantized(model)
        with forward, self._predictions.compared(model) as comparison:
            quality = measure_quality(module, self.evaluator, self.data)
        if quality is None:
            return None
        moved = comparison.reduced(collectives_of(self.evaluator))
        return replace(quality, moved=moved)


def recovered_share(original: Quality | None, calibrated: Quality | None, tuned: Quality | None) -> float | None:
    """The share of calibration's loss that fine-tuning recovered, from 0 (none, or it lost more) to 1 (all, or more).

    ``Finetune`` calls it at the end of its run, for the closing lines and the row of the run.

    Args:
        original: the quality in full precision.
        calibrated: the quality of the calibrated model before training.
        tuned: the quality of that model after training.

    Returns:
        None if one of the three was not measured, if calibration lost next to nothing, or if the metric does not say
        which direction is better.
    """
    if original is None or calibrated is None or tuned is None or original.higher_is_better is None:
        return None
    sign = -1 if original.higher_is_better else 1
    lost = sign * (calibrated.value - original.value)
    recovered = sign * (calibrated.value - tuned.value)
    if lost <= 0 or lost < _LEAST_LOSS * abs(original.value):
        return None
    return min(1.0, max(0.0, recovered / lost))
