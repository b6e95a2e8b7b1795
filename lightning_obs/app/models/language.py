"""The command line's models as LightningModules: their base class, and language models of transformers.

A user's module (``model._target_``) needs none of this. The command line requires of it: ``validation_step``
runs the model, ``test_step`` logs a value (see :class:`lightning_obs.app.job.Quality`), and the model inside takes a
batch as its keyword arguments, or the result of ``model_inputs(batch)``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torchmetrics.text import Perplexity
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from typing_extensions import override

from lightning_obs.app.models.pretrained import load_pretrained
from lightning_obs.errors import CalibrationError
from lightning_obs.moe.experts import linearize_experts as _linearize

#: the key of a batch that holds the labels
LABELS = "labels"


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
        """Keyword arguments of ``self.model``: the batch without labels."""
        return {key: value for key, value in batch.items() if key != LABELS}

    def for_data(self) -> dict[str, Any]:
        """Facts of the model for a LightningDataModule, whose constructor gets the ones that it takes."""
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


def require_rate(learning_rate: float) -> None:
    """Refuse a learning rate that AdamW would refuse after the model is loaded."""
    is_number = isinstance(learning_rate, (int, float)) and not isinstance(learning_rate, bool)
    if not is_number or not 0 < learning_rate < math.inf:
        raise CalibrationError("model.learning_rate", got=repr(learning_rate), expected="a positive number")


class LanguageModel(TaskModule):
    """Trains on the cross entropy of the next token, and is judged by the perplexity.

    Args:
        path, dtype, attn_implementation, trust_remote_code, device_map, offload_folder: of
            :func:`~lightning_obs.app.models.pretrained.load_pretrained`.
        linearize_experts: give every expert Linear modules of its own, so that they can be quantized.
        learning_rate: of AdamW, see :class:`TaskModule`.
    """

    auto_class: ClassVar[Any]

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        dtype: str = "auto",
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        device_map: str | Mapping[str, Any] | None = None,
        offload_folder: str | None = None,
        linearize_experts: bool = True,
        learning_rate: float = 2e-5,
    ) -> None:
        require_rate(learning_rate)
        where = {"device_map": device_map, "offload_folder": offload_folder}
        model, tokenizer = load_pretrained(
            path, self.auto_class, dtype, attn_implementation, trust_remote_code, **where
        )
        super().__init__(model, learning_rate)
        self.tokenizer = tokenizer
        self.perplexity = Perplexity(ignore_index=-100)  # the label that transformers' losses leave out
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
        return self(**{LABELS: batch["input_ids"], **batch}).loss

    @override
    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        logits = self(**batch).logits
        if self.model.config.is_encoder_decoder:  # the decoder reads the labels one to the right
            self.perplexity.update(logits.float(), batch[LABELS])
        else:  # each token from the tokens before it
            self.perplexity.update(logits[:, :-1].float(), batch["input_ids"][:, 1:])
        self.log("perplexity", self.perplexity)


class CausalLM(LanguageModel):
    """A causal language model. Its perplexity is that of every token but the first of each block.

    Batches are ``{"input_ids": (batch, tokens)}`` and other arguments of the model's forward.
    """

    auto_class = AutoModelForCausalLM


class Seq2Seq(LanguageModel):
    """A model with encoder and decoder. Its perplexity is that of the labels.

    Batches are ``{"input_ids": (batch, tokens), "attention_mask": (batch, tokens), "labels": (batch, target tokens)}``,
    labels padded with -100.
    """

    auto_class = AutoModelForSeq2SeqLM
