r"""Calibrate a model with encoder and decoder (T5, BART, Marian...) from the command line, judged by its perplexity.

Run it in the folder of this file, or of your copy. Each line of pairs.jsonl is ``{"text": "...", "target": "..."}``:

    python -m lightning_obs \
        ~model +model._target_=text_pairs.Seq2Seq +model.path=<folder or hub name> \
        ~data +data._target_=text_pairs.TextPairs +data.path=pairs.jsonl \
        scheme=int8_static

Batches hold one sample, so that no padding is observed: the mask of the encoder's tokens does not fit the decoder's.
"""

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from torchmetrics.text import Perplexity
from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq

from lightning_obs.app.models.pretrained import load_pretrained

Batch = dict[str, torch.Tensor]


class Seq2Seq(L.LightningModule):
    """A transformers model that writes a target text for a text.

    Args:
        path: a folder, or a name on the hub; the command line passes the folder of the checkpoint to load it again.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.model, self.tokenizer = load_pretrained(path, AutoModelForSeq2SeqLM)
        self.perplexity = Perplexity(ignore_index=-100)

    def model_inputs(self, batch: Batch) -> dict[str, Any]:
        """Arguments of ``self.model`` for a batch: the decoder reads the labels, each from those before it."""
        return {**batch, "use_cache": False}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.model(**self.model_inputs(batch))  # calibration observes this call

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        logits = self.model(**self.model_inputs(batch)).logits
        self.perplexity.update(logits.float(), batch["labels"])
        self.log("perplexity", self.perplexity)


class TextPairs(L.LightningDataModule):
    """Texts with target texts, one pair in a batch. Every second pair is held out; calibration sees the others.

    Batches are ``input_ids`` and ``attention_mask`` ``(1, tokens)``, and ``labels`` ``(1, target tokens)``.

    Args:
        tokenizer: of the model; the command line passes it on.
        path: a file of JSON lines with the fields ``text`` and ``target``.
        tokens: longer texts and targets are cut here.
    """

    def __init__(self, tokenizer: Any, path: str, tokens: int = 128) -> None:
        super().__init__()
        self.collate = DataCollatorForSeq2Seq(tokenizer)
        samples = []
        for line in Path(path).read_text().splitlines():
            row = json.loads(line)
            sample = tokenizer(row["text"], text_target=row["target"], truncation=True, max_length=tokens)
            samples.append(dict(sample))
        self.calibration = samples[0::2]
        self.held_out = samples[1::2]

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.calibration, batch_size=1, collate_fn=self.collate)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, batch_size=1, collate_fn=self.collate)
