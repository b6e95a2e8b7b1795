"""Text to calibrate on, and other text to measure on.

Every second document is held out: calibration never sees what perplexity is measured on. The default text is Python's
own documentation of its topics (``pydoc_data.topics``, in the standard library): about 113,000 tokens of English.
"""

from __future__ import annotations

import csv
import json
import os
from codecs import BOM_UTF8
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_obs.errors import CalibrationError

_SUFFIXES = (".txt", ".md", ".rst", ".jsonl", ".json", ".csv", ".parquet")


class TextData(LightningDataModule):
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
        super().__init__()
        sizes = {"batches": batches, "batch_size": batch_size, "tokens": tokens, "eval_batches": eval_batches}
        for name, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CalibrationError(f"data.{name}", got=repr(value), expected="a positive whole number")
        documents = list(read_documents(path, text_field))
        if eval_path is not None:
            seen, held_out = documents, list(read_documents(eval_path, text_field, "data.eval_path"))
        else:
            if len(documents) == 1:
                half = len(documents[0]) // 2
                documents = [documents[0][:half], documents[0][half:]]
            seen, held_out = documents[0::2], documents[1::2]
        self.batch_size, self.num_workers = batch_size, num_workers
        wanted = (batches + train_batches) * batch_size
        blocks = _blocks(tokenizer, seen, wanted, tokens, "calibration", "batches")
        self.calibration = TokenBlocks(blocks.tokens[: batches * batch_size])
        self.training = TokenBlocks(blocks.tokens[batches * batch_size :])
        self.held_out = _blocks(tokenizer, held_out, eval_batches * batch_size, tokens, "held-out", "eval_batches")

    @override
    def train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        """Batches to train on, in another order each epoch."""
        return DataLoader(self.training, batch_size=self.batch_size, num_workers=self.num_workers, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        """Batches to calibrate on: ``{"input_ids": (batch_size, tokens)}``."""
        return DataLoader(self.calibration, batch_size=self.batch_size, num_workers=self.num_workers)

    @override
    def test_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        """Batches that calibration does not see."""
        return DataLoader(self.held_out, batch_size=self.batch_size, num_workers=self.num_workers)


class TokenBlocks(Dataset[dict[str, torch.Tensor]]):
    """Rows of a token matrix ``(blocks, tokens)``."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index]}


def read_documents(
    path: str | os.PathLike[str] | None, text_field: str = "text", option: str = "data.path"
) -> Iterator[str]:
    """Documents of a file or folder (see :class:`TextData`), in a fixed order. ``option`` is what errors call it.

    Raises:
        CalibrationError: no such file; what cannot be read, by file and line; an object without ``text_field``.
    """
    if path is None:
        from pydoc_data.topics import topics

        yield from (topics[name] for name in sorted(topics))
        return
    path = Path(path)
    if not path.exists():
        raise CalibrationError(f"{option}={path} does not exist")
    if path.is_dir():
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            yield from _saved_dataset(path, text_field, option)
            return
        files = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in _SUFFIXES and file.is_file()]
        if not files:
            raise CalibrationError(
                f"{option}={path} holds nothing to read", expected=f"files ending in {', '.join(_SUFFIXES)}"
            )
        for file in files:
            yield from read_documents(file, text_field, option)
        return
    readers = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    suffix = path.suffix.lower()
    if suffix in readers:
        for place, row in readers[suffix](path):
            yield _field(place, row, text_field)
    else:
        yield from (paragraph for paragraph in _decoded(path).split("\n\n") if paragraph.strip())


def _decoded(path: Path) -> str:
    data = path.read_bytes().removeprefix(BOM_UTF8)
    try:
        text = data.decode("utf-8")
        bad = data.find(b"\0")  # which decodes, and is in no text
    except UnicodeDecodeError as error:
        bad = error.start
    if bad >= 0:
        raise CalibrationError(
            f"{path}:{data.count(10, 0, bad) + 1} is no text in UTF-8",
            got=f"byte 0x{data[bad]:02x}",
            remedy="convert it (iconv -f latin1 -t utf-8), or give a text, jsonl, json, csv or parquet file.",
        )
    return text.replace("\r\n", "\n")


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_decoded(path).split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _unreadable(f"{path}:{number}", "JSON", error) from error
            yield f"{path}:{number}", row


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """A list of objects, or lines of them as many call it too."""
    text = _decoded(path)
    if not text.lstrip().startswith("["):
        yield from _json_lines(path)
        return
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(f"{path}:{getattr(error, 'lineno', 1)}", "JSON", error) from error
    yield from ((f"{path}[{index}]", row) for index, row in enumerate(rows))


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    rows = csv.DictReader(StringIO(_decoded(path), newline=""), strict=True)
    try:
        for row in rows:
            yield f"{path}:{rows.line_num}", row
    except csv.Error as error:
        raise _unreadable(f"{path}:{rows.reader.line_num}", "CSV", error) from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise CalibrationError(
            f"{path} is read by the package pyarrow, which is not installed", remedy="pip install pyarrow"
        ) from error
    try:
        rows = (row for batch in parquet.ParquetFile(path).iter_batches() for row in batch.to_pylist())
        yield from ((f"{path}[{index}]", row) for index, row in enumerate(rows))
    except (OSError, ValueError) as error:  # what pyarrow raises is one of them
        raise _unreadable(str(path), "Parquet", error) from error


def _unreadable(place: str, kind: str, error: Exception) -> CalibrationError:
    return CalibrationError(f"{place} is no {kind}", got=str(error)[:200], remedy="mend the file, or leave it out.")


def _field(place: str, row: Any, text_field: str) -> str:
    value = row.get(text_field) if isinstance(row, dict) else None
    if not isinstance(value, str):
        raise CalibrationError(
            f"{place} has no text in the field {text_field!r}",
            got=repr(row)[:80],
            remedy="name the field: data.text_field=...",
        )
    return value


def _saved_dataset(path: Path, text_field: str, option: str) -> Iterator[str]:
    try:
        from datasets import DatasetDict, load_from_disk
    except ImportError as error:
        raise CalibrationError(
            f"{option}={path} was saved by the package datasets, which is not installed", remedy="pip install datasets"
        ) from error
    loaded = load_from_disk(str(path))
    parts = list(loaded.values()) if isinstance(loaded, DatasetDict) else [loaded]
    for part in parts:
        if text_field not in part.column_names:
            raise CalibrationError(
                f"{path} has no column {text_field!r}",
                expected=", ".join(part.column_names),
                remedy="data.text_field=...",
            )
        yield from (_field(f"{path}[{index}]", row, text_field) for index, row in enumerate(part))


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
