"""Models with one output per sample, as LightningModules: text encoders, and models of timm, which is not required."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.regression import CosineSimilarity
from typing_extensions import override

from lightning_obs.app.models.language import LABELS, TaskModule, require_rate
from lightning_obs.app.models.pretrained import load_pretrained
from lightning_obs.checkpoint.load import load_checkpoint
from lightning_obs.errors import CalibrationError
from lightning_obs.packages import import_package

#: logged if the data have no labels: the cosine similarity of the outputs to the unquantized model's
SIMILARITY = "similarity"


class OneOutputPerSample(TaskModule):
    """A classifier, or a model that turns a sample into one vector.

    ``test_step`` logs ``accuracy`` if the data have labels (``mse`` for models with one output). Otherwise it logs
    ``similarity``, the mean cosine similarity to the outputs of the first test, which is that of the unquantized model.

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
        """Cross entropy with the labels; the squared error if the model has one output."""
        loss = torch.nn.functional.cross_entropy if self.mse is None else torch.nn.functional.mse_loss
        return loss(*self._against_labels(self.output(batch), batch))

    @override
    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        output = self.output(batch).float()
        if LABELS in batch:
            name, compared = "accuracy" if self.mse is None else "mse", self._against_labels(output, batch)
        else:
            if batch_idx == len(self._first):
                self._first.append(output)
            name, compared = SIMILARITY, (output, self._first[batch_idx].to(output.device))
        metric = getattr(self, name)
        metric.update(*compared)
        self.log(name, metric)

    def _against_labels(
        self, output: torch.Tensor, batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predictions and labels, as losses and metrics take them."""
        if LABELS not in batch:
            raise CalibrationError(
                "training needs labels, but the data have none",
                got=f"batches of {', '.join(batch)}",
                remedy="data.label_field=<the field that holds them>; of images, one folder for each class.",
            )
        labels = batch[LABELS]
        if self.mse is not None:
            return output.squeeze(-1), labels.to(output.dtype)
        if self.accuracy is None:
            raise CalibrationError(
                "the data have labels, but the model has no head that predicts them",
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


class Encoder(OneOutputPerSample):
    """A text encoder: a classifier, or a model that makes embeddings.

    Batches are ``{"input_ids": (batch, tokens), "attention_mask": (batch, tokens)}``, ``labels`` ``(batch,)`` if there
    are any. A sample's output is its logits; of a model without a head for sequences, the mean over its tokens.

    Args:
        path: folder or hub name; the model is of the class that wrote it.
        dtype, attn_implementation, learning_rate: see :class:`~lightning_obs.app.models.language.LanguageModel`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        dtype: str = "auto",
        attn_implementation: str | None = None,
        learning_rate: float = 2e-5,
    ) -> None:
        require_rate(learning_rate)
        model, tokenizer = load_pretrained(path, None, dtype, attn_implementation)
        classifies = type(model).__name__.endswith("ForSequenceClassification")
        super().__init__(model, model.config.num_labels if classifies else None, learning_rate)
        self.tokenizer = tokenizer

    @override
    def for_data(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer, "label2id": self.model.config.label2id}

    @override
    def output(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits ``(batch, classes)``, or the mean over tokens ``(batch, features)``."""
        output = self(**batch)
        values: torch.Tensor = output.logits if "logits" in output else output.last_hidden_state
        if values.ndim == 2:
            return values
        counts = batch["attention_mask"].unsqueeze(-1).to(values.dtype)
        return (values * counts).sum(1) / counts.sum(1)


class TimmModel(OneOutputPerSample):
    """Wrap a model of timm for Lightning's fit, validate and test.

    Batches are ``{"images": (batch, channels, height, width)}``, with ``labels`` ``(batch,)`` where there are any.

    Args:
        name: timm's name of the architecture, with the weights' name behind a dot where there are several.
        path: a file of weights; the folder of a checkpoint that was exported from such a model; None: timm loads its
            own from the hub.
        num_classes: of the head; None: as the architecture has it.
        learning_rate: of AdamW, see :class:`~lightning_obs.app.models.language.TaskModule`.

    Raises:
        CalibrationError: timm is not installed; no such model; weights that do not fit.
    """

    def __init__(
        self,
        name: str,
        path: str | os.PathLike[str] | None = None,
        num_classes: int | None = None,
        learning_rate: float = 1e-4,
    ) -> None:
        require_rate(learning_rate)
        timm = import_package("timm", "model=timm")
        exported = path is not None and Path(path).is_dir()
        weights = {} if path is None or exported else {"checkpoint_path": str(path)}
        classes = {} if num_classes is None else {"num_classes": num_classes}
        try:
            model = timm.create_model(name, pretrained=path is None, **weights, **classes).eval()
        except (RuntimeError, OSError, ValueError) as error:
            raise CalibrationError(
                f"timm cannot make model.name={name} with model.path={path}",
                got=str(error).strip().splitlines()[0][:300],
            ) from error
        if exported:
            load_checkpoint(model, Path(str(path)))
        super().__init__(model, model.num_classes or None, learning_rate)
        self.data_config = timm.data.resolve_model_data_config(model)

    @override
    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {"x": batch["images"]}

    @override
    def for_data(self) -> dict[str, Any]:
        return {"data_config": self.data_config, "classes": self.model.num_classes}

    @override
    def output(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self(**batch).flatten(1)
