"""One sample for each text: what encoders and sequence-to-sequence models are calibrated and measured on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding

from lightning_obs.app.data.files import read_rows, text_of
from lightning_obs.app.data.splits import CalibrationData, require_positive
from lightning_obs.errors import CalibrationError, name_list

Sample = dict[str, Any]

#: words that make a paragraph of the default text a sample
_SENTENCE = 8


class DocumentData(CalibrationData):
    """Texts, padded to the longest of a batch: ``val_dataloader`` to calibrate on, ``test_dataloader`` held out.

    Batches have ``input_ids`` and ``attention_mask`` ``(batch_size, tokens)``. With ``label_field`` they have
    ``labels`` ``(batch_size,)``; with ``targets``, ``labels`` ``(batch_size, target tokens)``, padded with -100.

    Args:
        tokenizer: a transformers tokenizer.
        path: see :func:`~lightning_obs.app.data.files.read_rows`; each object is a sample. None: paragraphs of Python's
            own documentation.
        batches: calibration batches.
        batch_size: samples per batch.
        tokens: of a text; longer ones are cut.
        eval_batches: batches to measure on.
        text_field: the field or column that holds the text.
        label_field: that of the label: a number, or a name that ``label2id`` has. None: no labels.
        target_field: that of the text that ``targets`` asks for; None: the text's own second half.
        num_workers: of the DataLoaders.
        train_batches: batches to train on: other samples of the half that is not held out.
        eval_path: other texts to measure on; None: every second sample of ``path``.
        label2id: numbers of the labels' names.
        targets: samples have a target text.

    Raises:
        CalibrationError: numbers that are not positive; a file that is not there or cannot be read; an unknown label;
            fewer samples than asked for.
    """

    def __init__(
        self,
        tokenizer: Any,
        path: str | os.PathLike[str] | None = None,
        batches: int = 16,
        batch_size: int = 8,
        tokens: int = 128,
        eval_batches: int = 16,
        text_field: str = "text",
        label_field: str | None = None,
        target_field: str | None = None,
        num_workers: int = 0,
        train_batches: int = 0,
        eval_path: str | os.PathLike[str] | None = None,
        label2id: Mapping[str, int] | None = None,
        targets: bool = False,
    ) -> None:
        pad = (DataCollatorForSeq2Seq if targets else DataCollatorWithPadding)(tokenizer)
        super().__init__(batch_size, num_workers, partial(_padded, pad))
        require_positive(batches=batches, batch_size=batch_size, tokens=tokens, eval_batches=eval_batches)
        self.targets = targets
        self._tokenizer, self._tokens, self._label2id = tokenizer, tokens, label2id or {}
        self._text_field, self._label_field, self._target_field = text_field, label_field, target_field
        seen = list(_default_rows(text_field) if path is None else read_rows(path, text_field))
        if eval_path is not None:
            held_out = list(read_rows(eval_path, text_field, "data.eval_path"))
        else:
            seen, held_out = seen[0::2], seen[1::2]
        wanted, measured = (batches + train_batches) * batch_size, eval_batches * batch_size
        _require_samples(seen, wanted, "calibration", "batches")
        _require_samples(held_out, measured, "held-out", "eval_batches")
        samples = [self._sample(*row) for row in seen[:wanted]]
        self.calibration, self.training = samples[: batches * batch_size], samples[batches * batch_size :]
        self.held_out = [self._sample(*row) for row in held_out[:measured]]

    def _sample(self, place: str, row: Any) -> Sample:
        text = text_of(place, row, self._text_field)
        if self.targets:
            if self._target_field is None:
                words = text.split()
                half = max(1, min(len(words) // 2, self._tokens))
                text, target = " ".join(words[:half]), " ".join(words[half:])
            else:
                target = text_of(place, row, self._target_field, "data.target_field")
            return {**self._encoded(text=text), "labels": self._encoded(text_target=target)["input_ids"]}
        sample = self._encoded(text=text)
        return sample if self._label_field is None else {**sample, "labels": self._label(place, row)}

    def _encoded(self, **text: str) -> Sample:
        return dict(self._tokenizer(**text, truncation=True, max_length=self._tokens))

    def _label(self, place: str, row: Mapping[str, Any]) -> int | float:
        value = row.get(self._label_field or "")
        if isinstance(value, str) and value in self._label2id:
            return self._label2id[value]
        try:
            return int(value) if float(value) == int(float(value)) else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError) as error:
            if value is None:
                raise CalibrationError(
                    f"{place} has no field {self._label_field!r}",
                    got=f"the fields {name_list(list(row))}" if isinstance(row, dict) else repr(row)[:80],
                    remedy="name the field of the labels: data.label_field=...",
                ) from error
            known = ", ".join(f"{name!r} ({number})" for name, number in self._label2id.items())
            raise CalibrationError(
                f"{place}: the model does not know the label in the field {self._label_field!r}",
                got=repr(value),
                expected=f"a class by its number or its name; the model knows {known or 'no names'}",
                remedy="write the classes as numbers, or put their names into the model's config.json: "
                f'"label2id": {{{json.dumps(str(value))}: 0, ...}}.',
            ) from error


def _padded(pad: Callable[[list[Sample]], Mapping[str, Any]], samples: list[Sample]) -> dict[str, Any]:
    """A function, not a lambda: processes that are spawned get the data pickled."""
    return dict(pad(samples))


def _default_rows(text_field: str) -> Iterator[tuple[str, Any]]:
    """Paragraphs of the default text that are sentences, not headings."""
    for place, row in read_rows(None, text_field):
        paragraphs = (text.strip() for text in row[text_field].split("\n\n"))
        yield from ((place, {text_field: text}) for text in paragraphs if len(text.split()) >= _SENTENCE)


def _require_samples(rows: Sequence[object], count: int, what: str, option: str) -> None:
    if len(rows) < count:
        raise CalibrationError(
            f"too few {what} texts (every second one is held out, unless data.eval_path is given)",
            got=str(len(rows)),
            expected=str(count),
            remedy=f"more of them, or a smaller data.{option} or data.batch_size.",
        )
