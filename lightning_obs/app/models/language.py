"""Models of transformers as LightningModules: causal, encoder and decoder, encoder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torchmetrics.text import Perplexity
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from typing_extensions import override

from lightning_obs.app.models.pretrained import load_pretrained
from lightning_obs.app.models.task_module import LABELS, OneOutputPerSample, TaskModule
from lightning_obs.moe.experts import linearize_experts as _linearize

#: what transformers' losses leave out
_PADDING = -100


class LanguageModel(TaskModule):
    """Trains on the cross entropy of the next token, and is judged by the perplexity.

    Args:
        path: folder or hub name; None for the default model.
        dtype: auto, float32, bfloat16, float16.
        attn_implementation: as in transformers.
        linearize_experts: give every expert Linear modules of its own, so that they can be quantized.
        learning_rate: of AdamW, see :class:`~lightning_obs.app.models.task_module.TaskModule`.
    """

    auto_class: ClassVar[Any]

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        dtype: str = "auto",
        attn_implementation: str | None = None,
        linearize_experts: bool = True,
        learning_rate: float = 2e-5,
    ) -> None:
        model, tokenizer = load_pretrained(path, self.auto_class, dtype, attn_implementation)
        super().__init__(model, learning_rate)
        self.tokenizer = tokenizer
        self.perplexity = Perplexity(ignore_index=_PADDING)
        if linearize_experts:
            _linearize(self.model)

    @override
    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {**batch, "use_cache": False}

    @override
    def for_data(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer, "targets": self.model.config.is_encoder_decoder}

    @override
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self(**{LABELS: batch["input_ids"], **batch}).loss
        return loss

    @override
    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        logits = self(**batch).logits
        if self.model.config.is_encoder_decoder:  # the decoder reads the labels one to the right
            self.perplexity.update(logits.float(), batch[LABELS])
        else:  # each token from those before it
            self.perplexity.update(logits[:, :-1].float(), batch["input_ids"][:, 1:])
        self.log("perplexity", self.perplexity)


class CausalLM(LanguageModel):
    """A causal language model. Its perplexity is that of every token but the first of each block.

    Batches are ``{"input_ids": (batch, tokens)}`` and whatever else the model's forward takes.
    """

    auto_class = AutoModelForCausalLM


class Seq2Seq(LanguageModel):
    """A model with encoder and decoder. Its perplexity is that of the labels.

    Batches are ``{"input_ids": (batch, tokens), "attention_mask": (batch, tokens), "labels": (batch, target tokens)}``,
    labels padded with -100.
    """

    auto_class = AutoModelForSeq2SeqLM


class Encoder(OneOutputPerSample):
    """An encoder of texts: a classifier, or what makes an embedding of a text.

    Batches are ``{"input_ids": (batch, tokens), "attention_mask": (batch, tokens)}``, ``labels`` ``(batch,)`` if there
    are any. A sample's output is its logits; of a model without a head for sequences, the mean over its tokens.

    Args:
        path: folder or hub name; the model is of the class that wrote it.
        dtype, attn_implementation, learning_rate: see :class:`LanguageModel`.
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
        super().__init__(model, model.config.num_labels if classifies else None, learning_rate)
        self.tokenizer = tokenizer

    @override
    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {key: value for key, value in batch.items() if key != LABELS}

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


def load_causal_lm(
    path: str | os.PathLike[str] | None = None, dtype: str = "auto", attn_implementation: str | None = None
) -> tuple[Any, Any]:
    """Model and tokenizer: :func:`~lightning_obs.app.models.pretrained.load_pretrained` of a causal language model."""
    return load_pretrained(path, AutoModelForCausalLM, dtype, attn_implementation)
