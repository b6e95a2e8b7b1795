"""Causal language models of transformers as a LightningModule, which the command line runs by default.

A user's own module (``model._target_``) is written from scratch, see docs/guide/other_models.md. The command line
requires that its ``validation_step`` runs the model and that its ``test_step`` logs a value
(:class:`lightning_obs.app.quality.Quality`). The keyword arguments of the model inside are the batch, or the result of
``model_inputs(batch)`` if the module has this method.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torchmetrics.text import Perplexity
from transformers import AutoModelForCausalLM
from typing_extensions import override

from lightning_obs.app.models.adapters import add_adapters, load_adapters, refuse_both
from lightning_obs.app.models.pretrained import load_pretrained, positions_of
from lightning_obs.checkpoint.packed import keep_packed as with_packed_weights
from lightning_obs.errors import CalibrationError
from lightning_obs.moe.experts import linearize_experts as give_experts_linears


class CausalLM(LightningModule):
    """A causal language model: trained on the cross entropy of the next token, judged by the perplexity.

    ``make_module`` (``from_config.py``) makes it of the config group ``model`` before the data are read.

    The perplexity counts every token but the first of each block. Batches are ``{"input_ids": (batch, tokens)}``, with
    further arguments of the model's forward.

    Args:
        path: a folder or a hub name; None: the default model.
        dtype: auto (as it was saved), float32, bfloat16 or float16.
        attn_implementation: as in transformers (``sdpa``, ``eager``...); None lets transformers choose.
        trust_remote_code: run the code that comes with a model.
        device_map: as in transformers, and ``"disk"``; None: the whole model is loaded on the CPU.
        offload_folder: for weights on disk that have no safetensors file.
        linearize_experts: give every expert Linear modules of its own, so that experts can be quantized.
        learning_rate: the rate of AdamW after a warm-up over a tenth of the steps; it falls to zero along a cosine.
        keep_packed: let the weights of a quantized checkpoint stay packed (:func:`~lightning_obs.keep_packed`).
        lora: arguments of peft's ``LoraConfig`` for new adapters, which are then all that is trained; None: none.
        adapters: a folder of adapters that peft has saved, which are loaded; None: none.

    Attributes:
        model: the model of transformers, inside peft's wrapper if it has adapters.
        tokenizer: the tokenizer of the model, by which the data are read.
        perplexity: the metric that :meth:`test_step` logs.

    Raises:
        CalibrationError: a learning rate that is not a positive number; a model that cannot be loaded
            (:func:`~lightning_obs.app.models.pretrained.load_pretrained`) or whose weights cannot stay packed; adapters
            that cannot be made or loaded.
    """

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
        keep_packed: bool = False,
        lora: Mapping[str, Any] | None = None,
        adapters: str | os.PathLike[str] | None = None,
    ) -> None:
        _refuse_rate(learning_rate)
        refuse_both(lora, adapters)
        super().__init__()
        self.model, self.tokenizer = load_pretrained(
            path,
            AutoModelForCausalLM,
            dtype,
            attn_implementation,
            trust_remote_code,
            device_map=device_map,
            offload_folder=offload_folder,
        )
        self.learning_rate = learning_rate
        self.perplexity = Perplexity()
        if linearize_experts:
            give_experts_linears(self.model)
        if keep_packed:
            with_packed_weights(self.model)
        if lora is not None:
            self.model = add_adapters(self.model, lora)
        if adapters is not None:
            self.model = load_adapters(self.model, adapters)

    def for_data(self) -> dict[str, Any]:
        """Return what the data need: the tokenizer, and the longest text that the model takes (``facts_for_data``)."""
        return {"tokenizer": self.tokenizer, "positions": positions_of(self.model.config)}

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the keyword arguments of ``self.model`` for a batch; each step calls it, and ``Job.inputs``."""
        return {**batch, "use_cache": False}

    @override
    def forward(self, **batch: torch.Tensor) -> Any:
        """Return the output of the model inside for a batch, given by its keys; every step below calls this."""
        return self.model(**self.model_inputs(batch))

    @override
    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Run the model on a batch to calibrate on; nothing is logged. Lightning's validation loop calls it."""
        self(**batch)  # calibration observes this call

    @override
    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Log the perplexity of a held-out batch; ``trainer.test`` calls it when ``app/quality.py`` measures."""
        logits = self(**batch).logits
        self.perplexity.update(logits[:, :-1].float(), batch["input_ids"][:, 1:])
        self.log("perplexity", self.perplexity)

    @override
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a training batch: the cross entropy of the next token, as transformers computes it.

        Lightning's fit calls it, for ``task=finetune`` and ``task=lora``.
        """
        return self(**{"labels": batch["input_ids"], **batch}).loss

    @override
    def configure_optimizers(self) -> Any:
        """AdamW without weight decay; the rate warms up over a tenth of the steps and falls to 0 along a cosine.

        Lightning's fit calls it. Weight decay is left out because a trained model needs a few hundred steps only.
        """
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=self.learning_rate, weight_decay=0.0)
        steps = int(self.trainer.estimated_stepping_batches)
        warm_up = max(1, steps // 10)

        def factor(step: int) -> float:
            """The share of the learning rate at a step: up to 1 in the warm-up, then down to 0 along a cosine.

            torch's scheduler calls it for each step.
            """
            if step < warm_up:
                return (step + 1) / warm_up
            progress = (step - warm_up) / max(1, steps - warm_up)
            return 0.5 * (1 + math.cos(math.pi * progress))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _refuse_rate(learning_rate: float) -> None:
    """Raise for a learning rate that AdamW would refuse, before the model is loaded."""
    is_number = isinstance(learning_rate, (int, float)) and not isinstance(learning_rate, bool)
    if not is_number or not 0 < learning_rate < math.inf:
        raise CalibrationError("model.learning_rate", got=repr(learning_rate), expected="a positive number")
