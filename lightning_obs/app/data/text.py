"""Text to calibrate on, and other text to measure on.

Every second document is held out: calibration never sees what perplexity is measured on. The default text is Python's
own documentation of its topics (``pydoc_data.topics``, in the standard library): about 113,000 tokens of English.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import Dataset

from lightning_obs.app.data.files import read_documents
from lightning_obs.app.data.splits import CalibrationData, require_positive
from lightning_obs.errors import CalibrationError


class TextData(CalibrationData):
    """Blocks of tokens: ``val_dataloader`` to calibrate on, ``test_dataloader`` held out.

    Args:
        tokenizer: a transformers tokenizer.
        path: a text file in UTF-8 (documents are paragraphs); a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file,
            whose objects or rows have ``text_field``; a folder of such files, or one saved by ``datasets``. None: the
            default text.
        batches: calibration batches.
        batch_size: blocks per batch.
        tokens: tokens per block.
        eval_batches: batches to measure perplexity on.
        text_field: the field or column that holds the text.
        num_workers: of the DataLoaders.
        train_batches: batches to train on: other blocks of the half that is not held out; 0 for none.
        eval_path: another text to measure perplexity on, of any kind that ``path`` takes. Then all of ``path`` is there
            to calibrate and train on. None: every second document of ``path``.

    Raises:
        CalibrationError: numbers that are not positive; a file that is not there or cannot be read; less text than
            asked for.
    """

    def __init__(
        self,
        tokenizer: Any,
        path: str | os.PathLike[str] | None = None,
        batches: int = 16,
        batch_size: int = 1,
        tokens: int = 512,
        eval_batches: int = 16,
        text_field: str = "text",
        num_workers: int = 0,
        train_batches: int = 0,
        eval_path: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers)
        require_positive(batches=batches, batch_size=batch_size, tokens=tokens, eval_batches=eval_batches)
        documents = list(read_documents(path, text_field))
        if eval_path is not None:
            seen, held_out = documents, list(read_documents(eval_path, text_field, "data.eval_path"))
        else:
            if len(documents) == 1:
                half = len(documents[0]) // 2
                documents = [documents[0][:half], documents[0][half:]]
            seen, held_out = documents[0::2], documents[1::2]
        wanted = (batches + train_batches) * batch_size
        blocks = _blocks(tokenizer, seen, wanted, tokens, "calibration", "batches")
        self.calibration = TokenBlocks(blocks.tokens[: batches * batch_size])
        self.training = TokenBlocks(blocks.tokens[batches * batch_size :])
        self.held_out = _blocks(tokenizer, held_out, eval_batches * batch_size, tokens, "held-out", "eval_batches")


class TokenBlocks(Dataset[dict[str, torch.Tensor]]):
    """Rows of a token matrix ``(blocks, tokens)``."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index]}


def _blocks(tokenizer: Any, documents: list[str], count: int, tokens: int, what: str, option: str) -> TokenBlocks:
    ids = torch.tensor(tokenizer("\n\n".join(documents), verbose=False).input_ids, dtype=torch.long)
    if len(ids) < count * tokens:
        raise CalibrationError(
            f"too little {what} text (every second document is held out, unless data.eval_path is given)",
            got=f"{len(ids)} tokens",
            expected=f"{count} blocks of {tokens}",
            remedy=f"more text, or a smaller data.{option} or data.tokens.",
        )
    return TokenBlocks(ids[: count * tokens].view(count, tokens))
