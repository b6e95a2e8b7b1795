"""Texts to calibrate on, and others to measure on: blocks of tokens, or one sample for each text.

The default text is Python's own documentation of its topics (``pydoc_data.topics``, in the standard library): about
113,000 tokens of English.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding
from typing_extensions import override

from lightning_obs.app.data.files import Row, read_documents, read_rows, text_of
from lightning_obs.app.data.splits import CalibrationData
from lightning_obs.errors import CalibrationError, name_list

#: words that make a paragraph of the default text a sample
_SENTENCE = 8


class TextData(CalibrationData):
    """Blocks of tokens, as language models are calibrated on them: batches ``{"input_ids": (batch_size, tokens)}``.

    Args:
        tokenizer: a transformers tokenizer.
        path: see :func:`~lightning_obs.app.data.files.read_rows`; a single document is cut in two halves.
        text_field: the field or column that holds the text.
        **options: of :class:`~lightning_obs.app.data.splits.DataOptions`.

    Raises:
        CalibrationError: see :class:`~lightning_obs.app.data.splits.CalibrationData`.
    """

    unit = "blocks of text"

    def __init__(
        self, tokenizer: Any, path: str | os.PathLike[str] | None = None, text_field: str = "text", **options: Any
    ) -> None:
        self._tokenizer, self._text_field = tokenizer, text_field
        super().__init__(path=path, **options)

    @override
    def read(self, path: Any, option: str) -> list[str]:
        documents = read_documents(path, self._text_field, option)
        if len(documents) > 1 or self.options.eval_path is not None:
            return documents
        return [text[part] for text in documents for part in (slice(len(text) // 2), slice(len(text) // 2, None))]

    @override
    def samples(self, found: list[str], count: int) -> list[dict[str, torch.Tensor]]:
        tokens = self.options.tokens
        ids = torch.tensor(self._tokenizer("\n\n".join(found), verbose=False).input_ids, dtype=torch.long)
        return [{"input_ids": block} for block in ids[: count * tokens].split(tokens) if len(block) == tokens]


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
        **options: of :class:`~lightning_obs.app.data.splits.DataOptions`.

    Raises:
        CalibrationError: see :class:`~lightning_obs.app.data.splits.CalibrationData`; an unknown label.
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
        pad = (DataCollatorForSeq2Seq if targets else DataCollatorWithPadding)(tokenizer)
        super().__init__(partial(_padded, pad), **options)

    @override
    def read(self, path: Any, option: str) -> list[Row]:
        rows = list(read_rows(path, self._text_field, option))
        if path is not None:
            return rows
        paragraphs = ((place, text.strip()) for place, row in rows for text in row[self._text_field].split("\n\n"))
        # headings are no samples
        return [(place, {self._text_field: text}) for place, text in paragraphs if len(text.split()) >= _SENTENCE]

    @override
    def samples(self, found: list[Row], count: int) -> list[dict[str, Any]]:
        return [self._sample(*row) for row in found[:count]]

    def _sample(self, place: str, row: Any) -> dict[str, Any]:
        text = text_of(place, row, self._text_field)
        if self._targets:
            if self._target_field is None:
                words = text.split()
                half = max(1, min(len(words) // 2, self.options.tokens))
                text, target = " ".join(words[:half]), " ".join(words[half:])
            else:
                target = text_of(place, row, self._target_field, "data.target_field")
            return {**self._encoded(text=text), "labels": self._encoded(text_target=target)["input_ids"]}
        sample = self._encoded(text=text)
        return sample if self._label_field is None else {**sample, "labels": self._label(place, row)}

    def _encoded(self, **text: str) -> dict[str, Any]:
        return dict(self._tokenizer(**text, truncation=True, max_length=self.options.tokens))

    def _label(self, place: str, row: Mapping[str, Any]) -> int | float:
        value = row.get(self._label_field or "")
        if value is None:
            raise CalibrationError(
                f"{place} has no field {self._label_field!r}",
                got=f"the fields {name_list(list(row))}",
                remedy="name the field of the labels: data.label_field=...",
            )
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


def _padded(pad: Callable[[Any], Mapping[str, Any]], samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A function, not a lambda: processes that are spawned get the data pickled."""
    return dict(pad(samples))
