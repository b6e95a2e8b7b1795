"""Language models of transformers as LightningModules: causal ones, and those with encoder and decoder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torchmetrics.text import Perplexity
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from typing_extensions import override

from lightning_obs.app.models.default_model import default_model_folder
from lightning_obs.app.models.task_module import LABELS, TaskModule
from lightning_obs.app.pretrained import load_pretrained
from lightning_obs.moe.experts import linearize_experts as _linearize

#: what transformers' losses leave out
_PADDING = -100


class LanguageModel(TaskModule):
    """Trains on the cross entropy of the next token, and is judged by the perplexity.

    Args:
        model, tokenizer: of transformers.
        learning_rate: of AdamW, see :class:`~lightning_obs.app.models.task_module.TaskModule`.
    """

    def __init__(self, model: Any, tokenizer: Any, learning_rate: float) -> None:
        super().__init__(learning_rate)
        self.model, self.tokenizer = model, tokenizer
        self.perplexity = Perplexity(ignore_index=_PADDING)

    def predicted(self, batch: Mapping[str, torch.Tensor], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits that are judged, ``(batch, tokens, vocabulary)``, and the tokens they should predict."""
        raise NotImplementedError

    @override
    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The batch; no cache is kept."""
        return {**batch, "use_cache": False}

    @override
    def for_data(self) -> dict[str, Any]:
        """The tokenizer."""
        return {"tokenizer": self.tokenizer}

    @override
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Cross entropy of the next token."""
        loss: torch.Tensor = self(**{LABELS: batch["input_ids"], **batch}).loss
        return loss

    @override
    def on_test_epoch_start(self) -> None:
        """Start the perplexity anew."""
        self.perplexity.reset()

    @override
    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Add to the perplexity."""
        logits, tokens = self.predicted(batch, self(**batch).logits)
        self.perplexity.update(logits.float(), tokens)
        self.log("perplexity", self.perplexity, on_epoch=True)


class CausalLM(LanguageModel):
    """A causal language model. Its perplexity is that of every token but the first of each block.

    Batches are ``{"input_ids": (batch, tokens)}`` and whatever else the model's forward takes.

    Args:
        path: folder or hub name; None for the default model.
        dtype: auto, float32, bfloat16, float16.
        attn_implementation: as in transformers.
        linearize_experts: give every expert Linear modules of its own, so that they can be quantized.
        learning_rate: see :class:`LanguageModel`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        dtype: str = "auto",
        attn_implementation: str | None = None,
        linearize_experts: bool = True,
        learning_rate: float = 2e-5,
    ) -> None:
        super().__init__(*load_causal_lm(path, dtype, attn_implementation), learning_rate)
        if linearize_experts:
            _linearize(self.model)

    @override
    def predicted(self, batch: Mapping[str, torch.Tensor], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token from those before it."""
        return logits[:, :-1], batch["input_ids"][:, 1:]


class Seq2Seq(LanguageModel):
    """A model with encoder and decoder. Its perplexity is that of the labels.

    Batches are ``{"input_ids": (batch, tokens), "attention_mask": (batch, tokens), "labels": (batch, target tokens)}``,
    labels padded with -100.

    Args:
        path: folder or hub name.
        dtype, attn_implementation, learning_rate: see :class:`CausalLM`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        dtype: str = "auto",
        attn_implementation: str | None = None,
        learning_rate: float = 2e-5,
    ) -> None:
        super().__init__(*load_pretrained(path, AutoModelForSeq2SeqLM, dtype, attn_implementation), learning_rate)

    @override
    def for_data(self) -> dict[str, Any]:
        """The tokenizer, and that a target is a text."""
        return {**super().for_data(), "targets": True}

    @override
    def predicted(self, batch: Mapping[str, torch.Tensor], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The labels; the decoder reads them one to the right."""
        return logits, batch[LABELS]


def load_causal_lm(
    path: str | os.PathLike[str] | None = None, dtype: str = "auto", attn_implementation: str | None = None
) -> tuple[Any, Any]:
    """Load model and tokenizer; of None the default model.

    Args:
        path, dtype, attn_implementation: see :func:`~lightning_obs.app.pretrained.load_pretrained`.

    Raises:
        CalibrationError: what cannot be loaded; the default model's package is not installed.
    """
    source = path if path is not None else default_model_folder()
    return load_pretrained(source, AutoModelForCausalLM, dtype, attn_implementation)
