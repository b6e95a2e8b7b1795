"""The models that accuracy is measured on: how each is calibrated, and how its loss on held-out texts is computed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from held_out_pictures import Pictures, digits
from held_out_texts import BlockTexts, SentenceTexts
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForImageClassification, AutoTokenizer

from lightning_obs import linearize_experts
from lightning_obs.app.models.pretrained import load_pretrained
from lightning_obs.numerics.divergence import compare

Batch: TypeAlias = dict[str, torch.Tensor]
MOST_TOKENS = 128


@dataclass(frozen=True)
class Estimate:
    """A mean over blocks or texts, with its standard error.

    >>> str(Estimate.of([0.1, 0.2, 0.3]))
    '0.2000 ± 0.0577'
    """

    mean: float
    error: float

    @classmethod
    def of(cls, values: list[float]) -> Estimate:
        numbers = torch.tensor(values, dtype=torch.float64)
        error = numbers.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(numbers.mean().item(), error)

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.error:.4f}"


#: the estimates of one row, each in the order of ``columns``, by the name of the held-out text
Losses: TypeAlias = dict[str, list[Estimate]]


class Encoder:
    """Sentence embeddings of a model of transformers.

    Args:
        folder: of the model.
        device: that runs it.
        batches: to calibrate on, of ``batch_size`` paragraphs.
        batch_size: paragraphs of a batch.
    """

    columns = ("1 - cosine",)
    ignore: tuple[str, ...] = ("re:.*pooler.*",)
    pipeline, token_mask = "basic", "attention_mask"

    def __init__(self, folder: Path, device: str, batches: int = 4, batch_size: int = 16) -> None:
        self.device = device
        self._batch_size = batch_size
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval().to(device)
        texts = SentenceTexts(self.tokenizer, batch_size * batches)
        self._calibration = texts.calibration
        self.held_out = texts.held_out
        self._expected = {name: self._embed(self.model, texts) for name, texts in self.held_out.items()}
        counts = [f"{len(texts)} texts ({name})" for name, texts in self.held_out.items()]
        self.title = ", ".join(counts)

    @cached_property
    def plain(self) -> float:
        """The time of the batches to calibrate on without calibration [s]."""
        return seconds_of_second(self.calibrate, self.model, self.device)

    def batches(self) -> list[Batch]:
        """The batches to calibrate on."""
        return self._tokenized(self._calibration)

    def calibrate(self, model: nn.Module) -> None:
        self._embed(model, self._calibration)

    def measure(self, model: nn.Module) -> Losses:
        """1 - cosine of the embeddings to the unquantized model's."""
        losses = {}
        for name, texts in self.held_out.items():
            cosines = (self._embed(model, texts) * self._expected[name]).sum(-1)
            losses[name] = [Estimate.of((1 - cosines).tolist())]
        return losses

    def _tokenized(self, texts: list[str]) -> list[Batch]:
        options = {"return_tensors": "pt", "padding": True, "truncation": True, "max_length": MOST_TOKENS}
        size = self._batch_size
        starts = range(0, len(texts), size)
        return [dict(self.tokenizer(texts[start : start + size], **options)) for start in starts]

    @torch.no_grad()
    def _embed(self, model: nn.Module, texts: list[str]) -> torch.Tensor:
        """Embeddings of texts, ``(texts, C)`` of length 1: the mean over tokens."""
        embeddings = []
        for batch in on_device(self._tokenized(texts), self.device):
            hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            embeddings.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
        return torch.cat(embeddings)


class Classifier:
    """The classes that a vision transformer of transformers sees in pictures of digits.

    Args:
        folder: of the model.
        device: that runs it.
        batches: to calibrate on, of ``batch_size`` pictures.
        batch_size: pictures of a batch.
    """

    columns = ("1 - cosine [1e-3]", "KL [1e-3 nats]", "accuracy")
    ignore: tuple[str, ...] = ("classifier",)
    pipeline, token_mask = "basic", None

    def __init__(self, folder: Path, device: str, batches: int = 8, batch_size: int = 16) -> None:
        self.device = device
        self.model = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32).eval().to(device)
        data = digits()
        self._calibration = data.calibration.values[: batches * batch_size].split(batch_size)
        self.held_out = data.held_out
        self._expected = {name: self._seen(self.model, pictures) for name, pictures in self.held_out.items()}
        self.title = ", ".join(self._accuracy_of(name) for name in self.held_out)

    @cached_property
    def plain(self) -> float:
        """The time of the batches to calibrate on without calibration [s]."""
        return seconds_of_second(self.calibrate, self.model, self.device)

    def batches(self) -> list[Batch]:
        """The batches to calibrate on."""
        return [{"pixel_values": values} for values in self._calibration]

    @torch.no_grad()
    def calibrate(self, model: nn.Module) -> None:
        for batch in on_device(self.batches(), self.device):
            model(**batch)

    def measure(self, model: nn.Module) -> Losses:
        """1 - cosine of what the head reads, the divergence of its predictions, and the share that is right."""
        losses = {}
        for name, pictures in self.held_out.items():
            read, logits = self._seen(model, pictures)
            expected_read, expected_logits = self._expected[name]
            cosines = F.cosine_similarity(read, expected_read)
            divergences = F.kl_div(
                logits.log_softmax(-1), expected_logits.log_softmax(-1), reduction="none", log_target=True
            )
            is_right = logits.argmax(-1).cpu() == pictures.labels
            losses[name] = [
                Estimate.of((1e3 * (1 - cosines)).tolist()),
                Estimate.of((1e3 * divergences.sum(-1)).tolist()),
                Estimate.of(is_right.tolist()),
            ]
        return losses

    @torch.no_grad()
    def _seen(self, model: nn.Module, pictures: Pictures) -> tuple[torch.Tensor, torch.Tensor]:
        """What the head reads, ``(pictures, C)``, and its logits ``(pictures, classes)``."""
        output = model(pixel_values=pictures.values.to(self.device), output_hidden_states=True)
        norm = model.get_submodule("vit.layernorm")
        return norm(output.hidden_states[-1])[:, 0], output.logits

    def _accuracy_of(self, name: str) -> str:
        labels = self.held_out[name].labels
        _, logits = self._expected[name]
        accuracy = (logits.argmax(-1).cpu() == labels).float().mean().item()
        return f"{len(labels)} pictures ({name}, accuracy {accuracy:.4f})"


