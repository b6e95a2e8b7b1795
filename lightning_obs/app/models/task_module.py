"""What the command line's models have in common as LightningModules.

A module of one's own (``model._target_``) needs none of this. What the command line asks of it: ``validation_step``
runs the model, ``test_step`` logs a value (see :class:`lightning_obs.app.job.Quality`), and the model inside takes a
batch as its keyword arguments, or what ``model_inputs(batch)`` returns.
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
        model: of any package.
        learning_rate: of AdamW, after a warm-up over a tenth of the steps, and down to zero along a cosine.
    """

    def __init__(self, model: Any, learning_rate: float) -> None:
        super().__init__()
        self.model, self.learning_rate = model, learning_rate

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Keyword arguments of ``self.model``."""
        raise NotImplementedError

    def for_data(self) -> dict[str, Any]:
        """What a LightningDataModule may want to know of the model: its constructor gets those that it takes."""
        raise NotImplementedError

    @override
    def forward(self, **batch: torch.Tensor) -> Any:
        return self.model(**self.model_inputs(batch))

    @override
    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self(**batch)  # calibration observes it

    @override
    def configure_optimizers(self) -> Any:
        """AdamW without weight decay: a few hundred steps from a trained model."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.learning_rate, weight_decay=0.0)
        steps = int(self.trainer.estimated_stepping_batches)
        warm_up = max(1, steps // 10)

        def factor(step: int) -> float:
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
        model: see :class:`TaskModule`.
        outputs: how many numbers the model's head has; None where it has none.
        learning_rate: see :class:`TaskModule`.
    """

    def __init__(self, model: Any, outputs: int | None, learning_rate: float) -> None:
        super().__init__(model, learning_rate)
        self.accuracy = MulticlassAccuracy(outputs, average="micro") if outputs is not None and outputs > 1 else None
        self.mse = MeanSquaredError() if outputs == 1 else None
        self.similarity = CosineSimilarity(reduction="mean")
        self._first: list[torch.Tensor] = []

    def output(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One row of numbers for each sample, ``(batch, outputs)``."""
        raise NotImplementedError

    @override
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Cross entropy with the labels; of one output the squared error."""
        loss = torch.nn.functional.cross_entropy if self.mse is None else torch.nn.functional.mse_loss
        return loss(*self._against_labels(self.output(batch), batch))

    @override
    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        output = self.output(batch).float()
        name: str
        metric: Metric | None
        if LABELS in batch:
            predicted, expected = self._against_labels(output, batch)
            name, metric = ("accuracy", self.accuracy) if self.mse is None else ("mse", self.mse)
        else:
            if batch_idx == len(self._first):
                self._first.append(output)
            predicted, expected = output, self._first[batch_idx].to(output.device)
            name, metric = SIMILARITY, self.similarity
        assert metric is not None
        metric.update(predicted, expected)
        self.log(name, metric)

    def _against_labels(
        self, output: torch.Tensor, batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predictions and labels, as losses and metrics take them."""
        if LABELS not in batch:
            raise CalibrationError(
                "training needs labels, and the data have none",
                got=f"batches of {', '.join(batch)}",
                remedy="data.label_field=<the field that holds them>; of images, one folder for each class.",
            )
        labels = batch[LABELS]
        if self.mse is not None:
            return output.squeeze(-1), labels.to(output.dtype)
        if self.accuracy is None:
            raise CalibrationError(
                "the data have labels, and the model has no head that predicts them",
                got=type(self.model).__name__,
                remedy="leave data.label_field out, or give a model for sequence classification.",
            )
        wrong = labels[(labels < 0) | (labels >= self.accuracy.num_classes) | (labels != labels.long())]
        if len(wrong):
            raise CalibrationError(
                f"labels that {type(self.model).__name__} has no class for",
                got=str(sorted(set(wrong.tolist()))[:5]),
                expected=f"whole numbers from 0 to {self.accuracy.num_classes - 1}",
                remedy="name another field (data.label_field=...), or count the classes from 0.",
            )
        return output, labels
