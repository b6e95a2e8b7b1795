"""Samples to calibrate, to train and to measure on: blocks of tokens, texts, or images of a folder.

What a held-out sample repeats is neither calibrated nor trained on (:mod:`lightning_obs.app.data.overlap`).

The default text is Python's own documentation of its topics (``pydoc_data.topics``, in the standard library): about
113,000 tokens of English.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, default_collate
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding
from typing_extensions import override

from lightning_obs.app.console import say
from lightning_obs.app.data.chats import Chat, apart_from, holds_chat, read_texts, token_ids
from lightning_obs.app.data.files import Row, read_rows, require_fields, value_of
from lightning_obs.app.data.overlap import RUN, HeldOutRuns, Selection
from lightning_obs.app.models.language import LABELS
from lightning_obs.errors import CalibrationError
from lightning_obs.packages import import_package

#: least number of words of a paragraph of the default text that is a sample
_SENTENCE = 8


@dataclass(frozen=True)
class DataOptions:
    """The data to read, and how much of it; the keys that every config of the group ``data`` has."""

    path: str | os.PathLike[str] | None = None  # where the samples are; None: the default text
    batches: int = 16  # to calibrate on; no sample is in two of batches, eval_batches and train_batches
    batch_size: int = 1
    tokens: int = 512  # length of a sample; images have none
    eval_batches: int = 16  # to measure on
    eval_path: str | os.PathLike[str] | None = None  # of the samples to measure on; None: every second one of ``path``
    train_batches: int = 0  # to train on
    num_workers: int = 0

    def __post_init__(self) -> None:
        for name in ("batches", "batch_size", "tokens", "eval_batches"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CalibrationError(f"data.{name}", got=repr(value), expected="a positive whole number")


class CalibrationData(LightningDataModule, ABC):
    """Samples to calibrate on (``val_dataloader``), to train on, and held out (``test_dataloader``); subclasses read.

    No run of 32 tokens of a held-out sample is in the others: it is left out there, and a line says how much that is.

    Args:
        collate: makes a batch of samples; None: PyTorch's own.
        **options: of :class:`DataOptions`.

    Raises:
        CalibrationError: numbers that are not positive; unreadable files; fewer samples than asked for.
    """

    #: the name of samples in errors, in the plural
    unit: ClassVar[str]

    def __init__(self, collate: Callable[[list[Any]], Any] | None = None, **options: Any) -> None:
        super().__init__()
        asked = self.options = DataOptions(**options)
        self.collate = collate
        seen = self.read(asked.path, "data.path")
        if asked.eval_path is None:
            seen, held_out = seen[0::2], seen[1::2]
        else:
            held_out = self.read(asked.eval_path, "data.eval_path")
        nothing = HeldOutRuns([])
        self.held_out = self._samples(held_out, nothing, asked.eval_batches, "held-out", "eval_batches")
        runs = HeldOutRuns(self.sequences(self.held_out))
        samples = self._samples(seen, runs, asked.batches + asked.train_batches, "calibration", "batches")
        calibrated = asked.batches * asked.batch_size
        self.calibration = samples[:calibrated]
        self.training = samples[calibrated:]

    @classmethod
    def check(cls, asked: Mapping[str, Any]) -> None:
        """Refuse, by a config's keys, data that are not there or lack a field; no model is loaded yet."""
        DataOptions(**{field.name: asked[field.name] for field in fields(DataOptions) if field.name in asked})
        for name in ("path", "eval_path"):
            if asked.get(name) is not None:
                cls.check_fields(asked[name], asked, f"data.{name}")

    @classmethod
    def check_fields(cls, path: Any, asked: Mapping[str, Any], option: str) -> None:
        """Refuse, by its first object, a ``path`` without the fields that ``asked`` names."""
        require_fields(path, asked, option)

    @abstractmethod
    def read(self, path: Any, option: str) -> list[Any]:
        """The documents, rows or images at ``path``, which errors call ``option``."""

    @abstractmethod
    def samples(self, data: list[Any], count: int, held_out: HeldOutRuns) -> Selection:
        """Make ``count`` samples of the data read, or as many as there are, without the runs of ``held_out``."""

    @abstractmethod
    def sequences(self, samples: list[Any]) -> Iterable[Sequence[int] | torch.Tensor]:
        """The token ids of the samples, which the others may not repeat; images have none."""

    def _samples(self, data: list[Any], held_out: HeldOutRuns, batches: int, role: str, option: str) -> list[Any]:
        count = batches * self.options.batch_size
        selection = self.samples(data, count, held_out)
        if len(selection.samples) < count:
            left_out = f"; left out: {selection.left_out}" if selection.left_out else ""
            shared = "without what many documents share, " if selection.left_out else ""
            raise CalibrationError(
                f"too few {role} {self.unit} (half of the data is held out, unless data.eval_path is given{left_out})",
                got=str(len(selection.samples)),
                expected=str(count),
                remedy=f"more data, {shared}or a smaller data.{option}, data.batch_size or data.tokens.",
            )
        if selection.left_out:
            say(f"\N{MIDDLE DOT} neither calibrated nor trained on: {selection.left_out}")
        return selection.samples

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.training, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.calibration)

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.held_out)

    def _loader(self, samples: Any, shuffle: bool = False) -> DataLoader[Any]:
        # keyword arguments, because Lightning makes the loader again with a sampler of its own
        sizes: dict[str, Any] = {"batch_size": self.options.batch_size, "num_workers": self.options.num_workers}
        return DataLoader(samples, shuffle=shuffle, collate_fn=self.collate, **sizes)