class Language:
    """The predictions of a causal model, whose experts, if it has any, are linear layers.

    Args:
        folder: of the model; None: the default model.
        device: that runs it.
        batches: to calibrate on, of one block of 512 tokens.
        eval_batches: blocks of each held-out text.
        path: text to calibrate on and to hold out, in place of Python's documentation.
    """

    columns = ("loss grows by [nats]", "KL [nats]")
    ignore: tuple[str, ...] = ("lm_head", "re:.*shared_expert_gate")
    pipeline, token_mask = "sequential", None

    def __init__(
        self, folder: Path | None, device: str, batches: int = 16, *, eval_batches: int, path: str | None = None
    ) -> None:
        self.folder, self.device = folder, device
        self.model, self.tokenizer = load_pretrained(folder, dtype="float32")
        linearize_experts(self.model)
        self.model.eval().to(device)
        texts = BlockTexts(self.tokenizer, batches, eval_batches, path)
        self._calibration = texts.calibration
        self.held_out = texts.held_out
        self._expected = {}
        for name, blocks in self.held_out.items():
            self._expected[name] = [self._hidden(block) for block in blocks]
        self.title = ", ".join(self._perplexity_of(name) for name in self.held_out)

    @cached_property
    def plain(self) -> float:
        """The time of the batches to calibrate on without calibration [s]."""
        return seconds_of_second(self.calibrate, self.model, self.device)

    def batches(self) -> list[Batch]:
        """The batches to calibrate on."""
        return [{"input_ids": block.unsqueeze(0)} for block in self._calibration]

    @torch.no_grad()
    def calibrate(self, model: nn.Module) -> None:
        for batch in on_device(self.batches(), self.device):
            model(**batch, use_cache=False)

    def measure(self, model: nn.Module) -> Losses:
        """The growth of the next-token loss and the divergence from the unquantized model's predictions."""
        losses = {}
        for name, blocks in self.held_out.items():
            grown, divergences = [], []
            for block, hidden, quantized in zip(blocks, self._expected[name], self._logits(model, blocks), strict=True):
                expected = self._head(hidden)
                grown.append(next_token_loss(quantized, block) - next_token_loss(expected, block))
                divergence, _ = compare(quantized, expected)
                divergences.append(divergence.item() / len(block))
            losses[name] = [Estimate.of(grown), Estimate.of(divergences)]
        return losses

    @torch.no_grad()
    def _logits(self, model: nn.Module, blocks: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The logits ``(tokens, classes)`` of each block."""
        for block in blocks:
            yield model(input_ids=block.unsqueeze(0).to(self.device), use_cache=False).logits[0].float()

    @torch.no_grad()
    def _hidden(self, block: torch.Tensor) -> torch.Tensor:
        """What the unquantized model's head reads of a block, ``(tokens, C)``: SmolLM2's logits are 85 times as large.

        Raises:
            AssertionError: the head of this model does more than its output embedding does.
        """
        output = self.model(input_ids=block.unsqueeze(0).to(self.device), use_cache=False, output_hidden_states=True)
        hidden = output.hidden_states[-1][0]
        torch.testing.assert_close(self._head(hidden), output.logits[0].float(), rtol=1e-3, atol=1e-3)
        return hidden

    @torch.no_grad()
    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``(tokens, classes)`` by the output embedding, which stays as it is."""
        return self.model.get_output_embeddings()(hidden).float()

    def _perplexity_of(self, name: str) -> str:
        blocks = self.held_out[name]
        losses = []
        for block, hidden in zip(blocks, self._expected[name], strict=True):
            losses.append(next_token_loss(self._head(hidden), block))
        perplexity = math.exp(sum(losses) / len(losses))
        return f"{sum(map(len, blocks)):,} tokens ({name}, perplexity {perplexity:.2f})"


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """The mean cross-entropy of each next token [nats], from logits ``(tokens, classes)``."""
    return F.cross_entropy(logits[:-1], tokens[1:].to(logits.device)).item()


def on_device(batches: list[Batch], device: str) -> Iterator[Batch]:
    for batch in batches:
        yield {name: value.to(device) for name, value in batch.items()}


def clock(device: str) -> float:
    """CPU time; of an accelerator wall time, with all done that it was given [s]."""
    if device == "cpu":
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def seconds_of_second(run: Any, model: nn.Module, device: str) -> float:
    """The time of the second of two runs [s]."""
    run(model)
    start = clock(device)
    run(model)
    return clock(device) - start
