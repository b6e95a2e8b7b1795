"""What the command line's models have in common as LightningModules.

A module of one's own (``model._target_``) needs none of this. What the command line asks of it: ``validation_step``
runs the model, ``test_step`` logs a value (see :mod:`lightning_obs.app.quality`), and the model inside takes a batch as
its keyword arguments, or what ``model_inputs(batch)`` returns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torchmetrics import MeanSquaredError, Metric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.regression import CosineSimilarity
from typing_extensions import override

from lightning_obs.errors import CalibrationError

#: the key of a batch that holds the labels
LABELS = "labels"
#: logged where the data have no labels: the cosine of the outputs to the unquantized model's
SIMILARITY = "similarity"


class TaskModule(LightningModule):
    """Runs ``self.model`` in validation, trains it with AdamW.

    Args:
        learning_rate: of AdamW, after a warm-up over a tenth of the steps, and down to zero along a cosine.
    """

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Keyword arguments of ``self.model``."""
        return dict(batch)

    def for_data(self) -> dict[str, Any]:
        """What a LightningDataModule may want to know of the model: its constructor gets those that it takes."""
        return {}

    @override
    def forward(self, **batch: torch.Tensor) -> Any:
        """The model's output."""
        return self.model(**self.model_inputs(batch))

    @override
    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Run the model; calibration observes it."""
        self(**batch)

    @override
    def configure_optimizers(self) -> Any:
        """AdamW without weight decay: a few hundred steps from a trained model."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.learning_rate, weight_decay=0.0)
        steps = int(self.trainer.estimated_stepping_batches)

        def factor(step: int) -> float:
            warm_up = max(1, steps // 10)
            if step < warm_up:
                return (step + 1) / warm_up
            return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class OneOutputPerSample(TaskModule):
    """A classifier, or a model that makes one vector of a sample.

    Where the data have labels, ``test_step`` logs ``accuracy`` (of models with one output: ``mse``). Where they have
    none, it logs ``similarity``: the first test's outputs are remembered, and of every later one the mean cosine to
    them is taken, so that a quantized model is held against the unquantized one.

    Args:
        outputs: how many numbers the model's head has; None where it has none.
        learning_rate: see :class:`TaskModule`.
    """

    def __init__(self, outputs: int | None, learning_rate: float) -> None:
        super().__init__(learning_rate)
        self.accuracy = MulticlassAccuracy(outputs, average="micro") if outputs is not None and outputs > 1 else None
        self.mse = MeanSquaredError() if outputs == 1 else None
        self.similarity = CosineSimilarity(reduction="mean")
        self._first: list[torch.Tensor] = []
        self._remembering = True

    def output(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One row of numbers for each sample, ``(batch, outputs)``."""
        raise NotImplementedError

    @override
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Cross entropy with the labels; of one output the squared error."""
        output, labels = self.output(batch), self._labels(batch)
        if self.mse is not None:
            return torch.nn.functional.mse_loss(output.squeeze(-1), labels.to(output.dtype))
        return torch.nn.functional.cross_entropy(output, labels)

    @override
    def on_test_epoch_start(self) -> None:
        """Start anew."""
        self._remembering = not self._first
        for metric in (self.accuracy, self.mse, self.similarity):
            if metric is not None:
                metric.reset()

    @override
    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Add to ``accuracy``, ``mse`` or ``similarity``."""
        output = self.output(batch).float()
        if LABELS not in batch:
            if self._remembering:
                self._first.append(output)
            self.similarity.update(output, self._first[batch_idx].to(output.device))
            self._log(SIMILARITY, self.similarity)
        elif self.mse is not None:
            self.mse.update(output.squeeze(-1), batch[LABELS].float())
            self._log("mse", self.mse)
        else:
            labels = self._labels(batch)
            assert self.accuracy is not None
            self.accuracy.update(output, labels)
            self._log("accuracy", self.accuracy)

    def _log(self, name: str, metric: Metric) -> None:
        self.log(name, metric, on_epoch=True)

    def _labels(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if LABELS not in batch:
            raise CalibrationError(
                "training needs labels, and the data have none",
                got=f"batches of {', '.join(batch)}",
                remedy="data.label_field=<the field that holds them>; of images, one folder for each class.",
            )
        if self.accuracy is None and self.mse is None:
            raise CalibrationError(
                "the data have labels, and the model has no head that predicts them",
                got=type(self.model).__name__,
                remedy="leave data.label_field out, or give a model for sequence classification.",
            )
        labels = batch[LABELS]
        if self.accuracy is not None:
            wrong = labels[(labels < 0) | (labels >= self.accuracy.num_classes) | (labels != labels.long())]
            if len(wrong):
                raise CalibrationError(
                    f"labels that {type(self.model).__name__} has no class for",
                    got=str(sorted(set(wrong.tolist()))[:5]),
                    expected=f"whole numbers from 0 to {self.accuracy.num_classes - 1}",
                    remedy="name another field (data.label_field=...), or count the classes from 0.",
                )
        return labels
