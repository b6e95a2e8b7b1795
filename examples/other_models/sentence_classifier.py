r"""Calibrate a classifier of texts (BERT, ModernBERT, RoBERTa...) from the command line, judged by its accuracy.

Run it in the folder of this file, or of your copy. Each line of reviews.jsonl is ``{"text": "...", "label": "good"}``:

    python -m lightning_obs \
        ~model +model._target_=sentence_classifier.SentenceClassifier +model.path=<folder or hub name> \
        ~data +data._target_=sentence_classifier.LabelledTexts +data.path=reviews.jsonl \
        token_mask=attention_mask 'ignore=["re:.*(pooler|classifier|head)"]' scheme=int8_static

``token_mask`` keeps padding away from the observers. The head is small, and vLLM keeps it in full precision.
With ``task=finetune`` the same command trains through the quantization.
"""

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

from lightning_obs import CalibrationError
from lightning_obs.app.models.pretrained import load_pretrained

Batch = dict[str, torch.Tensor]


class SentenceClassifier(L.LightningModule):
    """A transformers model for sequence classification.

    Args:
        path: a folder, or a name on the hub; the command line passes the folder of the checkpoint to load it again.
        learning_rate: of AdamW; ``task=finetune`` sets it.
    """

    def __init__(self, path: str, learning_rate: float = 2e-5) -> None:
        super().__init__()
        self.model, self.tokenizer = load_pretrained(path, AutoModelForSequenceClassification)
        self.learning_rate = learning_rate
        self.accuracy = MulticlassAccuracy(self.model.config.num_labels, average="micro")

    def for_data(self) -> dict[str, Any]:
        """Arguments for the constructor of the data."""
        return {"tokenizer": self.tokenizer, "label2id": self.model.config.label2id}

    def model_inputs(self, batch: Batch) -> Batch:
        """Arguments of ``self.model`` for a batch."""
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.model(**self.model_inputs(batch))  # calibration observes this call

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        logits = self.model(**self.model_inputs(batch)).logits
        self.accuracy.update(logits, batch["labels"])
        self.log("accuracy", self.accuracy)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        logits = self.model(**self.model_inputs(batch)).logits
        return torch.nn.functional.cross_entropy(logits, batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.learning_rate, weight_decay=0.0)


class LabelledTexts(L.LightningDataModule):
    """Texts with labels. Every second text is held out; calibration sees the others, and training some of them.

    Batches are ``input_ids`` and ``attention_mask`` ``(batch, tokens)``, padded to the longest text, and ``labels``
    ``(batch,)``.

    Args:
        tokenizer: of the model.
        label2id: the number of each label, from the model's config.
        path: a file of JSON lines with the fields ``text`` and ``label``, which is a number or a name.
        batch_size: texts in a batch.
        tokens: longer texts are cut here.
        train_batches: of the texts that are not held out, to train on; ``task=finetune`` sets it.

    Raises:
        CalibrationError: a label that the model does not know.
    """

    def __init__(
        self,
        tokenizer: Any,
        label2id: dict[str, int],
        path: str,
        batch_size: int = 8,
        tokens: int = 128,
        train_batches: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.collate = DataCollatorWithPadding(tokenizer)
        samples = []
        for line in Path(path).read_text().splitlines():
            row = json.loads(line)
            label = label2id.get(row["label"], row["label"])
            if label not in label2id.values():
                names = ", ".join(label2id)
                raise CalibrationError(f"a label in {path}", got=repr(label), expected=f"a number, or one of {names}")
            sample = tokenizer(row["text"], truncation=True, max_length=tokens)
            samples.append({**sample, "labels": label})
        self.calibration = samples[0::2]
        self.held_out = samples[1::2]
        self.training = self.calibration[: train_batches * batch_size]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.training, self.batch_size, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.calibration, self.batch_size, collate_fn=self.collate)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, self.batch_size, collate_fn=self.collate)