class TextData(CalibrationData):
    """Blocks of tokens, as language models are calibrated on them: batches ``{"input_ids": (batch_size, tokens)}``.

    Args:
        tokenizer: a transformers tokenizer.
        path: see :func:`~lightning_obs.app.data.files.read_rows`; a single document is cut in two halves.
        text_field: the field or column that holds the text. A row without it may hold a chat in ``messages``.
        **options: of :class:`DataOptions`.
    """

    unit = "blocks of text"

    def __init__(
        self, tokenizer: Any, path: str | os.PathLike[str] | None = None, text_field: str = "text", **options: Any
    ) -> None:
        self._tokenizer, self._text_field = tokenizer, text_field
        _require_predictions(options)
        super().__init__(path=path, **options)

    @override
    @classmethod
    def check_fields(cls, path: Any, asked: Mapping[str, Any], option: str) -> None:
        first = next(read_rows(path, asked["text_field"], option), None)
        if first is None or not holds_chat(first[1], asked["text_field"]):
            super().check_fields(path, asked, option)

    @override
    @classmethod
    def check(cls, asked: Mapping[str, Any]) -> None:
        _require_predictions(asked)
        super().check(asked)

    @override
    def read(self, path: Any, option: str) -> list[str]:
        documents = read_texts(list(read_rows(path, self._text_field, option)), self._text_field, self._tokenizer)
        if len(documents) == 1 and self.options.eval_path is None:
            half = len(documents[0]) // 2
            return [documents[0][:half], documents[0][half:]]
        return documents

    @override
    def samples(self, data: list[str], count: int, held_out: HeldOutRuns) -> Selection:
        if data and all(isinstance(document, Chat) for document in data):
            chats, repeated = apart_from(held_out, data, self._tokenizer, (count + 1) * self.options.tokens)
            blocks = self._blocks(torch.tensor(token_ids(chats, self._tokenizer), dtype=torch.long), count)
            looked_at = len(chats) + repeated
            left_out = (
                f"{repeated:,} of {looked_at:,} chats, which a held-out chat repeats, {RUN} tokens or more in a row"
            )
        else:
            ids = torch.tensor(token_ids(data, self._tokenizer), dtype=torch.long)
            positions = held_out.positions_apart(ids)[: count * self.options.tokens]
            blocks = self._blocks(ids[positions], count)
            looked_at = int(positions[-1]) + 1 if len(blocks) == count else len(ids)
            repeated = looked_at - len(positions)
            left_out = f"{repeated:,} of {looked_at:,} tokens, which the held-out text repeats, {RUN} or more in a row"
        return Selection(blocks, left_out if repeated else "")

    def _blocks(self, ids: torch.Tensor, count: int) -> list[dict[str, torch.Tensor]]:
        size = self.options.tokens
        return [{"input_ids": block} for block in ids[: count * size].split(size) if len(block) == size]

    @override
    def sequences(self, samples: list[Any]) -> Iterable[torch.Tensor]:
        return [torch.cat([sample["input_ids"] for sample in samples])]


