"""A sequence-to-sequence model as a LightningModule."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torchmetrics.text import Perplexity
from transformers import AutoModelForSeq2SeqLM
from typing_extensions import override

from lightning_obs.app.pretrained import load_pretrained
from lightning_obs.app.task_module import LABELS, TaskModule

#: what transformers' losses leave out
_PADDING = -100


class Seq2Seq(TaskModule):
    """Wrap a transformers model with encoder and decoder for Lightning's fit, validate and test.

    Batches are ``{"input_ids": (batch, tokens), "attention_mask": (batch, tokens), "labels": (batch, target tokens)}``,
    labels padded with -100. The perplexity is that of the labels.

    Args:
        path: folder or hub name.
        dtype: auto, float32, bfloat16, float16.
        attn_implementation: as in transformers.
        learning_rate: of AdamW, see :class:`~lightning_obs.app.task_module.TaskModule`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        dtype: str = "auto",
        attn_implementation: str | None = None,
        learning_rate: float = 2e-5,
    ) -> None:
        super().__init__(learning_rate)
        self.model, self.tokenizer = load_pretrained(path, AutoModelForSeq2SeqLM, dtype, attn_implementation)
        self.perplexity = Perplexity(ignore_index=_PADDING)

    @override
    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The batch; the decoder reads the labels, one to the right."""
        return {**batch, "use_cache": False}

    @override
    def for_data(self) -> dict[str, Any]:
        """The tokenizer, and that a target is a text."""
        return {"tokenizer": self.tokenizer, "targets": True}

    @override
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Cross entropy of the labels."""
        loss: torch.Tensor = self(**batch).loss
        return loss

    @override
    def on_test_epoch_start(self) -> None:
        """Start the perplexity anew."""
        self.perplexity.reset()

    @override
    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Add to the perplexity."""
        self.perplexity.update(self(**batch).logits.float(), batch[LABELS])
        self.log("perplexity", self.perplexity, on_epoch=True)
