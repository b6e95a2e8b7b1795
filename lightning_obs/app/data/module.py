"""Blocks of text to calibrate, to train and to measure on, as a LightningDataModule of the program's Lightning.

No text that a held-out block repeats is calibrated or trained on (:mod:`lightning_obs.app.data.overlap`).

The default text is Python's own documentation of its topics (``pydoc_data.topics``, in the standard library): about
113,000 tokens of English.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_obs.app.console import say
from lightning_obs.app.data.chats import (
    Chat,
    chat_token_ids,
    chats_apart_from,
    holds_chat,
    read_texts,
    text_token_ids,
)
from lightning_obs.app.data.files import read_rows, value_of
from lightning_obs.app.data.overlap import RUN, HeldOutRuns
from lightning_obs.app.data.text_blocks import cut_into_blocks, opening_token, without_opening
from lightning_obs.callbacks.lightning_package import LightningDataModule
from lightning_obs.errors import CalibrationError

#: a block of tokens, ``{"input_ids": (tokens,)}``
Block = dict[str, torch.Tensor]
#: of English, about; so much text is tokenized at first for each token that is needed
_CHARACTERS_PER_TOKEN = 4


class TextData(LightningDataModule):
    """The default data of the command line: blocks of tokens of equal length.

    A batch is ``{"input_ids": (batch_size, tokens)}``. ``from_config.read_data`` makes an instance once the model, and
    with it the tokenizer, is loaded.

    The blocks of ``val_dataloader`` are to calibrate on, those of ``train_dataloader`` to train on, and those of
    ``test_dataloader`` to measure on; no block is in two of them. Runs of 32 tokens that also occur in the held-out
    text are cut out of the other text; a printed line says how much was cut. Each block begins with the token that
    begins a text (``<bos>``), if the tokenizer adds one.

    Args:
        tokenizer: a transformers tokenizer.
        path: a file or folder of texts (:func:`~lightning_obs.app.data.files.read_rows`); None: Python's documentation.
            Without ``eval_path`` a single document is cut in two halves.
        text_field: the field or column that holds the text. A row without it may hold a chat in ``messages``.
        batches: number of batches to calibrate on.
        batch_size: blocks in a batch.
        tokens: tokens in a block.
        eval_batches: number of batches to measure on.
        eval_path: the file or folder of the text to measure on; None: every second document of ``path``.
        train_batches: number of batches to train on.
        num_workers: processes that load batches.
        positions: the longest text that the model takes, in tokens; None: of any length.

    Attributes:
        held_out: the blocks to measure on, which are cut first.
        calibration: the blocks to calibrate on.
        training: the blocks to train on, which follow those to calibrate on.

    Raises:
        CalibrationError: sizes that are not positive; blocks longer than the model takes; unreadable files; too little
            text.
    """

    def __init__(
        self,
        tokenizer: Any,
        path: str | os.PathLike[str] | None = None,
        text_field: str = "text",
        batches: int = 16,
        batch_size: int = 1,
        tokens: int = 512,
        eval_batches: int = 16,
        eval_path: str | os.PathLike[str] | None = None,
        train_batches: int = 0,
        num_workers: int = 0,
        positions: int | None = None,
    ) -> None:
        super().__init__()
        sizes = {"batches": batches, "batch_size": batch_size, "tokens": tokens, "eval_batches": eval_batches}
        _refuse_sizes({**sizes, "train_batches": train_batches, "num_workers": num_workers})
        if positions is not None and tokens > positions:
            raise CalibrationError(
                "data.tokens is longer than the texts that the model was made for",
                got=str(tokens),
                expected=f"at most {positions} (max_position_embeddings of its config)",
                remedy=f"data.tokens={positions}.",
            )
        self.tokenizer = tokenizer
        self.text_field = text_field
        self.batch_size = batch_size
        self.tokens = tokens
        self.num_workers = num_workers
        self._opening = opening_token(tokenizer)

        documents = self._read(path, "data.path", halve=eval_path is None)
        if eval_path is None:
            held_out_documents = documents[1::2]
            documents = documents[0::2]
        else:
            held_out_documents = self._read(eval_path, "data.eval_path", halve=False)
        self.held_out = self._blocks(held_out_documents, eval_batches, "held-out", "eval_batches", HeldOutRuns([]))
        held_out_tokens = [without_opening(block["input_ids"], self._opening) for block in self.held_out]
        runs = HeldOutRuns([torch.cat(held_out_tokens)])
        blocks = self._blocks(documents, batches + train_batches, "calibration", "batches", runs)
        calibration_blocks = batches * batch_size
        self.calibration = blocks[:calibration_blocks]
        self.training = blocks[calibration_blocks:]

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Refuse wrong sizes and files that are absent or lack the field of the text.

        The command line calls this (``check_data`` in ``from_config.py``) before it loads the model.

        Args:
            options: arguments of the constructor, without the tokenizer; only the first row of a file is read.
        """
        _refuse_sizes({name: options[name] for name in _LEAST if name in options})
        field = options.get("text_field", "text")
        for name in ("path", "eval_path"):
            if options.get(name) is not None:
                place, row = next(read_rows(options[name], field, f"data.{name}"))
                if not holds_chat(row, field):
                    value_of(place, row, field)

    def _read(self, path: str | os.PathLike[str] | None, option: str, halve: bool) -> list[str]:
        """Read the texts of the rows at ``path``.

        Args:
            path: as for :func:`~lightning_obs.app.data.files.read_rows`.
            option: the key that sets ``path``, for errors.
            halve: cut a single document into two, so that one half can be held out.
        """
        rows = list(read_rows(path, self.text_field, option))
        documents = read_texts(rows, self.text_field, self.tokenizer)
        if halve and len(documents) == 1:
            [document] = documents
            middle = len(document) // 2
            return [document[:middle], document[middle:]]
        return documents

    def _blocks(self, documents: list[str], batches: int, role: str, option: str, held_out: HeldOutRuns) -> list[Block]:
        """Make the blocks for a number of batches from the first documents, leaving out text that is held out.

        The constructor calls it for the held-out blocks, and then for those to calibrate and to train on. If all
        documents are chats, a chat is left out as a whole. If only some or none are chats, all are read as text, and
        runs of tokens are left out.

        Args:
            documents: texts; the text of a chat is a :class:`.Chat`, a subclass of str.
            batches: the number of batches that are needed.
            role: the use of the blocks (``"held-out"``, ``"calibration"``), for errors.
            option: the key of ``data`` that sets ``batches``, for errors.
            held_out: runs of tokens to leave out; no runs for the held-out blocks themselves.

        Raises:
            CalibrationError: too little text.
        """
        count = batches * self.batch_size
        if documents and all(isinstance(document, Chat) for document in documents):
            blocks, left_out = self._blocks_of_chats(documents, count, held_out)
        else:
            blocks, left_out = self._blocks_of_text(documents, count, held_out)
        if len(blocks) < count:
            reason = f"; left out: {left_out}" if left_out else ""
            kind_of_data = "without what many documents share, " if left_out else ""
            raise CalibrationError(
                f"too few {role} blocks of text (half of the data is held out, unless data.eval_path is given{reason})",
                got=str(len(blocks)),
                expected=str(count),
                remedy=f"more data, {kind_of_data}or a smaller data.{option}, data.batch_size or data.tokens.",
            )
        if left_out:
            say(f"\N{MIDDLE DOT} neither calibrated nor trained on: {left_out}")
        return blocks

    def _blocks_of_chats(self, chats: Sequence[Any], count: int, held_out: HeldOutRuns) -> tuple[list[Block], str]:
        """Up to ``count`` blocks of the chats that share no held-out run, and words about the chats left out.

        The words are empty if no chat was left out; :meth:`_blocks` prints them.
        """
        # A block to spare: tokenized once more as one text, the chats may have fewer tokens.
        enough_tokens = (count + 1) * self.tokens
        usable, repeated = chats_apart_from(held_out, chats, self.tokenizer, enough_tokens)
        ids = torch.tensor(chat_token_ids(usable, self.tokenizer), dtype=torch.long)
        blocks = self._cut(ids, count)
        if not repeated:
            return blocks, ""
        total = len(usable) + repeated
        return blocks, f"{repeated:,} of {total:,} chats, which a held-out chat repeats, {RUN} tokens or more in a row"

    def _blocks_of_text(self, documents: Sequence[str], count: int, held_out: HeldOutRuns) -> tuple[list[Block], str]:
        """Up to ``count`` blocks of the text without held-out runs, and words about the tokens left out.

        The words are empty if no token was left out; :meth:`_blocks` prints them.
        """
        ids, positions = self._tokens_of_text(documents, count * self.tokens, held_out)
        blocks = self._cut(ids[positions], count)
        tokens_read = int(positions[-1]) + 1 if len(blocks) == count else len(ids)
        repeated = tokens_read - len(positions)
        if not repeated:
            return blocks, ""
        sentence = f"{repeated:,} of {tokens_read:,} tokens, which the held-out text repeats, {RUN} or more in a row"
        return blocks, sentence

    def _tokens_of_text(
        self, documents: Sequence[str], count: int, held_out: HeldOutRuns
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokenize as many of the first documents as are needed for ``count`` tokens without held-out runs.

        Returns:
            Token ids ``(M,)``, and the positions in them of up to ``count`` tokens that are in no held-out run,
            ascending; fewer only if there is no more text.
        """
        characters = _CHARACTERS_PER_TOKEN * count
        while True:
            first = _first_documents(documents, characters)
            ids = torch.tensor(text_token_ids(first, self.tokenizer), dtype=torch.long)
            positions = held_out.positions_apart(ids)[:count]
            # A run that begins in the last tokens may go on in the next document.
            is_enough = len(positions) == count and int(positions[-1]) + RUN < len(ids)
            if is_enough or len(first) == len(documents):
                return ids, positions
            characters *= 2

    def _cut(self, ids: torch.Tensor, count: int) -> list[Block]:
        """Up to ``count`` blocks of token ids ``(N,)``, as :func:`.cut_into_blocks` makes them."""
        blocks = cut_into_blocks(ids, count, self.tokens, self._opening)
        return [{"input_ids": block} for block in blocks]

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        """The blocks to train on, shuffled; Lightning's fit calls it, and ``tasks/lora.py``."""
        return self._loader(self.training, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        """The blocks to calibrate on; Lightning's validation calls it, and tasks that run the model themselves."""
        return self._loader(self.calibration)

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        """The held-out blocks; ``trainer.test`` calls it, and measurements beside it (layer errors, timing)."""
        return self._loader(self.held_out)

    def _loader(self, blocks: Any, shuffle: bool = False) -> DataLoader[Any]:
        """A loader of batches of these blocks; on several devices Lightning gives each device a share of them."""
        return DataLoader(blocks, batch_size=self.batch_size, shuffle=shuffle, num_workers=self.num_workers)


def _first_documents(documents: Sequence[str], characters: int) -> Sequence[str]:
    """The first documents that have at least this many characters together, or all."""
    total = 0
    for index, document in enumerate(documents):
        total += len(document)
        if total >= characters:
            return documents[: index + 1]
    return documents


#: the smallest value of each size, by its key in ``data``
_LEAST = {"batches": 1, "batch_size": 1, "tokens": 1, "eval_batches": 1, "train_batches": 0, "num_workers": 0}


def _refuse_sizes(sizes: Mapping[str, Any]) -> None:
    """Raise for sizes, by their keys in ``data``, that are too small or no whole numbers, or blocks of one token."""
    for name, value in sizes.items():
        least = _LEAST[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            expected = "a positive whole number" if least else "a whole number, 0 or more"
            raise CalibrationError(f"data.{name}", got=repr(value), expected=expected)
    if sizes.get("tokens") == 1:
        raise CalibrationError(
            "data.tokens: in a block of one token there is nothing to predict, and no perplexity",
            got="1",
            expected="at least 2",
            remedy="data.tokens=512.",
        )