def _require_predictions(asked: Mapping[str, Any]) -> None:
    """Refuse blocks of one token: a perplexity is of every token but the first of its block."""
    if asked.get("tokens") == 1:
        raise CalibrationError(
            "data.tokens: in a block of one token there is nothing to predict, and no perplexity",
            got="1",
            expected="at least 2",
            remedy="data.tokens=512.",
        )


class DocumentData(CalibrationData):
    """One sample for each text, cut at ``tokens`` and padded to the longest of its batch.

    Batches have ``input_ids`` and ``attention_mask`` ``(batch_size, tokens)``. With ``label_field`` they have
    ``labels`` ``(batch_size,)``; with ``targets``, ``labels`` ``(batch_size, target tokens)``, padded with -100.
    Without a ``path``, samples are paragraphs of the default text.

    Args:
        tokenizer: a transformers tokenizer.
        text_field: the field or column that holds the text.
        label_field: that of the label: a number, or a name that ``label2id`` has. None: no labels.
        target_field: that of the text that ``targets`` asks for; None: the text's own second half.
        label2id: numbers of the labels' names.
        targets: samples have a target text.
        **options: of :class:`DataOptions`.

    Raises:
        CalibrationError: an unknown label.
    """

    unit = "texts"

    def __init__(
        self,
        tokenizer: Any,
        text_field: str = "text",
        label_field: str | None = None,
        target_field: str | None = None,
        label2id: Mapping[str, int] | None = None,
        targets: bool = False,
        **options: Any,
    ) -> None:
        self._tokenizer, self._label2id, self._targets = tokenizer, label2id or {}, targets
        self._text_field, self._label_field, self._target_field = text_field, label_field, target_field
        super().__init__((DataCollatorForSeq2Seq if targets else DataCollatorWithPadding)(tokenizer), **options)

    @override
    def read(self, path: Any, option: str) -> list[Row]:
        rows = list(read_rows(path, self._text_field, option))
        if path is not None:
            return rows
        paragraphs = ((place, text.strip()) for place, row in rows for text in row[self._text_field].split("\n\n"))
        # headings are not samples
        return [(place, {self._text_field: text}) for place, text in paragraphs if len(text.split()) >= _SENTENCE]

    @override
    def samples(self, data: list[Row], count: int, held_out: HeldOutRuns) -> Selection:
        samples: list[dict[str, Any]] = []
        repeated = 0
        for place, row in data:
            if len(samples) == count:
                break
            sample = self._sample(place, row)
            if any(held_out.shares(sequence) for sequence in self.sequences([sample])):
                repeated += 1
            else:
                samples.append(sample)
        looked_at = len(samples) + repeated
        left_out = f"{repeated:,} of {looked_at:,} texts, which a held-out text repeats, whole or {RUN} tokens in a row"
        return Selection(samples, left_out if repeated else "")

    @override
    def sequences(self, samples: list[dict[str, Any]]) -> Iterable[list[int]]:
        for sample in samples:
            yield sample["input_ids"]
            target = sample["labels"] if self._targets else []
            if len(target) >= RUN:  # a short one is an answer that many texts have
                yield target

    def _sample(self, place: str, row: Any) -> dict[str, Any]:
        text = value_of(place, row, self._text_field)
        if self._targets:
            if self._target_field is None:
                words = text.split()
                half = max(1, min(len(words) // 2, self.options.tokens))
                text, target = " ".join(words[:half]), " ".join(words[half:])
            else:
                target = value_of(place, row, self._target_field, "data.target_field")
            labels = self._encoded(place, text_target=target)["input_ids"]
            return {**self._encoded(place, text=text), "labels": labels}
        sample = self._encoded(place, text=text)
        return sample if self._label_field is None else {**sample, "labels": self._label(place, row)}

    def _encoded(self, place: str, **text: str) -> dict[str, Any]:
        sample = dict(self._tokenizer(**text, truncation=True, max_length=self.options.tokens))
        if not sample["input_ids"]:
            ((kind, value),) = text.items()
            raise CalibrationError(
                f"{place} has {'an empty target' if kind == 'text_target' else 'an empty text'}",
                got=repr(value),
                expected="a text of at least one token",
                remedy="leave such rows out of the file.",
            )
        return sample

    def _label(self, place: str, row: Mapping[str, Any]) -> int | float:
        value = value_of(place, row, str(self._label_field), "data.label_field", object)
        if isinstance(value, str) and value in self._label2id:
            return self._label2id[value]
        try:
            return int(value) if float(value) == int(float(value)) else float(value)
        except (TypeError, ValueError, OverflowError) as error:
            known = ", ".join(f"{name!r} ({number})" for name, number in self._label2id.items())
            raise CalibrationError(
                f"{place}: the model does not know the label in the field {self._label_field!r}",
                got=repr(value),
                expected=f"a class by its number or its name; the model knows {known or 'no names'}",
                remedy="write the classes as numbers, or put their names into the model's config.json: "
                f'"label2id": {{{json.dumps(str(value))}: 0, ...}}.',
            ) from error


class ImageData(CalibrationData):
    """Images of a folder, at any depth: batches ``{"images": (batch_size, channels, height, width)}``.

    One folder for each class, as many as the model has classes, are ``labels`` ``(batch_size,)``, in the order of their
    names. Otherwise images have no labels.

    Args:
        data_config: ``timm.data.resolve_model_data_config`` of the model.
        classes: how many the model knows.
        **options: of :class:`DataOptions`.
    """

    unit = "images"

    def __init__(self, data_config: Mapping[str, Any], classes: int = 0, **options: Any) -> None:
        self._data_config = data_config
        self._classes: list[dict[str, int]] = []
        super().__init__(**options)
        first, last = self._classes[0], self._classes[-1]
        labelled = first == last and len(first) == classes
        self.collate = partial(_batch, labelled)
        if not labelled:
            counts = f"{len(first)}/{len(last)} folders to calibrate/measure on"
            say(f"\N{MIDDLE DOT} images without labels: {counts}, {classes} classes")

    @override
    @classmethod
    def check(cls, asked: Mapping[str, Any]) -> None:
        for name in ("path", "eval_path"):
            if asked.get(name) is not None and not Path(asked[name]).is_dir():
                raise CalibrationError(f"data.{name}={asked[name]} is not a folder")

    @override
    def read(self, path: Any, option: str) -> list[Any]:
        timm = import_package("timm", "model=timm")
        try:
            images = timm.data.ImageDataset(str(path), transform=timm.data.create_transform(**self._data_config))
        except RuntimeError as error:
            raise CalibrationError(f"{option}={path} holds no images", got=str(error).splitlines()[0]) from error
        self._classes.append(images.reader.class_to_idx)
        return [(images, index) for index in range(len(images))]

    @override
    def samples(self, data: list[Any], count: int, held_out: HeldOutRuns) -> Selection:
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(data), generator=generator)  # a folder is sorted by class
        return Selection([data[index] for index in order[:count].tolist()])

    @override
    def sequences(self, samples: list[Any]) -> Iterable[list[int]]:
        return []


def _batch(labelled: bool, samples: list[tuple[Any, int]]) -> dict[str, torch.Tensor]:
    """Load the images of a batch, in the process that collates it."""
    images, labels = default_collate([folder[index] for folder, index in samples])
    return {"images": images, **({LABELS: labels} if labelled else {})}
