"""An encoder of texts as a LightningModule: a classifier, or what makes an embedding of a text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from lightning_obs.app.models.task_module import LABELS, OneOutputPerSample
from lightning_obs.app.pretrained import load_pretrained


class Encoder(OneOutputPerSample):
    """Wrap a transformers encoder for Lightning's fit, validate and test.

    Batches are ``{"input_ids": (batch, tokens), "attention_mask": (batch, tokens)}``, ``labels`` ``(batch,)`` if there
    are any. A sample's output is its logits; of a model without a head for sequences, the mean over its tokens.

    Args:
        path: folder or hub name; the model is of the class that wrote it.
        dtype: auto, float32, bfloat16, float16.
        attn_implementation: as in transformers.
        learning_rate: of AdamW, see :class:`~lightning_obs.app.models.task_module.TaskModule`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        dtype: str = "auto",
        attn_implementation: str | None = None,
        learning_rate: float = 2e-5,
    ) -> None:
        model, tokenizer = load_pretrained(path, None, dtype, attn_implementation)
        classifies = type(model).__name__.endswith("ForSequenceClassification")
        super().__init__(model.config.num_labels if classifies else None, learning_rate)
        self.model, self.tokenizer = model, tokenizer

    @override
    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The batch without its labels."""
        return {key: value for key, value in batch.items() if key != LABELS}

    @override
    def for_data(self) -> dict[str, Any]:
        """The tokenizer, and the numbers of the labels' names."""
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
