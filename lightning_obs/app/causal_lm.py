"""A causal language model as a LightningModule: forward, loss, perplexity, nothing else."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torchmetrics.text import Perplexity
from typing_extensions import override

from lightning_obs.app.load_model import load_causal_lm
from lightning_obs.model.experts import linearize_experts as _linearize


class CausalLM(LightningModule):
    """Wrap a transformers model for Lightning's fit, validate and test.

    Batches are ``{"input_ids": (batch, tokens)}`` and whatever else the model's forward takes. The perplexity is that
    of every token but the first of each block.

    Args:
        path: folder or hub name; None for the default model.
        dtype: auto, float32, bfloat16, float16.
        attn_implementation: as in transformers.
        linearize_experts: give every expert Linear modules of its own, so that they can be quantized.
        learning_rate: of AdamW, after a warm-up over a tenth of the steps, and down to zero along a cosine.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        dtype: str = "auto",
        attn_implementation: str | None = None,
        linearize_experts: bool = True,
        learning_rate: float = 2e-5,
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.model, self.tokenizer = load_causal_lm(path, dtype, attn_implementation)
        if linearize_experts:
            _linearize(self.model)
        self.perplexity = Perplexity()

    @override
    def forward(self, **batch: torch.Tensor) -> Any:
        """Logits ``(batch, tokens, vocabulary)`` and whatever else the model returns."""
        return self.model(**batch, use_cache=False)

    @override
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Cross entropy of the next token."""
        loss: torch.Tensor = self(**batch, labels=batch["input_ids"]).loss
        return loss

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

    @override
    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Run the model; calibration observes it."""
        self(**batch)

    @override
    def on_test_epoch_start(self) -> None:
        """Start the perplexity anew."""
        self.perplexity.reset()

    @override
    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Add to the perplexity."""
        logits = self(**batch).logits
        self.perplexity.update(logits[:, :-1].float(), batch["input_ids"][:, 1:])
        self.log("perplexity", self.perplexity, on_epoch=True)
